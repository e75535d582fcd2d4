"""Anthropic's libraries, and LangChain's for it, on Messages."""

from typing import Any

import pytest

from loadtests.stacks.local_stack import LocalStack
from tests.clients.conftest import Seen, act, act_in_node

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

HELLO = "Hello there, my friend!"
PARIS = ["weather", {"city": "Paris"}]
ROME = ["weather", {"city": "Rome"}]
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def seen(talking_cluster: LocalStack) -> Seen:
    return act("many", "anthropic_messages.py", talking_cluster)


@pytest.fixture(scope="module")
def langchain(talking_cluster: LocalStack) -> Seen:
    return act("many", "langchain_anthropic_messages.py", talking_cluster)


@pytest.fixture(scope="module")
def seen_in_node(talking_cluster: LocalStack) -> Seen:
    return act_in_node("anthropic_messages.cjs", talking_cluster)


def prompt_of(usage: dict[str, Any]) -> int:
    return int(
        usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    )


def test_an_answer_has_its_blocks_its_reason_and_a_disjoint_usage(seen: Seen) -> None:
    answer = seen["plain"]
    assert [(block["type"], block["text"]) for block in answer["content"]] == [("text", HELLO)]
    assert answer["stop_reason"] == "end_turn" and answer["role"] == "assistant"
    assert answer["model"] == "talking" and answer["request_id"]
    assert answer["usage"]["output_tokens"] > 3 and prompt_of(answer["usage"]) > 3


def test_a_stream_has_the_events_in_their_order(seen: Seen) -> None:
    streamed, helper = seen["streamed"], seen["by_the_stream_helper"]
    assert [kind for kind in streamed["kinds"] if kind != "ping"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert streamed["text"] == helper["text"] == seen["asynchronous"] == HELLO
    usage = helper["final"]["usage"]
    assert usage["output_tokens"] == seen["plain"]["usage"]["output_tokens"]


def test_tools_are_called_whole_and_streamed(seen: Seen) -> None:
    tools, streamed = seen["tools"], seen["streamed_tools"]
    assert tools["auto"] == tools["any"] == tools["named"] == [[PARIS], "tool_use"]
    assert tools["parallel"] == [[PARIS, ROME], "tool_use"]
    assert streamed["calls"] == [PARIS, ROME] and streamed["stop"] == "tool_use"
    assert "input_json" in streamed["kinds"]


def test_the_next_turn_hits_on_what_was_said_before(seen: Seen) -> None:
    turns = seen["second_turn"]
    first, second = turns["usages"]
    assert turns["text"] == "It is 21 degrees there."
    assert second["cache_read_input_tokens"] >= prompt_of(first) + first["output_tokens"] - BLOCK_SIZE


def test_thinking_is_a_block_of_its_own_and_the_next_turn_hits_on_it(seen: Seen) -> None:
    for blocks in seen["thinking"]:
        assert [[kind, text.strip()] for kind, text in blocks] == [
            ["thinking", "They ask about the sky."],
            ["text", "It is blue."],
        ]
    turns = seen["thinking_second_turn"]
    assert turns["kinds"] == ["thinking", "tool_use"]
    assert turns["cached"] >= turns["total"] - BLOCK_SIZE


def test_what_is_marked_is_written_and_then_read(seen: Seen) -> None:
    first, second = seen["cached"]
    assert first["cache_creation"]["ephemeral_1h_input_tokens"] == first["cache_creation_input_tokens"] > 100
    assert second["cache_read_input_tokens"] >= first["cache_creation_input_tokens"] - BLOCK_SIZE


def test_tokens_are_counted_as_they_are_billed(seen: Seen) -> None:
    counted, used = seen["counted"]
    assert counted == used > 10


def test_models_are_listed_and_found(seen: Seen) -> None:
    assert seen["models"] == [["talking"], "talking"]


def test_refusals_are_the_librarys_own_errors(seen: Seen) -> None:
    refusals = seen["refusals"]
    for name in ("model", "stream"):
        assert refusals[name]["name"] == "NotFoundError", refusals[name]
        assert refusals[name]["body"]["error"]["type"] == "not_found_error" and refusals[name]["request_id"]
    for name in ("markers", "tokens"):
        assert refusals[name]["name"] == "BadRequestError", refusals[name]
    assert "cache_control" in refusals["markers"]["message"]


def test_langchain_reads_answers_streams_and_calls(langchain: Seen) -> None:
    plain, streamed, tools = langchain["plain"], langchain["streamed"], langchain["tools"]
    assert plain["text"] == streamed["text"] == HELLO
    assert streamed["usage"]["total_tokens"] == plain["usage"]["total_tokens"]
    assert tools["calls"] == [PARIS] and tools["streamed"] == [PARIS, ROME]
    assert tools["text"] == "It is 21 degrees there."


def test_langchain_sees_what_was_cached_and_what_is_refused(langchain: Seen) -> None:
    first, second = langchain["cached"]
    assert second["input_token_details"]["cache_read"] >= first["input_tokens"] - 2 * BLOCK_SIZE
    assert langchain["refused"]["name"].endswith("NotFoundError")


def test_node_s_library_reads_answers_streams_thoughts_and_calls(seen: Seen, seen_in_node: Seen) -> None:
    plain, streamed, helper = (seen_in_node[name] for name in ("plain", "streamed", "byTheStreamHelper"))
    assert (plain["content"][0]["text"], plain["stop_reason"]) == (HELLO, "end_turn") and plain["request_id"]
    assert streamed == {"text": HELLO, "last": "message_stop"}
    assert helper == {"calls": [PARIS, ROME], "stop": "tool_use"}
    assert seen_in_node["thinking"] == [["thinking", "They ask about the sky."], ["text", "It is blue."]]
    assert seen_in_node["models"] == seen["models"] and seen_in_node["counted"] > 3
    assert 3 <= seen_in_node["aborted"] < 10_000


def test_node_s_library_runs_tools_and_its_next_turn_and_what_is_marked_hit(seen_in_node: Seen) -> None:
    run = seen_in_node["runTools"]
    assert run["text"] == "It is 21 degrees there." and run["cities"] == ["Paris"]
    before, after = run["usages"]
    assert after["cache_read_input_tokens"] >= prompt_of(before) + before["output_tokens"] - BLOCK_SIZE
    first, second = seen_in_node["cached"]
    assert first["cache_creation"]["ephemeral_1h_input_tokens"] == first["cache_creation_input_tokens"] > 100
    assert second["cache_read_input_tokens"] >= first["cache_creation_input_tokens"] - BLOCK_SIZE


def test_node_s_library_raises_refusals_as_its_own_errors(seen_in_node: Seen) -> None:
    refused = seen_in_node["refused"]
    assert (refused["name"], refused["status"]) == ("NotFoundError", 404)
    assert refused["type"] == "not_found_error" and refused["id"]
