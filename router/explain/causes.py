"""Causes: finds why the tokens of a prompt were not read from cache.

Pure: what is asked of it comes as facts. A token that a replica had to compute has one cause, and the spans
of a prompt add up to all tokens that were computed.

Each fact speaks of leading tokens, for a block that was somewhere stands on everything before it. So a fact
gives its cause to all tokens before its end that no stronger fact has spoken of::

    read   ├ broke its lease ┤ held elsewhere ├──── evicted ────┤ never cached ┤ below a block
    0 ── cached                                              known          the last full block ── end

The order of the facts is their strength: what the replica itself has said, what the index said of the replica
that was chosen, of others, what had left it before, and what this router has seen.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from replicas.protocol.events import Removal
from replicas.protocol.frames import PromptUsage
from replicas.protocol.status import ReplicaId
from router.explain.prefix_tree import Known
from router.explain.repeats import Run
from router.misses import Cause, MissedSpan, Misses, losses
from router.routing.decision import Decision
from router.routing.levels import Holdings


class Departed(NamedTuple):
    """Some block that ends at `end` left a replica: for this reason, or the incarnation went."""

    end: int
    replica_id: ReplicaId
    is_replica_gone: bool
    at: float
    reason: Removal = Removal.EVICTED


class Past(NamedTuple):
    """Facts about a prompt besides its decision and its usage.

    `departed` is sorted by end. `is_known_replica_gone` is whether the incarnation of `known.replica_id` that
    served it is gone; None if unknown. `repeated` are its tokens that an earlier prompt had, after a change
    or in another namespace, as `repeated_by` says. `stride_tokens` is the distance between indexed blocks of
    a chain; 0 if unknown.
    """

    known: Known
    departed: Sequence[Departed] = ()
    is_known_replica_gone: bool | None = None
    repeated: Sequence[Run] = ()
    repeated_by: Cause = Cause.PREFIX_CHANGED
    stride_tokens: int = 0
    departed_points: Sequence[Departed] = ()
    """Ends of a sparse model's resume points that left the chosen replica."""
    known_points: Sequence[Departed] = ()
    """Likewise those that left the replica of `known`."""
    num_known_unresumable: int = 0
    """Leading tokens that it computed for a sparse model and, by the index, did not lose."""
    num_reusable_tokens: int | None = None
    """Tokens that could be read at most; None is all full blocks before the last token."""
    peek_tokens: int = 0
    """Tokens behind every hit that are computed again for a draft model."""
    decided_at: float = math.inf
    """Time of the decision, by the clock of departures."""


class _Fact(NamedTuple):
    """Tokens before `end` have this cause, if no stronger fact has said another."""

    end: int
    cause: Cause
    replica_id: ReplicaId | None = None
    at: float | None = None


def misses(usage: PromptUsage, decision: Decision | None, past: Past, block_size: int) -> Misses:
    """Why each token that was not read was not."""
    num_cached = usage.num_cached_tokens
    if num_cached is None:
        return Misses(Cause.NOT_REPORTED, ())
    num_reusable = past.num_reusable_tokens
    if num_reusable is None:
        num_reusable = max(0, usage.num_prompt_tokens - 1) // block_size * block_size
    spans: list[MissedSpan] = []
    start = num_cached
    if start < num_reusable:
        for fact in _facts(usage, num_cached, decision, past, block_size, num_reusable):
            end = min(fact.end, num_reusable)
            if end <= start:
                continue
            if spans and spans[-1].cause is fact.cause and spans[-1].replica_id == fact.replica_id:
                spans[-1] = spans[-1]._replace(end=end, at=fact.at)
            else:
                spans.append(MissedSpan(fact.cause, start, end, fact.replica_id, fact.at))
            start = end
    if usage.num_prompt_tokens > start:
        spans.append(MissedSpan(Cause.BELOW_A_BLOCK, start, usage.num_prompt_tokens))
    is_hit = bool(num_reusable) and num_cached >= num_reusable
    if is_hit or not spans:
        return Misses(Cause.HIT, tuple(spans))
    first = next((span.cause for span in spans if span.cause is not Cause.BELOW_A_BLOCK), Cause.BELOW_A_BLOCK)
    return Misses(next(iter(losses(spans)), first), tuple(spans))


def _facts(
    usage: PromptUsage,
    num_cached: int,
    decision: Decision | None,
    past: Past,
    block_size: int,
    num_reusable: int,
) -> Iterator[_Fact]:
    """The strongest first."""
    replica_id = None if decision is None else decision.replica_id
    if usage.num_unresumable_tokens:
        yield from _unresumable(num_cached + usage.num_unresumable_tokens, replica_id, past.departed_points)
    num_found = num_cached + usage.num_unresumable_tokens
    if past.peek_tokens and num_found:
        yield _Fact(num_found + past.peek_tokens, Cause.BELOW_A_BLOCK, replica_id)
    yield from _of_replica(usage, num_cached, replica_id)
    if decision is not None:
        held = decision.holdings
        is_held = held is not None and any(
            levels and levels[0][0] * block_size > num_cached for levels in (held.levels, held.stored)
        )
        if is_held or decision.overlap_tokens > num_cached:
            yield from _of_chosen(num_cached, decision, past, block_size)
        if is_held and held is not None:
            yield from _of_others(decision, held, block_size)
    if past.num_known_unresumable:
        yield from _unresumable(past.num_known_unresumable, past.known.replica_id, past.known_points)
    if past.departed:
        yield from _of_departed(past.departed)
    if past.known.num_tokens > num_cached:
        yield from _of_known(past, decision, block_size)
    for start, end in past.repeated:
        yield _Fact(start, Cause.NEVER_CACHED)
        yield _Fact(end, past.repeated_by)
    yield _Fact(num_reusable, Cause.NEVER_CACHED)


