"""The simulated cache of several groups, against the hits of vLLM's own scheduler."""

from typing import Any

import pytest

from tests.replicas.simulated_engine.test_grouped_cache import Served
from tests.replicas.vllm_engine.router_view import Prompts

pytestmark = pytest.mark.vllm

NUM_PROMPTS = 60
LONGEST = 980

SIMULATED = {
    "gpt-oss": "window:32:128 full:32",
    "gemma 3": "5*window:32:256 full:32",
    "two windows": "window:32:100 window:32:300 full:32",
    "llama 4": "3*chunked:32:256 full:32",
    "mistral": "window:32:256",
    "qwen3-next": "3*state:64 full:64",
    "jamba": "2*state:32 full:32",
}
"""Shapes of `scheduler_run.py`."""


@pytest.mark.parametrize("name", SIMULATED)
def test_hits_are_those_of_vllm_with_evictions(name: str, environment: None) -> None:
    from tests.replicas.vllm_engine.scheduler_run import SHAPES, SchedulerRun

    shape = SHAPES[name]
    run = SchedulerRun(shape)
    served = Served(SIMULATED[name], shape.retention or 0, num_blocks=shape.num_blocks, budget=512)
    assert served.cache.alignment == run.shape.alignment
    assert len(served.cache.groups) == len(shape.specs)
    prompts = Prompts(1, run.shape.hash_block, LONGEST)
    wrong = num_hits = 0
    for number in range(NUM_PROMPTS):
        prompt = prompts.next()
        request: Any = run.add(str(number), prompt, prompts.num_output_tokens())
        while run.scheduler.has_requests():
            run.step()
        (started,) = run.core.take_started()
        hit = served.answer(prompt, list(request.output_token_ids))
        wrong += hit.num_tokens != started.num_found_tokens
        num_hits += hit.num_tokens > 0
        prompts.ran(prompt, request.output_token_ids)
    assert num_hits > NUM_PROMPTS // 5
    assert wrong == 0
