"""Words in the place of an image, a file or another block that a model cannot read.

Owns the words. A tool's result and an earlier answer are not their sender's choice and stay in the conversation:
if one of their blocks were refused, so would be every later turn. By the words a place in a prompt is found.
"""

from collections.abc import Mapping
from typing import Any

_IMAGE, _FILE, _AUDIO = "an image", "a file", "a recording"
_NOUNS = {
    **dict.fromkeys(
        ("image", "image_url", "input_image", "computer_screenshot", "image_generation_call"), _IMAGE
    ),
    **dict.fromkeys(("file", "input_file", "container_upload"), _FILE),
    **dict.fromkeys(("audio", "input_audio"), _AUDIO),
    "video": "a video",
    "document": "a document",
    "browser_state": "the state of a browser",
    "compaction": "a summary of earlier turns",
}
"""By the type of a block, or the first word of its media type."""


def noun_of(block: Mapping[str, Any]) -> str | None:
    """Return what a block is called in a prompt that cannot have it. None for text and unknown kinds."""
    kind = block.get("type") or block.get("mimeType") or block.get("mime_type")
    if not isinstance(kind, str):
        return None
    family, slash, _ = kind.partition("/")
    return _NOUNS.get(family, _FILE if slash else None)


def unread(block: Any) -> str:
    noun = noun_of(block) if isinstance(block, dict) else None
    return f"[{noun or 'something'}, which cannot be read here]"
