"""Waits: how long requests wait for their turn in the engine, and for their first token.

Owns when each request was taken; the rest it reads from frames.
"""

from collections.abc import Callable

from replicas.observation.metrics import ReplicaMetrics
from replicas.protocol.frames import StepFrame


class Waits:
    def __init__(self, metrics: ReplicaMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._queued: dict[int, float] = {}
        self._silent: dict[int, float] = {}

    def begin(self, serial: int) -> None:
        """The request has been given to the engine."""
        self._queued[serial] = self._silent[serial] = self._clock()

    def take(self, frame: StepFrame, step_seconds: float) -> None:
        """A frame, and the duration of its step. Of several choices the first counts."""
        now = self._clock()
        for serial, _ in frame.started:
            taken = self._queued.pop(serial, None)
            if taken is not None:
                # The engine takes requests up to the moment when a step begins; clocks are read around it.
                self._metrics.queue_seconds.observe(max(0.0, now - step_seconds - taken))
        for delta in frame.deltas:
            taken = self._silent.pop(delta.key.number, None)
            if taken is not None and delta.refusal is None:
                self._metrics.ttft_seconds.observe(now - taken)

    def end(self, serial: int) -> None:
        """Record a request's end, whatever its result."""
        self._queued.pop(serial, None)
        self._silent.pop(serial, None)
