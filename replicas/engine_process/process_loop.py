"""ProcessLoop: an EngineLoop that runs in the engine's own process, seen from the replica's.

Owns the two threads at this end of the pipe and the set of requests at the other. Like the loop that it
represents, it knows neither asyncio nor gRPC nor Redis.

    submit, abort (any thread) ──▶ outbox ──▶ pipe ──▶ EngineLoop ──▶ pipe ──▶ on_frame(frame, seconds)

The engine never waits for this process between two steps: on a busy machine, being scheduled twice per step
costs more than all the work in between.
"""

import logging
import queue
import threading
from typing import TypeAlias

from replicas.engine import Engine, keys_of
from replicas.engine_process.parent import (
    AbortChoice,
    AskStore,
    Close,
    EngineProcess,
    StartLoop,
    Stepped,
    Take,
    TakeMedia,
)
from replicas.errors import EngineDied
from replicas.loop import ENGINE_FAILED, EngineLoop, OnDeath, OnFrame
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

logger = logging.getLogger(__name__)

_Sent: TypeAlias = StartLoop | Take | AbortChoice | AskStore | TakeMedia | Close


def drive(engine: Engine, on_frame: OnFrame, on_death: OnDeath) -> "EngineLoop | ProcessLoop":
    """Return a loop for this engine, not yet started, in the process where the engine is."""
    if isinstance(engine, EngineProcess):
        return ProcessLoop(engine, on_frame, on_death)
    return EngineLoop(engine, on_frame, on_death)


class ProcessLoop:
    """Keeps the promises of EngineLoop; the death of the process counts as the engine's."""

    def __init__(self, engine: EngineProcess, on_frame: OnFrame, on_death: OnDeath) -> None:
        self._engine = engine
        self._on_frame = on_frame
        self._on_death = on_death
        self._outbox: queue.SimpleQueue[_Sent] = queue.SimpleQueue()
        self._outbox.put(StartLoop())
        self._door = threading.Lock()  # guards _ended and _live against the outbox
        self._ended = False
        self._live: set[RequestKey] = set()
        self._load = LoadSnapshot(num_total_blocks=engine.card.num_blocks)
        self._reader = threading.Thread(target=self._read, name="engine frames", daemon=True)
        # A thread of its own: a child that hangs does not empty the pipe, and a full one blocks.
        self._writer = threading.Thread(target=self._write, name="engine requests", daemon=True)

    def start(self) -> None:
        self._reader.start()
        self._writer.start()

    def submit(self, serial: int, submit: Submit) -> bool:
        """Give a request's choices to the engine: False if it has ended and took none. From any thread."""
        with self._door:
            if not self._ended:
                self._live.update(keys_of(serial, submit))
                self._outbox.put(Take(serial, submit))
            return not self._ended

    def abort(self, key: RequestKey) -> None:
        """Stop a request; its last delta may already be on its way. From any thread."""
        with self._door:
            self._live.discard(key)
            if not self._ended:
                self._outbox.put(AbortChoice(key))

    def ask_store(self, question: StoreQuestion) -> None:
        """The answer comes with a frame, unless the engine ends before. From any thread."""
        with self._door:
            if not self._ended:
                self._outbox.put(AskStore(question))

    def take_media(self, question: ImageQuery) -> None:
        """The answer comes with a frame, unless the engine ends before. From any thread."""
        with self._door:
            if not self._ended:
                self._outbox.put(TakeMedia(question))

    def stop(self, timeout_seconds: float | None = None) -> bool:
        """End the process after the step that runs, or kill it in the middle of one. Idempotent."""
        with self._door:
            self._ended = True
            self._outbox.put(Close())
        if self._reader.ident is not None:
            self._reader.join(timeout_seconds)
            if self._reader.is_alive():
                logger.error("the engine does not finish its step; killing its process %d", self._engine.pid)
                self._engine.kill()
                self._reader.join(timeout_seconds)
            self._writer.join(timeout_seconds)
        self._engine.close()
        return not self._reader.is_alive()

    def kill(self) -> None:
        """Kill the process, which counts as its death."""
        self._engine.kill()

    def _write(self) -> None:
        message: _Sent | None = None
        while not isinstance(message, Close):
            message = self._outbox.get()
            try:
                self._engine.send(message)
            except EngineDied:
                return  # the reader hears of it too

    def _read(self) -> None:
        try:
            while True:
                answer = self._engine.receive()
                assert isinstance(answer, Stepped)
                self._deliver(answer)
        except BaseException as error:  # the thread's outermost frame: it must end loudly, not vanish
            self._bury(error)

    def _deliver(self, step: Stepped) -> None:
        self._load = step.frame.load
        for delta in step.frame.deltas:
            if delta.finish_reason is not None:
                with self._door:
                    self._live.discard(delta.key)
        self._on_frame(step.frame, step.seconds)

    def _bury(self, death: BaseException) -> None:
        with self._door:
            if self._ended:
                return  # as it was told to
            self._ended = True
            keys = list(self._live)
        logger.error("the engine failed", exc_info=death)
        if keys:
            refusal = Refusal(RefusalCode.ENGINE_FAILED, ENGINE_FAILED)
            deltas = [TokenDelta(key, finish_reason=FinishReason.ERROR, refusal=refusal) for key in keys]
            self._on_frame(StepFrame(deltas=deltas, load=self._load), 0.0)
        self._on_death(death)
