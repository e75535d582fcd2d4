"""Tests of usage in each dialect when the engine does not say what was cached: it is left out, never 0."""

from typing import Any

import msgspec
import pytest

from replicas.protocol.frames import PromptUsage
from router.api.answer_usage import AnswerUsage
from router.api.anthropic.caching import usage_of as anthropic_usage
from router.api.gemini.answers import usage_of as gemini_usage
from router.api.openai.usage import usage_of as openai_usage

UNSAID = PromptUsage(40, None, 0)
SAID = PromptUsage(60, 32, 16)


@pytest.mark.parametrize("prompts", [[UNSAID], [SAID, UNSAID]])
def test_openai_leaves_it_out_and_so_for_several_prompts(prompts: list[PromptUsage]) -> None:
    usage = AnswerUsage(prompts, [()] * len(prompts), 5)
    assert msgspec.to_builtins(openai_usage(usage)) == {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": 5,
        "total_tokens": usage.num_prompt_tokens + 5,
        "prompt_tokens_details": {},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_anthropic_has_null() -> None:
    found: dict[str, Any] = msgspec.to_builtins(anthropic_usage(UNSAID, (), 16, 0))
    assert found.pop("input_tokens") == 40 and found.pop("output_tokens") == 0
    assert found == dict.fromkeys(
        ("cache_creation_input_tokens", "cache_read_input_tokens", "cache_creation")
    )


def test_gemini_leaves_it_out() -> None:
    found = msgspec.to_builtins(gemini_usage(AnswerUsage([UNSAID], [()], 5)))
    assert found["promptTokenCount"] == 40
    assert not {"cachedContentTokenCount", "cacheTokensDetails"} & found.keys()
