"""SegmentCache: token ids by text, bounded in bytes, least recently used goes first.

Owns its entries and its counters. What one owner has put in, no other finds: how soon a text is encoded would
tell that somebody has sent it before.
"""

import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

BYTES_PER_TOKEN = 36
"""A slot and the integer behind it. Tuples of integers, unlike lists, cost the garbage collector nothing."""

ENTRY_BYTES = 200


@dataclass(frozen=True, slots=True)
class SegmentCacheStatistics:
    num_entries: int
    num_bytes: int
    max_bytes: int
    num_hits: int
    num_misses: int


class SegmentCache:
    """Several threads may use it: long prompts are encoded in a thread."""

    def __init__(self, max_bytes: int) -> None:
        self._entries: OrderedDict[tuple[Hashable, str], tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._num_hits = 0
        self._num_misses = 0

    def has(self, text: str, owner: Hashable = None) -> bool:
        return (owner, text) in self._entries

    def get(self, text: str, owner: Hashable = None) -> tuple[int, ...] | None:
        key = (owner, text)
        with self._lock:
            token_ids = self._entries.get(key)
            if token_ids is None:
                self._num_misses += 1
            else:
                self._num_hits += 1
                self._entries.move_to_end(key)
            return token_ids

    def put(self, text: str, token_ids: tuple[int, ...], owner: Hashable = None) -> None:
        cost = _cost(text, token_ids)
        if cost > self._max_bytes // 4:  # one giant must not throw out everybody
            return
        with self._lock:
            if (owner, text) in self._entries:
                return
            self._entries[owner, text] = token_ids
            self._num_bytes += cost
            while self._num_bytes > self._max_bytes:
                (_, oldest), its_tokens = self._entries.popitem(last=False)
                self._num_bytes -= _cost(oldest, its_tokens)

    def statistics(self) -> SegmentCacheStatistics:
        with self._lock:
            return SegmentCacheStatistics(
                num_entries=len(self._entries),
                num_bytes=self._num_bytes,
                max_bytes=self._max_bytes,
                num_hits=self._num_hits,
                num_misses=self._num_misses,
            )


def _cost(text: str, token_ids: tuple[int, ...]) -> int:
    return sys.getsizeof(text) + BYTES_PER_TOKEN * len(token_ids) + ENTRY_BYTES
