"""The scheduler, step by step: order of service, budgets, hits, load."""

from typing import Any

import pytest

from replicas.protocol.events import AllBlocksCleared
from replicas.protocol.frames import FinishReason, PromptUsage
from tests.replicas.builders import OTHER_ROOT, engine_request, tokens_of
from tests.replicas.scheduling.stepping import add, model, plan, stored, usage


def test_nothing_to_do_is_an_empty_step() -> None:
    idle = model()
    assert not idle.scheduler.has_work()
    frame = idle.step()
    assert idle.chunks == [] and frame.deltas == [] and frame.events == []
    assert frame.load.num_total_blocks == 64


def test_a_prompt_is_computed_at_once_and_then_token_by_token() -> None:
    one = model()
    add(one, 1, 10, max_tokens=3)
    frames = []
    plans = []
    while one.scheduler.has_work():
        frames.append(one.step())
        plans.append(plan(one))
    assert plans == [[(1, 0, 10, True)], [(1, 10, 1, True)], [(1, 11, 1, True)]]
    assert [frame.num_prefill_tokens for frame in frames] == [10, 0, 0]
    assert [frame.num_decode_tokens for frame in frames] == [0, 1, 1]
    assert [frame.deltas[0].finish_reason for frame in frames] == [None, None, FinishReason.LENGTH]
    assert [frame.deltas[0].usage for frame in frames] == [PromptUsage(10, 0, 8), None, None]


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 7, 8, 16, 17, 18, 64])
def test_a_prompt_longer_than_the_budget_is_computed_in_chunks(budget: int) -> None:
    chunked = model(max_batched_tokens=budget)
    add(chunked, 1, 17, max_tokens=2)
    chunks = []
    while chunked.scheduler.has_work():
        frame = chunked.step()
        chunks += plan(chunked)
        assert bool(frame.deltas) == chunks[-1][3]
    starts = list(range(0, 17, budget))
    assert chunks[:-1] == [(1, start, min(budget, 17 - start), start == starts[-1]) for start in starts]
    assert chunks[-1] == (1, 17, 1, True)
    assert tokens_of(chunked.deltas, 1) == tokens_of(unbounded(17, max_tokens=2), 1)


def unbounded(num_tokens: int, **fields: Any) -> list[Any]:
    alone = model(max_batched_tokens=4096)
    add(alone, 1, num_tokens, **fields)
    return alone.run()


def test_decoding_requests_get_their_token_before_prompts_share_the_rest() -> None:
    mixed = model(max_batched_tokens=8)
    add(mixed, 1, 4)
    add(mixed, 2, 4)
    mixed.step()
    add(mixed, 3, 20)
    mixed.step()
    assert plan(mixed) == [(1, 4, 1, True), (2, 4, 1, True), (3, 0, 6, False)]
    add(mixed, 4, 4)
    mixed.step()
    assert plan(mixed) == [(1, 5, 1, True), (2, 5, 1, True), (3, 6, 6, False)]
    mixed.step()
    mixed.step()
    assert plan(mixed) == [(3, 18, 2, True), (4, 0, 4, True)]


def test_more_running_requests_than_budget_never_happen() -> None:
    narrow = model(max_batched_tokens=2, max_running=16)
    for serial in (1, 2, 3):
        add(narrow, serial, 1)
    narrow.step()
    assert [serial for serial, *_ in plan(narrow)] == [1, 2]
    narrow.step()
    assert plan(narrow) == [(1, 1, 1, True), (2, 1, 1, True)]


def test_no_more_than_max_running_requests_run() -> None:
    two = model(max_running=2)
    for serial in (1, 2, 3):
        add(two, serial, 4, max_tokens=serial)
    frame = two.step()
    assert (frame.load.num_running, frame.load.num_waiting) == (1, 1)
    two.step()
    assert [serial for serial, *_ in plan(two)] == [2, 3]


def test_lower_priority_numbers_go_first_then_who_came_first() -> None:
    ranked = model(max_running=1)
    for serial, priority in ((1, 5), (2, 0), (3, 5), (4, -1)):
        add(ranked, serial, 4, priority=priority, max_tokens=1)
    assert [delta.key.number for delta in ranked.run()] == [4, 2, 1, 3]


def test_a_waiting_request_that_does_not_fit_holds_back_those_behind_it() -> None:
    full = model(num_blocks=11)
    add(full, 1, 24)
    full.step()
    add(full, 2, 20)
    add(full, 3, 4)
    frame = full.step()
    assert plan(full) == [(1, 24, 1, True)]
    assert frame.load.num_waiting == 2


def test_a_prompt_is_not_started_unless_all_of_it_fits() -> None:
    full = model(num_blocks=11, max_batched_tokens=8)
    add(full, 1, 6, max_tokens=3)
    full.step()
    add(full, 2, 37)
    full.step()
    assert plan(full) == [(1, 6, 1, True)]
    full.step()
    full.step()
    assert plan(full) == [(2, 0, 8, False)]


