"""Resume points from vLLM's events, and the simulated cache, against the hits of vLLM's own scheduler."""

from collections import Counter
from typing import Any

import pytest

from replicas.protocol.hits import points_left
from tests.examples import examples
from tests.replicas.simulated_engine.test_grouped_cache import Served
from tests.replicas.vllm_engine.foretold import Prompts, RouterView

pytestmark = pytest.mark.vllm

NUM_PROMPTS = examples(240)
LONGEST = 980
NAMES = (
    *("gpt-oss", "gpt-oss, a tail every 256 tokens", "gpt-oss, dense", "gemma 3", "gemma 4", "two windows"),
    *("llama 4", "mistral", "qwen3-next", "qwen3-next, finer hits", "jamba", "kimi linear", "nemotron"),
    *("mamba 2", "states, a window and full attention", "deepseek v4", "gpt-oss, drafts"),
    *("gpt-oss, drafts on full attention", "gemma 4, drafts", "qwen3-next, drafts", "nemotron, drafts"),
    "qwen3-next, a tail every 256 tokens",
)


def replay(name: str, num_prompts: int, seed: int = 1, num_blocks: int | None = None) -> Counter[str]:
    """Run random prompts one after another; count what was foretold and what was found."""
    from tests.replicas.vllm_engine.scheduler_run import SHAPES, SchedulerRun

    shape = SHAPES[name]
    run = SchedulerRun(shape._replace(num_blocks=num_blocks or shape.num_blocks))
    assert run.shape.problem is None
    router = RouterView(run.card)
    prompts = Prompts(seed, run.shape.hash_block, LONGEST)
    figures: Counter[str] = Counter()
    for number in range(num_prompts):
        prompt = prompts.next()
        foretold, num_reached = router.hit(prompt), router.num_reached(prompt)
        request: Any = run.add(str(number), prompt, prompts.num_output_tokens())
        figures["wrong in the replica"] += run.cache.num_leading_tokens(request) != foretold
        while run.scheduler.has_requests():
            router.hear(run.step())
            figures["steps"] += 1
        (started,) = run.core.take_started()
        figures["wrong"] += started.num_found_tokens != foretold
        figures["tokens"] += len(prompt)
        figures["hit tokens"] += foretold
        figures["unresumable"] += started.num_shared_tokens > 0
        is_junction = num_reached * run.card.block_size > foretold + run.card.peek_tokens
        num_shared = num_reached if is_junction else 0
        chain = router.chain(prompt)
        found = (foretold + run.card.peek_tokens) // run.card.block_size if foretold else 0
        left = [end for end in points_left(run.card, len(prompt), num_shared) if end > found]
        figures["points that were promised and are not left"] += sum(
            chain[end - 1] not in router.points for end in left
        )
        figures["points promised"] += len(left)
        prompts.ran(prompt, request.output_token_ids)
    assert run.cache.num_copies == sum(copies.total() for copies in run.held().copies)
    figures["points"], figures["blocks"] = len(router.points), run.cache.num_copies
    figures["steps with points"] = router.num_steps_with_points
    return figures


@pytest.mark.parametrize("name", NAMES)
def test_every_hit_of_vllm_is_foretold_by_the_points(name: str, environment: None) -> None:
    figures = replay(name, NUM_PROMPTS)
    assert figures["wrong"] == figures["wrong in the replica"] == 0, figures
    assert figures["hit tokens"] > 0.1 * figures["tokens"], figures
    assert figures["points"] <= figures["blocks"], figures


INEXACT = ("states, a window and full attention", "gemma 4, drafts")
"""One promise of 34 and one of 76 do not hold: see `points_left`."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in INEXACT])
def test_every_point_that_is_promised_is_left(name: str, environment: None) -> None:
    """In a cache in which no request evicts what it has left itself."""
    figures = replay(name, NUM_PROMPTS // 2, num_blocks=3000)
    assert figures["points that were promised and are not left"] == 0 < figures["points promised"], figures


@pytest.mark.parametrize(("interval", "found"), [(0, 0), (256, 512)])
def test_points_at_intervals_can_be_had_after_the_start(interval: int, found: int, environment: None) -> None:
    """The second prompt with the same 600 tokens."""
    from tests.replicas.vllm_engine.scheduler_run import SHAPES, SchedulerRun

    run = SchedulerRun(SHAPES["gpt-oss"])
    run.core.retain(interval)
    assert run.core.cache_shape.retention_interval == interval
    for number in range(2):
        run.add(str(number), [*range(10, 610), *[number + 1000] * 90], 1)
        while run.scheduler.has_requests():
            run.step()
        (started,) = run.core.take_started()
    assert started.num_found_tokens == found


@pytest.mark.parametrize("name", ["gpt-oss", "gemma 4", "llama 4", "gpt-oss, drafts"])
def test_requests_at_once_and_preempted_leave_the_points_of_what_is_held(
    name: str, environment: None
) -> None:
    from tests.replicas.vllm_engine.scheduler_run import SHAPES, SchedulerRun

    run = SchedulerRun(SHAPES[name])
    router, prompts = RouterView(run.card), Prompts(2, run.shape.hash_block, LONGEST // 2)
    requests: list[Any] = []
    num_preempted = num_hits = 0
    for number in range(NUM_PROMPTS):
        prompt = prompts.next()
        requests.append(run.add(str(number), prompt, LONGEST // 2))
        prompts.ran(prompt, [])
        while run.scheduler.has_requests() and (len(run.scheduler.requests) > 5 or number == NUM_PROMPTS - 1):
            router.hear(run.step())
            num_preempted += run.core.take_num_preemptions()
        if number % 10 == 9:
            rule = run.held()
            assert run.cache.num_copies == sum(copies.total() for copies in rule.copies)
            for request in requests:
                hit = rule.hit(request.block_hashes, request.num_tokens)
                assert run.cache.num_leading_tokens(request) == router.hit(list(request.all_token_ids)) == hit
                num_hits += hit > 0
    assert num_preempted and num_hits


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
    for number in range(60):
        prompt = prompts.next()
        request: Any = run.add(str(number), prompt, prompts.num_output_tokens())
        while run.scheduler.has_requests():
            run.step()
        (started,) = run.core.take_started()
        hit = served.answer(prompt, list(request.output_token_ids))
        wrong += hit.num_tokens != started.num_found_tokens
        num_hits += hit.num_tokens > 0
        prompts.ran(prompt, request.output_token_ids)
    assert num_hits > 12
    assert wrong == 0
