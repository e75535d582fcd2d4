"""ResponseMemory: the stored responses that only this router has, bounded in number and bytes.

Owns which is forgotten: the oldest. Times are the caller's.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from router.responses.record import ResponseBounds, StoredResponse

ENTRY_BYTES = 1024
"""What an entry takes beside its content."""

Key = tuple[str, str]
"""Tenant and response id."""


class ResponseMemory:
    """`num_bytes` counts what is held for answers under way as well; `num_dropped` those that were forgotten
    for want of room."""

    def __init__(self, bounds: ResponseBounds) -> None:
        self._bounds = bounds
        self._entries: dict[Key, StoredResponse] = {}
        self._num_held_bytes = 0
        self._num_kept_bytes = 0
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return self._num_held_bytes + self._num_kept_bytes

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[bool]:
        """Room for a question until it is answered. False if there is none."""
        num_bytes += ENTRY_BYTES
        if self._num_held_bytes + num_bytes > self._bounds.memory_bytes:
            self.num_dropped += 1
            yield False
            return
        self._num_held_bytes += num_bytes
        self._make_room()
        try:
            yield True
        finally:
            self._num_held_bytes -= num_bytes

    def put(self, record: StoredResponse) -> None:
        self._entries[record.tenant, record.response_id] = record
        self._num_kept_bytes += _size(record)
        self._make_room()

    def get(self, key: Key, now: float) -> StoredResponse | None:
        """`now` is in seconds since 1970."""
        record = self._entries.get(key)
        if record is not None and record.created + self._bounds.seconds <= now:
            self.drop(key)
            return None
        return record

    def drop(self, key: Key) -> bool:
        """Whether it was there."""
        record = self._entries.pop(key, None)
        if record is None:
            return False
        self._num_kept_bytes -= _size(record)
        return True

    def _make_room(self) -> None:
        bounds = self._bounds
        while self._entries and (
            self.num_bytes > bounds.memory_bytes or len(self._entries) > bounds.num_responses
        ):
            self.drop(next(iter(self._entries)))
            self.num_dropped += 1


def _size(record: StoredResponse) -> int:
    return ENTRY_BYTES + record.num_bytes
