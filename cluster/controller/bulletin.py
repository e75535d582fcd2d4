"""Bulletin: the controller's news for its followers: numbered notes and current complaints.

Owns the numbering and the waiting.
"""

import asyncio
from collections import deque
from collections.abc import Callable

NUM_NOTES_KEPT = 200


class Bulletin:
    """`version` grows with every note; `complaints` are current problems by name."""

    def __init__(self) -> None:
        self.version = 0
        self.complaints: dict[str, str] = {}
        self._notes: deque[tuple[int, str]] = deque(maxlen=NUM_NOTES_KEPT)
        self._changed = asyncio.Condition()

    async def note(self, text: str) -> None:
        async with self._changed:
            self.version += 1
            self._notes.append((self.version, text))
            self._changed.notify_all()

    def news(self, what: str, complaint: str | None) -> str | None:
        """Record a complaint, or that it is over (None); returns the note if it is new."""
        if complaint == self.complaints.get(what):
            return None
        if complaint is None:
            del self.complaints[what]
            return f"{what}: all is well again"
        self.complaints[what] = complaint
        return complaint

    async def newer_than(self, version: int) -> tuple[str, ...]:
        """Wait for notes after `version`."""
        await self.until(lambda: self.version > version)
        return tuple(note for number, note in self._notes if number > version)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is checked after every note."""
        async with self._changed:
            await self._changed.wait_for(condition)
