"""details(): tokens by what they stand for, as Gemini writes them."""

from typing import Literal

from msgspec import Struct

from router.shared.answer_types import Count


class ModalityTokens(Struct, rename="camel"):
    modality: Literal["IMAGE", "TEXT"]
    token_count: Count


def details(num_tokens: int, num_image_tokens: int) -> list[ModalityTokens]:
    """Divide tokens by modality; `num_image_tokens` of them are images'."""
    found = [ModalityTokens("TEXT", num_tokens - num_image_tokens)]
    if num_image_tokens:
        found.append(ModalityTokens("IMAGE", num_image_tokens))
    return found
