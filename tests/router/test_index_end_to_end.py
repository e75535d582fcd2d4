"""The replica's index writer and the router's mirror, with a real Redis between them."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from replicas.index import index_writer
from replicas.index.index_writer import IndexWriter
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, Tier
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.status import ReplicaId, ReplicaState
from router.fleet.index_mirror import IndexMirror
from router.routing.overlap import PrefixIndex
from tests.redis_server import RedisServer
from tests.replicas.scripted_engine import CARD
from tests.replicas.written_index import EPOCH, running_writer
from tests.router.scripted_replica import eventually


@asynccontextmanager
async def running_mirror(url: str, writers: dict[ReplicaId, IndexWriter]) -> AsyncIterator[PrefixIndex]:
    index = PrefixIndex(CARD.block_size, CARD.block_size)
    mirror = IndexMirror(url, CARD.name, index, audit_seconds=0.1)
    mirror.set_live({replica_id: record(replica_id, writer) for replica_id, writer in writers.items()})
    async with asyncio.TaskGroup() as group:
        task = group.create_task(mirror.run())
        yield index
        task.cancel()


def record(replica_id: ReplicaId, writer: IndexWriter) -> ReplicaRecord:
    return ReplicaRecord(
        replica_id, EPOCH, "127.0.0.1:1", ReplicaState.READY, "card", writer.last_change, LoadSnapshot()
    )


class Cache:
    """A replica's cache that gains and loses blocks at random, in each of its tiers."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._held: dict[Tier, set[BlockHash]] = {tier: set() for tier in Tier}

    def step(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        tier = self._rng.choice([*Tier])
        held = self._held[tier]
        new = {BlockHash(self._rng.randrange(500).to_bytes(16, "big")) for _ in range(15)} - held
        gone = set(self._rng.sample(sorted(held), min(len(held), self._rng.randrange(16))))
        self._held[tier] = (held | new) - gone
        if self._rng.random() < 0.02:
            self._held[tier] = set()
            return [AllBlocksCleared(tier)]
        return [BlockStored(tuple(new), 0, tier=tier), BlockRemoved(tuple(gone), tier)]

    @property
    def fastest(self) -> dict[BlockHash, Tier]:
        return {each: tier for tier in reversed(Tier) for each in self._held[tier]}


@pytest.mark.timeout(90)
@pytest.mark.parametrize("is_killed", [False, True])
async def test_the_mirror_ends_up_with_what_every_replica_holds(
    own_redis: RedisServer, is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_writer, "HASHES_PER_CHANGE", 10)  # so that changes are split
    rng = random.Random(11)
    async with AsyncExitStack() as stack:
        writers = {
            ReplicaId(name): await stack.enter_async_context(
                running_writer(own_redis.url, ReplicaId(name), stream_length=50 if is_killed else 1000)
            )
            for name in ("a", "b", "c")
        }
        caches = {replica_id: Cache(rng) for replica_id in writers}
        index = await stack.enter_async_context(running_mirror(own_redis.url, writers))
        announced: list[tuple[ReplicaId, int]] = []
        for step in range(400):
            replica_id = rng.choice(sorted(writers))
            writers[replica_id].observe(caches[replica_id].step())
            if rng.random() < 0.5:
                writers[replica_id].announce(step, (BlockHash(rng.randbytes(16)),))
                announced.append((replica_id, step))
            if announced and rng.random() < 0.4:
                ended_at, announcement_id = announced.pop(rng.randrange(len(announced)))
                writers[ended_at].end(announcement_id)
            if rng.random() < 0.3:
                await asyncio.sleep(0.002)
            if is_killed and step in (120, 260):
                own_redis.kill()
                await asyncio.sleep(0.1)
                own_redis.start()
        await eventually(lambda: all(writer.is_settled for writer in writers.values()))
        await eventually(lambda: all(index.stored(r) == w.block_hashes for r, w in writers.items()))
        for replica_id, cache in caches.items():
            held = {tier: index.stored_in(replica_id, tier) for tier in Tier}
            assert held == {tier: {each for each, it in cache.fastest.items() if it is tier} for tier in Tier}
            assert all(held.values())
        known, live = index._predictions.keys(), {number for _, number in announced}
        # What was announced before a set was read is not in the set: it is only ever known too little of.
        await eventually(lambda: known <= live if is_killed else known == live)
        for replica_id, announcement_id in announced:
            writers[replica_id].end(announcement_id)
        await eventually(lambda: index.num_predictions == 0)
