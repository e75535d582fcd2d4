"""ResponseMemory: the stored responses that only this router has, bounded in number and bytes.

Owns eviction: the oldest go first. Times are the caller's.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from router.features.responses.record import ResponseBounds, StoredResponse
from router.shared.bounded_cache import BoundedCache

ENTRY_BYTES = 1024
"""An entry's memory beside its content."""

Key = tuple[str, str]
"""Tenant and response id."""


class ResponseMemory:
    """`num_bytes` includes the room that is held for answers under way."""

    def __init__(self, bounds: ResponseBounds) -> None:
        self._bounds = bounds
        self._entries: BoundedCache[Key, StoredResponse] = BoundedCache(
            bounds.memory_bytes,
            lambda _, record: ENTRY_BYTES + record.num_bytes,
            max_entries=bounds.num_responses,
        )
        self._num_refused = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return self._bounds.memory_bytes - self._entries.max_size + self._entries.size

    @property
    def num_dropped(self) -> int:
        """Responses that were evicted, or not taken, for lack of room."""
        return self._entries.num_evicted + self._num_refused

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[bool]:
        """Hold room for a question until it is answered. Yields False if there is none."""
        num_bytes += ENTRY_BYTES
        entries = self._entries
        if num_bytes > entries.max_size:
            self._num_refused += 1
            yield False
            return
        entries.resize(entries.max_size - num_bytes)
        try:
            yield True
        finally:
            entries.resize(entries.max_size + num_bytes)

    def put(self, record: StoredResponse) -> None:
        self._entries.put((record.tenant, record.response_id), record)

    def get(self, key: Key, now: float) -> StoredResponse | None:
        """`now` is in seconds since 1970."""
        record = self._entries.peek(key)
        if record is not None and record.created + self._bounds.seconds <= now:
            self.drop(key)
            return None
        return record

    def drop(self, key: Key) -> bool:
        """Whether it was there."""
        return self._entries.pop(key) is not None
