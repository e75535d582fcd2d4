"""Log-probabilities of a chat's tokens, in OpenAI's shape.

Owns that shape, which chats and Responses share.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from replicas.protocol.frames import TokenLogprobs

if TYPE_CHECKING:
    from router.prompt.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def logprobs_of(
    tokenizer: "Tokenizer", logprobs: Sequence[TokenLogprobs], *, as_ids: bool = False
) -> list[TokenLogprob]:
    """With `as_ids` tokens are named by their ids, which no two share."""

    def written(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        raw = tokenizer.token_text(token_id)[1]
        return token_name(tokenizer, token_id, as_ids=as_ids), finite(logprob), list(raw)

    return [
        TokenLogprob(
            *written(token.token_id, token.logprob), [TopLogprob(*written(*top)) for top in token.top]
        )
        for token in logprobs
    ]


def token_name(tokenizer: "Tokenizer", token_id: int, *, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else tokenizer.token_text(token_id)[0]
