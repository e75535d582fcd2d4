"""Blocks of dialects that no prompt has: those that words stand for, and those that are passed over.

Owns which, and the words. A tool's result and an earlier answer are not their sender's choice and stay in a
conversation: if one of their blocks were refused, so would be every later turn.
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

LATER_TOOLS = ("additional_tools", "tool_search_output")
"""Items with tools, which are offered like those of the request."""
_SILENT = frozenset(
    {*LATER_TOOLS, "code_interpreter_call", "configuration_update", "fallback", "file_search_call"}
    | {"mcp_approval_request", "mcp_approval_response", "mcp_list_tools", "mcp_tool_listing", "mcp_tool_use"}
    | {"program", "program_output", "server_tool_use", "tool_search_call", "web_search_call"}
)


def is_silent(kind: str) -> bool:
    """Whether a block says nothing to the model, such as a call of a vendor's own tool, and its result: the
    answer that follows stands for itself."""
    return kind in _SILENT or (kind.endswith("_tool_result") and kind != "mcp_tool_result")


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
