"""SparseTranslator: converts vLLM's cache events to resume points and reach.

For models whose layers keep different caches; all others have the EventTranslator.

Owns the chains of live requests, and the memory of which user computed what.

vLLM's events name blocks of such a cache by hash, with gaps that they do not place. So a block is found by
its request: `session_id` names it, its chain of hashes gives the block's position, and the prompt gives our
hash there, one per `alignment` tokens. Both chains grow with the answer.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from replicas.kvcache.hash_map import UnknownBlock
from replicas.kvcache.writers import BlockWriters, Shares
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    ResumePointsChanged,
    Tier,
)
from replicas.protocol.frames import Submit, UserTag
from replicas.vllm_engine.cache_shape import CacheShape
from replicas.vllm_engine.core_view import VllmAllBlocksCleared, VllmBlockRemoved, VllmBlockStored
from replicas.vllm_engine.resume_points import PointsChange, Reached, ResumePoints

logger = logging.getLogger(__name__)

_DEVICE_MEDIUM = "GPU"
"""vLLM's name for the memory that its attention reads, on a CPU too."""


class _GroupChain:
    """The part of a request's chain that was read: `names` are our hashes, `indices` the places of vLLM's."""

    __slots__ = ("_request", "_submit", "indices", "names")

    def __init__(self, request: Any, submit: Submit) -> None:
        self._request = request
        self._submit = submit
        self.indices: dict[bytes, int] = {}
        self.names: list[BlockHash] = []

    @property
    def hashes(self) -> list[bytes]:
        hashes: list[bytes] = self._request.block_hashes
        return hashes

    @property
    def user(self) -> UserTag:
        return self._submit.user

    @property
    def num_prompt_tokens(self) -> int:
        return self._submit.num_tokens - self._submit.num_output_tokens

    def read(self, hash_block: int, alignment: int) -> None:
        """Follow the request to its present end."""
        hashes, num_read = self.hashes, len(self.indices)
        if len(hashes) == num_read:
            return
        self.indices.update(zip(hashes[num_read:], range(num_read, len(hashes)), strict=True))
        start, end = len(self.names) * alignment, len(hashes) * hash_block // alignment * alignment
        if start < end:
            self.names += hash_blocks(
                self._submit.root,
                self._request.all_token_ids[start:end],
                alignment,
                parent=self.names[-1] if self.names else None,
                start=start,
                media=self._submit.media,
                published=self._submit.published,
            )


class SparseTranslator:
    """Raises AssertionError for a cache whose `problem` is not None."""

    def __init__(self, shape: CacheShape, num_blocks: int) -> None:
        self.points = ResumePoints(shape.groups, shape.hash_block, shape.alignment)
        self._hash_block = shape.hash_block
        self._alignment = shape.alignment
        self._groups = shape.groups
        self._writers = BlockWriters(num_blocks)
        self._chains: dict[str, _GroupChain] = {}
        self._left: list[tuple[str, _GroupChain]] = []
        """Requests whose last events are still to come."""

    @property
    def num_copies(self) -> int:
        """Blocks of all groups, every copy counted."""
        return self.points.num_copies

    def follow(self, name: str, request: Any, submit: Submit) -> None:
        """Follow a request of vLLM's, which has this session id."""
        chain = self._chains[name] = _GroupChain(request, submit)
        chain.read(self._hash_block, self._alignment)

    def forget(self, name: str) -> None:
        """The request has ended; its events are still known in the next `translate`."""
        self._left.append((name, self._chains[name]))

    def num_leading_tokens(self, request: Any) -> int:
        """Return the hit that a request of vLLM's would have now."""
        return self.points.num_leading(request.block_hashes, request.num_tokens)

    def translate(self, events: Iterable[Any]) -> list[CacheEvent]:
        """Translate all events of a step."""
        translated: list[CacheEvent] = []
        for chain in self._chains.values():
            chain.read(self._hash_block, self._alignment)
        stored_by: list[_GroupChain] = []
        for event in events:
            if isinstance(event, VllmAllBlocksCleared):
                self.points.cleared()
                self._writers.clear()
                translated.append(AllBlocksCleared())
            elif event.medium != _DEVICE_MEDIUM:
                continue
            elif isinstance(event, VllmBlockRemoved):
                self._removed(event)
            elif isinstance(event, VllmBlockStored):
                storer = self._chains.get(event.session_id)
                if storer is None:
                    logger.error("vLLM stores blocks of an unknown request: %s", event.session_id)
                    continue
                self._stored(event, storer)
                stored_by.append(storer)
        translated += self._told(self.points.take(), stored_by)
        for name, chain in self._left:
            if self._chains[name] is chain:  # else a new request has the name
                del self._chains[name]
        self._left.clear()
        return translated

    def cleared(self, tier: Tier) -> AllBlocksCleared:
        """Return the event for a cleared tier, which holds nothing of such a model but on the device."""
        return AllBlocksCleared(tier)

    def writer(self, block_hash: BlockHash) -> UserTag | None:
        """Return the user whose request computed a block of ours; None if unknown."""
        return self._writers.writer(block_hash)

    def token_shares(
        self, request: Any, user: UserTag, *, num_cached_tokens: int, num_prompt_tokens: int
    ) -> Shares:
        """Divide a hit of `num_cached_tokens` by user, for a request of vLLM's."""
        chain = self._chains[request.session_id]
        found = chain.names[: num_cached_tokens // self._alignment]
        return self._writers.token_shares(
            found, user, block_size=self._alignment, num_prompt_tokens=num_prompt_tokens
        )

    def _stored(self, event: Any, chain: _GroupChain) -> None:
        group = event.group_idx
        size = max(self._groups[group].block_size, self._alignment)
        for theirs in event.block_hashes:
            index = chain.indices.get(theirs)
            if index is None:
                logger.error("vLLM stores a block that its request does not have: %s", theirs.hex())
                continue
            self.points.stored(group, chain.hashes, index, chain.names)
            end = (index + 1) * self._hash_block // self._alignment
            self._writers.wrote(chain.names[max(0, end - size // self._alignment) : end], chain.user)

    def _removed(self, event: Any) -> None:
        for theirs in event.block_hashes:
            try:
                self.points.removed(event.group_idx, theirs)
            except UnknownBlock as error:
                logger.error("vLLM removes a block that it does not hold: %s", error)

    def _told(self, change: PointsChange, stored_by: Iterable[_GroupChain]) -> Iterator[CacheEvent]:
        if change.lost:
            self._writers.forget(change.lost)
            yield BlockRemoved(change.lost)
        if change.reached:
            ends = {
                chain.names[number - 1]
                for chain in stored_by
                if 0 < (number := chain.num_prompt_tokens // self._alignment) <= len(chain.names)
            }
            for run in change.reached:
                yield from _runs(run, ends)
        if change.added or change.removed:
            yield ResumePointsChanged(change.added, change.removed)


def _runs(run: Reached, ends: set[BlockHash]) -> Iterator[BlockStored]:
    """Cut a run behind each block that is the last full one of a prompt."""
    first = 0
    for place, name in enumerate(run.names, 1):
        if name in ends or place == len(run.names):
            names = tuple(run.names[first:place])
            yield BlockStored(names, run.first_index + first, ends_prompt=name in ends)
            first = place
