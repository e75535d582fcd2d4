"""Watchdog: watches a replica's engine, and reports when it hangs.

Owns the looks. `step_watch.py` decides when an engine hangs, and the host what follows. It runs on the event
loop, so it sees neither more time than the loop had nor an engine that blocks the loop: such a replica falls
silent, which routers and its lease notice.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from replicas.errors import EngineHung
from replicas.observation.metrics import ReplicaMetrics
from replicas.protocol.frames import StepFrame
from replicas.step_watch import StepWatch

logger = logging.getLogger(__name__)

LOOKS_PER_FLOOR = 30
MAX_LOOK_SECONDS = 1.0


class Watchdog:
    """`has_work` tells whether requests are open; `on_hung` is called at most once."""

    def __init__(
        self,
        *,
        floor_seconds: float,
        max_step_tokens: int,
        seconds_per_token: float,
        has_work: Callable[[], bool],
        on_hung: Callable[[EngineHung], None],
        metrics: ReplicaMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look_seconds = min(MAX_LOOK_SECONDS, floor_seconds / LOOKS_PER_FLOOR)
        self._watch = StepWatch(floor_seconds, self._look_seconds, max_step_tokens, seconds_per_token)
        self._has_work = has_work
        self._on_hung = on_hung
        self._metrics = metrics
        self._clock = clock

    def observe(self, frame: StepFrame, step_seconds: float) -> None:
        """A frame, if it is one of a step."""
        if step_seconds > 0:
            load = frame.load  # a step may compute nothing but images
            self._watch.step_ended(
                step_seconds, load.prefill_seconds_per_token + load.encode_seconds_per_token
            )

    async def run(self) -> None:
        watch = self._watch
        while not watch.look(self._clock(), has_work=self._has_work()):
            self._metrics.engine_silence.set(watch.silent_seconds / watch.limit_seconds)
            await asyncio.sleep(self._look_seconds)
        hung = EngineHung(
            f"the engine hangs: it has work, and no step has ended for {watch.silent_seconds:.1f} seconds"
        )
        self._metrics.engine_silence.set(watch.silent_seconds / watch.limit_seconds)
        logger.error("%s; the limit is %.1f seconds", hung, watch.limit_seconds)
        self._on_hung(hung)
