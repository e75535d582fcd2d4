"""Requests whose KV lies in host memory: what is copied when, what waits, and that it shows in nothing."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.engine import EngineRequest
from replicas.kvstore.plan import chunk_names
from replicas.protocol.blocks import hash_blocks
from replicas.protocol.frames import RequestKey, UserTag
from replicas.scheduling.request import Request
from tests.examples import examples
from tests.replicas.builders import OTHER_ROOT, ROOT, engine_request, tokens_of
from tests.replicas.scheduling.stepping import TieredModel, usage
from tests.replicas.scheduling.test_scheduler_storm import (
    Coverage,
    alone,
    check_nothing_left,
    workloads,
)

PROMPT = range(100, 126)
ANNA, BERT = UserTag(b"anna"), UserTag(b"bert")


def fill_device(model: TieredModel, serial: int) -> None:
    """Prompts of its own that take every block of the device."""
    num_tokens = model.manager.capacity_tokens
    tokens = [(serial * 131 + position) % 800 + 130 for position in range(num_tokens)]
    model.scheduler.add(engine_request(tokens, serial=serial, max_tokens=1))
    model.run()


def test_what_the_device_forgot_comes_back_from_host_memory() -> None:
    model = TieredModel(num_blocks=9)
    model.scheduler.add(engine_request(PROMPT, serial=1, max_tokens=1, user=ANNA))
    model.run()
    fill_device(model, 2)
    model.scheduler.add(engine_request(PROMPT, serial=3, max_tokens=1, user=BERT))
    frame = model.step()
    # Three chunks of 8 tokens are complete; 26 tokens have 6 full blocks of 4.
    assert usage(frame).num_cached_tokens == usage(frame).num_slower_tier_tokens == 24
    assert usage(frame).num_written_tokens == 0
    assert (usage(frame).num_cross_user_tokens, usage(frame).num_own_tokens) == (24, 0)
    assert [(chunk.start, chunk.num_tokens) for chunk in model.chunks] == [(24, 2)]


def test_a_load_begins_inside_a_chunk_where_the_device_has_its_beginning() -> None:
    model = TieredModel(num_blocks=9, blocks_per_chunk=3)
    model.scheduler.add(engine_request(PROMPT, serial=1, max_tokens=1))
    model.run()
    # The tail of the chain is handed out first: 4 of its 6 blocks go, and 2 stay on the device.
    model.scheduler.add(engine_request(range(300, 322), serial=2, max_tokens=1))
    model.run()
    model.scheduler.add(engine_request(PROMPT, serial=3, max_tokens=1))
    frame = model.step()
    assert usage(frame).num_cached_tokens == 24
    assert 0 < usage(frame).num_slower_tier_tokens < 24
    assert usage(frame).num_slower_tier_tokens % 12


def test_blocks_that_are_loaded_are_still_those_of_whoever_computed_them() -> None:
    model = TieredModel(num_blocks=9)
    model.scheduler.add(engine_request(PROMPT[:20], serial=1, max_tokens=1, user=ANNA))
    model.run()
    model.scheduler.add(engine_request(PROMPT, serial=2, max_tokens=1, user=BERT))
    model.run()
    # Only the last block goes: it is Bert's, and the one before it, of the same chunk, is Anna's.
    model.scheduler.add(engine_request(range(300, 310), serial=3, max_tokens=1))
    model.run()
    model.scheduler.add(engine_request(PROMPT, serial=4, max_tokens=1, user=BERT))
    said = usage(model.step())
    assert (said.num_cached_tokens, said.num_slower_tier_tokens) == (24, 4)
    assert (said.num_own_tokens, said.num_cross_user_tokens) == (4, 20)


def test_what_is_sooner_computed_than_loaded_is_computed() -> None:
    model = TieredModel(num_blocks=9)
    model.scheduler.add(engine_request(PROMPT, serial=1, max_tokens=1))
    model.run()
    fill_device(model, 2)
    model.store.loaded(1, 1e6)
    model.scheduler.add(engine_request(PROMPT, serial=3, max_tokens=1))
    assert usage(model.step()).num_cached_tokens == 0
    assert model.copier.num_in == 0


def test_the_last_token_is_computed_although_its_chunk_is_in_host_memory() -> None:
    model = TieredModel(num_blocks=9)
    model.scheduler.add(engine_request(PROMPT[:24], serial=1, max_tokens=1))
    model.run()
    fill_device(model, 2)
    model.scheduler.add(engine_request(PROMPT[:24], serial=3, max_tokens=1))
    frame = model.step()
    assert usage(frame).num_slower_tier_tokens == 20
    assert [(chunk.start, chunk.num_tokens) for chunk in model.chunks] == [(20, 4)]


def test_one_that_waits_for_copies_does_not_keep_others_waiting() -> None:
    model = TieredModel(num_blocks=40, host_chunks=40)
    model.scheduler.add(engine_request(PROMPT, serial=1, max_tokens=1))
    model.run()
    fill_device(model, 2)
    model.copier._looks = lambda: 4  # type: ignore[method-assign]
    model.scheduler.add(engine_request(PROMPT, serial=3, max_tokens=1))
    model.scheduler.add(engine_request(range(500, 510), serial=4, max_tokens=1))
    frame = model.step()
    assert [delta.key.number for delta in frame.deltas] == [4]
    assert frame.load.num_waiting == 1 and frame.load.num_pending_tokens == 2
    assert frame.look_again_seconds is not None
    model.run()
    assert tokens_of(model.deltas, 3) == tokens_of(model.deltas, 1)


def test_a_twin_waits_for_the_copies_of_the_first_and_makes_none() -> None:
    model = TieredModel(num_blocks=40, host_chunks=40)
    model.scheduler.add(engine_request(PROMPT, serial=1, max_tokens=1))
    model.run()
    fill_device(model, 2)
    model.copier._looks = lambda: 3  # type: ignore[method-assign]
    for serial in (3, 4):
        model.scheduler.add(engine_request(PROMPT, serial=serial, max_tokens=1))
    model.run()
    assert model.copier.num_in == 1
    cached = {d.key.number: d.usage.num_slower_tier_tokens for d in model.deltas if d.usage is not None}
    assert (cached[3], cached[4]) == (24, 0)


def test_blocks_into_which_something_is_copied_are_free_only_when_that_has_ended() -> None:
    model = TieredModel(num_blocks=9)
    model.scheduler.add(engine_request(PROMPT, serial=1, max_tokens=1))
    model.run()
    fill_device(model, 2)
    model.copier._looks = lambda: 3  # type: ignore[method-assign]
    model.scheduler.add(engine_request(PROMPT, serial=3, max_tokens=1))
    model.step()
    model.scheduler.abort(RequestKey(3, 0))
    assert model.manager.pool.num_used == 7
    assert model.scheduler.has_work() and not model.scheduler.reset_prefix_cache()
    model.run()
    assert model.manager.pool.num_used == 0
    assert not tokens_of(model.deltas, 3)
    model.settle()
    check_nothing_left(model)


def test_forgetting_everything_forgets_host_memory_too() -> None:
    model = TieredModel(num_blocks=9)
    model.scheduler.add(engine_request(PROMPT, serial=1, max_tokens=1))
    model.run()
    assert model.scheduler.reset_prefix_cache()
    model.step()
    assert not model.host_events.held
    model.scheduler.add(engine_request(PROMPT, serial=3, max_tokens=1))
    assert usage(model.step()).num_cached_tokens == 0


def test_a_hit_on_the_device_gives_host_memory_what_it_has_lost() -> None:
    model = TieredModel(num_blocks=40, host_chunks=4)
    model.scheduler.add(engine_request(PROMPT, serial=1, max_tokens=1))
    model.run()
    model.scheduler.add(engine_request(range(300, 332), serial=2, max_tokens=1))
    model.run()
    assert model.store.directory.num_in_host == 4
    before = set(model.host_events.held)
    model.scheduler.add(engine_request(PROMPT, serial=3, max_tokens=1))
    assert usage(model.step()).num_cached_tokens == 24
    model.settle()
    assert set(model.host_events.held) != before


@pytest.mark.parametrize("seed", range(6))
def test_a_storm_of_requests_and_aborts_over_slow_copies_leaves_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)
    model = TieredModel(
        num_blocks=rng.choice([12, 20, 30]),
        block_size=rng.choice([1, 3, 4]),
        blocks_per_chunk=rng.choice([1, 2, 3]),
        host_chunks=rng.choice([1, 6, 20]),
        seed=seed,
        max_looks=rng.choice([0, 2, 6]),
        max_batched_tokens=rng.choice([3, 8, 32]),
        max_running=rng.choice([2, 3]),
    )
    stems = [[rng.randrange(10, 1000) for _ in range(11)] for _ in range(3)]
    requests: dict[int, EngineRequest] = {}
    aborted: set[int] = set()
    for serial in range(150):
        tail = [rng.randrange(10, 1000) for _ in range(rng.randrange(6))]
        request = engine_request(
            (rng.choice(stems) + tail)[: model.manager.capacity_tokens],
            serial=serial,
            root=rng.choice([ROOT, ROOT, OTHER_ROOT]),
            priority=rng.randrange(3),
            max_tokens=rng.randrange(1, 8),
        )
        if model.scheduler.load().num_waiting > 20:
            model.run()
        model.scheduler.add(request)
        requests[serial] = request
        for _ in range(rng.randrange(4)):
            model.step()
        if rng.random() < 0.15:
            victim = rng.choice(list(requests))
            model.scheduler.abort(RequestKey(victim, 0))
            aborted.add(victim)
    model.run()
    model.settle()
    for serial, request in requests.items():
        if serial not in aborted:
            expected = alone(request)
            said = tokens_of(model.deltas, serial)
            assert said == expected[: len(said)] and said
    check_nothing_left(model)


@settings(max_examples=examples(200), deadline=None)
@given(
    workload=workloads(),
    block_size=st.integers(1, 5),
    blocks_per_chunk=st.integers(1, 3),
    host_chunks=st.integers(1, 12),
    num_blocks=st.integers(8, 40),
    max_batched_tokens=st.integers(1, 30),
    max_running=st.integers(1, 6),
    max_looks=st.integers(0, 4),
    seed=st.integers(0, 1000),
)
def test_host_memory_shows_in_nothing_that_comes_out(
    workload: list[dict[str, Any]],
    block_size: int,
    num_blocks: int,
    max_batched_tokens: int,
    max_running: int,
    **tiers: int,
) -> None:
    model = TieredModel(
        num_blocks=num_blocks,
        block_size=block_size,
        max_batched_tokens=max_batched_tokens,
        max_running=max_running,
        **tiers,
    )
    coverage = Coverage()
    requests: list[EngineRequest] = []
    capacity = (num_blocks - 1) * block_size
    step = 0
    while step <= 8 or model.scheduler.has_work():
        assert step < 2000
        for fields in workload:
            if fields["arrives_at"] == step and len(fields["token_ids"]) <= capacity:
                request = engine_request(**{name: fields[name] for name in fields if name != "arrives_at"})
                requests.append(request)
                model.scheduler.add(request)
        model.step()
        coverage.step(model, block_size, max_batched_tokens)
        step += 1
    for request in requests:
        expected = alone(request)[: capacity + 1 - len(request.token_ids)]
        assert tokens_of(model.deltas, request.key.number) == expected
        assert coverage.computed_until[request.key] == len(request.token_ids) + len(expected) - 1
        [said] = [d.usage for d in model.deltas if d.key == request.key and d.usage is not None]
        num_full_tokens = len(request.token_ids) // block_size * block_size
        assert said.num_cached_tokens + said.num_written_tokens == num_full_tokens
        assert said.num_slower_tier_tokens <= said.num_cached_tokens
    model.settle()
    check_nothing_left(model)


def test_one_whose_kv_is_coming_is_looked_at_again_when_something_has_come() -> None:
    model = TieredModel(num_blocks=40, host_chunks=40)
    model.store.loaded(1000, 1e-6)
    names = chunk_names(hash_blocks(ROOT, list(PROMPT), 4), 2)
    slots = {name.key: model.store.offer(name, (ANNA, ANNA)) for name in names}
    assert len(slots) == 3
    looked: list[RequestKey] = []
    find_cached = model.manager.find_cached

    def look(request: Request) -> list[int]:
        looked.append(request.key)
        return find_cached(request)

    model.manager.find_cached = look  # type: ignore[method-assign]
    model.scheduler.add(engine_request(PROMPT, serial=1, max_tokens=1))
    model.scheduler.add(engine_request(range(500, 510), serial=2, max_tokens=40))
    looked.clear()
    model.tiers._progress[RequestKey(1, 0)].waits_until = 1e9
    for _ in range(10):
        model.step()
    # Once, and again with each of the two chunks that the other one completes.
    assert looked.count(RequestKey(1, 0)) == 3
    assert not tokens_of(model.deltas, 1)
    for name, slot in zip(names, slots.values(), strict=True):
        assert slot is not None
        model.copier.host[slot] = [
            hash((ROOT, tuple(PROMPT[: position + 1])))
            for position in range((name.last_block - 1) * 4, (name.last_block + 1) * 4)
        ]
        model.store.filled(name.key)
    model.step()
    said = [delta.usage for delta in model.deltas if delta.key.number == 1]
    assert said[0] is not None and said[0].num_slower_tier_tokens == 24


def test_forgetting_everything_waits_for_copies_to_host_memory() -> None:
    model = TieredModel(num_blocks=9)
    model.copier._looks = lambda: 3  # type: ignore[method-assign]
    model.scheduler.add(engine_request(PROMPT, serial=1, max_tokens=1))
    model.run()
    assert model.tiers._offloads
    assert model.scheduler.reset_prefix_cache()
