"""SlotBooks: facts about the chunk in each slot, besides its bytes.

Owns the users of its blocks and the transfer that brought it, and tells the arena's table, if there is one,
when a slot is taken and when it is full.
"""

import os

from replicas.engine import SharedKv
from replicas.kvstore.arena import Arena
from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.layout import ChunkHeader, LayoutId
from replicas.protocol.frames import UserTag

Writers = tuple[UserTag, ...]
"""User whose request computed each block of a chunk."""


class SlotBooks:
    """Records of an arena whose chunks have this layout and that many tokens."""

    def __init__(self, arena: Arena, num_tokens: int, layout: LayoutId | None) -> None:
        self._arena = arena
        self._table = arena.table
        self._payload_bytes = arena.payload_bytes
        self._num_tokens = num_tokens
        self._layout = layout
        self._names: list[ChunkName | None] = [None] * arena.num_slots
        self._writers: list[Writers] = [()] * arena.num_slots
        self._transfers: list[int | None] = [None] * arena.num_slots

    @property
    def shared(self) -> SharedKv | None:
        """The arena, if it has a table."""
        if self._table is None or self._layout is None:
            return None
        arena = self._arena
        return SharedKv(os.getpid(), arena.fd, arena.num_slots, arena.payload_bytes, self._layout)

    def writers(self, slot: int) -> Writers:
        return self._writers[slot]

    def transfer(self, slot: int) -> int | None:
        """Return the number of the one that brought the chunk; None if it came from elsewhere."""
        return self._transfers[slot]

    def taken(self, slot: int, name: ChunkName | None = None, writers: Writers = ()) -> None:
        """Take a slot, before its first byte is written. A chunk that is read into it gives its name when it
        `came`."""
        if self._table is not None:
            self._table.take(slot)
        self._names[slot], self._writers[slot], self._transfers[slot] = name, writers, None

    def came(self, slot: int, header: ChunkHeader, transfer: int | None = None) -> None:
        """Record a chunk that was read into the slot."""
        self._names[slot], self._writers[slot], self._transfers[slot] = header.name, header.writers, transfer

    def filled(self, slot: int) -> None:
        """Record that it holds the chunk that it was taken for."""
        if self._table is not None and self._layout is not None:
            self._table.publish(slot, self.header(slot, self._layout, created_seconds=0))

    def header(self, slot: int, layout: LayoutId, *, created_seconds: int) -> ChunkHeader:
        """Return the header of the chunk in a full slot, for a copy."""
        name = self._names[slot]
        assert name is not None, "a slot that is full holds a chunk with a name"
        return ChunkHeader(
            layout=layout,
            name=name,
            num_tokens=self._num_tokens,
            payload_bytes=self._payload_bytes,
            writers=self._writers[slot],
            ends_prompt=False,
            tenant=b"",
            created_seconds=created_seconds,
        )

    def cleared(self) -> None:
        """No slot holds a chunk any more."""
        if self._table is not None:
            self._table.take_all()
