"""OpenAI's libraries on Chat Completions with tools, formats and reasoning."""

import pytest

from loadtests.stacks.local_stack import LocalStack
from tests.clients.conftest import Seen, act, act_in_node

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

HELLO = "Hello there, my friend!"
PARIS = ["weather", {"city": "Paris"}]
ROME = ["weather", {"city": "Rome"}]
ADA = {"name": "Ada", "age": 36}


@pytest.fixture(scope="module", params=["many", "instructor"])
def seen(request: pytest.FixtureRequest, talking_cluster: LocalStack) -> Seen:
    return act(request.param, "openai_tools.py", talking_cluster)


@pytest.fixture(scope="module")
def seen_in_node(talking_cluster: LocalStack) -> Seen:
    return act_in_node("openai_tools.cjs", talking_cluster)


def test_a_tool_is_called_whatever_the_choice_that_allows_it(seen: Seen) -> None:
    called = seen["called"]
    for choice in ("auto", "required", "named", "allowed"):
        assert called[choice]["calls"] == [["function", *PARIS]], choice
        assert not called[choice]["content"]
    assert called["auto"]["finish"] == called["required"]["finish"] == "tool_calls"
    assert called["parallel"]["calls"] == [["function", *PARIS], ["function", *ROME]]
    assert called["parallel"]["ids"] == 2


def test_no_tool_is_called_where_none_may_be(seen: Seen) -> None:
    answer = seen["not_called"]
    assert answer["calls"] == [] and answer["content"] == HELLO and answer["finish"] == "stop"


def test_calls_are_streamed_in_pieces(seen: Seen) -> None:
    streamed = seen["streamed"]
    assert streamed["calls"] == [PARIS, ROME] and streamed["ids"] == 2
    assert min(streamed["pieces"]) > 2 and streamed["finish"] == "tool_calls"
    helper = seen["streamed_by_the_helper"]
    assert helper["parsed"] == {"city": "Paris"}
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= set(
        helper["kinds"]
    )


def test_the_next_turn_hits_on_what_was_said_before(seen: Seen) -> None:
    turns = seen["second_turn"]
    assert turns["texts"] == ["It is 21 degrees there.", HELLO]
    for total, cached in zip(turns["totals"], turns["cached"][1:], strict=False):
        assert total - 16 <= cached, turns


def test_reasoning_is_apart_from_the_answer(seen: Seen) -> None:
    reasoning = seen["reasoning"]
    for text, thought in (reasoning["whole"], reasoning["streamed"]):
        assert text.strip() == "It is blue." and thought.strip() == "They ask about the sky."
    assert reasoning["tokens"] > 3


def test_answers_have_the_form_that_was_asked_for(seen: Seen) -> None:
    assert seen["structured"] == [ADA, ADA, ADA]


def test_a_schema_that_is_none_is_refused_by_name(seen: Seen) -> None:
    name, parameter = seen["bad_schema"]
    assert name == "BadRequestError" and parameter.startswith("response_format")


def test_node_runs_tools_streams_calls_and_parses(seen_in_node: Seen) -> None:
    assert seen_in_node["runTools"] == {"text": "It is 21 degrees there.", "cities": ["Paris"]}
    assert seen_in_node["streamedTools"] == {"calls": ["Paris", "Rome"], "finish": "tool_calls"}
    assert seen_in_node["parsed"] == ADA


def test_a_turn_of_nodes_stream_helper_hits_on_the_reasoning_of_the_one_before(seen_in_node: Seen) -> None:
    """Its helper sends the last piece of it back."""
    turns = seen_in_node["thinking"]
    assert "I need a tool.".endswith(turns["reasoning"])
    assert turns["text"] == "Take a coat."
    first, second = turns["usages"]
    said = first["prompt_tokens"] + first["completion_tokens"]
    assert second["prompt_tokens_details"]["cached_tokens"] >= said - 16


def test_node_reads_responses(seen_in_node: Seen) -> None:
    responses = seen_in_node["responses"]
    assert responses["texts"] == [HELLO, HELLO]
    assert responses["usage"]["input_tokens_details"]["cached_tokens"] >= 0
