"""Clients' own libraries, unchanged, against a whole cluster. Each script says what it saw."""

from typing import Any

import pytest

from loadtests.stacks.local_stack import LocalStack
from tests.clients.conftest import Seen, act, act_in_node

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

HELLO = "Hello there, my friend!"
NINE = "one two three four five six seven eight nine"


@pytest.fixture(scope="module", params=["many", "instructor"])
def chat_seen(request: pytest.FixtureRequest, talking_cluster: LocalStack) -> Seen:
    return act(request.param, "openai_chat.py", talking_cluster)


@pytest.fixture(scope="module")
def chat_in_node(talking_cluster: LocalStack) -> Seen:
    return act_in_node("openai_chat.cjs", talking_cluster)


def test_an_answer_has_its_words_its_reason_and_its_usage(chat_seen: Seen) -> None:
    answer = chat_seen["plain"]
    [choice] = answer["choices"]
    assert choice["message"]["content"] == HELLO and choice["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert answer["model"] == "talking" and answer["id"].startswith("chatcmpl-")
    assert answer["request_id"]


def test_a_stream_says_the_same_with_its_usage_at_the_end(chat_seen: Seen) -> None:
    streamed, plain = chat_seen["streamed"], chat_seen["plain"]
    assert streamed["text"] == HELLO and streamed["finish"] == "stop" and len(streamed["ids"]) == 1
    [usage] = streamed["usages"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == plain["usage"][name]


def test_the_librarys_own_helpers_and_its_asynchronous_half_work(chat_seen: Seen) -> None:
    helper = chat_seen["by_the_stream_helper"]
    assert helper["text"] == HELLO and {"chunk", "content.delta", "content.done"} <= set(helper["kinds"])
    assert chat_seen["asynchronous"] == [HELLO] * 4


def test_several_choices_and_logprobs_come_as_asked_for(chat_seen: Seen) -> None:
    assert chat_seen["several"] == [[0, HELLO], [1, HELLO], [2, HELLO]]
    assert chat_seen["logprobs"]["joined"].startswith(HELLO) and set(chat_seen["logprobs"]["tops"]) == {1}


def test_answers_end_at_a_length_and_at_words(chat_seen: Seen) -> None:
    by_length, by_word = chat_seen["cut_short"]
    assert by_length[0] == "length" and by_length[2] == 4 and NINE.startswith(by_length[1])
    assert by_word[:2] == ["stop", "one two three"]


def test_the_second_question_finds_the_first_in_the_cache(chat_seen: Seen) -> None:
    (num_prompt_tokens, _), (_, num_cached_tokens) = chat_seen["cached"]
    assert num_prompt_tokens - 16 <= num_cached_tokens < num_prompt_tokens


def test_completions_are_whole_and_streamed(chat_seen: Seen) -> None:
    assert chat_seen["in_words"] == [NINE, NINE]


def test_models_are_listed_and_found(chat_seen: Seen) -> None:
    assert chat_seen["models"] == {"listed": ["talking"], "one": "talking"}


def test_refusals_are_the_librarys_own_errors(chat_seen: Seen) -> None:
    refusals = chat_seen["refusals"]
    for name in ("model", "stream"):
        assert refusals[name]["name"] == "NotFoundError" and refusals[name]["code"] == "model_not_found"
        assert refusals[name]["request_id"]
    assert (refusals["range"]["name"], refusals["range"]["param"]) == ("BadRequestError", "temperature")
    assert refusals["length"]["name"] == "BadRequestError"
    assert refusals["length"]["code"] == "context_length_exceeded"


def test_node_reads_whole_answers_and_streams(chat_in_node: Seen) -> None:
    plain, streamed = chat_in_node["plain"], chat_in_node["streamed"]
    assert plain["choices"][0]["message"]["content"] == streamed["text"] == HELLO
    [usage] = streamed["usages"]
    assert usage["total_tokens"] == plain["usage"]["total_tokens"]
    assert chat_in_node["byTheStreamHelper"] == [HELLO, HELLO]


def test_node_goes_away_in_the_middle_of_a_stream(chat_in_node: Seen) -> None:
    assert 3 <= chat_in_node["aborted"] < 100


def test_node_reports_refusals_as_its_own_errors(chat_in_node: Seen) -> None:
    refused = chat_in_node["refused"]
    assert (refused["name"], refused["status"]) == ("NotFoundError", 404)
    assert refused["code"] == "model_not_found" and refused["id"]


PARIS = ["weather", {"city": "Paris"}]
ROME = ["weather", {"city": "Rome"}]
ADA = {"name": "Ada", "age": 36}


@pytest.fixture(scope="module", params=["many", "instructor"])
def tools_seen(request: pytest.FixtureRequest, talking_cluster: LocalStack) -> Seen:
    return act(request.param, "openai_tools.py", talking_cluster)


@pytest.fixture(scope="module")
def tools_in_node(talking_cluster: LocalStack) -> Seen:
    return act_in_node("openai_tools.cjs", talking_cluster)


def test_a_tool_is_called_whatever_the_choice_that_allows_it(tools_seen: Seen) -> None:
    called = tools_seen["called"]
    for choice in ("auto", "required", "named", "allowed"):
        assert called[choice]["calls"] == [["function", *PARIS]], choice
        assert not called[choice]["content"]
    assert called["auto"]["finish"] == called["required"]["finish"] == "tool_calls"
    assert called["parallel"]["calls"] == [["function", *PARIS], ["function", *ROME]]
    assert called["parallel"]["ids"] == 2


def test_no_tool_is_called_where_none_may_be(tools_seen: Seen) -> None:
    answer = tools_seen["not_called"]
    assert answer["calls"] == [] and answer["content"] == HELLO and answer["finish"] == "stop"


def test_calls_are_streamed_in_pieces(tools_seen: Seen) -> None:
    streamed = tools_seen["streamed"]
    assert streamed["calls"] == [PARIS, ROME] and streamed["ids"] == 2
    assert min(streamed["pieces"]) > 2 and streamed["finish"] == "tool_calls"
    helper = tools_seen["streamed_by_the_helper"]
    assert helper["parsed"] == {"city": "Paris"}
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= set(
        helper["kinds"]
    )


def test_the_next_turn_hits_on_what_was_said_before(tools_seen: Seen) -> None:
    turns = tools_seen["second_turn"]
    assert turns["texts"] == ["It is 21 degrees there.", HELLO]
    for total, cached in zip(turns["totals"], turns["cached"][1:], strict=False):
        assert total - 16 <= cached, turns


def test_reasoning_is_apart_from_the_answer(tools_seen: Seen) -> None:
    reasoning = tools_seen["reasoning"]
    for text, thought in (reasoning["whole"], reasoning["streamed"]):
        assert text.strip() == "It is blue." and thought.strip() == "They ask about the sky."
    assert reasoning["tokens"] > 3


def test_answers_have_the_form_that_was_asked_for(tools_seen: Seen) -> None:
    assert tools_seen["structured"] == [ADA, ADA, ADA]


def test_a_schema_that_is_none_is_refused_by_name(tools_seen: Seen) -> None:
    name, parameter = tools_seen["bad_schema"]
    assert name == "BadRequestError" and parameter.startswith("response_format")


def test_node_runs_tools_streams_calls_and_parses(tools_in_node: Seen) -> None:
    assert tools_in_node["runTools"] == {"text": "It is 21 degrees there.", "cities": ["Paris"]}
    assert tools_in_node["streamedTools"] == {"calls": ["Paris", "Rome"], "finish": "tool_calls"}
    assert tools_in_node["parsed"] == ADA


def test_a_turn_of_nodes_stream_helper_hits_on_the_reasoning_of_the_one_before(tools_in_node: Seen) -> None:
    """Its helper sends the last piece of it back."""
    turns = tools_in_node["thinking"]
    assert "I need a tool.".endswith(turns["reasoning"])
    assert turns["text"] == "Take a coat."
    first, second = turns["usages"]
    said = first["prompt_tokens"] + first["completion_tokens"]
    assert second["prompt_tokens_details"]["cached_tokens"] >= said - 16


def test_node_reads_responses(tools_in_node: Seen) -> None:
    responses = tools_in_node["responses"]
    assert responses["texts"] == [HELLO, HELLO]
    assert responses["usage"]["input_tokens_details"]["cached_tokens"] >= 0


PARIS_RESPONSES = ["weather", {"city": "Paris"}, True]
ROME_RESPONSES = ["weather", {"city": "Rome"}, True]


@pytest.fixture(scope="module", params=["many", "instructor"])
def responses_seen(request: pytest.FixtureRequest, talking_cluster: LocalStack) -> Seen:
    return act(request.param, "openai_responses.py", talking_cluster)


def test_an_answer_has_its_items_and_a_whole_usage(responses_seen: Seen) -> None:
    answer = responses_seen["plain"]
    assert answer["text"] == HELLO and answer["status"] == "completed"
    assert [item["type"] for item in answer["output"]] == ["message"]
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] >= 0
    assert usage["output_tokens_details"]["reasoning_tokens"] == 0


def test_a_stream_has_the_events_in_their_order(responses_seen: Seen) -> None:
    streamed = responses_seen["streamed"]
    assert streamed["kinds"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert streamed["text"] == streamed["final"] == HELLO and streamed["numbers"]
    assert streamed["usage"]["output_tokens"] == responses_seen["plain"]["usage"]["output_tokens"]


def test_tools_are_called_whole_and_streamed(responses_seen: Seen) -> None:
    tools, helper = responses_seen["tools"], responses_seen["by_the_stream_helper"]
    assert tools["auto"] == tools["required"] == tools["named"] == helper["calls"] == [PARIS_RESPONSES]
    assert tools["parallel"] == [PARIS_RESPONSES, ROME_RESPONSES]
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= set(
        helper["kinds"]
    )


def test_the_next_turn_hits_on_what_was_said_before_responses(responses_seen: Seen) -> None:
    turn = responses_seen["second_turn"]
    assert turn["text"] == "It is 21 degrees there."
    assert turn["cached"] >= turn["total"] - 16, turn


def test_a_turn_goes_on_from_one_that_is_named(responses_seen: Seen) -> None:
    turn = responses_seen["second_turn_by_id"]
    assert turn["text"] == "It is 21 degrees there."
    assert turn["cached"] >= turn["total"] - 16, turn


def test_responses_are_kept_and_forgotten(responses_seen: Seen) -> None:
    assert responses_seen["stored"] == [HELLO, "NotFoundError"]


def test_reasoning_is_an_item_of_its_own(responses_seen: Seen) -> None:
    kinds, text, num_tokens = responses_seen["reasoning"]
    assert kinds == ["reasoning", "message"] and text.strip() == "It is blue." and num_tokens > 3


def test_answers_have_the_form_that_was_asked_for_responses(responses_seen: Seen) -> None:
    assert responses_seen["structured"] == {"name": "Ada", "age": 36}


def test_refusals_are_the_librarys_own_errors_responses(responses_seen: Seen) -> None:
    refusals = responses_seen["refusals"]
    assert (refusals["model"]["name"], refusals["model"]["code"]) == ("NotFoundError", "model_not_found")
    assert refusals["previous"]["param"] == "previous_response_id"
    assert (refusals["range"]["name"], refusals["range"]["param"]) == ("BadRequestError", "temperature")


BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def anthropic_seen(talking_cluster: LocalStack) -> Seen:
    return act("many", "anthropic_messages.py", talking_cluster)


@pytest.fixture(scope="module")
def langchain_messages(talking_cluster: LocalStack) -> Seen:
    return act("many", "langchain_anthropic_messages.py", talking_cluster)


@pytest.fixture(scope="module")
def anthropic_in_node(talking_cluster: LocalStack) -> Seen:
    return act_in_node("anthropic_messages.cjs", talking_cluster)


def prompt_of(usage: dict[str, Any]) -> int:
    return int(
        usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    )


def test_an_answer_has_its_blocks_its_reason_and_a_disjoint_usage(anthropic_seen: Seen) -> None:
    answer = anthropic_seen["plain"]
    assert [(block["type"], block["text"]) for block in answer["content"]] == [("text", HELLO)]
    assert answer["stop_reason"] == "end_turn" and answer["role"] == "assistant"
    assert answer["model"] == "talking" and answer["request_id"]
    assert answer["usage"]["output_tokens"] > 3 and prompt_of(answer["usage"]) > 3


def test_a_stream_has_the_events_in_their_order_anthropic(anthropic_seen: Seen) -> None:
    streamed, helper = anthropic_seen["streamed"], anthropic_seen["by_the_stream_helper"]
    assert [kind for kind in streamed["kinds"] if kind != "ping"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert streamed["text"] == helper["text"] == anthropic_seen["asynchronous"] == HELLO
    usage = helper["final"]["usage"]
    assert usage["output_tokens"] == anthropic_seen["plain"]["usage"]["output_tokens"]


def test_tools_are_called_whole_and_streamed_anthropic(anthropic_seen: Seen) -> None:
    tools, streamed = anthropic_seen["tools"], anthropic_seen["streamed_tools"]
    assert tools["auto"] == tools["any"] == tools["named"] == [[PARIS], "tool_use"]
    assert tools["parallel"] == [[PARIS, ROME], "tool_use"]
    assert streamed["calls"] == [PARIS, ROME] and streamed["stop"] == "tool_use"
    assert "input_json" in streamed["kinds"]


def test_the_next_turn_hits_on_what_was_said_before_anthropic(anthropic_seen: Seen) -> None:
    turns = anthropic_seen["second_turn"]
    first, second = turns["usages"]
    assert turns["text"] == "It is 21 degrees there."
    assert second["cache_read_input_tokens"] >= prompt_of(first) + first["output_tokens"] - BLOCK_SIZE


def test_thinking_is_a_block_of_its_own_and_the_next_turn_hits_on_it(anthropic_seen: Seen) -> None:
    for blocks in anthropic_seen["thinking"]:
        assert [[kind, text.strip()] for kind, text in blocks] == [
            ["thinking", "They ask about the sky."],
            ["text", "It is blue."],
        ]
    turns = anthropic_seen["thinking_second_turn"]
    assert turns["kinds"] == ["thinking", "tool_use"]
    assert turns["cached"] >= turns["total"] - BLOCK_SIZE


def test_what_is_marked_is_written_and_then_read(anthropic_seen: Seen) -> None:
    first, second = anthropic_seen["cached"]
    assert first["cache_creation"]["ephemeral_1h_input_tokens"] == first["cache_creation_input_tokens"] > 100
    assert second["cache_read_input_tokens"] >= first["cache_creation_input_tokens"] - BLOCK_SIZE


def test_tokens_are_counted_as_they_are_billed(anthropic_seen: Seen) -> None:
    counted, used = anthropic_seen["counted"]
    assert counted == used > 10


def test_models_are_listed_and_found_anthropic(anthropic_seen: Seen) -> None:
    assert anthropic_seen["models"] == [["talking"], "talking"]


def test_refusals_are_the_librarys_own_errors_anthropic(anthropic_seen: Seen) -> None:
    refusals = anthropic_seen["refusals"]
    for name in ("model", "stream"):
        assert refusals[name]["name"] == "NotFoundError", refusals[name]
        assert refusals[name]["body"]["error"]["type"] == "not_found_error" and refusals[name]["request_id"]
    for name in ("markers", "tokens"):
        assert refusals[name]["name"] == "BadRequestError", refusals[name]
    assert "cache_control" in refusals["markers"]["message"]


def test_langchain_reads_answers_streams_and_calls(langchain_messages: Seen) -> None:
    plain, streamed, tools = (
        langchain_messages["plain"],
        langchain_messages["streamed"],
        langchain_messages["tools"],
    )
    assert plain["text"] == streamed["text"] == HELLO
    assert streamed["usage"]["total_tokens"] == plain["usage"]["total_tokens"]
    assert tools["calls"] == [PARIS] and tools["streamed"] == [PARIS, ROME]
    assert tools["text"] == "It is 21 degrees there."


def test_langchain_sees_what_was_cached_and_what_is_refused(langchain_messages: Seen) -> None:
    first, second = langchain_messages["cached"]
    assert second["input_token_details"]["cache_read"] >= first["input_tokens"] - 2 * BLOCK_SIZE
    assert langchain_messages["refused"]["name"].endswith("NotFoundError")


def test_node_s_library_reads_answers_streams_thoughts_and_calls(
    anthropic_seen: Seen, anthropic_in_node: Seen
) -> None:
    plain, streamed, helper = (anthropic_in_node[name] for name in ("plain", "streamed", "byTheStreamHelper"))
    assert (plain["content"][0]["text"], plain["stop_reason"]) == (HELLO, "end_turn") and plain["request_id"]
    assert streamed == {"text": HELLO, "last": "message_stop"}
    assert helper == {"calls": [PARIS, ROME], "stop": "tool_use"}
    assert anthropic_in_node["thinking"] == [["thinking", "They ask about the sky."], ["text", "It is blue."]]
    assert anthropic_in_node["models"] == anthropic_seen["models"] and anthropic_in_node["counted"] > 3
    assert 3 <= anthropic_in_node["aborted"] < 10_000


def test_node_s_library_runs_tools_and_its_next_turn_and_what_is_marked_hit(anthropic_in_node: Seen) -> None:
    run = anthropic_in_node["runTools"]
    assert run["text"] == "It is 21 degrees there." and run["cities"] == ["Paris"]
    before, after = run["usages"]
    assert after["cache_read_input_tokens"] >= prompt_of(before) + before["output_tokens"] - BLOCK_SIZE
    first, second = anthropic_in_node["cached"]
    assert first["cache_creation"]["ephemeral_1h_input_tokens"] == first["cache_creation_input_tokens"] > 100
    assert second["cache_read_input_tokens"] >= first["cache_creation_input_tokens"] - BLOCK_SIZE


def test_node_s_library_raises_refusals_as_its_own_errors(anthropic_in_node: Seen) -> None:
    refused = anthropic_in_node["refused"]
    assert (refused["name"], refused["status"]) == ("NotFoundError", 404)
    assert refused["type"] == "not_found_error" and refused["id"]


@pytest.fixture(scope="module")
def google_seen(talking_cluster: LocalStack) -> Seen:
    return act("many", "google_chat.py", talking_cluster)


@pytest.fixture(scope="module")
def google_in_node(talking_cluster: LocalStack) -> Seen:
    return act_in_node("google_chat.cjs", talking_cluster)


def test_an_answer_has_its_words_its_reason_and_its_usage_google(google_seen: Seen) -> None:
    plain, streamed = google_seen["plain"], google_seen["streamed"]
    assert (plain["text"], plain["finish"], plain["model"]) == (HELLO, "STOP", "talking")
    usage = plain["usage"]
    assert usage["total_token_count"] == usage["prompt_token_count"] + usage["candidates_token_count"]
    assert (streamed["text"], streamed["finish"]) == (HELLO, "STOP") and streamed["num"] > 2
    assert streamed["usage"]["candidates_token_count"] == usage["candidates_token_count"]
    assert google_seen["asynchronous"] == [HELLO] * 2


def test_a_chat_goes_on_whole_or_streamed_and_finds_its_turns_in_the_cache(google_seen: Seen) -> None:
    assert google_seen["chatted"]["texts"] == [HELLO, NINE, HELLO]
    assert google_seen["chatted"]["cached"] > 0


def test_thoughts_are_shown_only_where_they_are_asked_for(google_seen: Seen) -> None:
    thoughts = google_seen["thoughts"]
    (is_thought, thought), (is_not, text) = thoughts["parts"]
    assert is_thought and thought.strip() == "They ask about the sky."
    assert not is_not and text == thoughts["hidden"] == "It is blue."
    assert thoughts["num"] > 0


def test_functions_are_called_by_hand_and_by_the_library(google_seen: Seen) -> None:
    assert google_seen["called"] == [PARIS, PARIS]
    assert google_seen["called_by_itself"] == ["It is 21 degrees there.", 3]


def test_answers_have_the_form_that_was_asked_for_google(google_seen: Seen) -> None:
    assert google_seen["formatted"] == [ADA, ADA]


def test_tokens_are_counted_and_models_listed(google_seen: Seen) -> None:
    counted, generated = google_seen["counted"]
    assert counted == generated > 0
    names, limit = google_seen["listed"]
    assert names == ["models/talking"] and limit > 0


def test_a_cache_is_made_used_extended_and_deleted(google_seen: Seen) -> None:
    cached = google_seen["cached"]
    assert cached["text"] == HELLO and cached["listed"] and cached["same"]
    usage = cached["usage"]
    assert usage["prompt_token_count"] > cached["size"] > 400
    assert cached["size"] - 32 < usage["cached_content_token_count"] <= cached["size"]
    assert 59 <= cached["more"] <= 70 and cached["gone"] == [404, "NOT_FOUND"]


def test_node_s_library_does_the_same(google_seen: Seen, google_in_node: Seen) -> None:
    assert google_in_node["plain"]["text"] == google_in_node["streamed"]["text"] == HELLO
    assert google_in_node["plain"]["finish"] == "STOP"
    assert google_in_node["chatted"] == {"texts": [HELLO, NINE, HELLO], "turns": 3}
    assert google_in_node["called"] == [PARIS, PARIS]
    assert google_in_node["counted"] == google_seen["counted"][0]
    cached = google_in_node["cached"]
    assert cached["text"] == HELLO and cached["longer"] and cached["listed"]
    assert cached["size"] - 32 < cached["cached"] <= cached["size"]
    assert google_in_node["refused"] == {"name": "ApiError", "status": 404}


def test_refusals_have_their_code_status_and_words(google_seen: Seen) -> None:
    (code, status, _), streamed, invalid = google_seen["refused"]
    assert (code, status) == (404, "NOT_FOUND") == tuple(streamed[:2])
    assert invalid[:2] == [400, "INVALID_ARGUMENT"] and "temperature" in invalid[2]


@pytest.fixture(scope="module")
def caching_seen(talking_cluster: LocalStack) -> Seen:
    return act("many", "caching_fields.py", talking_cluster)


def test_chats_take_all_fields_at_once_and_a_salt_keeps_them_apart(caching_seen: Seen) -> None:
    first, *later = caching_seen["chat"]["same"]
    assert first[1] == 0
    for num_prompt_tokens, num_cached_tokens in later:
        assert num_cached_tokens >= num_prompt_tokens - BLOCK_SIZE
    one, other, again = (cached for _, cached in caching_seen["chat"]["salted"])
    assert one == other == 0 and again >= first[0] - BLOCK_SIZE


def test_responses_are_computed_ahead_and_echo_what_was_said_of_caching(caching_seen: Seen) -> None:
    responses = caching_seen["responses"]
    assert responses["ahead"] == [[], 0] and responses["text"] == HELLO
    num_prompt_tokens, num_cached_tokens = responses["usage"]
    assert num_cached_tokens >= num_prompt_tokens - BLOCK_SIZE
    key, options = responses["echoed"]
    assert key == "key" and options.items() >= {"mode": "explicit", "ttl": "30m"}.items()


def test_messages_are_computed_ahead(caching_seen: Seen) -> None:
    content, reason, ahead = caching_seen["messages"]["ahead"]
    assert (content, reason, ahead["output_tokens"]) == ([], "max_tokens", 0)
    usage = caching_seen["messages"]["usage"]
    assert caching_seen["messages"]["text"] == HELLO
    num_prompt_tokens = ahead["input_tokens"] + ahead["cache_creation_input_tokens"]
    assert usage["cache_read_input_tokens"] >= num_prompt_tokens - BLOCK_SIZE


WARM = "It is 21 degrees there."


@pytest.fixture(scope="module")
def litellm(talking_cluster: LocalStack) -> Seen:
    return act("many", "litellm_chat.py", talking_cluster)


@pytest.fixture(scope="module")
def langchain(talking_cluster: LocalStack) -> Seen:
    return act("many", "langchain_openai_chat.py", talking_cluster)


@pytest.fixture(scope="module")
def agents(talking_cluster: LocalStack) -> Seen:
    return act("many", "agents_chat.py", talking_cluster)


def test_litellm_reads_whole_answers_and_streams_of_both_its_providers(litellm: Seen) -> None:
    assert [text for text, _ in litellm["plain"]] == [HELLO, HELLO]
    assert litellm["streamed"] == [[HELLO, True], [HELLO, True]]


def test_litellm_sees_what_was_cached(litellm: Seen) -> None:
    (num_prompt_tokens, _), (_, num_cached_tokens) = litellm["cached"]
    assert num_prompt_tokens - 16 <= num_cached_tokens < num_prompt_tokens


def test_litellm_tells_refusals_apart(litellm: Seen) -> None:
    refusals = litellm["refusals"]
    assert refusals["model"]["name"] == "NotFoundError"
    assert refusals["length"]["name"] == "ContextWindowExceededError"


def test_langchain_reads_whole_answers_and_streams(langchain: Seen) -> None:
    plain, streamed = langchain["plain"], langchain["streamed"]
    assert plain["text"] == streamed["text"] == HELLO
    assert streamed["usage"][-1]["total_tokens"] == plain["usage"]["total_tokens"]
    assert plain["response"]["finish_reason"] == "stop"


def test_langchain_sees_what_was_cached(langchain: Seen) -> None:
    first, second = langchain["cached"]
    num_cached_tokens = second["input_token_details"]["cache_read"]
    assert first["input_tokens"] - 16 <= num_cached_tokens < first["input_tokens"]


def test_langchain_knows_a_model_that_is_not_there(langchain: Seen) -> None:
    assert langchain["refused"]["name"] == "OpenAIModelNotFoundError"


def test_agents_answer_and_stream(agents: Seen) -> None:
    assert agents["agents_plain"] == HELLO
    text, kinds = agents["agents_streamed"]
    assert text == HELLO and "raw_response_event" in kinds


def test_pydantic_ai_answers_and_streams(agents: Seen) -> None:
    text, num_output_tokens = agents["pydantic_plain"]
    assert text == HELLO and num_output_tokens > 0
    assert agents["pydantic_streamed"] == HELLO


def test_litellm_calls_tools_and_reads_formats_and_reasoning(litellm: Seen) -> None:
    tools = litellm["tools"]
    assert tools["auto"] == tools["required"] == [PARIS] and tools["streamed"] == [PARIS, ROME]
    assert litellm["structured"] == ADA
    text, thought = litellm["reasoning"]
    assert text.strip() == "It is blue." and thought.strip() == "They ask about the sky."


def test_litellm_reads_responses(litellm: Seen) -> None:
    assert litellm["responses"] == HELLO


def test_litellm_reads_messages(litellm: Seen) -> None:
    assert litellm["messages"]["content"][0]["text"] == HELLO


def test_langchain_calls_tools_and_reads_formats(langchain: Seen) -> None:
    tools = langchain["tools"]
    assert tools["auto"] == tools["any"] == tools["named"] == [PARIS] and tools["streamed"] == [PARIS, ROME]
    assert langchain["second_turn"] == WARM
    assert langchain["structured"] == [ADA, ADA]


def test_langchain_reads_responses(langchain: Seen) -> None:
    text, num_tokens = langchain["responses"]
    assert text == HELLO and num_tokens > 3


def test_agents_run_tools_and_read_formats(agents: Seen) -> None:
    assert agents["agents_tools"] == [WARM, ["Paris"]]
    assert agents["agents_structured"] == ADA


def test_agents_run_on_responses_as_is_their_default(agents: Seen) -> None:
    assert agents["agents_on_responses"] == HELLO
    assert agents["agents_tools_on_responses"] == [WARM, ["Paris"]]
    assert agents["agents_streamed_on_responses"] == ["run_item_stream_event", HELLO]


def test_pydantic_ai_runs_tools_and_reads_formats(agents: Seen) -> None:
    assert agents["pydantic_tools"] == WARM
    assert agents["pydantic_structured"] == [ADA, ADA, ADA]


def test_instructor_reads_objects_in_each_of_its_ways(talking_cluster: LocalStack) -> None:
    seen = act("instructor", "instructor_chat.py", talking_cluster)
    assert seen == dict.fromkeys(("tools", "json", "json_schema", "responses_tools"), ADA)
