"""Log-probabilities of a chat's tokens, in OpenAI's shape.

Owns that shape, which chats and Responses share.
"""

from collections.abc import Sequence
from typing import Any

from replicas.protocol.frames import TokenLogprobs
from router.prompt.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def logprobs_of(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs], *, as_ids: bool = False
) -> list[dict[str, Any]]:
    """With `as_ids` tokens are named by their ids, which no two share."""
    return [
        {
            **_token(tokenizer, token.token_id, token.logprob, as_ids),
            "top_logprobs": [_token(tokenizer, token_id, logprob, as_ids) for token_id, logprob in token.top],
        }
        for token in logprobs
    ]


def token_name(tokenizer: Tokenizer, token_id: int, *, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else tokenizer.token_text(token_id)[0]


def _token(tokenizer: Tokenizer, token_id: int, logprob: float, as_ids: bool) -> dict[str, Any]:
    raw = tokenizer.token_text(token_id)[1]
    name = token_name(tokenizer, token_id, as_ids=as_ids)
    return {"token": name, "logprob": finite(logprob), "bytes": list(raw)}
