"""LiteLLM, LangChain, openai-agents, pydantic-ai and instructor on OpenAI's routes."""

import pytest

from loadtests.stacks.local_stack import LocalStack
from tests.clients.conftest import Seen, act

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

HELLO = "Hello there, my friend!"
WARM = "It is 21 degrees there."
PARIS = ["weather", {"city": "Paris"}]
ROME = ["weather", {"city": "Rome"}]
ADA = {"name": "Ada", "age": 36}


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
