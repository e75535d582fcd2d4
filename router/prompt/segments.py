"""SegmentCache: an LRU cache of token ids by text, bounded in bytes.

Owns its entries and its counters. Entries are per owner: how soon a text is encoded would tell that another
has sent it before.
"""

import sys
import threading
from collections.abc import Hashable

from router.shared.bounded_cache import BoundedCache

BYTES_PER_TOKEN = 36
"""A slot and its integer. Tuples of integers, unlike lists, cost the garbage collector nothing."""

ENTRY_BYTES = 200


class SegmentCache:
    """Several threads may use it: long prompts are encoded in a thread."""

    def __init__(self, max_bytes: int) -> None:
        self._entries: BoundedCache[tuple[Hashable, str], tuple[int, ...]] = BoundedCache(max_bytes, _size)
        self._lock = threading.Lock()
        self.num_hits = 0
        self.num_misses = 0

    def has(self, text: str, owner: Hashable = None) -> bool:
        return (owner, text) in self._entries

    def get(self, text: str, owner: Hashable = None) -> tuple[int, ...] | None:
        with self._lock:
            token_ids = self._entries.get((owner, text))
            if token_ids is None:
                self.num_misses += 1
            else:
                self.num_hits += 1
            return token_ids

    def put(self, text: str, token_ids: tuple[int, ...], owner: Hashable = None) -> None:
        key = (owner, text)
        if _size(key, token_ids) > self._entries.max_size // 4:  # one giant must not evict all others
            return
        with self._lock:
            if key not in self._entries:
                self._entries.put(key, token_ids)

    @property
    def num_bytes(self) -> int:
        return self._entries.size

    @property
    def num_entries(self) -> int:
        return len(self._entries)


def _size(key: tuple[Hashable, str], token_ids: tuple[int, ...]) -> int:
    return sys.getsizeof(key[1]) + BYTES_PER_TOKEN * len(token_ids) + ENTRY_BYTES
