"""EventTranslator: converts vLLM's cache events to ours, and attributes hits to users.

Owns the map of hashes and the memory of which user computed what. A block without our name is left out, and
no router finds it.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from replicas.kvcache.hash_map import HashMap, UnknownBlock, root_in
from replicas.kvcache.writers import BlockWriters, Shares
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, Tier
from replicas.protocol.frames import NO_USER, UserTag
from replicas.vllm_engine.core_view import VllmAllBlocksCleared, VllmBlockRemoved, VllmBlockStored
from replicas.vllm_engine.media_spans import media_in

logger = logging.getLogger(__name__)

_TIERS: Mapping[str, Tier] = {"GPU": Tier.DEVICE, "CPU": Tier.HOST, "STORAGE": Tier.DISK}
"""vLLM's media. "GPU" is the memory that its attention reads, on a CPU too."""

_WRITERS_PER_BLOCK = 8
"""How much larger than the device's the other tiers may be before the oldest writers are forgotten."""


@dataclass(frozen=True, slots=True)
class Storer:
    """The request that stored a block. Its first `num_found_tokens` were found, not computed.

    `loaded_from` returns the user whose request computed a block that our tier brought back; None for any
    other.
    """

    user: UserTag
    num_prompt_tokens: int
    num_found_tokens: int
    loaded_from: Callable[[BlockHash], UserTag | None] = lambda _: None


class EventTranslator:
    """`storer_of` finds a request by its session id in vLLM."""

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        *,
        has_more_tiers: bool,
        storer_of: Callable[[str | None], Storer | None],
        peek_tokens: int = 0,
    ) -> None:
        self._block_size = block_size
        self._peek_tokens = peek_tokens
        self._storer_of = storer_of
        self._writers = BlockWriters(num_blocks * (_WRITERS_PER_BLOCK if has_more_tiers else 1))
        self.hashes = HashMap(
            block_size, on_gone=self._writers.forget, num_remembered=num_blocks if has_more_tiers else 0
        )

    @property
    def num_copies(self) -> int:
        """Blocks on the device, every copy counted."""
        return self.hashes.num_copies()

    def num_leading_tokens(self, request: Any) -> int:
        """Return the tokens of a request of vLLM's that lie in some tier; with a draft model it reads a block
        less."""
        num_tokens = self.hashes.num_leading(request.block_hashes) * self._block_size
        return max(0, num_tokens - self._peek_tokens)

    def translate(self, events: Iterable[Any]) -> list[CacheEvent]:
        translated: list[CacheEvent] = []
        for event in events:
            if isinstance(event, VllmAllBlocksCleared):
                translated.append(self.hashes.cleared())
                continue
            tier = _TIERS.get(event.medium)
            if tier is None:
                continue
            if isinstance(event, VllmBlockRemoved):
                translated += self._removed(event.block_hashes, tier)
            elif isinstance(event, VllmBlockStored):
                translated += self._stored(event) if tier is Tier.DEVICE else self._copied(event, tier)
        return translated

    def cleared(self, tier: Tier) -> AllBlocksCleared:
        """Return the event for a cleared tier, which vLLM does not report."""
        return self.hashes.cleared(tier)

    def writer(self, block_hash: BlockHash) -> UserTag | None:
        """Return the user whose request computed a block of ours; None if unknown."""
        return self._writers.writer(block_hash)

    def token_shares(
        self, request: Any, user: UserTag, *, num_cached_tokens: int, num_prompt_tokens: int
    ) -> Shares:
        """Divide a hit of `num_cached_tokens` by user, for a request of vLLM's."""
        found = self.hashes.names(request.block_hashes[: num_cached_tokens // self._block_size])
        return self._writers.token_shares(
            found, user, block_size=self._block_size, num_prompt_tokens=num_prompt_tokens
        )

    def _stored(self, event: Any) -> list[BlockStored]:
        storer = self._storer_of(event.session_id)
        try:
            stored = self.hashes.stored(
                event.block_hashes,
                parent=event.parent_block_hash,
                roots=[root_in(keys) for keys in event.extra_keys or ()],
                token_ids=event.token_ids,
                num_prompt_tokens=None if storer is None else storer.num_prompt_tokens,
                media=[media_in(keys) for keys in event.extra_keys or ()],
            )
        except UnknownBlock as error:
            logger.error("vLLM stores blocks that cannot be named: %s", error)
            return []
        for run in stored:
            num_found = 0 if storer is None else storer.num_found_tokens // self._block_size
            num_loaded = max(0, num_found - run.first_block_index)
            if storer is not None:
                self._note_loaded(run.block_hashes, storer.loaded_from)
            # What was read back from another tier has its writer still, or has none that is known.
            self._writers.wrote(run.block_hashes[:num_loaded], NO_USER)
            self._writers.wrote(run.block_hashes[num_loaded:], NO_USER if storer is None else storer.user)
        return stored

    def _note_loaded(
        self, block_hashes: Iterable[BlockHash], loaded_from: Callable[[BlockHash], UserTag | None]
    ) -> None:
        for block_hash in block_hashes:
            writer = loaded_from(block_hash)
            if writer is not None:
                self._writers.wrote((block_hash,), writer)

    def _copied(self, event: Any, tier: Tier) -> list[BlockStored]:
        copies = [self.hashes.copied(theirs, tier) for theirs in event.block_hashes]
        return [copy for copy in copies if copy is not None]

    def _removed(self, hashes: Iterable[bytes], tier: Tier) -> list[BlockRemoved]:
        named: list[BlockHash] = []
        for theirs in hashes:
            try:
                block_hash = self.hashes.removed(theirs, tier)
            except UnknownBlock as error:
                logger.error("vLLM removes a block that it does not hold: %s", error)
                continue
            if block_hash is not None:
                named.append(block_hash)
        return [BlockRemoved(tuple(named), tier)] if named else []
