"""Counts the tokens of a message's prompt, and writes the answer of /v1/messages/count_tokens.

Owns its answer. Runs beside the event loop for small bodies, and in a process of its own for others.
"""

from msgspec import Struct

from router.api.anthropic.body import read_counted_message
from router.api.chat_prompt import counted_chat
from router.api.json_body import encode_json
from router.prompt.text_model import TextModels
from router.shared.answer_types import Count


class MessageTokens(Struct):
    input_tokens: Count


def count_message_tokens(models: TextModels, body: bytes, *, is_bounded: bool) -> bytes:
    """Raises InvalidRequest or UnknownModel, and TooMuchWork if it is to be bounded and is not."""
    counted = counted_chat(models, read_counted_message(body), is_bounded=is_bounded)
    return encode_json(MessageTokens(len(counted.token_ids)))
