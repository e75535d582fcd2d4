"""MissExplainer: explains a prompt that was not read wholly from cache, at its first token.

Owns the sightings. Asks the index what departed from which replica, and passes all facts to `causes.py`,
which decides. Knows hashes and numbers, never text.

Its findings may be told to the sender of the prompt. A chain's hashes are rooted in its namespace, so
everything found by them belongs to those who share it. Beginnings are compared across namespaces, but only
within one tenant and one salt, so sending a prompt reveals nothing about others' prompts.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache

from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import PromptUsage
from router.explain.causes import Departed, Past, misses
from router.explain.chain_tree import NamespaceName
from router.explain.repeats import LEAST_BLOCKS, Run
from router.explain.sightings import Known, Sighting, Sightings, short_key
from router.generation import Generation
from router.misses import Cause, Misses
from router.routing.decision import Decision
from router.routing.departures import Departure
from router.routing.overlap import PrefixIndex
from router.served import ServedPrompt, ServedRequest

BEGINNING_TOKENS = 128
"""Prompts with this many first tokens in common begin alike, whatever namespace they are in."""

_BEGINNING_BYTES = 4 * BEGINNING_TOKENS

_BEGINNING: Sequence[Run] = ((0, BEGINNING_TOKENS),)
"""Tokens known to be computed if a prompt began alike in another namespace."""

_NOTHING_KNOWN = Past(Known(0))
_NONE: tuple[Cause, Sequence[Run]] = (Cause.PREFIX_CHANGED, ())

Repeated = Callable[[int], tuple[Cause, Sequence[Run]]]
"""Finds the tokens from one on that the nearest earlier prompt has as well, and the cause by which they were
not found in cache."""


class MissExplainer:
    """Gets the block size and the index, if there is one, of a served model."""

    def __init__(
        self, block_size_of: Callable[[str], int], index_of: Callable[[str], PrefixIndex | None]
    ) -> None:
        self._block_size_of = block_size_of
        self._index_of = index_of
        self.sightings = Sightings()

    def misses(
        self,
        generation: Generation,
        decision: Decision | None,
        usage: PromptUsage,
        *,
        decided_at: float,
        repeated: Repeated | None = None,
    ) -> Misses:
        """Call it when the usage has come: by the request's end the past has changed. `repeated` is asked if
        at least as much is missing as counts as repeated."""
        block_size = self._block_size_of(generation.model)
        first, last = usage.num_cached_tokens // block_size, max(0, usage.num_prompt_tokens - 1) // block_size
        if first >= last:
            return misses(usage, decision, _NOTHING_KNOWN, block_size)
        index = self._index_of(generation.model)
        known = self.sightings.known(
            generation.submit.root,
            generation.block_hashes,
            num_cached_tokens=usage.num_cached_tokens,
            decided_at=decided_at,
            beginning=beginning_of(generation),
        )
        past = Past(known, _departed(index, generation.block_hashes, first, block_size))
        if index is not None and usage.num_unresumable_tokens:
            gone = index.departed_points(generation.block_hashes, first)
            past = past._replace(departed_points=_in_tokens(gone, block_size))
        if known.model not in (None, generation.model):  # two names of it: their replicas share nothing
            elsewhere: Sequence[Run] = ((0, known.num_tokens),)
            known = Known(0)
            past = past._replace(known=known, repeated=elsewhere, repeated_by=Cause.OTHER_NAMESPACE)
        else:
            is_enough = last * block_size - usage.num_cached_tokens >= LEAST_BLOCKS * block_size
            cause, runs = repeated(usage.num_cached_tokens) if repeated is not None and is_enough else _NONE
            if runs:
                past = past._replace(repeated=runs, repeated_by=cause)
            elif known.is_elsewhere and not known.num_tokens:
                past = past._replace(repeated=_BEGINNING, repeated_by=Cause.OTHER_NAMESPACE)
        if index is not None and known.replica_id is not None and known.epoch is not None:
            is_gone = index.epoch(known.replica_id) != known.epoch
            stride_tokens = index.blocks_per_stride * block_size
            past = past._replace(is_known_replica_gone=is_gone, stride_tokens=stride_tokens)
        return misses(usage, decision, past, block_size)

    def observe(self, served: ServedRequest) -> None:
        """A request has ended: its prompts have been seen."""
        for prompt in served.prompts:
            if prompt.usage is not None and prompt.decision is not None:
                self._see(served, prompt, prompt.usage, prompt.decision)

    def _see(
        self, served: ServedRequest, prompt: ServedPrompt, usage: PromptUsage, decision: Decision
    ) -> None:
        generation = prompt.generation
        adapter = generation.adapter
        index = self._index_of(generation.model)
        self.sightings.see(
            Sighting(
                root=generation.submit.root,
                namespace=NamespaceName(
                    generation.model, None if adapter is None else adapter.name, generation.tenant
                ),
                block_hashes=generation.block_hashes,
                block_size=self._block_size_of(generation.model),
                user=generation.submit.user,
                key=short_key(generation.prompt_cache_key),
                replica_id=decision.replica_id,
                num_cached_tokens=usage.num_cached_tokens,
                num_cross_user_tokens=usage.num_cross_user_tokens,
                num_own_tokens=usage.num_own_tokens,
                decided_at=served.arrived_at + (served.prepared_seconds or 0.0),
                ended_at=served.arrived_at + served.ended_seconds,
                beginning=beginning_of(generation),
                epoch=None if index is None else index.epoch(decision.replica_id),
            )
        )


def salt_tag(salt: str | None) -> bytes:
    """Return a digest that distinguishes salts, if one is given."""
    return hashlib.blake2b(salt.encode(), digest_size=16).digest() if salt else b""


def beginning_of(generation: Generation) -> bytes | None:
    """None for a prompt that is too short to begin like another."""
    first = generation.submit.packed_tokens[:_BEGINNING_BYTES]
    if len(first) < _BEGINNING_BYTES:
        return None
    whose = _whose(generation.caller.owner or "", generation.salt_tag)
    return hashlib.blake2b(first, key=whose, digest_size=8).digest()


@lru_cache(maxsize=256)
def _whose(owner: str, tag: bytes) -> bytes:
    return hashlib.blake2b(owner.encode(), salt=tag, digest_size=16).digest()


def _departed(
    index: PrefixIndex | None, block_hashes: Sequence[BlockHash], first: int, block_size: int
) -> list[Departed]:
    if index is None:
        return []
    return _in_tokens(index.departed(block_hashes, first), block_size)


def _in_tokens(departures: Sequence[tuple[int, Departure]], block_size: int) -> list[Departed]:
    return [
        Departed((block + 1) * block_size, left.replica_id, left.is_replica_gone, left.at, left.reason)
        for block, left in departures
    ]
