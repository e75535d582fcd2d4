"""ServerResidency: which blocks the server holds, by its events, under our names.

Pure. Owns the map and who computed what. Pages that are smaller than our blocks are joined first. Another
client's blocks carry no namespace of ours and are left out, as are blocks whose beginning was stored before
anybody listened.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from replicas.kvcache.hash_map import HashMap, UnknownBlock, root_in
from replicas.kvcache.writers import BlockWriters, Shares
from replicas.protocol.blocks import BlockHash
from replicas.protocol.bounds import Uint32
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from replicas.protocol.frames import NO_USER, UserTag
from replicas.remote_engine.pages import Hash, Pages

MOST_REMEMBERED = 8192
"""Requests that are remembered after their end, for events that come late."""

MOST_TIMES = 4
"""How many times the blocks that the server has may be held at most, by its events."""

MOST_DISTINCT = 2
"""The same, of different blocks, of which no server holds more than it has at a time."""

_DEVICE = "GPU"
"""The medium that attention reads, on a CPU too."""


class Stored(msgspec.Struct, tag="BlockStored", tag_field="type"):
    block_hashes: list[Hash]
    token_ids: list[Uint32]
    block_size: int
    parent_block_hash: Hash | None = None
    medium: str | None = None
    extra_keys: list[list[object] | None] | None = None
    group_idx: int | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", tag_field="type"):
    block_hashes: list[Hash]
    medium: str | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    pass


ServerEvent = Stored | Removed | Cleared


class Storer(NamedTuple):
    user: UserTag
    num_prompt_tokens: int


class ServerResidency:
    def __init__(self, block_size: int, num_blocks: int, page_size: int | None = None) -> None:
        self._block_size, self._num_blocks = block_size, num_blocks
        self._page_size = page_size or block_size
        is_joined = self._page_size < block_size
        self._pages = Pages(self._page_size, block_size // self._page_size) if is_joined else None
        self._writers = BlockWriters(num_blocks)
        self._hashes = HashMap(block_size, on_gone=self._writers.forget)
        self._storers: OrderedDict[str, Storer] = OrderedDict()
        self.num_unnamed = 0
        """Blocks that were stored and have no name of ours."""
        self.complaint: str | None = None
        """Why these events cannot be followed, once they have shown it."""
        self.has_groups = False
        """The layers keep different caches."""

    @property
    def num_copies(self) -> int:
        return self._hashes.num_copies()

    def expect(self, name: str, user: UserTag, num_prompt_tokens: int) -> None:
        """Remember a request by the name that its blocks will carry."""
        self._storers[name] = Storer(user, num_prompt_tokens)
        if len(self._storers) > MOST_REMEMBERED:
            self._storers.popitem(last=False)

    def expects(self, name: str | None) -> bool:
        return name in self._storers

    def shares(self, block_hashes: Sequence[BlockHash], user: UserTag, *, num_prompt_tokens: int) -> Shares:
        """Divide a hit of these blocks by the user who computed them."""
        return self._writers.token_shares(
            block_hashes, user, block_size=self._block_size, num_prompt_tokens=num_prompt_tokens
        )

    def apply(self, events: Sequence[ServerEvent]) -> list[CacheEvent]:
        translated: list[CacheEvent] = []
        for event in events:
            match event:
                case Cleared():
                    translated.append(self.clear())
                case Stored() if event.medium in (None, _DEVICE):
                    translated += self._stored(event)
                case Removed() if event.medium in (None, _DEVICE):
                    translated += self._removed(event)
        return translated

    def clear(self) -> AllBlocksCleared:
        """Nothing is known to be held."""
        if self._pages is not None:
            self._pages.clear()
        return self._hashes.cleared()

    def _stored(self, event: Stored) -> list[BlockStored]:
        if event.group_idx or event.block_size != self._page_size or event.lookahead_token_ids:
            self.complaint = _complaint(event, self._page_size)
            self.has_groups |= bool(event.group_idx)
            return []
        if self._pages is not None:
            return self._joined(event, self._pages)
        return self._named(event)

    def _joined(self, event: Stored, pages: Pages) -> list[BlockStored]:
        keys = event.extra_keys[0] if event.extra_keys else None
        hashes, parent = event.block_hashes, event.parent_block_hash
        try:
            blocks = pages.stored(hashes, parent, event.token_ids, keys)
        except UnknownBlock:
            self.num_unnamed += len(hashes) * self._page_size // self._block_size
            return []
        stored: list[BlockStored] = []
        for block in blocks:
            whole = Stored(
                [block.name],
                block.token_ids,
                self._block_size,
                block.parent,
                extra_keys=None if block.keys is None else [block.keys],
                session_id=event.session_id,
            )
            stored += self._named(whole)
        return stored

    def _named(self, event: Stored) -> list[BlockStored]:
        storer = self._storers.get(event.session_id or "")
        try:
            stored = self._hashes.stored(
                [_as_bytes(theirs) for theirs in event.block_hashes],
                parent=None if event.parent_block_hash is None else _as_bytes(event.parent_block_hash),
                roots=[root_in(keys) for keys in event.extra_keys or ()],
                token_ids=event.token_ids,
                num_prompt_tokens=None if storer is None else storer.num_prompt_tokens,
            )
        except UnknownBlock:
            self.num_unnamed += len(event.block_hashes)
            return []
        num_blocks = self._num_blocks
        if self.num_copies > MOST_TIMES * num_blocks or len(self._hashes) > MOST_DISTINCT * num_blocks:
            self.complaint = f"more blocks are stored and not removed than the {self._num_blocks} that it has"
        for run in stored:
            self._writers.wrote(run.block_hashes, NO_USER if storer is None else storer.user)
        return stored

    def _removed(self, event: Removed) -> list[BlockRemoved]:
        gone: list[BlockHash] = []
        hashes = event.block_hashes if self._pages is None else self._pages.removed(event.block_hashes)
        for theirs in hashes:
            try:
                block_hash = self._hashes.removed(_as_bytes(theirs))
            except UnknownBlock:
                continue  # it had no name
            if block_hash is not None:
                gone.append(block_hash)
        return [BlockRemoved(tuple(gone))] if gone else []


def _complaint(event: Stored, page_size: int) -> str:
    if event.group_idx:
        return "its layers keep different caches, which is not followed over events yet"
    if event.lookahead_token_ids:
        return "a draft model's tokens are part of its hashes: start vLLM with disable_lookahead_block_hashes"
    return f"its blocks have {event.block_size} tokens, and its configuration says {page_size}"


def _as_bytes(theirs: Hash) -> bytes:
    return theirs if isinstance(theirs, bytes) else (theirs % 2**64).to_bytes(8)
