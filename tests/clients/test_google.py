"""Google's libraries on Gemini's API."""

import pytest

from loadtests.stacks.local_stack import LocalStack
from tests.clients.conftest import Seen, act, act_in_node

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

HELLO = "Hello there, my friend!"
NINE = "one two three four five six seven eight nine"
PARIS = ["weather", {"city": "Paris"}]
ADA = {"name": "Ada", "age": 36}


@pytest.fixture(scope="module")
def seen(talking_cluster: LocalStack) -> Seen:
    return act("many", "google_chat.py", talking_cluster)


@pytest.fixture(scope="module")
def seen_in_node(talking_cluster: LocalStack) -> Seen:
    return act_in_node("google_chat.cjs", talking_cluster)


def test_an_answer_has_its_words_its_reason_and_its_usage(seen: Seen) -> None:
    plain, streamed = seen["plain"], seen["streamed"]
    assert (plain["text"], plain["finish"], plain["model"]) == (HELLO, "STOP", "talking")
    usage = plain["usage"]
    assert usage["total_token_count"] == usage["prompt_token_count"] + usage["candidates_token_count"]
    assert (streamed["text"], streamed["finish"]) == (HELLO, "STOP") and streamed["num"] > 2
    assert streamed["usage"]["candidates_token_count"] == usage["candidates_token_count"]
    assert seen["asynchronous"] == [HELLO] * 2


def test_a_chat_goes_on_whole_or_streamed_and_finds_its_turns_in_the_cache(seen: Seen) -> None:
    assert seen["chatted"]["texts"] == [HELLO, NINE, HELLO]
    assert seen["chatted"]["cached"] > 0


def test_thoughts_are_shown_only_where_they_are_asked_for(seen: Seen) -> None:
    thoughts = seen["thoughts"]
    (is_thought, thought), (is_not, text) = thoughts["parts"]
    assert is_thought and thought.strip() == "They ask about the sky."
    assert not is_not and text == thoughts["hidden"] == "It is blue."
    assert thoughts["num"] > 0


def test_functions_are_called_by_hand_and_by_the_library(seen: Seen) -> None:
    assert seen["called"] == [PARIS, PARIS]
    assert seen["called_by_itself"] == ["It is 21 degrees there.", 3]


def test_answers_have_the_form_that_was_asked_for(seen: Seen) -> None:
    assert seen["formatted"] == [ADA, ADA]


def test_tokens_are_counted_and_models_listed(seen: Seen) -> None:
    counted, generated = seen["counted"]
    assert counted == generated > 0
    names, limit = seen["listed"]
    assert names == ["models/talking"] and limit > 0


def test_a_cache_is_made_used_extended_and_deleted(seen: Seen) -> None:
    cached = seen["cached"]
    assert cached["text"] == HELLO and cached["listed"] and cached["same"]
    usage = cached["usage"]
    assert usage["prompt_token_count"] > cached["size"] > 400
    assert cached["size"] - 32 < usage["cached_content_token_count"] <= cached["size"]
    assert 59 <= cached["more"] <= 70 and cached["gone"] == [404, "NOT_FOUND"]


def test_node_s_library_does_the_same(seen: Seen, seen_in_node: Seen) -> None:
    assert seen_in_node["plain"]["text"] == seen_in_node["streamed"]["text"] == HELLO
    assert seen_in_node["plain"]["finish"] == "STOP"
    assert seen_in_node["chatted"] == {"texts": [HELLO, NINE, HELLO], "turns": 3}
    assert seen_in_node["called"] == [PARIS, PARIS]
    assert seen_in_node["counted"] == seen["counted"][0]
    cached = seen_in_node["cached"]
    assert cached["text"] == HELLO and cached["longer"] and cached["listed"]
    assert cached["size"] - 32 < cached["cached"] <= cached["size"]
    assert seen_in_node["refused"] == {"name": "ApiError", "status": 404}


def test_refusals_have_their_code_status_and_words(seen: Seen) -> None:
    (code, status, _), streamed, invalid = seen["refused"]
    assert (code, status) == (404, "NOT_FOUND") == tuple(streamed[:2])
    assert invalid[:2] == [400, "INVALID_ARGUMENT"] and "temperature" in invalid[2]
