"""The scheduler, step by step: order of service, budgets, hits, load, preemption, stopping, aborting."""

from typing import Any

import pytest

from replicas.protocol.frames import FinishReason, PromptUsage, UserTag
from tests.replicas.builders import EOS, FakeModel, engine_request, scheduler, tokens_of
from tests.replicas.scheduling.stepping import add, key, model, plan, stored, usage


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


class TestPreemption:
    def crowded(self) -> FakeModel:
        """Two requests that fill all ten blocks, and both need one more in the next step."""
        crowd = model(num_blocks=11)
        add(crowd, 1, 20, max_tokens=12)
        add(crowd, 2, 20, max_tokens=12)
        crowd.step()
        return crowd

    def test_the_last_to_arrive_makes_room_and_waits_in_front(self) -> None:
        crowd = self.crowded()
        add(crowd, 3, 4)
        frame = crowd.step()
        assert plan(crowd) == [(1, 20, 1, True)]
        assert (frame.load.num_running, frame.load.num_waiting) == (1, 2)
        assert [request.key.number for request in crowd.scheduler._waiting] == [2, 3]

    def test_the_lowest_priority_makes_room_even_if_it_came_first(self) -> None:
        crowd = model(num_blocks=11)
        add(crowd, 1, 20, priority=1, max_tokens=12)
        add(crowd, 2, 20, priority=0, max_tokens=12)
        crowd.step()
        crowd.step()
        assert plan(crowd) == [(2, 20, 1, True)]

    def test_a_step_that_preempts_admits_nothing(self) -> None:
        crowd = self.crowded()
        add(crowd, 3, 4, priority=-1)
        crowd.step()
        assert plan(crowd) == [(1, 20, 1, True)]
        crowd.step()
        assert (3, 0, 4, True) in plan(crowd)

    def test_resuming_hits_the_blocks_that_it_left_behind(self) -> None:
        crowd = self.crowded()
        crowd.step()
        crowd.scheduler.abort(key(1))
        crowd.step()
        # 20 prompt tokens and one sampled: four or five of its five blocks are still there.
        [(serial, start, num_tokens, samples)] = plan(crowd)
        assert (serial, samples) == (2, True)
        assert start >= 16 and start + num_tokens == 21

    def test_a_preemption_is_counted_and_starts_nothing_anew(self) -> None:
        crowd = self.crowded()
        frames = []
        while crowd.scheduler.has_work():
            frames.append(crowd.step())
        assert sum(frame.num_preemptions for frame in frames) >= 1
        assert not any(frame.started for frame in frames)  # both ran already

    def test_a_prompt_that_runs_out_of_blocks_half_way_steps_back_itself(self) -> None:
        crowd = model(num_blocks=11, max_batched_tokens=8)
        add(crowd, 1, 15, max_tokens=20)
        crowd.step()
        crowd.step()
        add(crowd, 2, 22, max_tokens=1)
        plans = []
        while crowd.scheduler.has_work():
            crowd.step()
            plans.append([chunk[:3] for chunk in plan(crowd) if chunk[0] == 2])
        # It has four blocks by then, the other request five: one is left, and it needs two.
        assert plans[:4] == [[(2, 0, 7)], [(2, 7, 7)], [], []]
        deltas = crowd.deltas
        assert len(tokens_of(deltas, 1)) == 20 and len(tokens_of(deltas, 2)) == 1
        # What it found of its own when it came back was never cached before it came.
        assert [delta.usage for delta in deltas if delta.key == key(2)] == [PromptUsage(22, 0, 20)]


