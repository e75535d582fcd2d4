"""LoopLag: how late the event loop runs due work.

Owns one small task. It measures the lateness, not the cause.
"""

import asyncio
import time
from collections.abc import Iterator

from router.shared.instruments import Instrument, gauge

NAP_SECONDS = 0.1
NUM_NAPS_PER_WINDOW = 100


class LoopLag:
    """`run()` as a task of the owner's."""

    def __init__(self) -> None:
        self._worst_before = 0.0
        self._worst = 0.0

    @property
    def seconds(self) -> float:
        """The worst of the window that runs and the one before."""
        return max(self._worst_before, self._worst)

    def instruments(self) -> Iterator[Instrument]:
        yield gauge(
            "router_event_loop_lag_seconds",
            "Worst delay of a due task on the event loop within the last 10 to 20 seconds",
            lambda: self.seconds,
        )

    async def run(self) -> None:
        while True:
            for _ in range(NUM_NAPS_PER_WINDOW):
                due = time.monotonic() + NAP_SECONDS
                await asyncio.sleep(NAP_SECONDS)
                self._worst = max(self._worst, time.monotonic() - due)
            self._worst_before, self._worst = self._worst, 0.0
