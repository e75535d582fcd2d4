"""FrameBridge: carries frames from the engine thread to the event loop, in order and bounded.

Owns the queue between the two.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from replicas.protocol.frames import StepFrame

MAX_FRAMES = 64
"""Frames that may wait for the event loop. Beyond, the engine waits: memory is worth more than a step."""

Deliver = Callable[[StepFrame, float], None]


class FrameBridge:
    """`put` in the engine thread; `deliver` runs for each frame on the event loop, woken once per batch."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Deliver) -> None:
        self._loop = loop
        self._deliver = deliver
        self._frames: deque[tuple[StepFrame, float]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, frame: StepFrame, seconds: float) -> None:
        with self._changed:
            while len(self._frames) >= MAX_FRAMES and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return
            self._frames.append((frame, seconds))
            if len(self._frames) == 1:
                self._loop.call_soon_threadsafe(self._deliver_all)

    def call(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the event loop after every frame that was put before."""
        with self._changed:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(self._deliver_all)
                self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        """Drop pending items and release all waiters."""
        with self._changed:
            self._is_closed = True
            self._frames.clear()
            self._changed.notify_all()

    def _deliver_all(self) -> None:
        with self._changed:
            frames = list(self._frames)
            self._frames.clear()
            self._changed.notify_all()
        for frame, seconds in frames:
            self._deliver(frame, seconds)
