"""EngineLoop: the one thread that drives an engine: inbox, step, frame.

Owns the thread, the inbox, the set of requests that live in the engine, and the measuring of speed.
It is free of asyncio, gRPC and Redis: a caller that wants the frames passes a callback.

    submit, abort (any thread) ──▶ inbox ──▶ add / abort ──▶ step ──▶ on_frame(frame, seconds)
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from replicas.engine import Engine, EngineRequest, RequestRefused, expand, keys_of
from replicas.protocol.frames import (
    FinishReason,
    LoadSnapshot,
    Refusal,
    RefusalCode,
    RequestKey,
    StepFrame,
    Submit,
    TokenDelta,
)
from replicas.protocol.hand_overs import StoreQuestion
from replicas.protocol.media import ImageQuery
from replicas.scheduling.speed_meter import SpeedMeter

logger = logging.getLogger(__name__)

OnFrame = Callable[[StepFrame, float], None]
"""Called in the engine thread with each frame and the seconds that its step took."""

ENGINE_FAILED = "the engine of this replica has failed"

OnDeath = Callable[[BaseException], None]

LAST_WORDS_SECONDS = 3.0
"""Seconds that a dead engine is left as it is, for others to hear of it: closing a large one collects garbage
for seconds, in which no other thread runs."""


@dataclass(frozen=True, slots=True)
class _AddOrder:
    """All choices of one request in one message, so that no step counts only some of them."""

    serial: int
    submit: Submit


@dataclass(frozen=True, slots=True)
class _AbortOrder:
    key: RequestKey


@dataclass(frozen=True, slots=True)
class _StoreOrder:
    question: StoreQuestion


@dataclass(frozen=True, slots=True)
class _MediaOrder:
    question: ImageQuery


@dataclass(frozen=True, slots=True)
class _Wake:
    """The engine has something to report."""


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Order = _AddOrder | _AbortOrder | _StoreOrder | _MediaOrder | _Wake | _Stop


class EngineLoop:
    """Runs `engine` in a thread of its own until `stop` or until the engine raises.

    Every request gets a last delta, or was aborted, or the loop was stopped. An engine that raises ends all
    its live requests with an ENGINE_FAILED refusal, and `submit` takes nothing more.
    """

    def __init__(
        self,
        engine: Engine,
        on_frame: OnFrame,
        on_death: OnDeath,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._on_frame = on_frame
        self._on_death = on_death
        self._clock = clock
        self._inbox: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._door = threading.Lock()  # guards _ended against the inbox: nothing is put in afterwards
        self._ended = False
        self._may_close = threading.Event()
        self._live: set[RequestKey] = set()
        self._last_serial = 0
        self._last_counted_serial = 0
        self._load = LoadSnapshot(num_total_blocks=engine.card.num_blocks)
        self._meter = SpeedMeter(engine.card.num_blocks * engine.card.block_size)
        self._num_aborted = 0
        """Requests, since the last step."""
        self._look_again_seconds: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, serial: int, submit: Submit) -> bool:
        """Give a request's choices to the engine; False if it has ended and took none. Thread-safe.

        Serials ascend: a frame's `last_serial` says how far its load counts them.
        """
        with self._door:
            if not self._ended:
                self._inbox.put(_AddOrder(serial, submit))
            return not self._ended

    def abort(self, key: RequestKey) -> None:
        """Stop a request; its last delta may already be on its way. From any thread."""
        with self._door:
            if not self._ended:
                self._inbox.put(_AbortOrder(key))

    def ask_store(self, question: StoreQuestion) -> None:
        """The answer comes with a frame, unless the engine ends before. From any thread."""
        with self._door:
            if not self._ended:
                self._inbox.put(_StoreOrder(question))

    def take_media(self, question: ImageQuery) -> None:
        """The answer comes with a frame, unless the engine ends before. From any thread."""
        with self._door:
            if not self._ended:
                self._inbox.put(_MediaOrder(question))

    def stop(self, timeout_seconds: float | None = None) -> bool:
        """End the thread after the step that runs, close the engine, and wait. Idempotent.

        False if the step does not end in time; the thread is then left to itself.
        """
        with self._door:
            if not self._ended:
                self._inbox.put(_Stop())
        self._may_close.set()
        if self._thread.ident is None:
            self._engine.close()  # never started, so the thread will not do it
        elif self._thread.is_alive():
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def kill(self) -> None:
        """Stop after the running step; a thread cannot be killed."""
        with self._door:
            if not self._ended:
                self._inbox.put(_Stop())

    def _run(self) -> None:
        death: BaseException | None = None
        try:
            self._engine.begin(lambda: self._inbox.put(_Wake()))
            while self._turn():
                pass
        except BaseException as error:  # the thread's outermost frame: it must end loudly, not vanish
            logger.exception("the engine failed")
            death = error
        with self._door:
            self._ended = True
        if death is not None:
            self._bury(death)
            self._may_close.wait(LAST_WORDS_SECONDS)
        try:
            self._engine.close()
        except Exception:  # nothing is left to save, and a thread's death would only be printed
            logger.exception("the engine could not be closed")

    def _turn(self) -> bool:
        """Take the inbox, waiting for it if there is nothing else to do, then step once."""
        if not self._drain_inbox(wait=not self._engine.has_work()):
            return False
        self._step()
        return True

    def _drain_inbox(self, *, wait: bool) -> bool:
        """False if it said to stop. It is not waited for longer than the last step has asked for."""
        while True:
            try:
                message = self._inbox.get(block=wait, timeout=self._look_again_seconds)
            except queue.Empty:
                return True
            wait = False
            match message:
                case _AddOrder(serial, submit):
                    for request in expand(submit, serial):
                        self._add(request)
                case _AbortOrder(key):
                    self._num_aborted += key in self._live
                    self._live.discard(key)
                    self._engine.abort(key)
                case _StoreOrder(question):
                    self._engine.ask_store(question)
                case _MediaOrder(asked):
                    self._engine.take_media(asked)
                case _Wake():
                    pass
                case _Stop():
                    return False

    def _add(self, request: EngineRequest) -> None:
        self._last_serial = request.key.number
        try:
            self._engine.add(request)
        except RequestRefused as refused:
            # Said at once: the step that follows may be a long one.
            self._emit_errors([request.key], Refusal(refused.code, refused.message, refused.error))
        else:
            self._live.add(request.key)

    def _step(self) -> None:
        started = self._clock()
        frame = self._engine.step()
        seconds = self._clock() - started
        ended = [delta.key for delta in frame.deltas if delta.finish_reason is not None]
        self._live.difference_update(ended)
        self._meter.observe(frame, seconds)
        self._meter.ran(frame.load.num_running + len(ended), seconds, len(ended) + self._num_aborted)
        self._num_aborted = 0
        self._look_again_seconds = frame.look_again_seconds
        load = frame.load if frame.load.has_speeds else self._meter.fill(frame.load)
        self._load, self._last_counted_serial = load, self._last_serial
        self._on_frame(replace(frame, load=self._load, last_serial=self._last_counted_serial), seconds)

    def _bury(self, death: BaseException) -> None:
        keys = list(self._live)
        self._live.clear()
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, _AddOrder):
                keys += keys_of(message.serial, message.submit)
        self._emit_errors(keys, Refusal(RefusalCode.ENGINE_FAILED, ENGINE_FAILED))
        self._on_death(death)

    def _emit_errors(self, keys: Sequence[RequestKey], refusal: Refusal) -> None:
        if keys:
            deltas = [TokenDelta(key, finish_reason=FinishReason.ERROR, refusal=refusal) for key in keys]
            frame = StepFrame(deltas=deltas, load=self._load, last_serial=self._last_counted_serial)
            self._on_frame(frame, 0.0)
