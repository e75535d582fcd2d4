"""Every kind of block that the vendors' libraries know, with an example of each that their types allow.

Prints a line of JSON: by dialect and place, the kinds and their examples. An example has all fields that are
required, and one more example for each other form that such a field may have.
"""

import json
import sys
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Required, Union, get_args, get_origin, get_type_hints

import anthropic.types as messages
import anthropic.types.beta as beta
import openai.types.chat as chat
import openai.types.responses as responses
from anthropic.types import tool_result_block_param
from anthropic.types.beta import beta_tool_result_block_param
from google.genai import types as gemini
from openai.types.chat import chat_completion_assistant_message_param as assistant
from openai.types.responses import response_custom_tool_call_output_param as custom_output
from openai.types.responses import response_output_message_param as output_message
from typing_extensions import is_typeddict

WORDS = "words_to_find"
DEPTH = 6
Example = dict[str, Any]


def arms(kind: Any) -> Iterator[Any]:
    """The types in a union of unions."""
    if get_origin(kind) in (Annotated, Required):
        yield from arms(get_args(kind)[0])
    elif get_origin(kind) in (Union, types.UnionType):
        for arm in get_args(kind):
            yield from arms(arm)
    else:
        yield kind


def examples(kind: Any, depth: int = DEPTH) -> list[Any]:
    return [found for arm in arms(kind) if arm is not type(None) for found in _of_arm(arm, depth)] or [None]


def _of_arm(kind: Any, depth: int) -> list[Any]:
    origin = get_origin(kind)
    if origin is Literal:
        return [get_args(kind)[0]]
    if is_typeddict(kind):
        return _of_fields(kind, depth - 1) if depth else [{}]
    if kind in (str, bytes):
        return [WORDS]
    if kind in (int, float, bool):
        return [kind(1)]
    if origin not in (None, dict) and (inner := get_args(kind)):
        return [[examples(inner[0], depth)[0]]]
    return [{}]


def _of_fields(kind: Any, depth: int) -> list[Example]:
    hints = get_type_hints(kind, include_extras=True)
    forms = {name: examples(hint, depth) for name, hint in hints.items() if get_origin(hint) is Required}
    first = {name: form[0] for name, form in forms.items()}
    return [first, *({**first, name: other} for name, form in forms.items() for other in form[1:])]


def typed(*unions: Any) -> dict[str, list[Example]]:
    """By the `type` that they have. Models of answers give no example: a parameter is what is sent back."""
    found: dict[str, list[Example]] = {}
    for arm in (arm for union in unions for arm in arms(union)):
        if is_typeddict(arm):
            for example in examples(arm):
                kind = example.get("type") or examples(get_type_hints(arm)["type"])[0]
                found.setdefault(kind, []).append({**example, "type": kind})
        else:
            found.setdefault(examples(arm.model_fields["type"].annotation)[0], [])
    return found


def parts(model: Any) -> dict[str, list[Example]]:
    """Those of Gemini, by the field that they have."""
    return {
        field: [{field: example} for example in _of_model(info.annotation)]
        for field, info in model.model_fields.items()
    }


def _of_model(kind: Any, depth: int = 3) -> list[Any]:
    """All fields, since none is required."""
    arm = next(arm for arm in arms(kind) if arm is not type(None))
    if hasattr(arm, "model_fields") and depth:
        fields = {name: _of_model(info.annotation, depth - 1)[0] for name, info in arm.model_fields.items()}
        return [{name: value for name, value in fields.items() if value not in ({}, [{}])}]
    if isinstance(arm, type) and issubclass(arm, str) and arm is not str:
        return [next(iter(arm)).value]
    return _of_arm(arm, depth)


if __name__ == "__main__":
    texts = (chat.ChatCompletionContentPartParam, assistant.ContentArrayOfContentPart)
    outputs = (responses.ResponseFunctionCallOutputItemParam, custom_output.OutputOutputContentList)
    results = (tool_result_block_param.Content, beta_tool_result_block_param.Content)
    blocks = (messages.ContentBlockParam, beta.BetaContentBlockParam)
    sys.stdout.write(
        json.dumps(
            {
                "chats": {
                    "part": typed(*texts),
                    "call": typed(chat.ChatCompletionMessageToolCallUnionParam),
                },
                "responses": {
                    "part": typed(responses.ResponseInputContentParam, *outputs, output_message.Content),
                    "item": typed(responses.ResponseInputItemParam, responses.ResponseOutputItem),
                },
                "messages": {"block": typed(*blocks), "result": typed(*results)},
                "gemini": {"part": parts(gemini.Part), "result": parts(gemini.FunctionResponsePart)},
            }
        )
    )
