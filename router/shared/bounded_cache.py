"""BoundedCache: values by key, least recently used out first.

Owns the entries and their total size. Pure.
"""

from collections import OrderedDict
from collections.abc import Callable, ItemsView
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """For one thread. `size_of` an entry must not change while it is here; by default each counts 1."""

    def __init__(
        self, max_size: int, size_of: Callable[[K, V], int] | None = None, *, max_entries: int | None = None
    ) -> None:
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._size_of = size_of or (lambda key, value: 1)
        self._max_entries = max_entries
        self.max_size = max_size
        self.size = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        """Counts as a use."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def items(self) -> ItemsView[K, V]:
        """Return the least recently used first."""
        return self._entries.items()

    def peek(self, key: K) -> V | None:
        return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        """Store a value. One that is larger than the bound is evicted at once, after all others."""
        self.pop(key)
        self._entries[key] = value
        self.size += self._size_of(key, value)
        self.resize(self.max_size)

    def pop(self, key: K) -> V | None:
        value = self._entries.pop(key, None)
        if value is not None:
            self.size -= self._size_of(key, value)
        return value

    def resize(self, max_size: int) -> None:
        self.max_size = max_size
        entries, most = self._entries, self._max_entries
        while self.size > max_size or (most is not None and len(entries) > most):
            key, value = entries.popitem(last=False)
            self.size -= self._size_of(key, value)
            self.num_evicted += 1
