"""MissExplainer: explains a prompt that was not read wholly from cache, at its first token.

Asks the memory what was known of it, and the index what departed from which replica, and passes all facts to
`causes.py`, which decides. Knows hashes and numbers, never text.

Its findings may be told to the sender of the prompt. A chain's hashes are rooted in its namespace, so
everything found by them belongs to those who share it. Beginnings are compared across namespaces, but only
within one tenant and one salt, so sending a prompt reveals nothing about others' prompts.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache

from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import PromptUsage
from replicas.protocol.status import ReplicaId
from router.explain.causes import Departed, Past, misses
from router.explain.nearest import PromptFacts
from router.explain.prefix_tree import Known, PackedHashes
from router.explain.prompt_memory import PromptMemory
from router.explain.repeats import LEAST_BLOCKS, Run
from router.misses import Cause, Misses
from router.routing.decision import Decision
from router.routing.departures import Departure
from router.routing.overlap import PrefixIndex

BEGINNING_TOKENS = 128
"""Prompts with this many first tokens in common begin alike, whatever namespace they are in."""

_BEGINNING_BYTES = 4 * BEGINNING_TOKENS

_BEGINNING: Sequence[Run] = ((0, BEGINNING_TOKENS),)
"""Tokens known to be computed if a prompt began alike in another namespace."""

Repeated = Callable[[int], tuple[Cause, Sequence[Run]]]
"""Finds the tokens from one on that the nearest earlier prompt has as well, and the cause by which they were
not found in cache."""


class MissExplainer:
    """Gets the index of a served model, if there is one."""

    def __init__(self, memory: PromptMemory, index_of: Callable[[str], PrefixIndex | None]) -> None:
        self._memory = memory
        self._index_of = index_of

    def misses(
        self,
        facts: PromptFacts,
        decision: Decision | None,
        usage: PromptUsage,
        *,
        decided_at: float,
        repeated: Repeated | None = None,
    ) -> Misses:
        """Call it when the usage has come: by the request's end the past has changed. `repeated` is asked if
        at least as much is missing as counts as repeated."""
        decision = None if decision is None else decision.of_prompt()
        block_size, model, num_cached = facts.block_size, facts.namespace.model, usage.num_cached_tokens
        num_reusable, peek = facts.num_reusable_tokens, facts.peek_tokens
        if num_reusable is None:
            num_reusable = max(0, usage.num_prompt_tokens - 1) // block_size * block_size
        past = Past(Known(0), num_reusable_tokens=num_reusable, peek_tokens=peek, decided_at=decided_at)
        if num_cached is None or num_cached >= num_reusable:
            return misses(usage, decision, past, block_size)
        index = self._index_of(model)
        known = self._memory.known(facts, num_cached, decided_at)
        past, hashes = past._replace(known=known), PackedHashes(facts.packed_hashes)
        if index is not None:
            first = num_cached // block_size
            past = past._replace(departed=_in_tokens(index.departed(hashes, first), block_size))
            if usage.num_unresumable_tokens and decision is not None:
                gone = index.departed_points(decision.replica_id, hashes, first)
                past = past._replace(departed_points=_in_tokens(gone, block_size, peek))
        if known.model not in (None, model):  # two names of it: their replicas share nothing
            elsewhere: Sequence[Run] = ((0, known.num_tokens),)
            known = Known(0)
            past = past._replace(known=known, repeated=elsewhere, repeated_by=Cause.OTHER_NAMESPACE)
        else:
            is_enough = num_reusable - num_cached >= LEAST_BLOCKS * block_size
            if repeated is not None and is_enough:
                cause, runs = repeated(num_cached)
                past = past._replace(repeated=runs, repeated_by=cause)
            if not past.repeated and known.is_elsewhere and not known.num_tokens:
                past = past._replace(repeated=_BEGINNING, repeated_by=Cause.OTHER_NAMESPACE)
        if index is not None and known.replica_id is not None and known.epoch is not None:
            is_gone = index.epoch(known.replica_id) != known.epoch
            stride_tokens = index.blocks_per_stride * block_size
            past = past._replace(is_known_replica_gone=is_gone, stride_tokens=stride_tokens)
            if index.is_sparse and decision is not None and not is_gone:
                past = _with_unresumable(past, index, decision.replica_id, hashes, block_size, num_cached)
        return misses(usage, decision, past, block_size)


def _with_unresumable(
    past: Past,
    index: PrefixIndex,
    chosen: ReplicaId,
    hashes: Sequence[BlockHash],
    block_size: int,
    num_cached: int,
) -> Past:
    """Add what the replica that served the prompt's beginning has of it without a point to resume at. The
    chosen one has said so itself, if the model has full attention."""
    known = past.known
    assert known.replica_id is not None
    if not index.has_reach:
        num_held = known.num_tokens
    elif known.replica_id != chosen:
        num_held = min(known.num_tokens, index.reach(known.replica_id, hashes) * block_size)
    else:
        return past
    gone = index.departed_points(known.replica_id, hashes, num_cached // block_size)
    points = _in_tokens(gone, block_size, past.peek_tokens)
    return past._replace(num_known_unresumable=num_held, known_points=points)


def beginning_of(packed_tokens: bytes, owner: str | None, salt_tag: bytes) -> bytes | None:
    """Return a digest of the first tokens in no namespace; None for a prompt that is too short."""
    first = packed_tokens[:_BEGINNING_BYTES]
    if len(first) < _BEGINNING_BYTES:
        return None
    return hashlib.blake2b(first, key=_whose(owner or "", salt_tag), digest_size=8).digest()


@lru_cache(maxsize=256)
def _whose(owner: str, tag: bytes) -> bytes:
    return hashlib.blake2b(owner.encode(), salt=tag, digest_size=16).digest()


def salt_tag(salt: str | None) -> bytes:
    """Return a digest that distinguishes salts, if one is given."""
    return hashlib.blake2b(salt.encode(), digest_size=16).digest() if salt else b""


def _in_tokens(
    departures: Sequence[tuple[int, Departure]], block_size: int, peek_tokens: int = 0
) -> list[Departed]:
    return [
        Departed(
            (block + 1) * block_size - peek_tokens,
            *(left.replica_id, left.is_replica_gone, left.at, left.reason),
        )
        for block, left in departures
    ]
