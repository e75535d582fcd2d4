"""countTokens: how many tokens the prompt of a request has, in Gemini's shape.

Owns the answer. Runs beside the event loop for small bodies, and in a process of its own for others.
"""

from msgspec import Struct

from router.api.chat_prompt import counted_chat
from router.api.gemini.body import read_counted
from router.api.gemini.modalities import ModalityTokens, details
from router.api.json_body import encode_json
from router.prompt.text_model import TextModels
from router.shared.answer_types import Count


class CountedTokens(Struct, rename="camel"):
    total_tokens: Count
    prompt_tokens_details: list[ModalityTokens]


def count_tokens(models: TextModels, body: bytes, *, is_bounded: bool) -> bytes:
    """Raises InvalidRequest or UnknownModel, and TooMuchWork if it is to be bounded and is not."""
    counted = counted_chat(models, read_counted(body), is_bounded=is_bounded)
    num_tokens = len(counted.token_ids)
    num_image_tokens = sum(image.length for image in counted.images)
    return encode_json(CountedTokens(num_tokens, details(num_tokens, num_image_tokens)))
