"""Conversations on which two template engines must agree before the faster one is trusted.

Owns the examples: every shape of message that dialects make, and every character that an engine might escape,
trim or format its own way, except the odd values of `likeness.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

_WEATHER_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Look up the weather <now> & \"later\" in 'Århus'",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Århus", "東京"]},
                "days": {"type": "integer", "default": 3, "minimum": -1, "maximum": 10**12},
                "scale": {"type": "number", "default": 0.1, "enum": [0.1, 2.5]},
                "verbose": {"type": "boolean", "default": False},
                "hours": {
                    "type": "array",
                    "items": {"type": ["string", "null"]},
                    "default": [],
                    "minItems": 1,
                },
                "place": {
                    "anyOf": [{"type": "object", "properties": {"x": {"type": "number"}}}, {"type": "null"}],
                    "default": None,
                    "examples": [{"x": 0.5}],
                },
            },
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": None,
    },
}

_PLAIN_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {"name": "stop", "description": "", "parameters": {}},
}

_CALL: Mapping[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Århus", "days": 2, "at": [1.5, None, True]}},
}

_LONG_CALL: Mapping[str, Any] = {
    "id": "call_2",
    "type": "function",
    "function": {
        "name": "get_weather",
        "arguments": {
            "city": " 'a' <b>\n\"c\" ",
            "days": -3,
            "scale": 0.25,
            "verbose": True,
            "hours": ["x", None, ["é"]],
            "place": {"x": {"y": []}, "z": {}},
            "none": None,
            "empty": "",
        },
    },
}

_HELLO = {"role": "user", "content": "Hello <b>& 'world'</b> \"quoted\" {{ not a template }}"}
_SYSTEM = {"role": "system", "content": "  You are terse.\n\n"}
_ANSWER = {"role": "assistant", "content": "Hi.\n"}
_THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi.", "reasoning_content": "hm"}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_CALLING_WITH_TEXT = {"role": "assistant", "content": "Let me see.", "tool_calls": [_CALL, _CALL]}
_CUT_CALL = {**_CALL, "function": {"name": "get_weather", "arguments": '{"city": "Århus\n'}}
_CUT = {"role": "assistant", "content": "", "tool_calls": [_CUT_CALL]}
_RESULT = {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": '{"sky": "blå"}'}
_UNICODE = {"role": "user", "content": " 日本語 👩‍👩‍👧 éa \u2028 \x00 ΟΔΟΣ ǆ 1e3 a\x0bb\x85c\t tab\r\n"}
_EMPTY = {"role": "user", "content": ""}
_DEVELOPER = {"role": "developer", "content": "Answer in verse."}
_NAMED = {"role": "user", "name": "ada", "content": "Who am I?"}

_CONVERSATIONS: Sequence[Sequence[Mapping[str, Any]]] = (
    (_HELLO,),
    (_SYSTEM, _HELLO),
    (_SYSTEM, _HELLO, _ANSWER, _UNICODE),
    (_HELLO, _ANSWER, _HELLO, _THOUGHT, _NAMED),
    (_SYSTEM, _HELLO, _CALLING, _RESULT),
    (_HELLO, _CALLING_WITH_TEXT, _RESULT, _RESULT, _ANSWER, _HELLO),
    (_HELLO, _CUT, _RESULT, _HELLO),
    (_HELLO, {"role": "assistant", "content": "", "tool_calls": [_LONG_CALL]}, _RESULT, _UNICODE),
    (_DEVELOPER, _EMPTY),
    (_SYSTEM, _SYSTEM, _HELLO, _HELLO, _ANSWER),
    (_SYSTEM,),
    (_ANSWER, _HELLO),
    (_HELLO, {"role": "martian", "content": "?"}),
)

_IMAGE = {"type": "image", "digest": "0123456789abcdef"}
_PICTURE = {"role": "user", "content": [_IMAGE, {"type": "text", "text": "What <is> 'this'?\n"}]}
_PICTURES = {
    "role": "user",
    "content": [{"type": "text", "text": " Compare "}, _IMAGE, {"type": "text", "text": "&"}, _IMAGE],
}
_PICTURE_FOUND = {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": [_IMAGE]}

_CONVERSATIONS_WITH_IMAGES: Sequence[Sequence[Mapping[str, Any]]] = (
    (_PICTURE,),
    (_SYSTEM, _PICTURES, _ANSWER, _UNICODE),
    (_HELLO, _ANSWER, _PICTURE, _ANSWER, _PICTURES),
    (_PICTURE, _CALLING, _PICTURE_FOUND),
)


def _probes(conversations: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Mapping[str, Any], ...]:
    probes: list[Mapping[str, Any]] = []
    for messages in conversations:
        for tools in (None, [_WEATHER_TOOL, _PLAIN_TOOL]):
            for variables in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
                probes += [
                    {
                        "messages": messages,
                        "tools": tools,
                        "add_generation_prompt": add_generation_prompt,
                        **variables,
                    }
                    for add_generation_prompt in (True, False)
                ]
    return tuple(probes)


PROBE_CONVERSATIONS = _probes(_CONVERSATIONS)
"""Template variables, ready to render."""

PROBES_WITH_IMAGES = _probes(_CONVERSATIONS_WITH_IMAGES)
"""For templates that read contents in parts."""
