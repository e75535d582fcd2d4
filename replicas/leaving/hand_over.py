"""HandOver: a replica that drains has others keep what it has leased, and says what nobody keeps.

Owns what became of each leased chunk. Its bounds are the seconds that the drain has left, the bytes that may
be handed over, the chunks in one call, the calls at once and the seconds that one peer may take: a peer that
hangs, lies or vanishes is asked once, and its chains go to the next.

    leased chunks ──Plan──▶ offers ──TakeOver──▶ a peer leases them, pulls them from here, and answers
                     ▲                    │
                     └── not taken ───────┘      in the end: who misses them is to be told
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from replicas.leaving.live_peers import LivePeers
from replicas.leaving.peer_calls import CallFailed, PeerCalls
from replicas.observation.leaving_metrics import LeavingMetrics
from replicas.protocol.blocks import BlockHash
from replicas.protocol.hand_overs import MAX_HANDED_CHUNKS, HandOverOutcome, LeasedChunk, TakeOver
from replicas.protocol.pulls import PullHint
from replicas.serving.store_questions import StoreQuestions

if TYPE_CHECKING:
    from replicas.leaving.plan import Offer, Plan

logger = logging.getLogger(__name__)

LIST_SECONDS = 5.0
"""How long the engine may take to say what is leased."""

SETTLE_SECONDS = 0.3
"""Where all replicas are told to leave at once, each finds after this that the others leave too."""

REDIS_SECONDS = 1.0

CALL_SECONDS = 5.0
"""A peer that has not taken `MAX_CALL_BYTES` in this time is not asked again."""

MAX_CALL_BYTES = 128 << 20

MAX_CALLS = 4
"""At once, each to another peer."""

TELL_SECONDS = 1.0
"""Of the time that is given: for saying what is lost."""


class HandOver:
    """`source` says who and where this replica is; each chunk takes `chunk_bytes` on its way."""

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
        self._failed: dict[PullHint, HandOverOutcome] = {}
        self._outcomes: dict[BlockHash, HandOverOutcome] = {}
        """Of earlier runs."""

    async def run(self, seconds: float) -> None:
        """Hand over what is leased and was not offered before, for at most so long. Raises nothing."""
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
        from replicas.leaving.plan import Plan

        taken = {key for key, outcome in self._outcomes.items() if outcome is HandOverOutcome.TAKEN}
        plan = Plan(chunks, self._max_chunks)
        plan.outcomes.update((key, HandOverOutcome.TAKEN) for key in taken)
        peers: list[PullHint] = []
        try:
            async with asyncio.timeout(max(0.0, seconds - (time.monotonic() - began) - TELL_SECONDS)):
                await asyncio.sleep(SETTLE_SECONDS)
                peers = await self._read_peers()
                await self._offer_all(plan, peers)
        except TimeoutError:
            logger.warning("the time of the drain is over before all leased KV is handed over")
        self._take_note(plan, taken, time.monotonic() - began)
        await self._tell_lost(plan, peers)

    async def _read_peers(self) -> list[PullHint]:
        try:
            async with asyncio.timeout(REDIS_SECONDS):
                return await self._peers.read()
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            logger.warning("leased KV is not handed over: Redis does not say to whom error=%r", error)
            return []

    async def _offer_all(self, plan: "Plan", peers: Collection[PullHint]) -> None:
        while offers := plan.offers([peer for peer in peers if peer not in self._failed]):
            async with asyncio.TaskGroup() as group:
                for offer in offers:
                    group.create_task(self._offer(plan, offer))

    async def _offer(self, plan: "Plan", offer: "Offer") -> None:
        for chunks in _batches(offer.chunks, self._chunks_per_call):
            for chunk, outcome in zip(chunks, await self._ask(offer.peer, chunks), strict=True):
                plan.answered(chunk, outcome)

    async def _ask(
        self, peer: PullHint, chunks: Sequence[LeasedChunk], *, are_lost: bool = False
    ) -> Sequence[HandOverOutcome]:
        """What the peer says of each, or why it says nothing."""
        async with self._at_once:
            failure = self._failed.get(peer)
            if failure is not None:
                return (failure,) * len(chunks)
            request = TakeOver(self._source(), self._layout, tuple(chunks), are_lost)
            try:
                return await self._calls.take_over(peer, request, CALL_SECONDS)
            except CallFailed as failed:
                logger.warning(
                    "a peer does not take leased KV over peer=%s reason=%s: %s",
                    peer.replica_id,
                    failed.outcome.value,
                    failed,
                )
                self._failed[peer] = failed.outcome
                return (failed.outcome,) * len(chunks)

    def _take_note(self, plan: "Plan", taken_before: Collection[BlockHash], seconds: float) -> None:
        outcomes = {key: plan.outcomes.get(key, HandOverOutcome.LATE) for key in plan.chunks}
        self._outcomes.update(outcomes)
        counts = Counter(outcome for key, outcome in outcomes.items() if key not in taken_before)
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

    async def _tell_lost(self, plan: "Plan", peers: Collection[PullHint]) -> None:
        """Best effort: a request for it is computed, told or not."""
        homes = plan.homes([peer for peer in peers if peer not in self._failed])
        try:
            async with asyncio.timeout(TELL_SECONDS), asyncio.TaskGroup() as group:
                for home in homes:
                    group.create_task(self._tell(home))
        except TimeoutError:
            logger.warning("not all replicas could be told which leases are broken")

    async def _tell(self, home: "Offer") -> None:
        for chunks in _batches(home.chunks, MAX_HANDED_CHUNKS):
            await self._ask(home.peer, chunks, are_lost=True)


def _batches(chunks: Sequence[LeasedChunk], most: int) -> Iterator[Sequence[LeasedChunk]]:
    return (chunks[at : at + most] for at in range(0, len(chunks), most))
