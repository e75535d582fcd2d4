"""OpenAI's libraries on Chat Completions and Completions: Python's in two versions, and Node's."""

import pytest

from loadtests.stacks.local_stack import LocalStack
from tests.clients.conftest import Seen, act, act_in_node

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

HELLO = "Hello there, my friend!"
NINE = "one two three four five six seven eight nine"


@pytest.fixture(scope="module", params=["many", "instructor"])
def seen(request: pytest.FixtureRequest, talking_cluster: LocalStack) -> Seen:
    return act(request.param, "openai_chat.py", talking_cluster)


@pytest.fixture(scope="module")
def seen_in_node(talking_cluster: LocalStack) -> Seen:
    return act_in_node("openai_chat.cjs", talking_cluster)


def test_an_answer_has_its_words_its_reason_and_its_usage(seen: Seen) -> None:
    answer = seen["plain"]
    [choice] = answer["choices"]
    assert choice["message"]["content"] == HELLO and choice["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert answer["model"] == "talking" and answer["id"].startswith("chatcmpl-")
    assert answer["request_id"]


def test_a_stream_says_the_same_with_its_usage_at_the_end(seen: Seen) -> None:
    streamed, plain = seen["streamed"], seen["plain"]
    assert streamed["text"] == HELLO and streamed["finish"] == "stop" and len(streamed["ids"]) == 1
    [usage] = streamed["usages"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == plain["usage"][name]


def test_the_librarys_own_helpers_and_its_asynchronous_half_work(seen: Seen) -> None:
    helper = seen["by_the_stream_helper"]
    assert helper["text"] == HELLO and {"chunk", "content.delta", "content.done"} <= set(helper["kinds"])
    assert seen["asynchronous"] == [HELLO] * 4


def test_several_choices_and_logprobs_come_as_asked_for(seen: Seen) -> None:
    assert seen["several"] == [[0, HELLO], [1, HELLO], [2, HELLO]]
    assert seen["logprobs"]["joined"].startswith(HELLO) and set(seen["logprobs"]["tops"]) == {1}


def test_answers_end_at_a_length_and_at_words(seen: Seen) -> None:
    by_length, by_word = seen["cut_short"]
    assert by_length[0] == "length" and by_length[2] == 4 and NINE.startswith(by_length[1])
    assert by_word[:2] == ["stop", "one two three"]


def test_the_second_question_finds_the_first_in_the_cache(seen: Seen) -> None:
    (num_prompt_tokens, _), (_, num_cached_tokens) = seen["cached"]
    assert num_prompt_tokens - 16 <= num_cached_tokens < num_prompt_tokens


def test_completions_are_whole_and_streamed(seen: Seen) -> None:
    assert seen["in_words"] == [NINE, NINE]


def test_models_are_listed_and_found(seen: Seen) -> None:
    assert seen["models"] == {"listed": ["talking"], "one": "talking"}


def test_refusals_are_the_librarys_own_errors(seen: Seen) -> None:
    refusals = seen["refusals"]
    for name in ("model", "stream"):
        assert refusals[name]["name"] == "NotFoundError" and refusals[name]["code"] == "model_not_found"
        assert refusals[name]["request_id"]
    assert (refusals["range"]["name"], refusals["range"]["param"]) == ("BadRequestError", "temperature")
    assert refusals["length"]["name"] == "BadRequestError"
    assert refusals["length"]["code"] == "context_length_exceeded"


def test_node_reads_whole_answers_and_streams(seen_in_node: Seen) -> None:
    plain, streamed = seen_in_node["plain"], seen_in_node["streamed"]
    assert plain["choices"][0]["message"]["content"] == streamed["text"] == HELLO
    [usage] = streamed["usages"]
    assert usage["total_tokens"] == plain["usage"]["total_tokens"]
    assert seen_in_node["byTheStreamHelper"] == [HELLO, HELLO]


def test_node_goes_away_in_the_middle_of_a_stream(seen_in_node: Seen) -> None:
    assert 3 <= seen_in_node["aborted"] < 100


def test_node_reports_refusals_as_its_own_errors(seen_in_node: Seen) -> None:
    refused = seen_in_node["refused"]
    assert (refused["name"], refused["status"]) == ("NotFoundError", 404)
    assert refused["code"] == "model_not_found" and refused["id"]
