"""The engine thread: what goes in, what comes out, and how it ends."""

import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from replicas.kvstore.rate import DECAY
from replicas.loop import EngineLoop
from replicas.protocol.blocks import ImageTokens
from replicas.protocol.frames import (
    FinishReason,
    LoadSnapshot,
    RefusalCode,
    RequestKey,
    StepFrame,
    Submit,
    TokenDelta,
)
from replicas.scheduling.speed_meter import SpeedMeter
from tests.replicas.router_client import submit
from tests.replicas.scripted_engine import ScriptedEngine


def asked(
    serial: int, num_tokens: int = 8, *, max_tokens: int = 3, num_choices: int = 1
) -> tuple[int, Submit]:
    return serial, submit(serial, range(num_tokens), max_tokens=max_tokens, num_choices=num_choices)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


class Harness:
    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.frames: queue.SimpleQueue[StepFrame] = queue.SimpleQueue()
        self.deaths: list[BaseException] = []
        self.died = threading.Event()
        self.loop = EngineLoop(engine, lambda frame, _: self.frames.put(frame), self._on_death)
        self.loop.start()

    def _on_death(self, error: BaseException) -> None:
        self.deaths.append(error)
        self.died.set()

    def frame(self) -> StepFrame:
        return self.frames.get(timeout=30)

    def deltas_until_finished(self, *serials: int) -> dict[int, list[TokenDelta]]:
        open_serials, found = set(serials), {serial: list[TokenDelta]() for serial in serials}
        while open_serials:
            for delta in self.frame().deltas:
                found[delta.key.number].append(delta)
                if delta.finish_reason is not None:
                    open_serials.discard(delta.key.number)
        return found


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness(ScriptedEngine())
    yield harness
    harness.engine.gate.set()
    harness.loop.stop()


def test_requests_run_to_their_end_in_one_thread_of_the_loops_own(harness: Harness) -> None:
    harness.loop.submit(*asked(1))
    harness.loop.submit(*asked(2, max_tokens=5))
    found = harness.deltas_until_finished(1, 2)
    assert [delta.token_ids for delta in found[1]] == [(0,), (1,), (2,)]
    assert len(found[2]) == 5
    assert found[2][-1].finish_reason is FinishReason.LENGTH
    assert harness.engine.thread_ids.isdisjoint({threading.get_ident()})


def test_an_idle_loop_takes_no_steps(harness: Harness) -> None:
    harness.loop.submit(*asked(1))
    harness.deltas_until_finished(1)
    harness.loop.submit(*asked(2))  # passes only through a thread that waits for its inbox
    harness.deltas_until_finished(2)
    num_steps = harness.engine.num_steps
    threading.Event().wait(0.05)
    assert harness.engine.num_steps == num_steps


def test_an_abort_ends_the_request_and_reports_the_lighter_load(harness: Harness) -> None:
    harness.engine.gate.clear()
    harness.loop.submit(*asked(1, max_tokens=1000))
    harness.loop.abort(RequestKey(1, 0))
    harness.engine.gate.set()
    while harness.frame().load.num_running:
        pass
    assert harness.engine.aborted == [RequestKey(1, 0)]
    assert not harness.engine.has_work()


def test_a_refused_request_gets_one_last_delta_that_says_why(harness: Harness) -> None:
    harness.loop.submit(*asked(1, num_tokens=300))
    (delta,) = harness.deltas_until_finished(1)[1]
    assert delta.finish_reason is FinishReason.ERROR
    assert delta.refusal is not None
    assert delta.refusal.code is RefusalCode.CONTEXT_LENGTH_EXCEEDED


