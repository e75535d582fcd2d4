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


def logprobs_of(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        {
            **_token(tokenizer, token.token_id, token.logprob),
            "top_logprobs": [_token(tokenizer, token_id, logprob) for token_id, logprob in token.top],
        }
        for token in logprobs
    ]


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text, raw = tokenizer.token_text(token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}
