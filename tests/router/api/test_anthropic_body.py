"""Anthropic's bodies as conversations: every field and every kind of block, and what is refused by name."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.answers.wishes import FormatKind, OutputFormat, ToolChoice, ToolMode
from router.api.anthropic.body import read_counted_message, read_message
from router.api.anthropic.errors import ANTHROPIC_ERRORS
from router.api.chat_request import ChatRequest, KeepThrough
from router.edge.http_error import http_error
from router.errors import InvalidRequest, RouterError

HELLO = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": HELLO}
TOOL = {"name": "weather", "description": "Of a city", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Århus"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "21 degrees"}
MINUTES = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
USES_TOOL = [*HELLO, {"role": "assistant", "content": [CALL]}]


def read(**fields: Any) -> ChatRequest:
    return read_message(json.dumps(ASKED | fields).encode(), 8)


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def refusal(**fields: Any) -> str:
    """As the client reads it."""
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    body = json.loads(ANTHROPIC_ERRORS.body(http_error(caught.value), "req_1"))
    assert (body["type"], body["error"]["type"], body["request_id"]) == (
        "error",
        "invalid_request_error",
        "req_1",
    )
    message: str = body["error"]["message"]
    return message


def test_texts_and_blocks_of_texts_are_the_same() -> None:
    plain = read(system="Be brief.", messages=HELLO)
    in_blocks = read(system=[text("Be brief.")], messages=[{"role": "user", "content": [text("Hello")]}])
    assert plain == in_blocks
    assert plain.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    assert (plain.max_tokens, plain.cut_to_context, plain.add_generation_prompt) == (100, True, True)


def test_blocks_of_one_message_are_lines_and_what_the_assistant_says_goes_on() -> None:
    messages = [
        {"role": "user", "content": [text("One"), text("Two")]},
        {"role": "assistant", "content": [text("Three, "), text("four")]},
        {"role": "user", "content": "Five"},
        {"role": "user", "content": [text("Six")]},
    ]
    request = read(system=[text("A"), text("B")], messages=messages)
    assert [message["content"] for message in request.messages] == [
        "A\nB",
        "One\nTwo",
        "Three, four",
        "Five\nSix",
    ]


def test_calls_results_and_thinking_have_their_fields() -> None:
    thinking = {"type": "thinking", "thinking": "A tool.", "signature": "s"}
    messages = [
        *HELLO,
        {"role": "assistant", "content": [thinking, text("Let me see."), CALL, CALL | {"id": "toolu_2"}]},
        {
            "role": "user",
            "content": [
                RESULT | {"tool_use_id": "toolu_2", "is_error": True, "content": [text("No"), text("city")]},
                RESULT,
                text("And now?"),
            ],
        },
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, text("Warm.")]},
        {"role": "user", "content": "Thanks"},
    ]
    request = read(messages=messages, tools=[TOOL])
    function = {"name": "weather", "arguments": {"city": "Århus"}}
    assert request.messages[1:] == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "A tool.",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": function},
                {"id": "toolu_2", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_2", "name": "weather", "content": "Error: No\ncity"},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "weather", "content": "21 degrees"},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "Warm."},
        {"role": "user", "content": "Thanks"},
    ]
    assert request.tools == [
        {
            "type": "function",
            "function": {"name": "weather", "description": "Of a city", "parameters": {"type": "object"}},
        }
    ]


def test_documents_and_search_results_are_read_where_they_are_text() -> None:
    document = {"type": "document", "source": {"type": "text", "data": "All of it"}, "title": "Book"}
    nested = {"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}}
    found = {"type": "search_result", "title": "T", "source": "S", "content": [text("c")]}
    content = [document, nested, {**RESULT, "content": [found]}]
    request = read(messages=[*USES_TOOL, {"role": "user", "content": content}], tools=[TOOL])
    assert [message["content"] for message in request.messages[2:]] == ["Book\nAll of it\na\nb", "T\nS\nc"]


def test_a_system_message_in_the_middle_stays_there_even_before_a_result() -> None:
    messages = [
        *USES_TOOL,
        {"role": "system", "content": "New rules."},
        {"role": "user", "content": [RESULT]},
    ]
    assert [message["role"] for message in read(messages=messages).messages] == [
        "user",
        "assistant",
        "system",
        "tool",
    ]


def test_the_billing_header_never_reaches_the_prompt() -> None:
    rules = text("Be brief.", cache_control=MINUTES)
    requests = [
        read(system=[text(f"x-anthropic-billing-header: cch={number};"), rules]) for number in range(2)
    ]
    assert requests[0] == requests[1] == read(system=[rules])
    alone = read(system=[text("x-anthropic-billing-header: cch=1;")])
    assert alone.messages == HELLO


def test_an_answer_may_be_begun_by_the_client() -> None:
    begun = read(messages=[*HELLO, {"role": "assistant", "content": "The answer is ("}])
    assert begun.continue_final_message and not begun.add_generation_prompt
    assert begun.messages[-1]["content"] == "The answer is ("
    for nothing in ("", [], " \n"):
        not_begun = read(messages=[*HELLO, {"role": "assistant", "content": nothing}])
        assert not_begun == read()


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(parallel=False)),
        ({"type": "any"}, ToolChoice(ToolMode.REQUIRED)),
        ({"type": "none"}, ToolChoice(ToolMode.NONE)),
        ({"type": "tool", "name": "weather"}, ToolChoice(ToolMode.REQUIRED, ("weather",))),
    ],
)
def test_the_choice_of_tools(choice: Any, expected: ToolChoice) -> None:
    assert read(tools=[TOOL], tool_choice=choice).tool_choice == expected


def test_tools_that_run_elsewhere_are_not_offered() -> None:
    others = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "from_the_future", "weather": 1},
    ]
    assert [tool["function"]["name"] for tool in read(tools=[*others, TOOL]).tools] == ["weather"]
    assert read(tools=others).tools == []


def added(tool: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "tool_addition", "tool": tool, **more}


def removed(name: str) -> dict[str, Any]:
    return {"type": "tool_removal", "tool": {"type": "tool_reference", "name": name}}


REFERENCE = {"type": "tool_reference", "name": "weather"}
CLOCK = {"name": "clock", "input_schema": {"type": "object"}}
BY_VALUE = {"type": "tool_definition", "definition": CLOCK}
OTHER = {"type": "tool_definition", "definition": TOOL | {"description": "Another"}}
SERVERS = {"type": "tool_definition", "definition": {"type": "web_search_20260209", "name": "web_search"}}


@pytest.mark.parametrize(
    ("changes", "offered"),
    [
        ([added(REFERENCE)], ["weather: Of a city"]),
        ([added(BY_VALUE)], ["weather: Of a city", "clock: None"]),
        ([removed("weather")], []),
        ([removed("weather"), added(BY_VALUE), added(REFERENCE)], ["weather: Of a city", "clock: None"]),
        ([added(BY_VALUE), removed("clock")], ["weather: Of a city"]),
        ([added(BY_VALUE), removed("clock"), added(BY_VALUE)], ["weather: Of a city", "clock: None"]),
        ([added(OTHER)], ["weather: Another"]),
        ([added(SERVERS), added(REFERENCE | {"name": "gone"}), removed("gone")], ["weather: Of a city"]),
        ([added({"type": "mcp_toolset_reference", "server_name": "s"})], ["weather: Of a city"]),
    ],
)
def test_a_conversation_adds_and_removes_tools(changes: list[Any], offered: list[str]) -> None:
    summary = {"type": "compaction", "content": "All of it.", "tool_changes": changes}
    for said in (
        {"role": "system", "content": [text("New tools."), *changes]},
        {"role": "system", "content": changes},
        {"role": "assistant", "content": [summary]},
    ):
        fields = {"tools": [TOOL], "messages": [*HELLO, said, *HELLO]}
        counted = read_counted_message(json.dumps(ASKED | fields).encode())
        for request in (read(**fields), counted):
            functions = [tool["function"] for tool in request.tools]
            assert [f"{each['name']}: {each.get('description')}" for each in functions] == offered


def test_a_tool_that_is_added_can_be_chosen_and_has_to_be_one() -> None:
    def said(*blocks: Any) -> list[Any]:
        return [*HELLO, {"role": "system", "content": [*blocks]}]

    choice = {"type": "tool", "name": "clock"}
    assert read(messages=said(added(BY_VALUE)), tool_choice=choice).tool_choice.names == ("clock",)
    wrong = {"type": "tool_definition", "definition": {"name": "a b", "input_schema": {}}}
    begins = "messages.1.content.0.tool.definition.name: String should match"
    assert refusal(messages=said(added(wrong))).startswith(begins)
    assert refusal(messages=said(added({"type": "spoon"}))).startswith(
        "messages.1.content.0.tool: Input should"
    )


def test_blocks_of_anthropics_own_tools_are_passed_over_and_marks_on_them_count() -> None:
    search = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "x"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []}
    from_the_future = {"type": "telepathy", "thought": "x"}
    mcp = {"type": "mcp_tool_result", "tool_use_id": "m", "content": [text("Rain."), {"type": "image"}]}
    said = [text("So: "), search, found | {"cache_control": MINUTES}, from_the_future, mcp, text("Done.")]
    summary = [{"type": "compaction", "content": "They met. "}, {"type": "compaction", "content": None}]
    request = read(
        messages=[
            *HELLO,
            {"role": "assistant", "content": said},
            *HELLO,
            {"role": "assistant", "content": [*summary, text("Yes.")]},
            {"role": "user", "content": [search, text("?")]},
        ]
    )
    assert [message["content"] for message in request.messages] == [
        "Hello",
        "So: Rain.\n[an image, which cannot be read here]\nDone.",
        "Hello",
        "They met. \nYes.",
        "?",
    ]
    assert request.keeps == [KeepThrough(300, 1, len("So: "))]
    only_tools = {"role": "system", "content": [added(REFERENCE, cache_control=HOUR)]}
    assert read(messages=[*HELLO, only_tools], tools=[TOOL]).keeps == [KeepThrough(3600, 0)]


def test_what_an_answer_found_goes_on_and_what_is_told_ends_a_line() -> None:
    found = {"type": "search_result", "title": "T", "source": "S", "content": [text("It ")]}
    document = {"type": "document", "source": {"type": "text", "data": "is "}}
    tool = {"type": "tool_reference", "tool_name": "so. "}
    scan = {"type": "document", "source": {"type": "base64"}}
    said = {"role": "assistant", "content": [found, document, tool, scan, text("Yes.")]}
    answer = read(messages=[*HELLO, said]).messages[-1]["content"]
    assert answer == "T\nS\nIt is so. [a document, which cannot be read here]\nYes."


PASSED_OVER = {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []}


@pytest.mark.parametrize(
    "last",
    [
        {"role": "user", "content": [PASSED_OVER]},
        {"role": "system", "content": [{"type": "tool_removal", "tool": REFERENCE}]},
    ],
)
def test_an_answer_is_not_gone_on_with_where_a_turn_of_passed_over_blocks_follows(last: Any) -> None:
    request = read(messages=[*HELLO, {"role": "assistant", "content": "Yes"}, last])
    assert request.messages[-1]["content"] == "Yes"
    assert (request.add_generation_prompt, request.continue_final_message) == (True, False)


def test_a_mark_at_the_beginning_of_an_open_message_reaches_no_further() -> None:
    said = [PASSED_OVER | {"cache_control": MINUTES}, text("Yes.")]
    assert read(messages=[*HELLO, {"role": "assistant", "content": said}]).keeps == [KeepThrough(300, 1, 0)]


def test_thinking_is_an_argument_of_the_template() -> None:
    for thinking, expected in [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, True),
        ({"type": "enabled", "budget_tokens": 2000}, True),
    ]:
        request = read(max_tokens=4000, thinking=thinking)
        assert request.template_arguments == {"enable_thinking": expected}
    own = read(chat_template_kwargs={"enable_thinking": True, "style": "short"})
    assert own.template_arguments == {"enable_thinking": True, "style": "short"}


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_schema_is_an_output_format(field: str) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    request = read(**{field: {"format": wanted} if field == "output_config" else wanted})
    path = "output_config.format.schema" if field == "output_config" else "output_format.schema"
    assert request.output_format == OutputFormat(FormatKind.JSON_SCHEMA, {"type": "object"}, parameter=path)


def test_fields_of_sampling_users_and_others() -> None:
    user = json.dumps({"device_id": "d", "session_id": "s"})
    request = read(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stop_sequences=["a", "b", "c", "d", "e"],
        metadata={"user_id": user},
        stream=True,
        service_tier="auto",
        context_management={"edits": []},
        output_config={"effort": "high"},
        cache_salt="salt",
    )
    assert (request.temperature, request.top_p, request.top_k) == (0.5, 0.9, 7)
    assert request.stop == ["a", "b", "c", "d", "e"]
    assert request.end_user == user and request.stream and request.cache_salt == "salt"


def test_no_tokens_ask_for_the_prompt_alone() -> None:
    request = read(max_tokens=0)
    assert request.only_prompt and request.max_tokens is None


def test_marks_reach_to_the_ends_of_their_blocks() -> None:
    tools = [TOOL | {"cache_control": HOUR}]
    result = {"role": "user", "content": [RESULT | {"cache_control": MINUTES}, text("ab"), text("cd")]}
    last = {"role": "user", "content": [text("x")]}
    answered = {"role": "assistant", "content": [text("Yes.", cache_control=MINUTES)]}
    request = read(
        tools=tools,
        system=[text("S", cache_control=HOUR)],
        messages=[*USES_TOOL, result, answered, last],
    )
    assert request.keeps == [KeepThrough(3600, -1), KeepThrough(300, 3), KeepThrough(300, 5, 4)]


def test_a_mark_in_the_middle_of_a_message_says_where() -> None:
    content = [text("ab"), text("cde", cache_control=MINUTES), text("f")]
    assert read(messages=[{"role": "user", "content": content}]).keeps == [KeepThrough(300, 0, 6)]
    assert read(system=[text("ab", cache_control=HOUR), text("c")]).keeps == [KeepThrough(3600, 0, 2)]


def test_the_mark_at_the_top_is_on_the_last_block_that_can_be_cached() -> None:
    thought = {"type": "thinking", "thinking": "x", "signature": "s"}
    messages = [*HELLO, {"role": "assistant", "content": [text("Yes"), thought, text("")]}]
    assert read(messages=messages, cache_control=HOUR).keeps == [KeepThrough(3600, 1, 3)]
    marked = [{"role": "user", "content": [text("Hello", cache_control=MINUTES)]}]
    assert read(messages=marked, cache_control=MINUTES).keeps == [KeepThrough(300, 0, 5)]


_scalars = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=8)
_words = st.sampled_from(
    "type text role user assistant system content tool_use tool_result id tool_use_id thinking document"
    " source cache_control ephemeral ttl 1h name input data search_result schema json_schema input_schema any"
    " enabled".split()
)
_json = st.recursive(
    _scalars | _words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_words, inner, max_size=5),
    max_leaves=25,
)
_blocks = st.fixed_dictionaries(
    {"type": _words},
    optional={
        name: _json | st.sampled_from(["toolu_1", "x"]) | st.just(MINUTES)
        for name in ("text", "id", "name", "input", "tool_use_id", "content", "cache_control", "thinking")
    },
)
_messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.lists(_blocks, max_size=4)}
    ),
    max_size=5,
)
_fields = st.sampled_from(
    "messages system tools tool_choice thinking output_config metadata cache_control stop_sequences"
    " max_tokens temperature stream chat_template_kwargs model".split()
)


@given(st.dictionaries(_fields, _json, max_size=6), st.none() | _messages)
def test_any_json_is_read_or_refused(fields: dict[str, Any], messages: Any) -> None:
    body = ASKED | fields | ({} if messages is None else {"messages": messages})
    try:
        request = read_message(json.dumps(body).encode(), 8)
    except RouterError:
        return
    for message in request.messages:
        assert message["role"] in ("system", "user", "assistant", "tool")
        assert isinstance(message["content"], str)
    assert len(request.keeps) <= 4