def test_an_engine_that_raises_ends_every_request_and_the_loop() -> None:
    harness = Harness(ScriptedEngine(fail_at_step=2))
    harness.engine.gate.clear()
    harness.loop.submit(*asked(1, max_tokens=100))
    harness.loop.submit(*asked(2, max_tokens=100))
    harness.engine.gate.set()
    found = harness.deltas_until_finished(1, 2)
    for serial in (1, 2):
        assert found[serial][-1].finish_reason is FinishReason.ERROR
        refusal = found[serial][-1].refusal
        assert refusal is not None
        assert refusal.code is RefusalCode.ENGINE_FAILED
    assert harness.died.wait(30)
    assert isinstance(harness.deaths[0], RuntimeError)
    assert harness.loop.submit(*asked(3)) is False
    time.sleep(0.1)
    assert not harness.engine.is_closed  # its owner has time to say that it died
    harness.loop.stop()
    assert harness.engine.is_closed


def test_what_waits_in_the_inbox_of_a_dying_engine_is_ended_too() -> None:
    harness = Harness(ScriptedEngine(fail_at_step=1))
    harness.engine.gate.clear()
    harness.loop.submit(*asked(1))
    harness.loop.submit(*asked(2))
    harness.engine.gate.set()
    found = harness.deltas_until_finished(1, 2)
    assert {deltas[-1].finish_reason for deltas in found.values()} == {FinishReason.ERROR}
    harness.loop.stop()


def test_stop_joins_closes_the_engine_and_may_be_repeated(harness: Harness) -> None:
    harness.loop.submit(*asked(1, max_tokens=10_000))
    harness.frame()
    harness.loop.stop()
    harness.loop.stop()
    assert harness.engine.is_closed
    assert not harness.deaths


def test_every_frame_carries_the_measured_speed() -> None:
    ticks = iter(range(1000))
    frames: queue.SimpleQueue[StepFrame] = queue.SimpleQueue()
    engine = ScriptedEngine()
    loop = EngineLoop(engine, lambda frame, _: frames.put(frame), lambda _: None, lambda: next(ticks))
    loop.start()
    loop.submit(*asked(1, num_tokens=50, max_tokens=3))
    loads = [frames.get(timeout=30).load for _ in range(3)]
    loop.stop()
    assert loads[0].prefill_seconds_per_token == pytest.approx(1 / 50)
    assert loads[0].decode_step_seconds == 0.0
    assert loads[1].decode_step_seconds == pytest.approx(1.0)


def test_frames_say_how_soon_requests_that_end_give_back_room(harness: Harness) -> None:
    """One runs for 3 steps of a second, and ends; the other is aborted before its second."""
    ticks = iter(range(1000))
    frames: queue.SimpleQueue[StepFrame] = queue.SimpleQueue()
    engine = ScriptedEngine()
    loop = EngineLoop(engine, lambda frame, _: frames.put(frame), lambda _: None, lambda: next(ticks))
    engine.gate.clear()
    loop.submit(*asked(1, max_tokens=3))
    loop.start()
    wait_for(lambda: bool(engine.added))
    loop.submit(*(aborted := asked(2, max_tokens=100)))
    loop.abort(RequestKey(aborted[0], 0))
    engine.gate.set()
    loads = [frames.get(timeout=30).load for _ in range(3)]
    loop.stop()
    capacity = engine.card.num_blocks * engine.card.block_size
    assert loads[0].room_seconds_per_token == 0.0
    held_seconds, num_ended = 2.0, 1.0  # of the one that was aborted, after as many of the other
    held_seconds, num_ended = DECAY * held_seconds + 1.0, DECAY * num_ended + 1.0
    assert loads[2].room_seconds_per_token == pytest.approx(held_seconds / num_ended / capacity)


def test_room_is_given_back_by_requests_that_end_whether_or_not_they_ran_long() -> None:
    meter = SpeedMeter(1000)
    meter.ran(4, 2.0, 0)
    assert meter.fill(LoadSnapshot()).room_seconds_per_token == 0.0
    meter.ran(4, 3.0, 2)
    assert meter.fill(LoadSnapshot()).room_seconds_per_token == pytest.approx(20 / 2 / 1000)
    assert SpeedMeter().fill(LoadSnapshot()).room_seconds_per_token == 0.0