def _of_replica(usage: PromptUsage, num_cached: int, replica_id: ReplicaId | None) -> Iterator[_Fact]:
    """Yield the replica's own facts: first what it has but did not move, then what it lacks."""
    end = num_cached + usage.num_unresumable_tokens
    for num_tokens, cause in (
        (usage.num_lost_tokens, Cause.LOST_IN_TRANSFER),
        (usage.num_unmoved_tokens, Cause.NOT_WORTH_MOVING),
        (usage.num_evicted_early_tokens, Cause.LEASE_BROKEN),
        (usage.num_expired_tokens, Cause.EXPIRED),
    ):
        if num_tokens:
            end += num_tokens
            yield _Fact(end, cause, replica_id)


def _unresumable(
    end: int, replica_id: ReplicaId | None, departed_points: Sequence[Departed]
) -> Iterator[_Fact]:
    """Yield what a sparse model's replica has only for some layers: up to a point that it could be resumed at
    before that went, and behind it."""
    for gone in departed_points:
        if gone.end <= end:
            yield _Fact(gone.end, _CAUSES[gone.reason], replica_id, gone.at)
    yield _Fact(end, Cause.NOT_RESUMABLE, replica_id)


def _of_chosen(num_cached: int, decision: Decision, past: Past, block_size: int) -> Iterator[_Fact]:
    """Yield what the replica had by the index, or was about to have, and did not read."""
    is_cleared = any(
        gone.reason is Removal.CLEARED
        and gone.replica_id == decision.replica_id
        and gone.at >= past.decided_at
        for gone in past.departed
    )
    lost = Cause.CLEARED if is_cleared else Cause.EVICTED
    held, replica_id, planned = decision.holdings, decision.replica_id, decision.overlap_tokens
    if held is None:
        yield _Fact(planned, lost, replica_id)
        return
    num_stored = held.stored_depth(replica_id) * block_size
    chosen = next((each for each in decision.candidates if each.replica_id == replica_id), None)
    if chosen is None or chosen.load.speeds.host is None:
        yield _Fact(num_stored, lost, replica_id)
    else:
        if num_cached < planned:
            yield _Fact(min(planned, num_stored), lost, replica_id)
        yield _Fact(num_stored, Cause.NOT_WORTH_MOVING, replica_id)
    yield _Fact(held.depth(replica_id) * block_size, Cause.NOT_YET_WRITTEN, replica_id)
    if decision.pull_from is not None:
        yield _Fact(planned, Cause.NOT_WORTH_MOVING, decision.pull_from)


def _of_others(decision: Decision, held: Holdings, block_size: int) -> Iterator[_Fact]:
    """Yield what other replicas had stored, were about to store, or lost when they died."""
    candidates = [candidate.replica_id for candidate in decision.candidates]
    passed_over = {decision.replica_id, *held.gone}
    for levels, cause in ((held.stored, Cause.HELD_ELSEWHERE), (held.levels, Cause.NOT_YET_WRITTEN)):
        deepest = held.deepest(levels, without=passed_over, prefer=candidates)
        if deepest is not None:
            yield _Fact(deepest[1] * block_size, cause, deepest[0])
    for replica_id in held.gone:
        yield _Fact(held.stored_depth(replica_id) * block_size, Cause.REPLICA_RESTARTED, replica_id)


_CAUSES: Mapping[Removal, Cause] = {
    Removal.EVICTED: Cause.EVICTED,
    Removal.EXPIRED: Cause.EXPIRED,
    Removal.BROKEN: Cause.LEASE_BROKEN,
    Removal.LOST: Cause.FILE_LOST,
    Removal.CLEARED: Cause.CLEARED,
}


def _of_departed(departed: Sequence[Departed]) -> list[_Fact]:
    """Return what had departed earlier. A block that departed after an earlier one of its chain still had all
    before it beside it, in a chunk of host memory or at another replica, so those were present until then."""
    facts: list[_Fact] = []
    last: Departed | None = None
    for gone in reversed(departed):
        if last is None or gone.at >= last.at:
            last = gone
        cause = Cause.REPLICA_RESTARTED if last.is_replica_gone else _CAUSES[last.reason]
        facts.append(_Fact(gone.end, cause, last.replica_id, last.at))
    return facts[::-1]


def _of_known(past: Past, decision: Decision | None, block_size: int) -> Iterator[_Fact]:
    """It was served once, and of no replica it is known that it has it, nor how it went. Behind the last
    block on the stride the index knows of nothing but ends of prompts: another replica that has all up to
    there has the rest as well, if nothing said that it went."""
    known = past.known
    if past.is_known_replica_gone is False and past.stride_tokens and decision is not None:
        on_stride = known.num_tokens // past.stride_tokens * past.stride_tokens
        assert known.replica_id is not None
        held = (
            0 if decision.holdings is None else decision.holdings.stored_depth(known.replica_id) * block_size
        )
        if known.replica_id != decision.replica_id and held >= on_stride:
            yield _Fact(known.num_tokens, Cause.HELD_ELSEWHERE, known.replica_id)
    why = {True: Cause.REPLICA_RESTARTED, False: Cause.EVICTED, None: Cause.UNKNOWN}
    cause = why[past.is_known_replica_gone]
    last = past.departed[-1] if past.departed else None
    if (
        cause is Cause.EVICTED
        and last is not None
        and (last.replica_id, last.reason) == (known.replica_id, Removal.CLEARED)
    ):
        cause = Cause.CLEARED  # a cleared cache has lost what the index does not name as well
    yield _Fact(known.num_tokens, cause, known.replica_id)
