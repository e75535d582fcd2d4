"""Announcements: the blocks that this replica's requests are about to compute, and what readers know of them.

Owns the open announcements, and those for the next write. One that began and ended between two writes is left
out. Bounded by the open requests: each has at most one, and readers hear of an end only after a beginning.
"""

from replicas.protocol.blocks import BlockHash
from replicas.protocol.keys import Announcement


class Announcements:
    def __init__(self) -> None:
        self._live: dict[int, Announcement] = {}
        self._begun: dict[int, None] = {}
        """Live ones that no write has brought, oldest first."""
        self._ended: dict[int, None] = {}
        """Announcements that were written, and whose end was not, oldest first."""

    def __len__(self) -> int:
        return len(self._live)

    @property
    def has_change(self) -> bool:
        return bool(self._begun or self._ended)

    def begin(
        self, announcement_id: int, block_hashes: tuple[BlockHash, ...], points: tuple[BlockHash, ...] = ()
    ) -> bool:
        """Begin an announcement; False, without effect, if readers know one of this id, or will."""
        if announcement_id in self._live or announcement_id in self._ended:
            return False
        self._live[announcement_id] = Announcement(announcement_id, block_hashes, points)
        self._begun[announcement_id] = None
        return True

    def end(self, announcement_id: int) -> None:
        del self._live[announcement_id]
        if announcement_id in self._begun:
            del self._begun[announcement_id]
        else:
            self._ended[announcement_id] = None

    def take_change(self) -> tuple[tuple[Announcement, ...], tuple[int, ...]]:
        """Return the announcements that began and the ids that ended since the last call."""
        announced = tuple(self._live[begun] for begun in self._begun)
        ended = tuple(self._ended)
        self._begun.clear()
        self._ended.clear()
        return announced, ended

    def take_all(self) -> tuple[Announcement, ...]:
        """All that live, for readers that have forgotten everything."""
        self._begun.clear()
        self._ended.clear()
        return tuple(self._live.values())
