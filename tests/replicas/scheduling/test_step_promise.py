"""The promise of a step's time: what the fit finds, what a step may compute, and that prompts go on."""

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.scheduling.step_promise import (
    EXCESS_SHARE,
    FIRST_TOKENS,
    LEAST_TOKENS,
    WAIT_SECONDS,
    StepCost,
    StepFit,
    StepPromise,
    StepWork,
    open_promise,
)
from tests.examples import examples
from tests.replicas.builders import FakeModel, engine_request, scheduler
from tests.replicas.scheduling.stepping import add

COSTS = StepCost(0.018, 7e-5, 1.2e-9, 5e-8, 0.02)


def works(rng: random.Random, num_steps: int) -> list[StepWork]:
    """Steps with prompts, with decoding requests, and with both."""
    found = []
    for _ in range(num_steps):
        num_prompt, num_context = rng.choice(((0, 1), (1, 0), (1, 1)))
        num_prompt *= rng.randrange(1, 4000)
        num_context *= rng.randrange(1, 300_000)
        ends = num_prompt > 0 and rng.random() < 0.3
        found.append(StepWork(num_prompt, num_prompt * rng.randrange(60_000), num_context, ends))
    return found


@given(seed=st.integers(0, 2**32), factor=st.floats(0.01, 100))
@settings(max_examples=examples(50), deadline=None)
def test_the_fit_recovers_the_costs_that_made_the_times(seed: int, factor: float) -> None:
    costs, fit = StepCost(*(factor * each for each in COSTS)), StepFit()
    for work in works(random.Random(seed), 80):
        fit.observe(work, costs.seconds(work))
    found = fit.cost()
    assert found is not None
    for work in works(random.Random(seed + 1), 20):
        assert found.seconds(work) == pytest.approx(costs.seconds(work), rel=0.02)
    assert found.prompt_token == pytest.approx(costs.prompt_token, rel=0.05)


def test_what_prompts_cost_is_not_forgotten_over_a_long_answer() -> None:
    rng, fit = random.Random(1), StepFit()
    for work in works(rng, 80):
        fit.observe(work, COSTS.seconds(work))
    for num_context_tokens in range(1000, 4000):
        work = StepWork(0, 0, num_context_tokens)
        fit.observe(work, COSTS.seconds(work))
    found = fit.cost()
    assert found is not None and found.prompt_token == pytest.approx(COSTS.prompt_token, rel=0.05)


NONSENSE = (0.0, -1.0, -math.inf, math.inf, math.nan, 1e12)


@given(seed=st.integers(0, 2**32), outlier=st.sampled_from([*NONSENSE, 1e-9, 1e-30, 59.0]))
@settings(max_examples=examples(50), deadline=None)
def test_a_time_that_is_nonsense_changes_little(seed: int, outlier: float) -> None:
    rng, promise = random.Random(seed), StepPromise(0.05)
    for work in works(rng, 80):
        promise.observe(work, COSTS.seconds(work))
    before = promise.num_prompt_tokens(100_000, 1000)
    promise.observe(StepWork(300, 300_000, 100_000), outlier)
    after = promise.num_prompt_tokens(100_000, 1000)
    assert after >= LEAST_TOKENS and 0.5 * before <= after <= 2 * before
    if outlier in NONSENSE or math.isnan(outlier):
        assert after == before


@given(
    seconds=st.floats(1e-6, 1e6),
    steps=st.lists(
        st.tuples(
            st.builds(
                StepWork, st.integers(0, 10**6), st.integers(0, 10**12), st.integers(0, 10**9), st.booleans()
            ),
            st.floats(),
        ),
        max_size=30,
    ),
    context=st.integers(0, 10**9),
    start=st.integers(0, 10**7),
)
@settings(max_examples=examples(300), deadline=None)
def test_whatever_was_observed_prompts_get_their_least_and_no_leap(
    seconds: float, steps: list[tuple[StepWork, float]], context: int, start: int
) -> None:
    promise = StepPromise(seconds)
    most = 0
    for work, took in steps:
        promise.observe(work, took)
        most = max(most, work.num_prompt_tokens)
    found = promise.num_prompt_tokens(context, start)
    assert LEAST_TOKENS <= found <= max(FIRST_TOKENS, 1.25 * most)


def test_a_promise_that_is_kept_easily_grows_and_one_that_cannot_be_kept_gets_the_least() -> None:
    easy, hard = StepPromise(10.0), StepPromise(COSTS.seconds(StepWork(0, 0, 1000)))
    assert easy.num_prompt_tokens(1000, 0) == hard.num_prompt_tokens(1000, 0) == FIRST_TOKENS
    for _ in range(40):
        for promise in (easy, hard):
            num_tokens = promise.num_prompt_tokens(1000, 0)
            work = StepWork(num_tokens, 0, 1000)
            promise.observe(work, COSTS.seconds(work))
    assert easy.num_prompt_tokens(1000, 0) > 20_000
    assert hard.num_prompt_tokens(1000, 0) == LEAST_TOKENS


def test_where_decoding_alone_takes_longer_prompts_get_several_times_the_excess() -> None:
    promise, context = StepPromise(0.05), 2_000_000
    for _ in range(100):
        num_tokens = promise.num_prompt_tokens(context, 0)
        for work in (StepWork(num_tokens, 0, context), StepWork(0, 0, context)):
            promise.observe(work, COSTS.seconds(work))
    excess = COSTS.base + COSTS.context_token * context - 0.05
    expected = EXCESS_SHARE * excess / COSTS.prompt_token
    assert promise.num_prompt_tokens(context, 0) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("share", "times"), [(0.0, 0.0), (0.5, 1.0), (0.7, 7 / 3), (0.9, 3.0), (40.0, 3.0)])
