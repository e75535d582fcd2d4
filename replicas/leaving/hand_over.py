"""HandOver: a draining replica hands its leases to others, and reports those that no replica keeps.

Owns the outcome of each leased chunk. Bounds: the drain's remaining seconds, the bytes to hand over, the
chunks per call, the parallel calls, and the seconds per peer. A peer that lies or vanishes is asked once, a
slow or busy one a few times (`pace.py`); then its chains go to the next.

    leased chunks ──Plan──▶ offers ──TakeOver──▶ a peer leases them, pulls them from here, and answers
                     ▲                    │
                     └── not taken ───────┘      at the end: report losses to the peer that will miss them
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from replicas.leaving.live_peers import LivePeers
from replicas.leaving.pace import Pace, busy_pauses
from replicas.leaving.peer_calls import CallFailed, PeerCalls
from replicas.observation.leaving_metrics import LeavingMetrics
from replicas.protocol.blocks import BlockHash
from replicas.protocol.hand_overs import MAX_HANDED_CHUNKS, HandOverOutcome, LeasedChunk, TakeOver
from replicas.protocol.pulls import PullHint
from replicas.serving.store_questions import StoreQuestions

if TYPE_CHECKING:
    from replicas.leaving.plan import HandOverPlan, Offer

logger = logging.getLogger(__name__)

LIST_SECONDS = 10.0
"""Seconds for the engine to list its leases."""

SETTLE_SECONDS = 0.3
"""Seconds after which a replica sees that the others leave too, when all are told at once."""

REDIS_SECONDS = 1.0

CALL_SECONDS = 5.0
"""A peer that has not taken `MAX_CALL_BYTES` in this time is asked for less."""

MAX_CALL_BYTES = 128 << 20

SEND_AGAIN_SECONDS = (1.5, 3.0)
"""Pauses before a peer is asked again for chunks that it could not pull in time: slightly longer than its own
pause for this replica after a failed pull."""

MAX_CALLS = 4
"""At once, each to another peer."""

TELL_SECONDS = 1.0
"""Part of the given time that is reserved for reporting losses."""


class HandOver:
    """`source` identifies and locates this replica; each chunk travels as `chunk_bytes`."""

    def __init__(
        self,
        store: StoreQuestions,
        peers: LivePeers,
        calls: PeerCalls,
        *,
        source: Callable[[], PullHint],
        layout: bytes,
        chunk_bytes: int,
        max_bytes: int | None,
        metrics: LeavingMetrics,
    ) -> None:
        self._store = store
        self._peers = peers
        self._calls = calls
        self._source = source
        self._layout = layout
        self._chunk_bytes = chunk_bytes
        self._max_chunks = None if max_bytes is None else max_bytes // chunk_bytes
        self._metrics = metrics
        self._chunks_per_call = max(1, min(MAX_HANDED_CHUNKS, MAX_CALL_BYTES // chunk_bytes))
        self._at_once = asyncio.Semaphore(MAX_CALLS)
        self._paces: dict[PullHint, Pace] = {}
        self._outcomes: dict[BlockHash, HandOverOutcome] = {}
        """Outcomes of earlier runs."""

    async def run(self, seconds: float) -> None:
        """Hand over leases that were not offered before, for at most `seconds`. Raises nothing."""
        try:
            await self._run(seconds)
        except Exception:  # the hand-over's outermost frame: requests are still to be finished
            logger.exception("the hand-over of leased KV has failed by a fault of our own")

    async def _run(self, seconds: float) -> None:
        began = time.monotonic()
        try:
            chunks = await self._store.leased(max(0.0, min(LIST_SECONDS, seconds)))
        except TimeoutError:
            logger.warning("the engine does not say which KV is leased; nothing of it is handed over")
            return
        if all(chunk.key in self._outcomes for chunk in chunks):
            return
        # Here, since a replica has no other use for numpy in this process.
        from replicas.leaving.plan import HandOverPlan

        for pace in self._paces.values():
            pace.recover()
        taken = {key for key, outcome in self._outcomes.items() if outcome is HandOverOutcome.TAKEN}
        plan = HandOverPlan(chunks, self._max_chunks, taken)
        peers: list[PullHint] = []
        try:
            async with asyncio.timeout(max(0.0, seconds - (time.monotonic() - began) - TELL_SECONDS)):
                await asyncio.sleep(SETTLE_SECONDS)
                peers = await self._read_peers()
                await self._offer_all(plan, peers)
        except TimeoutError:
            logger.warning("the time of the drain is over before all leased KV is handed over")
        self._take_note(plan, taken, time.monotonic() - began)
        await self._tell_all(plan, peers)

    async def _read_peers(self) -> list[PullHint]:
        try:
            async with asyncio.timeout(REDIS_SECONDS):
                return await self._peers.read()
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            logger.warning("leased KV is not handed over: Redis does not say to whom error=%r", error)
            return []

    async def _offer_all(self, plan: "HandOverPlan", peers: Collection[PullHint]) -> None:
        while offers := plan.offers(self._asked(peers)):
            async with asyncio.TaskGroup() as group:
                for offer in offers:
                    group.create_task(self._offer(plan, offer))

    async def _offer(self, plan: "HandOverPlan", offer: "Offer") -> None:
        left = await self._offer_once(plan, offer)
        for pause in SEND_AGAIN_SECONDS:
            if not left or self._pace(offer.peer).given_up is not None:
                break
            await asyncio.sleep(pause)
            left = await self._offer_once(plan, offer._replace(chunks=left))

    async def _offer_once(self, plan: "HandOverPlan", offer: "Offer") -> list[LeasedChunk]:
        """Make one offer; returns the chunks that the peer would have taken if they had arrived."""
        pace, left = self._pace(offer.peer), [*offer.chunks]
        not_sent: list[LeasedChunk] = []
        while left and pace.given_up is None:
            chunks = left[: pace.num_chunks]
            outcomes = await self._ask(offer.peer, chunks)
            if outcomes is not None:
                del left[: len(chunks)]
                for chunk, outcome in zip(chunks, outcomes, strict=True):
                    plan.answered(chunk, outcome, offer.peer.replica_id)
                    has_failed = outcome in (HandOverOutcome.NOT_SENT, HandOverOutcome.INCOMPLETE)
                    not_sent += [chunk] * has_failed
        said_so = None if pace.was_late else offer.peer.replica_id
        for chunk in left:
            plan.answered(chunk, pace.given_up or HandOverOutcome.LATE, said_so)
        return not_sent if HandOverOutcome.NOT_SENT in map(plan.outcome, not_sent) else []

    async def _ask(
        self,
        peer: PullHint,
        chunks: Sequence[LeasedChunk],
        *,
        are_lost: bool = False,
        are_elsewhere: bool = False,
    ) -> Sequence[HandOverOutcome] | None:
        """Ask the peer about the chunks. None if it does not answer, which changes its pace."""
        pace = self._pace(peer)
        request = TakeOver(self._source(), self._layout, tuple(chunks), are_lost, are_elsewhere)
        try:
            outcomes = await self._ask_patiently(peer, request)
        except CallFailed as failed:
            logger.warning(
                "a peer does not take leased KV over peer=%s reason=%s: %s",
                peer.replica_id,
                failed.outcome.value,
                failed,
            )
            pace.failed(failed.outcome, len(chunks))
            return None
        pace.answered()
        return outcomes

    async def _ask_patiently(self, peer: PullHint, request: TakeOver) -> Sequence[HandOverOutcome]:
        """Asks one that is busy again, at times that other replicas that leave do not share."""
        for pause in busy_pauses():
            try:
                async with self._at_once:
                    return await self._calls.take_over(peer, request, CALL_SECONDS)
            except CallFailed as failed:
                if failed.outcome is not HandOverOutcome.BUSY:
                    raise
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        async with self._at_once:
            return await self._calls.take_over(peer, request, CALL_SECONDS)

    def _pace(self, peer: PullHint) -> Pace:
        return self._paces.setdefault(peer, Pace(self._chunks_per_call))

    def _asked(self, peers: Collection[PullHint]) -> list[PullHint]:
        """Return the peers that have not been given up."""
        return [peer for peer in peers if self._pace(peer).given_up is None]

    def _take_note(self, plan: "HandOverPlan", taken_before: Collection[BlockHash], seconds: float) -> None:
        outcomes = {key: plan.outcomes.get(key, HandOverOutcome.LATE) for key in plan.chunks}
        counts = Counter(
            outcome
            for key, outcome in outcomes.items()
            if key not in taken_before and (key not in self._outcomes or outcome is HandOverOutcome.TAKEN)
        )
        self._outcomes.update(outcomes)
        num_bytes = counts[HandOverOutcome.TAKEN] * self._chunk_bytes
        self._metrics.handed_over(counts, num_bytes, seconds)
        logger.info(
            "leased KV was handed over chunks=%d bytes=%d seconds=%.2f",
            counts[HandOverOutcome.TAKEN],
            num_bytes,
            seconds,
        )
        del counts[HandOverOutcome.TAKEN]
        lost = {outcome.value: number for outcome, number in counts.items()}
        if lost:
            logger.warning("leases are broken, since no other replica has taken them over chunks=%s", lost)

    async def _tell_all(self, plan: "HandOverPlan", peers: Collection[PullHint]) -> None:
        """Tell peers which of their leases are of use elsewhere, and which chunks are lost. Best effort:
        untold requests are computed anyway, and spare leases expire by themselves."""
        homes = plan.homes(self._asked(peers))
        for pace in self._paces.values():
            pace.recover()  # it may hold what it had no time to answer for
        try:
            async with asyncio.timeout(TELL_SECONDS), asyncio.TaskGroup() as group:
                for spare in plan.spare():
                    group.create_task(self._tell(spare, are_elsewhere=True))
                for home in homes:
                    group.create_task(self._tell(home, are_lost=True))
        except TimeoutError:
            logger.warning("not all replicas could be told which leases are broken, or kept by others")

    async def _tell(self, told: "Offer", *, are_lost: bool = False, are_elsewhere: bool = False) -> None:
        for chunks in _batches(told.chunks, MAX_HANDED_CHUNKS):
            if self._pace(told.peer).given_up is None:
                await self._ask(told.peer, chunks, are_lost=are_lost, are_elsewhere=are_elsewhere)


def _batches(chunks: Sequence[LeasedChunk], most: int) -> Iterator[Sequence[LeasedChunk]]:
    return (chunks[at : at + most] for at in range(0, len(chunks), most))
