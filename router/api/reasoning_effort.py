"""How much a model is to think before it answers: the values of the field, and what templates make of them.

Owns both, for every dialect that has the field.
"""

from typing import Any

from router.api.json_body import unsupported

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
WITHOUT_THINKING = ("none", "minimal")


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
