"""details(): tokens by what they stand for, as Gemini writes them."""

from typing import Any


def details(num_tokens: int, num_image_tokens: int) -> list[dict[str, Any]]:
    """Divide tokens by modality; `num_image_tokens` of them are images'."""
    found = [{"modality": "TEXT", "tokenCount": num_tokens - num_image_tokens}]
    if num_image_tokens:
        found.append({"modality": "IMAGE", "tokenCount": num_image_tokens})
    return found