class TestPrefixHits:
    def test_counts_are_exact_around_a_block_boundary(self) -> None:
        for num_tokens, num_cached, num_written in (
            (63, 48, 0),
            (64, 48, 16),
            (65, 64, 0),
            (80, 64, 16),
            (15, 0, 0),
            (16, 0, 16),
            (17, 16, 0),
        ):
            warm = model(block_size=16, max_batched_tokens=512)
            prompt = list(range(100, 180))
            warm.scheduler.add(engine_request(prompt, serial=1, max_tokens=1))
            assert usage(warm.step()) == PromptUsage(80, 0, 80)
            warm.scheduler.add(engine_request(prompt[:num_tokens], serial=2, max_tokens=1))
            frame = warm.step()
            assert usage(frame) == PromptUsage(num_tokens, num_cached, num_written)
            assert frame.num_prefill_tokens == num_tokens - num_cached

    def test_a_longer_prompt_hits_what_the_shorter_one_and_its_answer_filled(self) -> None:
        turns = model(block_size=4)
        turns.scheduler.add(engine_request(range(100, 110), serial=1, max_tokens=8))
        answer = tokens_of(turns.run(), 1)
        turns.scheduler.add(engine_request([*range(100, 110), *answer, 7, 8, 9], serial=2, max_tokens=1))
        # 10 + 8 tokens, of which the last has no KV: 17 computed, four full blocks.
        assert usage(turns.step()) == PromptUsage(21, 16, 4)

    def test_twins_in_one_step_compute_the_shared_prefix_once(self) -> None:
        twins = model(max_batched_tokens=64)
        for serial in (1, 2, 3):
            twins.scheduler.add(engine_request(range(100, 118), serial=serial, max_tokens=2))
        frame = twins.step()
        assert plan(twins) == [(1, 0, 18, True), (2, 16, 2, True), (3, 16, 2, True)]
        assert [delta.usage for delta in frame.deltas] == [
            PromptUsage(18, 0, 16),
            PromptUsage(18, 16, 0),
            PromptUsage(18, 16, 0),
        ]
        assert frame.load.num_used_blocks == 7
        tokens = [tokens_of(twins.run(), serial) for serial in (1, 2, 3)]
        assert tokens[0] == tokens[1] == tokens[2]

    def test_a_twin_of_a_half_computed_prompt_hits_what_is_there(self) -> None:
        twins = model(max_batched_tokens=16)
        twins.scheduler.add(engine_request(range(100, 124), serial=1))
        twins.step()
        twins.scheduler.add(engine_request(range(100, 124), serial=2))
        twins.step()
        assert plan(twins) == [(1, 16, 8, True), (2, 20, 4, True)]

    def test_another_root_never_shares(self) -> None:
        tenants = model()
        tenants.scheduler.add(engine_request(range(100, 120), serial=1, max_tokens=1))
        tenants.scheduler.add(engine_request(range(100, 120), serial=2, root=OTHER_ROOT, max_tokens=1))
        frame = tenants.step()
        assert [delta.usage for delta in frame.deltas] == [PromptUsage(20, 0, 20)] * 2

    def test_blocks_are_reported_by_the_step_that_computes_them(self) -> None:
        chunked = model(max_batched_tokens=10)
        add(chunked, 1, 17, max_tokens=5)
        events, ends_prompt = [], []
        while chunked.scheduler.has_work():
            blocks = stored(chunked.step())
            events.append([(event.first_block_index, len(event.block_hashes)) for event in blocks])
            ends_prompt.append([event.ends_prompt for event in blocks])
        # Positions 17 to 20 are output: the block that they begin is full when 19 is computed.
        assert events == [[(0, 2)], [(2, 2)], [], [], [(4, 1)], []]
        assert ends_prompt == [[False], [True], [], [], [False], []]

    def test_a_reset_waits_for_running_requests_and_reports_itself(self) -> None:
        cleared = model()
        add(cleared, 1, 9, max_tokens=2)
        cleared.step()
        assert not cleared.scheduler.reset_prefix_cache()
        cleared.run()
        assert not cleared.scheduler.has_work()
        assert cleared.scheduler.reset_prefix_cache()
        assert cleared.scheduler.has_work()
        assert cleared.step().events == [AllBlocksCleared()]
        assert not cleared.scheduler.has_work()
        add(cleared, 2, 9)
        assert cleared.step().load.num_cached_blocks == 2


class TestLoad:
    def test_pending_tokens_are_what_is_still_to_be_computed(self) -> None:
        busy = model(max_batched_tokens=8)
        add(busy, 1, 20, max_tokens=9)
        add(busy, 2, 6)
        pending = [busy.scheduler.load().num_pending_tokens]
        context = []
        for _ in range(4):
            load = busy.step().load
            pending.append(load.num_pending_tokens)
            context.append(load.num_context_tokens)
        assert pending == [26, 18, 10, 2, 0]
        assert context == [8, 16, 24, 27]

    def test_a_waiting_request_counts_only_what_the_cache_does_not_hold(self) -> None:
        warm = model()
        add(warm, 1, 20, max_tokens=1)
        warm.run()
        add(warm, 1, 22)
        load = warm.scheduler.load()
        assert (load.num_waiting, load.num_pending_tokens) == (1, 2)
        assert (load.num_used_blocks, load.num_cached_blocks) == (0, 5)
