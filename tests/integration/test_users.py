"""What one user's prompts are worth to another, with real engines behind a real router."""

import openai
import pytest
from openai.types import CompletionUsage

from loadtests.stacks.local_stack import LocalStack
from tests.integration.observe import metric

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SYSTEM = "You are a patient assistant who explains how caches work. " * 20


def ask(stack: LocalStack, question: str, **who: str) -> CompletionUsage:
    with openai.OpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        answer = client.chat.completions.create(model="toy", messages=messages, max_tokens=4, **who)  # type: ignore[call-overload]
    usage: CompletionUsage = answer.usage
    return usage


def cached(usage: CompletionUsage) -> tuple[int, int]:
    """All cached tokens, and those of them that another user had computed."""
    details = usage.prompt_tokens_details
    assert details is not None
    return details.cached_tokens, details.cross_user_cached_tokens  # type: ignore[attr-defined, return-value]


@pytest.mark.parametrize("fixture", [pytest.param("toy_stack", marks=pytest.mark.slow), "simulated_stack"])
def test_usage_tells_what_another_user_had_computed_from_what_one_had_oneself(
    request: pytest.FixtureRequest, fixture: str
) -> None:
    stack: LocalStack = request.getfixturevalue(fixture)
    assert cached(ask(stack, "What is a block?", user="ada")) == (0, 0)
    num_cached, num_of_others = cached(ask(stack, "What is a lease?", user="bob"))
    assert num_cached > 200
    assert num_of_others == num_cached
    num_cached, num_of_others = cached(ask(stack, "What is a block?", safety_identifier="ada"))
    assert num_cached > 200
    assert num_of_others == 0
    num_cached, num_of_others = cached(ask(stack, "What is a block?"))  # of nobody in particular
    assert num_cached > 200
    assert num_of_others == 0
    total = metric(stack, "router_cross_user_cached_tokens_total")
    assert total == metric(stack, "router_cached_tokens_total") - 2 * num_cached


def test_where_there_are_no_tiers_the_answer_says_that_nothing_keeps_a_prompt(
    simulated_stack: LocalStack,
) -> None:
    details = ask(simulated_stack, "What is a block?", prompt_cache_retention="24h").prompt_tokens_details
    assert details is not None
    assert details.cache_leases == [{"status": "refused", "reason": "no_tier"}]  # type: ignore[attr-defined]
