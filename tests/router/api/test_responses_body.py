"""Bodies of OpenAI's Responses: items become messages, and whatever comes is read or refused."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.answers.wishes import FormatKind, ToolMode
from router.api.chat_request import ChatRequest
from router.api.prepare_in_worker import rest_of
from router.api.responses.body import MAX_ECHOED_BYTES, Echo, ResponsesBody, read_response
from router.api.responses.input import packed_reasoning
from router.errors import RouterError
from tests.examples import examples

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "fine"}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def read(**fields: Any) -> ChatRequest:
    return read_response(json.dumps({"model": "m", "input": "Hi", **fields}).encode(), 4)


def messages_of(*items: Any) -> list[dict[str, Any]]:
    return read(input=items).messages


def assistant(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def test_a_text_is_a_users_and_instructions_are_the_systems() -> None:
    assert read(instructions="Be kind.").messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]


def test_what_one_answer_consisted_of_is_one_message_again() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    other = {**CALL, "call_id": "c2", "arguments": "not JSON"}
    assert messages_of(reasoning("Hm."), assistant("So."), CALL, other, RESULT) == [
        {
            "role": "assistant",
            "content": "So.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                call,
                {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "not JSON"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "fine"},
    ]


def test_two_answers_stay_two_messages() -> None:
    assert [each["content"] for each in messages_of(assistant("One."), assistant("Two."))] == ["One.", "Two."]
    after = messages_of(CALL, RESULT, reasoning("Hm."), assistant("Done."))
    assert [each["role"] for each in after] == ["assistant", "tool", "assistant"]
    assert after[2] == {"role": "assistant", "content": "Done.", "reasoning_content": "Hm."}


def test_text_around_a_call_is_of_the_same_message() -> None:
    (message,) = messages_of(assistant("One."), CALL, assistant("Two."))
    assert message["content"] == "One.Two." and len(message["tool_calls"]) == 1


def test_reasoning_comes_back_in_the_clear_or_packed_and_not_from_elsewhere() -> None:
    def thought(**fields: Any) -> str | None:
        item = {"type": "reasoning", "summary": [], **fields}
        return messages_of(item, assistant("So."))[0].get("reasoning_content")

    assert thought(content=[{"type": "reasoning_text", "text": "Hm."}]) == "Hm."
    assert thought(encrypted_content=packed_reasoning("Hm, 日本.")) == "Hm, 日本."
    assert thought(encrypted_content="gAAAAABo_another_vendors") is None
    assert thought(encrypted_content=packed_reasoning("Hm.") + "%") is None
    assert thought(encrypted_content=None) is None


def test_items_that_say_nothing_are_skipped_and_roles_are_kept() -> None:
    roles = ("user", "system", "developer")
    sent = [{"role": role, "content": [{"type": "input_text", "text": role}]} for role in roles]
    listed = {"type": "mcp_list_tools", "server_label": "x", "tools": []}
    assert messages_of(listed, *sent) == [{"role": role, "content": role} for role in roles]


def test_calls_of_custom_tools_are_calls_with_an_input() -> None:
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** Begin"}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    message, answer = messages_of(call, result)
    assert message["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "*** Begin"}}
    assert answer["content"] == "done"


@pytest.mark.parametrize(
    ("kind", "asked", "answered", "name", "said"),
    [
        ("shell_call", {"action": {"commands": ["ls"]}}, {"output": [{"stdout": "a", "stderr": ""}]},
         "shell", '{"stdout": "a", "stderr": ""}'),
        ("shell_call", {"action": {}}, {"output": [{"type": "exit", "stdout": "a"}]},
         "shell", '{"type": "exit", "stdout": "a"}'),
        ("apply_patch_call", {"operation": {"type": "delete_file", "path": "a"}}, {"status": "failed"},
         "apply_patch", "failed"),
        ("computer_call", {"action": {"type": "screenshot"}},
         {"output": {"type": "computer_screenshot", "file_id": "f"}},
         "computer", "[an image, which cannot be read here]"),
        ("local_shell_call", {"action": {"command": ["ls"]}, "id": "i"}, {"output": "a", "id": "c"},
         "local_shell", "a"),
        ("mcp_call", {"arguments": '{"a": 1}', "output": "Rain."}, None, "rain", "Rain."),
        ("mcp_call", {"arguments": "{}", "error": {"type": "http"}}, None, "rain", '{"type": "http"}'),
    ],
)  # fmt: skip
def test_calls_of_other_kinds_are_calls_and_their_results(
    kind: str, asked: dict[str, Any], answered: dict[str, Any] | None, name: str, said: str
) -> None:
    items: list[Any] = [{"type": kind, "call_id": "c", **asked}]
    if answered is None:
        items = [{"type": kind, "id": "c", "name": name, **asked}]
        arguments = json.loads(asked["arguments"])
    else:
        items.append({"type": f"{kind}_output", "call_id": "c", **answered})
        arguments = {key: value for key, value in asked.items() if key != "id"}
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    assert messages_of(*items) == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": said},
    ]


@pytest.mark.parametrize("kind", ["additional_tools", "tool_search_output"])
def test_tools_that_the_input_brings_are_offered_and_the_later_counts(kind: str) -> None:
    space = {"type": "namespace", "name": "n", "tools": [FUNCTION]}
    newer = {"type": "from the future", "parameters": {}}
    later = [{**FUNCTION, "description": "Newer"}, {"type": "web_search"}, newer, space]
    request = read(tools=[FUNCTION, {**FUNCTION, "name": "g"}], input=[{"type": kind, "tools": later}])
    offered = [(tool["function"]["name"], tool["function"].get("description")) for tool in request.tools]
    assert offered == [("f", "Newer"), ("g", None), ("n.f", None)]


def test_items_from_the_future_are_passed_over_if_they_are_of_an_answer() -> None:
    thought = {"type": "telepathy", "id": "tp_1", "thought": "x"}
    assert messages_of(thought, assistant("So.")) == [{"role": "assistant", "content": "So."}]
    for mistake in ({"type": "telepathy"}, {**thought, "role": "user"}):
        with pytest.raises(RouterError):
            messages_of(mistake)


def test_breakpoints_count_messages_and_not_items() -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    part = {"type": "input_text", "text": "x", **mark}
    request = read(
        instructions="Be kind.",
        input=[reasoning("Hm."), CALL, {**RESULT, "output": [part]}, {"role": "user", "content": [part]}],
        prompt_cache_options={"ttl": "12h"},
    )
    assert [(keep.seconds, keep.message) for keep in request.keeps] == [
        (43_200, None),
        (43_200, 2),
        (43_200, 3),
    ]


def test_tools_of_other_kinds_are_not_offered_and_do_no_harm() -> None:
    request = read(
        tools=[FUNCTION, {"type": "web_search"}, {"type": "custom", "name": "patch"}],
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp"}, FUNCTION]},
        parallel_tool_calls=False,
    )
    assert [tool["function"]["name"] for tool in request.tools] == ["f"]
    choice = request.tool_choice
    assert (choice.mode, choice.names, choice.parallel) == (ToolMode.REQUIRED, ("f",), False)


def test_the_format_is_that_of_the_text() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    wished = read(text=asked).output_format
    assert wished is not None
    assert (wished.kind, wished.schema) == (FormatKind.JSON_SCHEMA, schema)
    assert read(text={"verbosity": "low"}).output_format is None


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("minimal", False), ("high", None)])
def test_little_effort_is_no_thinking(effort: str, thinks: bool | None) -> None:
    assert read(reasoning={"effort": effort}).template_arguments.get("enable_thinking") is thinks


def test_an_answer_repeats_the_question_but_for_what_is_too_long() -> None:
    def echoed(**fields: Any) -> dict[str, Any]:
        echo = read(**fields).answers
        assert isinstance(echo, Echo)
        repeated: dict[str, Any] = json.loads(b"{" + echo.fields + b"}")
        return repeated

    assert echoed(tools=[FUNCTION])["tools"] == [FUNCTION]
    long = "x" * MAX_ECHOED_BYTES
    repeated = echoed(instructions=long, tools=[{**FUNCTION, "description": long}])
    assert (repeated["instructions"], repeated["tools"]) == (None, [])


def test_what_travels_to_the_other_process_and_back_stays_the_same() -> None:
    request = read(
        tools=[{"type": "namespace", "name": "n", "tools": [FUNCTION]}],
        include=["reasoning.encrypted_content"],
    )
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=ChatRequest)
    assert msgspec.convert(back.answers, Echo) == request.answers


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, width=32) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
WORDS = st.sampled_from(
    """
    message reasoning function_call function_call_output item_reference user assistant input_text
    output_text refusal namespace function custom allowed_tools explicit auto required json_schema
    json_object none f mcp_call custom_tool_call
    """.split()
)
KEYS = st.sampled_from(
    """
    type role content text name call_id arguments output id tools parameters encrypted_content namespace
    input mode format schema prompt_cache_breakpoint effort summary ttl prewarm refusal description
    strict
    """.split()
)
LIKELY = st.recursive(
    WORDS | JSON,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=6),
    max_leaves=24,
)
FIELDS = st.sampled_from(sorted(ResponsesBody.__struct_fields__))


@settings(max_examples=examples(200), deadline=None)
@given(st.dictionaries(FIELDS, LIKELY, max_size=4), st.lists(LIKELY, max_size=4) | LIKELY)
def test_whatever_json_comes_is_read_or_refused(fields: dict[str, Any], items: Any) -> None:
    body = json.dumps({"model": "m", "input": items, **fields}).encode()
    try:
        request = read_response(body, 4)
        rest_of(request)
    except RouterError:
        return
    json.loads(b"{" + request.answers.fields + b"}")
    assert all(isinstance(message["content"], str) for message in request.messages)


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_whatever_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(RouterError):
        read_response(body, 4)
