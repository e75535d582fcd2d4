"""OpenAI's tools, tool choice and messages: what they become, and what is refused, where."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.answers.wishes import ToolChoice, ToolMode
from router.api.chat_request import ChatRequest, KeepThrough
from router.api.completion_prompt import CompletionRequest, check_completion, prompts_of
from router.api.json_body import decode_body
from router.api.openai.chat_body import read_chat, read_tokenized_chat
from router.api.structured_outputs import output_format_of
from router.errors import InvalidRequest, RouterError

HELLO = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "set.it:now-2"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}
EXPLICIT = {"mode": "explicit"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def read(**fields: Any) -> ChatRequest:
    return read_chat(msgspec.json.encode({"model": "tiny", "messages": [HELLO]} | fields), 16)


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [TOOL, {"type": "function", "function": {"name": "f"} | fields}]}


@pytest.mark.parametrize(
    ("asked", "choice"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice(ToolMode.NONE)),
        ("required", ToolChoice(ToolMode.REQUIRED)),
        ({"type": "function", "function": {"name": "get"}}, ToolChoice(ToolMode.REQUIRED, ("get",))),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [OTHER]}},
            ToolChoice(ToolMode.REQUIRED, ("set.it:now-2",)),
        ),
    ],
)
def test_a_tool_choice_in_each_of_its_forms(asked: Any, choice: ToolChoice) -> None:
    request = read(tools=[TOOL, OTHER], tool_choice=asked)
    assert (request.tools, request.tool_choice) == ([TOOL, OTHER], choice)


def test_functions_are_tools_of_which_one_is_called() -> None:
    request = read(functions=[{"name": "f"}], function_call={"name": "f"})
    assert request.tools == [{"type": "function", "function": {"name": "f"}}]
    assert request.tool_choice == ToolChoice(ToolMode.REQUIRED, ("f",), parallel=False)
    assert read(tools=[], functions=[]).tools == []


def test_messages_reach_the_template_clean_and_with_objects_as_arguments() -> None:
    sent = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {**CALLS, "refusal": None, "audio": None, "function_call": None, "reasoning": "Hm.", "name": None},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "7"}]},
        {"role": "assistant", "content": "It is 7.", "tool_calls": None, "reasoning_content": "So.", "x": 1},
        {"role": "assistant", "refusal": "No."},
    ]
    assert read(messages=sent).messages == [
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": {"a": 1}}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "7"},
        {"role": "assistant", "content": "It is 7.", "reasoning_content": "So.", "x": 1},
        {"role": "assistant", "content": "No."},
    ]


def test_functions_of_old_are_calls_and_their_results() -> None:
    sent = [
        HELLO,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "not JSON"}},
        {"role": "function", "name": "f", "content": "7"},
    ]
    call, result = read(messages=sent).messages[1:]
    assert call["tool_calls"] == [
        {"id": "call_f", "type": "function", "function": {"name": "f", "arguments": "not JSON"}}
    ]
    assert result == {"role": "tool", "name": "f", "content": "7", "tool_call_id": "call_f"}


def _marked(text: str, mark: Any = EXPLICIT) -> dict[str, Any]:
    part = {"type": "text", "text": text, "prompt_cache_breakpoint": mark}
    return {"role": "user", "content": [part]}


@pytest.mark.parametrize(
    ("options", "num_marked", "keeps"),
    [
        (None, 1, [KeepThrough(1800, 1)]),
        ({"ttl": "12h"}, 1, [KeepThrough(43_200), KeepThrough(43_200, 1)]),
        ({"ttl": "90s"}, 0, [KeepThrough(90)]),
        ({"mode": "implicit"}, 5, [KeepThrough(1800, position) for position in (3, 4, 5)]),
        ({"mode": "explicit"}, 5, [KeepThrough(1800, position) for position in (2, 3, 4, 5)]),
        ({"mode": "explicit", "ttl": "24h"}, 0, []),
    ],
)
def test_breakpoints_are_kept_the_latest_first_to_count(
    options: dict[str, Any] | None, num_marked: int, keeps: list[KeepThrough]
) -> None:
    marked = [_marked(str(number)) for number in range(num_marked)]
    assert read(messages=[HELLO, *marked], prompt_cache_options=options).keeps == keeps


def test_a_prompt_can_be_prewarmed() -> None:
    options = {"prewarm": True, "comparison_response_id": "resp_1"}
    assert read(prompt_cache_options=options).only_prompt
    assert not read(prompt_cache_options={"prewarm": False}).only_prompt


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
WORDS = st.sampled_from(
    [
        "user", "assistant", "tool", "function", "text", "refusal", "auto", "required", "json_schema", "get",
        "allowed_tools", "explicit", "call_1", "30m",
    ]
)  # fmt: skip
KEYS = st.sampled_from(
    [
        "role", "content", "type", "text", "tool_calls", "id", "function", "name", "arguments", "parameters",
        "tool_call_id", "function_call", "reasoning", "refusal", "schema", "json_schema", "allowed_tools",
        "mode", "tools", "ttl", "prompt_cache_breakpoint", "json", "regex", "choice", "grammar", "strict",
    ]
)  # fmt: skip
VALUES = st.recursive(
    SCALARS | WORDS,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(KEYS, children, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        "messages", "tools", "functions", "tool_choice", "function_call", "response_format", "stop",
        "structured_outputs", "guided_json", "guided_choice", "regex", "prompt_cache_options", "logit_bias",
        "reasoning_effort", "stream_options", "chat_template_kwargs", "modalities", "truncate_prompt_tokens",
        "prompt_cache_retention", "allowed_token_ids", "max_tokens", "top_logprobs", "logprobs",
    ]
)  # fmt: skip


@given(st.dictionaries(FIELDS, VALUES, max_size=4), st.lists(st.dictionaries(KEYS, VALUES), max_size=3))
def test_whatever_the_fields_hold_they_are_read_or_refused(
    fields: dict[str, Any], messages: list[Any]
) -> None:
    body = msgspec.json.encode({"model": "tiny", "messages": messages} | fields)
    for reader in (lambda: read_chat(body, 16), lambda: read_tokenized_chat(body)):
        try:
            request = reader()
        except RouterError as error:
            assert isinstance(error, InvalidRequest) and error.message
        else:
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=ChatRequest)


@given(st.dictionaries(FIELDS, VALUES, max_size=4), VALUES)
def test_whatever_a_completion_holds_it_is_read_or_refused(fields: dict[str, Any], prompt: Any) -> None:
    body = msgspec.json.encode({"model": "tiny", "prompt": prompt} | fields)
    try:
        request = decode_body(msgspec.json.Decoder(CompletionRequest), body)
        check_completion(request, 16)
        prompts_of(request.prompt, 16)
        output_format_of(request, request.response_format)
    except RouterError as error:
        assert isinstance(error, InvalidRequest) and error.message
