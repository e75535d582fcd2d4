"""OpenAI's library on Responses."""

import pytest

from loadtests.stacks.local_stack import LocalStack
from tests.clients.conftest import Seen, act

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

HELLO = "Hello there, my friend!"
PARIS = ["weather", {"city": "Paris"}, True]
ROME = ["weather", {"city": "Rome"}, True]


@pytest.fixture(scope="module", params=["many", "instructor"])
def seen(request: pytest.FixtureRequest, talking_cluster: LocalStack) -> Seen:
    return act(request.param, "openai_responses.py", talking_cluster)


def test_an_answer_has_its_items_and_a_whole_usage(seen: Seen) -> None:
    answer = seen["plain"]
    assert answer["text"] == HELLO and answer["status"] == "completed"
    assert [item["type"] for item in answer["output"]] == ["message"]
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] >= 0
    assert usage["output_tokens_details"]["reasoning_tokens"] == 0


def test_a_stream_has_the_events_in_their_order(seen: Seen) -> None:
    streamed = seen["streamed"]
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
    assert streamed["usage"]["output_tokens"] == seen["plain"]["usage"]["output_tokens"]


def test_tools_are_called_whole_and_streamed(seen: Seen) -> None:
    tools, helper = seen["tools"], seen["by_the_stream_helper"]
    assert tools["auto"] == tools["required"] == tools["named"] == helper["calls"] == [PARIS]
    assert tools["parallel"] == [PARIS, ROME]
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= set(
        helper["kinds"]
    )


def test_the_next_turn_hits_on_what_was_said_before(seen: Seen) -> None:
    turn = seen["second_turn"]
    assert turn["text"] == "It is 21 degrees there."
    assert turn["cached"] >= turn["total"] - 16, turn


def test_a_turn_goes_on_from_one_that_is_named(seen: Seen) -> None:
    turn = seen["second_turn_by_id"]
    assert turn["text"] == "It is 21 degrees there."
    assert turn["cached"] >= turn["total"] - 16, turn


def test_responses_are_kept_and_forgotten(seen: Seen) -> None:
    assert seen["stored"] == [HELLO, "NotFoundError"]


def test_reasoning_is_an_item_of_its_own(seen: Seen) -> None:
    kinds, text, num_tokens = seen["reasoning"]
    assert kinds == ["reasoning", "message"] and text.strip() == "It is blue." and num_tokens > 3


def test_answers_have_the_form_that_was_asked_for(seen: Seen) -> None:
    assert seen["structured"] == {"name": "Ada", "age": 36}


def test_refusals_are_the_librarys_own_errors(seen: Seen) -> None:
    refusals = seen["refusals"]
    assert (refusals["model"]["name"], refusals["model"]["code"]) == ("NotFoundError", "model_not_found")
    assert refusals["previous"]["param"] == "previous_response_id"
    assert (refusals["range"]["name"], refusals["range"]["param"]) == ("BadRequestError", "temperature")
