"""A request that samples, and whose prompt takes several steps."""

import pytest

from tests.replicas.engine_contract import EngineRun, prompt_of, run

__all__ = ["run"]

pytestmark = pytest.mark.vllm


def test_it_draws_what_it_would_have_drawn_with_its_prompt_in_one_step(run: EngineRun) -> None:
    prompt = prompt_of(run.engine, 600)
    in_pieces = run.generate(prompt, max_tokens=8, temperature=1.0, seed=11)
    at_once = run.generate(prompt, max_tokens=8, temperature=1.0, seed=11)
    usages = [run.usage(key) for key in (in_pieces, at_once)]
    assert [usage.num_cached_tokens > 500 for usage in usages] == [False, True]
    assert len(run.tokens(in_pieces)) == 8
    assert run.tokens(in_pieces) == run.tokens(at_once)