def test_tiny_prefills_do_not_make_a_replica_look_slow() -> None:
    meter = SpeedMeter()
    meter.observe(StepFrame(num_prefill_tokens=1000), 1.0)
    for _ in range(100):
        meter.observe(StepFrame(num_prefill_tokens=1), 0.5)
        meter.observe(StepFrame(num_prefill_tokens=100, num_decode_tokens=90), 3.0)
    assert meter.fill(LoadSnapshot()).prefill_seconds_per_token == pytest.approx(0.001)


def test_what_a_step_takes_beyond_its_tokens_encoding_its_images_takes() -> None:
    meter = SpeedMeter()
    meter.observe(StepFrame(num_prefill_tokens=1000), 1.0)
    assert meter.fill(LoadSnapshot()).encode_seconds_per_token == 0.0
    assert meter.encode_seconds([ImageTokens(b"", 0, 100)]) is None
    meter.observe(StepFrame(num_decode_tokens=5), 0.25)
    meter.observe(StepFrame(num_prefill_tokens=100, num_encoded_tokens=64, num_decode_tokens=5), 0.99)
    load = meter.fill(LoadSnapshot())
    assert load.prefill_seconds_per_token == pytest.approx(0.001)
    assert load.decode_step_seconds == pytest.approx(0.25)
    assert load.encode_seconds_per_token == pytest.approx(0.01)
    left = meter.encode_seconds([ImageTokens(b"", 0, 100), ImageTokens(b"", 200, 50)])
    assert left is not None
    assert [left(ready) for ready in (0, 99, 100, 249, 250)] == pytest.approx([1.5, 1.5, 0.5, 0.5, 0.0])
    assert meter.encode_seconds([]) is None


def test_a_step_that_was_faster_than_its_tokens_encodes_in_no_time() -> None:
    meter = SpeedMeter()
    meter.observe(StepFrame(num_prefill_tokens=1000), 1.0)
    meter.observe(StepFrame(num_prefill_tokens=100, num_encoded_tokens=64), 0.01)
    assert meter.fill(LoadSnapshot()).encode_seconds_per_token == 0.0


def test_images_count_as_prefill_until_a_step_without_them_has_shown_what_that_takes() -> None:
    meter = SpeedMeter()
    meter.observe(StepFrame(num_prefill_tokens=100, num_encoded_tokens=64), 1.0)
    assert meter.fill(LoadSnapshot()).prefill_seconds_per_token == pytest.approx(0.01)
    assert meter.fill(LoadSnapshot()).encode_seconds_per_token == 0.0
    meter.observe(StepFrame(num_prefill_tokens=100), 0.1)
    assert meter.fill(LoadSnapshot()).prefill_seconds_per_token == pytest.approx(0.001)
    meter.observe(StepFrame(num_prefill_tokens=100, num_encoded_tokens=64), 0.74)
    assert meter.fill(LoadSnapshot()).encode_seconds_per_token == pytest.approx(0.01)


def test_a_frame_says_up_to_which_request_its_load_counts(harness: Harness) -> None:
    harness.engine.gate.clear()
    harness.loop.submit(*asked(1, max_tokens=50))
    wait_for(lambda: bool(harness.engine.added))  # the step that follows waits at the gate
    harness.loop.submit(*asked(2, num_tokens=300))
    harness.loop.submit(*asked(3, max_tokens=50, num_choices=2))
    harness.engine.gate.set()
    seen = []
    while not seen or seen[-1][0] < 3:
        frame = harness.frame()
        seen.append((frame.last_serial, frame.load.num_running, [delta.key for delta in frame.deltas]))
    assert seen[0] == (1, 1, [RequestKey(1, 0)])
    assert seen[1] == (1, 1, [RequestKey(2, 0)])  # a refusal, with the load of the step before
    assert seen[2][:2] == (3, 3)


def test_the_frame_of_a_death_counts_no_more_than_the_last_step_did() -> None:
    harness = Harness(ScriptedEngine(fail_at_step=2))
    harness.loop.submit(*asked(1, max_tokens=100))
    harness.loop.submit(*asked(2, max_tokens=100))
    frames = [harness.frame(), harness.frame()]
    assert frames[1].deltas[0].finish_reason is FinishReason.ERROR
    assert frames[1].last_serial == frames[0].last_serial
    harness.loop.stop()