IGNORING: dict[str, Any] = {"ignore_eos": True}
LATE: dict[str, Any] = {"max_tokens": 9, "min_tokens": 3, "stop_token_ids": (9,)}
RESUMED: dict[str, Any] = {"token_ids": [5, 6, 7, 8, 9], "num_output_tokens": 2}
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("sampled", "fields", "finish"),
    [
        ([9, EOS], {"max_tokens": 9}, STOP),
        ([9, EOS], {"max_tokens": 2}, STOP),
        ([EOS, EOS], {"max_tokens": 2, **IGNORING}, LENGTH),
        ([EOS, 9], {"max_tokens": 5, "stop_token_ids": (9,), **IGNORING}, STOP),
        ([EOS, 9, EOS], LATE, STOP),
        ([EOS, 9], LATE, None),
        ([9, 9], {"max_tokens": 50, "context_length": 5}, LENGTH),
        ([9], {"max_tokens": 3, **RESUMED}, LENGTH),
        ([EOS], {"max_tokens": 9, "min_tokens": 4, **RESUMED}, None),
        ([EOS], {"max_tokens": 9, "min_tokens": 3, **RESUMED}, STOP),
    ],
)
def test_an_answer_ends_with_its_last_token(
    sampled: list[int], fields: dict[str, Any], finish: FinishReason | None
) -> None:
    asked = {"token_ids": [5, 6, 7], **fields}
    one = model(context_length=asked.pop("context_length", 4096))
    one.scheduler.add(engine_request(asked.pop("token_ids"), **asked))
    for token_id in sampled:
        assert one.scheduler.has_work()
        one.step(token_ids={key(1): token_id})
    assert (tokens_of(one.deltas, 1), one.deltas[-1].finish_reason) == (sampled, finish)


def test_the_size_of_the_whole_cache_ends_the_answer() -> None:
    tiny = model(num_blocks=3, block_size=4)
    tiny.scheduler.add(engine_request([5] * 6, max_tokens=50))
    deltas = tiny.run()
    assert len(deltas) == 3 and deltas[-1].finish_reason is FinishReason.LENGTH


def test_resumed_output_is_no_part_of_the_prompt() -> None:
    elsewhere = model()
    prompt = list(range(100, 110))
    elsewhere.scheduler.add(engine_request(prompt, serial=1, max_tokens=12))
    all_tokens = tokens_of(elsewhere.run(), 1)
    for num_output_tokens in (1, 5, 11):
        here = model()
        submitted = prompt + all_tokens[:num_output_tokens]
        fields: dict[str, Any] = {"num_output_tokens": num_output_tokens, "max_tokens": 12}
        here.scheduler.add(engine_request(submitted, serial=1, **fields))
        assert usage(here.step()) == PromptUsage(10, 0, 8)
        assert tokens_of(here.run(), 1) == all_tokens[num_output_tokens:]
        here.scheduler.add(engine_request(submitted, serial=2, **fields))
        num_hit = (len(submitted) - 1) // 4 * 4
        assert usage(here.step()) == PromptUsage(10, min(num_hit, 10), 0)


def test_aborting_between_schedule_and_finish_leaves_no_delta() -> None:
    one = scheduler()
    one.add(engine_request([5, 6, 7, 8, 9]))
    chunks = one.schedule()
    one.abort(key(1))
    frame = one.finish_step(chunks, {})
    assert frame.deltas == [] and len(stored(frame)) == 1
    load = one.load()
    assert (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0)
    assert (load.num_pending_tokens, load.num_context_tokens) == (0, 0)
    assert not one.has_work()


ANN, BOB = UserTag(b"ann"), UserTag(b"bob")


def usages(model: FakeModel, serial: int) -> list[PromptUsage]:
    return [d.usage for d in model.deltas if d.key.number == serial and d.usage is not None]


def test_preemption_changes_nothing_of_it_even_if_the_others_blocks_are_evicted() -> None:
    crowd = FakeModel(scheduler(num_blocks=11, max_batched_tokens=8))
    shared = list(range(100, 108))
    crowd.scheduler.add(engine_request(shared, serial=1, user=BOB, max_tokens=1))
    crowd.run()
    crowd.scheduler.add(engine_request(range(200, 214), serial=2, max_tokens=22))
    crowd.step()
    crowd.step()
    crowd.scheduler.add(engine_request([*shared, *range(300, 315)], serial=3, user=ANN, max_tokens=1))
    starts = []
    while crowd.scheduler.has_work():
        crowd.step()
        starts += [chunk.start for chunk in crowd.chunks if chunk.request.key.number == 3]
    assert starts == [8, 15, 4, 12, 20]  # only one of the two blocks is left when it starts again
    assert usages(crowd, 3) == [PromptUsage(23, 8, 12, 8)]