def test_prompts_that_wait_get_the_time_to_be_computed_soon(share: float, times: float) -> None:
    """Decoding takes nearly the promised time; `share` of the time from now on would do for what waits."""
    context = 1000
    decoding = COSTS.seconds(StepWork(0, 0, context))
    promise = StepPromise(1.1 * decoding)
    for _ in range(60):
        for work in (StepWork(5000, 0, context), StepWork(0, 0, context)):
            promise.observe(work, COSTS.seconds(work))
    num_pending_tokens = round(share * WAIT_SECONDS / COSTS.prompt_token)
    expected = max(LEAST_TOKENS, max(0.1, times) * decoding / COSTS.prompt_token)
    found = promise.num_prompt_tokens(context, 0, num_pending_tokens)
    assert found == pytest.approx(min(expected, 1.25 * 5000), rel=0.1)


def test_no_setting_is_no_promise_and_a_large_alignment_raises_the_least() -> None:
    assert open_promise(None) is None
    aligned = open_promise(0.001, alignment=1600)
    assert aligned is not None and aligned.num_prompt_tokens(1, 0) == 1600


# The scheduler.


@dataclass
class Drawn:
    """Allows what a test drew, and keeps what it was asked for."""

    allowed: list[int]
    asked: list[tuple[int, int]] = field(default_factory=list)

    def num_prompt_tokens(self, num_context_tokens: int, start: int, num_pending_tokens: int = 0) -> int:
        self.asked.append((num_context_tokens, start))
        return self.allowed[len(self.asked) % len(self.allowed)]


def num_of(model: FakeModel) -> tuple[int, int]:
    """Return the prompt tokens of the latest step, and the tokens of requests that decode."""
    decodes = [chunk for chunk in model.chunks if chunk.is_decode]
    return sum(chunk.num_tokens for chunk in model.chunks) - len(decodes), len(decodes)


requests = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(0, 20)), min_size=1, max_size=8
)


@settings(max_examples=examples(200), deadline=None)
@given(
    workload=requests, allowed=st.lists(st.integers(1, 9), min_size=1, max_size=5), budget=st.integers(8, 40)
)
def test_a_step_with_decoding_requests_has_what_the_promise_allows_and_all_end(
    workload: list[tuple[int, int, int]], allowed: list[int], budget: int
) -> None:
    promise: Any = Drawn(allowed)
    model = FakeModel(scheduler(num_blocks=40, max_batched_tokens=budget, promise=promise))
    step = 0
    while step <= 20 or model.scheduler.has_work():
        assert step < 2000
        for serial, (num_tokens, max_tokens, arrives_at) in enumerate(workload, 1):
            if arrives_at == step:
                add(model, serial, num_tokens, max_tokens=max_tokens)
        num_asked = len(promise.asked)
        model.step()
        num_prompt, num_decode = num_of(model)
        assert num_prompt + num_decode <= budget
        if num_decode:
            [(num_context_tokens, _)] = promise.asked[num_asked:]
            assert num_context_tokens >= sum(chunk.start + 1 for chunk in model.chunks if chunk.is_decode)
            # A prompt's single last token is computed with the decoding requests'.
            num_single = sum(
                chunk.num_tokens == 1 and chunk.samples and not chunk.is_decode for chunk in model.chunks
            )
            assert num_prompt - num_single <= allowed[len(promise.asked) % len(allowed)]
        step += 1
    ended = {delta.key.number for delta in model.deltas if delta.finish_reason is not None}
    assert ended == set(range(1, len(workload) + 1))


def test_a_step_in_which_nothing_decodes_has_the_whole_budget() -> None:
    promise: Any = Drawn([2])
    model = FakeModel(scheduler(num_blocks=400, max_batched_tokens=64, promise=promise))
    add(model, 1, 100)
    model.step()
    assert num_of(model) == (64, 0) and not promise.asked
    add(model, 2, 100)
    model.step()
    assert num_of(model) == (64, 0) and not promise.asked
    model.step()
    assert num_of(model) == (2, 1) and promise.asked == [(101, 28)]


def test_a_promise_that_bounds_nothing_changes_no_step() -> None:
    """The rule without a promise is the twin: the same chunks in the same steps."""
    rng = random.Random(7)
    for _ in range(20):
        limits: dict[str, Any] = {"num_blocks": 30, "max_batched_tokens": rng.choice([16, 20, 32])}
        generous: Any = Drawn([10**9])
        models = [FakeModel(scheduler(**limits)), FakeModel(scheduler(**limits, promise=generous))]
        for serial in range(1, 30):
            token_ids = [rng.randrange(10, 900) for _ in range(rng.randrange(1, 40))]
            max_tokens = rng.randrange(1, 9)
            for model in models:
                model.scheduler.add(engine_request(token_ids, serial=serial, max_tokens=max_tokens))
            for _ in range(rng.randrange(4)):
                chunks = []
                for model in models:
                    model.step()
                    chunks.append([(chunk.request.key, *chunk[1:]) for chunk in model.chunks])
                assert chunks[0] == chunks[1]
        assert generous.asked
