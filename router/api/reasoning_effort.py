"""How much a model is to think before it answers: the values of the fields, and what templates make of them.

Owns both, for every dialect that has the fields.
"""

from typing import Any

from router.api.json_body import unsupported

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
WITHOUT_THINKING = ("none", "minimal")


def thinking_arguments(enable_thinking: bool | None, thinking: Any) -> dict[str, Any]:
    """Read two fields of chats: `enable_thinking` as in Qwen's API, `thinking` as in DeepSeek's, GLM's and
    Kimi's. Templates know one or the other. Raises InvalidRequest."""
    match thinking:
        case None | bool():
            wished = thinking
        case {"type": "enabled" | "adaptive" | "auto"}:
            wished = True
        case {"type": "disabled"}:
            wished = False
        case _:
            message = "Invalid value for 'thinking': its type is 'enabled', 'adaptive', 'auto' or 'disabled'."
            raise unsupported("thinking", message)
    if wished is None:
        wished = enable_thinking
    elif enable_thinking not in (None, wished):
        raise unsupported("enable_thinking", "'enable_thinking' and 'thinking' say the opposite.")
    return {} if wished is None else {"enable_thinking": wished, "thinking": wished}


def reasoning_arguments(parameter: str, effort: str | None) -> dict[str, Any]:
    """For the chat template: `enable_thinking` is what most know, `reasoning_effort` a few. Raises
    InvalidRequest."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise unsupported(parameter, f"Invalid value for '{parameter}': it is one of {', '.join(EFFORTS)}.")
    if effort in WITHOUT_THINKING:
        return {"enable_thinking": False, "reasoning_effort": effort}
    return {"reasoning_effort": effort}
