"""CacheMemory: the named caches that a router has used lately, bounded in bytes.

Owns which is forgotten: the least recently used. Times are the caller's.
"""

from collections import OrderedDict
from dataclasses import dataclass

from router.caches.record import CacheContent, CacheRecord

ENTRY_BYTES = 2048
"""What an entry takes beside its content."""


@dataclass(slots=True)
class Remembered:
    """`checked_at` is when Redis last said that it is so."""

    record: CacheRecord
    content: CacheContent
    checked_at: float


class CacheMemory:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, Remembered] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, record: CacheRecord, content: CacheContent, now: float) -> None:
        self.drop(record.cache_id)
        self._entries[record.cache_id] = Remembered(record, content, now)
        self.num_bytes += _size(content)
        while self.num_bytes > self._max_bytes:
            self.drop(next(iter(self._entries)))

    def use(self, cache_id: str) -> Remembered | None:
        entry = self._entries.get(cache_id)
        if entry is not None:
            self._entries.move_to_end(cache_id)
        return entry

    def drop(self, cache_id: str) -> None:
        entry = self._entries.pop(cache_id, None)
        if entry is not None:
            self.num_bytes -= _size(entry.content)


def _size(content: CacheContent) -> int:
    return ENTRY_BYTES + content.num_bytes
