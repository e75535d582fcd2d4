"""LiteLLM, LangChain, openai-agents and pydantic-ai on Chat Completions."""

import pytest

from loadtests.stacks.local_stack import LocalStack
from tests.clients.conftest import Seen, act

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

HELLO = "Hello there, my friend!"


@pytest.fixture(scope="module")
def litellm(talking_cluster: LocalStack) -> Seen:
    return act("litellm", "litellm_chat.py", talking_cluster)


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
