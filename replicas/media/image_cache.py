"""ImageCache: an LRU cache of decoded images by hash, bounded in bytes.

Owns which are held by requests: those are never evicted. Pure: not thread-safe, and independent of the
engine's type of content.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Content = TypeVar("Content")


@dataclass(frozen=True, slots=True)
class CachedImage(Generic[Content]):
    """`token_ids` represent it in a prompt; `content` is the engine's input."""

    token_ids: tuple[int, ...]
    num_bytes: int
    content: Content


@dataclass(slots=True)
class _KeptImage(Generic[Content]):
    item: CachedImage[Content]
    num_holders: int = 0


class ImageCache(Generic[Content]):
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, _KeptImage[Content]] = OrderedDict()
        self._num_bytes = 0
        self._num_held_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def num_held(self) -> int:
        """Holds that were not released."""
        return sum(kept.num_holders for kept in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def has(self, content_hash: bytes) -> bool:
        """Whether it is there; then it is the newest."""
        if content_hash not in self._kept:
            return False
        self._kept.move_to_end(content_hash)
        return True

    def put(self, content_hash: bytes, item: CachedImage[Content]) -> bool:
        """Store an item; False, without eviction, if held items leave no room."""
        if self.has(content_hash):
            return True
        if self._num_held_bytes + item.num_bytes > self._max_bytes:
            return False
        self._forget_until(self._max_bytes - item.num_bytes)
        self._kept[content_hash] = _KeptImage(item)
        self._num_bytes += item.num_bytes
        return True

    def hold(self, hashes: Iterable[bytes]) -> list[CachedImage[Content]] | None:
        """Hold each hash's item until `release`. None, holding nothing, if one is missing."""
        wanted = list(hashes)
        if not all(content_hash in self._kept for content_hash in wanted):
            return None
        items = []
        for content_hash in wanted:
            kept = self._kept[content_hash]
            if not kept.num_holders:
                self._num_held_bytes += kept.item.num_bytes
            kept.num_holders += 1
            self._kept.move_to_end(content_hash)
            items.append(kept.item)
        return items

    def release(self, hashes: Iterable[bytes]) -> None:
        """Release the images as often as they were held."""
        for content_hash in hashes:
            kept = self._kept[content_hash]
            kept.num_holders -= 1
            if not kept.num_holders:
                self._num_held_bytes -= kept.item.num_bytes

    def clear(self) -> None:
        """Evict everything that no request holds."""
        self._forget_until(0)

    def _forget_until(self, num_bytes: int) -> None:
        """Evict unused images, oldest first, down to that many bytes."""
        for content_hash, kept in list(self._kept.items()):
            if self._num_bytes <= num_bytes:
                return
            if not kept.num_holders:
                del self._kept[content_hash]
                self._num_bytes -= kept.item.num_bytes
