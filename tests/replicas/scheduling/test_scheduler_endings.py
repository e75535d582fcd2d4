"""How a request's run is interrupted or ends: preemption, stopping, aborting."""

from typing import Any

import pytest

from replicas.protocol.frames import FinishReason, PromptUsage
from replicas.scheduling.scheduler import Scheduler
from tests.replicas.builders import EOS, FakeModel, engine_request, scheduler, tokens_of
from tests.replicas.scheduling.stepping import add, key, model, plan, stored, usage


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

    def test_the_lowest_priority_makes_room_even_if_it_ran_first(self) -> None:
        crowd = model(num_blocks=11)
        add(crowd, 1, 19, priority=1, max_tokens=12)
        crowd.step()
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

    def test_preemption_changes_neither_tokens_nor_usage(self) -> None:
        crowd = self.crowded()
        deltas = crowd.run()
        for serial in (1, 2):
            alone = model()
            add(alone, serial, 20, max_tokens=12)
            assert tokens_of(deltas, serial) == tokens_of(alone.run(), serial)
        assert [delta.usage for delta in deltas if delta.usage] == [PromptUsage(20, 0, 20)] * 2

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


class TestStopping:
    def finish(self, sampled: list[int], **fields: Any) -> tuple[list[int], FinishReason | None]:
        one = model(context_length=fields.pop("context_length", 4096))
        one.scheduler.add(engine_request(fields.pop("token_ids", [5, 6, 7]), **fields))
        for token_id in sampled:
            assert one.scheduler.has_work()
            one.step(token_ids={key(1): token_id})
        return tokens_of(one.deltas, 1), one.deltas[-1].finish_reason

    def test_eos_ends_the_answer_and_is_part_of_it(self) -> None:
        assert self.finish([9, EOS], max_tokens=9) == ([9, EOS], FinishReason.STOP)

    def test_eos_as_the_last_allowed_token_is_a_stop(self) -> None:
        assert self.finish([9, EOS], max_tokens=2) == ([9, EOS], FinishReason.STOP)

    def test_eos_can_be_ignored(self) -> None:
        assert self.finish([EOS, EOS], max_tokens=2, ignore_eos=True) == ([EOS, EOS], FinishReason.LENGTH)

    def test_a_stop_token_stops_even_where_eos_is_ignored(self) -> None:
        stop: dict[str, Any] = {"stop_token_ids": (9,), "ignore_eos": True}
        assert self.finish([EOS, 9], max_tokens=5, **stop) == ([EOS, 9], FinishReason.STOP)

    def test_nothing_stops_before_min_tokens(self) -> None:
        sampling: dict[str, Any] = {"max_tokens": 9, "min_tokens": 3, "stop_token_ids": (9,)}
        assert self.finish([EOS, 9, EOS], **sampling) == ([EOS, 9, EOS], FinishReason.STOP)
        assert self.finish([EOS, 9], **sampling) == ([EOS, 9], None)

    def test_the_context_length_ends_the_answer(self) -> None:
        assert self.finish([9, 9], max_tokens=50, context_length=5) == ([9, 9], FinishReason.LENGTH)

    def test_the_size_of_the_whole_cache_ends_the_answer(self) -> None:
        tiny = model(num_blocks=3, block_size=4)
        tiny.scheduler.add(engine_request([5] * 6, max_tokens=50))
        deltas = tiny.run()
        assert len(deltas) == 3 and deltas[-1].finish_reason is FinishReason.LENGTH

    def test_resumed_output_counts_as_output(self) -> None:
        resumed: dict[str, Any] = {"token_ids": [5, 6, 7, 8, 9], "num_output_tokens": 2}
        assert self.finish([9], max_tokens=3, **resumed) == ([9], FinishReason.LENGTH)
        assert self.finish([EOS], max_tokens=9, min_tokens=4, **resumed) == ([EOS], None)
        assert self.finish([EOS], max_tokens=9, min_tokens=3, **resumed) == ([EOS], FinishReason.STOP)

    def test_resumed_output_is_no_part_of_the_prompt(self) -> None:
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


class TestAbort:
    def check_empty(self, scheduler: Scheduler) -> None:
        load = scheduler.load()
        assert (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0)
        assert (load.num_pending_tokens, load.num_context_tokens) == (0, 0)
        assert not scheduler.has_work()

    @pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
    def test_aborting_after_any_step_frees_everything(self, num_steps: int) -> None:
        """Waiting, half prefilled, prefilled, decoding."""
        one = model(max_batched_tokens=8)
        add(one, 1, 20, max_tokens=10)
        for _ in range(num_steps):
            one.step()
        one.scheduler.abort(key(1))
        self.check_empty(one.scheduler)
        one.manager.pool.check()

    def test_aborting_a_preempted_request_frees_everything(self) -> None:
        crowd = TestPreemption().crowded()
        crowd.step()
        crowd.scheduler.abort(key(2))
        crowd.scheduler.abort(key(1))
        self.check_empty(crowd.scheduler)

    def test_aborting_between_schedule_and_finish_leaves_no_delta(self) -> None:
        one = scheduler()
        one.add(engine_request([5, 6, 7, 8, 9]))
        chunks = one.schedule()
        one.abort(key(1))
        frame = one.finish_step(chunks, {})
        assert frame.deltas == [] and len(stored(frame)) == 1
        self.check_empty(one)

    def test_a_twin_outlives_the_abort_of_the_request_whose_blocks_it_hits(self) -> None:
        twins = model(max_batched_tokens=64)
        for serial in (1, 2):
            twins.scheduler.add(engine_request(range(100, 118), serial=serial, max_tokens=6))
        twins.step()
        twins.scheduler.abort(key(1))
        assert twins.scheduler.load().num_used_blocks == 5
        assert len(tokens_of(twins.run(), 2)) == 6
        self.check_empty(twins.scheduler)

    def test_unknown_and_finished_requests_are_ignored(self) -> None:
        one = model()
        one.scheduler.abort(key(9))
        add(one, 1, 4, max_tokens=1)
        one.run()
        one.scheduler.abort(key(1))
        self.check_empty(one.scheduler)
