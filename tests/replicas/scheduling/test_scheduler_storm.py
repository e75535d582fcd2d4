"""The scheduler under anything: random requests, aborts and tiny pools, over slots that remember."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.engine import EngineRequest, RequestRefused
from replicas.protocol.frames import FinishReason, RefusalCode, RequestKey
from tests.examples import examples
from tests.replicas.builders import (
    EOS,
    OTHER_ROOT,
    ROOT,
    FakeModel,
    engine_request,
    next_token,
    scheduler,
    tokens_of,
)


def alone(request: EngineRequest) -> list[int]:
    """What the request would be answered with nobody else around, in an ample cache."""
    model = FakeModel(scheduler(num_blocks=400, block_size=4, max_batched_tokens=4096))
    model.scheduler.add(request)
    return tokens_of(model.run(), request.key.number)


def check_nothing_left(model: FakeModel) -> None:
    """Every counter reads zero, and every block that was stored is removed once all are handed out again."""
    load = model.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0)
    assert (load.num_pending_tokens, load.num_context_tokens) == (0, 0)
    assert not model.scheduler._requests
    pool = model.manager.pool
    pool.allocate(pool.num_usable)
    model.events.apply(pool.take_events())
    assert model.events.stored == model.events.removed and not model.events.held


@pytest.mark.parametrize("seed", range(8))
def test_after_a_storm_of_requests_and_aborts_everything_is_given_back(seed: int) -> None:
    rng = random.Random(seed)
    model = FakeModel(
        scheduler(
            num_blocks=rng.choice([12, 20, 40]),
            block_size=rng.choice([1, 3, 4]),
            max_batched_tokens=rng.choice([3, 8, 32]),
            max_running=rng.choice([2, 5, 16]),
            max_waiting=6,
        )
    )
    stems = [[rng.randrange(10, 1000) for _ in range(12)] for _ in range(3)]
    alive: list[RequestKey] = []
    num_refused = num_aborted = 0
    for serial in range(120):
        tail = [rng.randrange(10, 1000) for _ in range(rng.randrange(6))]
        prompt = rng.choice(stems)[: rng.randrange(13)] + tail
        try:
            model.scheduler.add(
                engine_request(
                    prompt,
                    serial=serial,
                    root=rng.choice([ROOT, ROOT, OTHER_ROOT]),
                    priority=rng.randrange(3),
                    max_tokens=rng.randrange(1, 12),
                )
            )
            alive.append(RequestKey(serial, 0))
        except RequestRefused as refused:
            assert refused.code in RefusalCode
            num_refused += 1
        for _ in range(rng.randrange(3)):
            eos = {key: EOS for key in alive if rng.random() < 0.05}
            model.step(token_ids=eos)
        if rng.random() < 0.15:
            model.scheduler.abort(rng.choice(alive))
            num_aborted += 1
            model.check()
    model.run()
    assert num_refused and num_aborted
    check_nothing_left(model)


def prompts() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(10, 12), min_size=1, max_size=24)


@st.composite
def workloads(draw: st.DrawFn) -> list[dict[str, Any]]:
    return [
        {
            "token_ids": draw(prompts()),
            "serial": serial,
            "root": draw(st.sampled_from([ROOT, ROOT, OTHER_ROOT])),
            "priority": draw(st.integers(0, 2)),
            "max_tokens": draw(st.integers(1, 12)),
            "arrives_at": draw(st.integers(0, 8)),
        }
        for serial in range(draw(st.integers(1, 7)))
    ]


class Coverage:
    """Holds every chunk against the rules: contiguous, inside what is known, nothing skipped or repeated."""

    def __init__(self) -> None:
        self.computed_until: dict[RequestKey, int] = {}
        self.num_preemptions: dict[RequestKey, int] = {}
        self.num_sampled: dict[RequestKey, int] = {}

    def step(self, model: FakeModel, block_size: int, max_batched_tokens: int) -> None:
        known = {chunk.request.key: chunk.request.num_tokens - chunk.samples for chunk in model.chunks}
        assert len(known) == len(model.chunks), "two chunks of one request in one step"
        assert sum(chunk.num_tokens for chunk in model.chunks) <= max_batched_tokens
        for request, start, num_tokens, samples in model.chunks:
            key = request.key
            started = key in self.computed_until and self.num_preemptions[key] == request.num_preemptions
            if started:
                assert start == self.computed_until[key]
            else:
                assert start % block_size == 0 and start <= (known[key] - 1) // block_size * block_size
                assert key in self.computed_until or start == request.num_cached_tokens
            self.computed_until[key] = start + num_tokens
            self.num_preemptions[key] = request.num_preemptions
            assert num_tokens >= 1 and start + num_tokens <= known[key]
            assert samples == (start + num_tokens == known[key])
            self.num_sampled[key] = self.num_sampled.get(key, 0) + samples


@settings(max_examples=examples(150), deadline=None)
@given(
    workload=workloads(),
    block_size=st.integers(1, 5),
    num_blocks=st.integers(8, 40),
    max_batched_tokens=st.integers(1, 30),
    max_running=st.integers(1, 6),
)
def test_every_token_is_computed_once_in_order_and_answers_are_those_given_alone(
    workload: list[dict[str, Any]],
    block_size: int,
    num_blocks: int,
    max_batched_tokens: int,
    max_running: int,
) -> None:
    """Chunks, hits, twins, preemption and priorities are invisible in what comes out."""
    model = FakeModel(
        scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            max_batched_tokens=max_batched_tokens,
            max_running=max_running,
        )
    )
    coverage = Coverage()
    requests: list[EngineRequest] = []
    capacity = (num_blocks - 1) * block_size
    step = 0
    while step <= 8 or model.scheduler.has_work():
        assert step < 1000
        for fields in workload:
            if fields["arrives_at"] == step and len(fields["token_ids"]) <= capacity:
                request = engine_request(**{name: fields[name] for name in fields if name != "arrives_at"})
                requests.append(request)
                model.scheduler.add(request)
        model.step()
        coverage.step(model, block_size, max_batched_tokens)
        step += 1
    for request in requests:
        key = request.key
        expected = alone(request)[: capacity + 1 - len(request.token_ids)]
        assert tokens_of(model.deltas, key.number) == expected
        assert coverage.num_sampled[key] == len(expected)
        # All but the last output token has been computed.
        assert coverage.computed_until[key] == len(request.token_ids) + len(expected) - 1
        [finish] = [d for d in model.deltas if d.key == key and d.finish_reason is not None]
        assert finish.finish_reason is FinishReason.LENGTH
        [usage] = [d.usage for d in model.deltas if d.key == key and d.usage is not None]
        assert (
            usage.num_cached_tokens + usage.num_written_tokens
            == len(request.token_ids) // block_size * block_size
        )
    check_nothing_left(model)


@settings(max_examples=examples(60), deadline=None)
@given(prompt=prompts(), max_tokens=st.integers(2, 14), data=st.data())
def test_a_generation_resumed_anywhere_goes_on_as_if_nothing_had_happened(
    prompt: list[int], max_tokens: int, data: st.DataObject
) -> None:
    whole = alone(engine_request(prompt, max_tokens=max_tokens))
    done = data.draw(st.integers(0, max_tokens - 1))
    rest = alone(engine_request(prompt + whole[:done], max_tokens=max_tokens, num_output_tokens=done))
    assert whole[:done] + rest == whole


def test_the_stand_in_for_a_model_notices_a_block_that_holds_something_else() -> None:
    model = FakeModel(scheduler())
    model.scheduler.add(engine_request(range(100, 120), max_tokens=3))
    model.step()
    [chunk] = model.chunks
    model.slots[chunk.request.block_ids[1] * 4 + 2] = "something else"
    with pytest.raises(AssertionError):
        model.step()
    assert next_token(chunk.request) != EOS
