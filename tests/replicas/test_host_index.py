"""What a whole replica has in Redis: in storms and outages, after restarts, beside another of its name."""

import asyncio
import random
from typing import Any

import pytest
from msgspec.structs import replace

from replicas.engine import Engine
from replicas.engine_process.build import build_engine
from replicas.errors import LeaseLost
from replicas.host import ReplicaHost
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored
from replicas.protocol.frames import Abort, StepFrame, Submit
from replicas.protocol.keys import blocks_key, is_indexed
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState
from replicas.protocol.wire import Nothing, decode_block_list
from tests.redis_server import RedisServer
from tests.replicas.mirror import connect, live_announcements, read_changes, read_record, read_set, replay
from tests.replicas.router_client import submit
from tests.replicas.whole_replica import MODEL, REPLICA, config, running, until


def announcing(bare: Submit, block_size: int, index_stride: int) -> Submit:
    """As a router sends it that believes the replica's cache to be empty."""
    hashes = hash_blocks(bare.root, bare.token_ids(), block_size)
    ends = {*range(index_stride // block_size - 1, len(hashes), index_stride // block_size), len(hashes) - 1}
    kept = tuple(hashes[end] for end in sorted(ends) if end >= 0)
    return replace(bare, announcement_id=bare.submit_id + 1, announced_hashes=kept)


class WatchedEngine:
    """An engine that keeps all events that ever left it, as a second bookkeeper would see them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.events: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> StepFrame:
        frame = self._engine.step()
        self.events.extend(frame.events)
        return frame

    def kept(self, index_stride: int) -> set[BlockHash]:
        """Resident hashes on the stride, or stored as a prompt's end since they became resident."""
        copies: list[BlockHash] = []
        wanted: set[BlockHash] = set()
        size = self._engine.card.block_size
        for event in self.events:
            if isinstance(event, BlockStored):
                copies.extend(event.block_hashes)
                for offset, block_hash in enumerate(event.block_hashes):
                    is_last = offset == len(event.block_hashes) - 1
                    on_stride = is_indexed(event.first_block_index + offset, size, index_stride)
                    if on_stride or (event.ends_prompt and is_last):
                        wanted.add(block_hash)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    copies.remove(block_hash)
                    if block_hash not in copies:
                        wanted.discard(block_hash)
            else:
                assert isinstance(event, AllBlocksCleared)
                copies.clear()
                wanted.clear()
        return wanted


async def test_after_a_storm_redis_holds_exactly_what_the_engine_keeps(redis_url: str) -> None:
    settings = config(redis_url, num_blocks=64, block_size=4, context_length=200, max_running=8)
    engine, bundle = await asyncio.to_thread(build_engine, settings)
    watched = WatchedEngine(engine)
    host = ReplicaHost(config(redis_url, index_stride=8), build=lambda _: (watched, bundle))
    rng = random.Random(7)
    redis = connect(redis_url)
    async with running(host) as client:
        waiting = set()
        for submit_id in range(200):
            start = rng.choice([0, 100, 200, 300])
            prompt = [start + n for n in range(rng.randrange(1, 60))] + [rng.randrange(2000)]
            await client.send(announcing(submit(submit_id, prompt, max_tokens=rng.randrange(1, 30)), 4, 8))
            if rng.random() < 0.3:
                await client.send(Abort(submit_id))
            else:
                waiting.add(submit_id)
        while waiting:
            frame = await client.read()
            assert frame is not None
            waiting -= {delta.key.number for delta in frame.deltas if delta.finish_reason is not None}

        async def is_settled() -> bool:
            record = await read_record(redis, MODEL, REPLICA)
            changes = await read_changes(redis, MODEL, host.epoch)
            return (
                record is not None
                and not watched.has_work()
                and record.last_change == changes[-1].number
                and record.load.num_running == record.load.num_used_blocks == 0
                and live_announcements(changes) == {}
                and replay(changes) == watched.kept(index_stride=8)
            )

        await until(is_settled)
        expected = watched.kept(index_stride=8)
        assert any(isinstance(event, BlockRemoved) for event in watched.events)
        assert len(expected) > 5
        assert await read_set(redis, MODEL, REPLICA, host.epoch) == expected
        changes = await read_changes(redis, MODEL, host.epoch)
        assert replay(changes) == expected
        assert live_announcements(changes) == {}
        assert sum(len(change.announced) for change in changes) > 20
        listed = [decode_block_list(each).hashes async for each in client.stub.list_blocks(Nothing())]
        packed = b"".join(listed)
        assert {packed[at : at + 16] for at in range(0, len(packed), 16)} == expected
        record = await read_record(redis, MODEL, REPLICA)
        assert record is not None
        assert (record.load.num_running, record.load.num_waiting, record.load.num_used_blocks) == (0, 0, 0)
    await redis.aclose()


@pytest.mark.timeout(60)
async def test_when_an_announcement_ends_its_blocks_are_there(redis_url: str) -> None:
    host = ReplicaHost(config(redis_url, index_stride=16, max_batched_tokens=64, max_running=8))
    rng = random.Random(2)
    keys: list[tuple[int, int]] = []
    redis = connect(redis_url)
    async with running(host) as client:
        for submit_id in range(1, 150):
            prompt = [rng.randrange(4) * 500 + n for n in range(rng.randrange(16, 400))]
            num_choices = rng.randrange(1, 4)
            keys += [(submit_id, choice) for choice in range(num_choices)]
            bare = submit(submit_id, prompt, max_tokens=2, num_choices=num_choices)
            await client.send(announcing(bare, 16, 16))
            if submit_id % 10 == 0:
                await asyncio.sleep(0.002)
        await client.finish(*keys)

        async def is_over() -> bool:
            record = await read_record(redis, MODEL, REPLICA)
            return record is not None and record.load.num_running == record.load.num_waiting == 0

        await until(is_over)
        held: set[BlockHash] = set()
        live: dict[int, tuple[BlockHash, ...]] = {}
        num_ended = 0
        for change in await read_changes(redis, MODEL, host.epoch):
            held |= set(change.added)
            assert not change.removed
            live |= {it.announcement_id: it.block_hashes for it in change.announced}
            for announcement_id in change.ended:
                num_ended += 1
                assert held.issuperset(live.pop(announcement_id))
        assert live == {}
        assert num_ended > 20
    await redis.aclose()


async def test_serving_goes_on_through_an_outage_of_redis_and_the_index_comes_back(
    own_redis: RedisServer,
) -> None:
    host = ReplicaHost(config(own_redis.url, index_stride=16))
    async with running(host) as client:
        await client.send(submit(1, range(64)))
        await client.finish((1, 0))
        own_redis.kill()
        await client.send(submit(2, range(100, 200)))
        await client.finish((2, 0))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(own_redis.start)
        redis = connect(own_redis.url)

        async def is_back() -> bool:
            held = await read_set(redis, MODEL, REPLICA, host.epoch)
            return (
                held is not None
                and len(held) == 4 + 6
                and await read_record(redis, MODEL, REPLICA) is not None
            )

        await until(is_back)
        await redis.aclose()


async def test_a_replica_starts_and_serves_without_redis_and_registers_when_it_comes(
    own_redis: RedisServer,
) -> None:
    own_redis.kill()
    host = ReplicaHost(config(own_redis.url, lease_seconds=0.2))
    async with running(host) as client:
        await client.send(submit(1))
        await client.finish((1, 0))
        await asyncio.to_thread(own_redis.start)
        redis = connect(own_redis.url)

        async def is_registered() -> bool:
            return await read_record(redis, MODEL, REPLICA) is not None

        await until(is_registered)
        await redis.aclose()


async def test_a_lost_blocks_set_is_written_again_by_the_heartbeat(redis_url: str) -> None:
    host = ReplicaHost(config(redis_url, index_stride=16))
    redis = connect(redis_url)
    async with running(host) as client:
        await client.send(submit(1, range(64)))
        await client.finish((1, 0))

        async def is_written() -> bool:
            held = await read_set(redis, MODEL, REPLICA, host.epoch)
            return held is not None and len(held) == 4

        await until(is_written)
        await redis.flushall()
        await until(is_written)
    await redis.aclose()


async def test_a_replica_restarted_under_its_old_name_replaces_its_dead_predecessor(redis_url: str) -> None:
    redis = connect(redis_url)
    first = ReplicaHost(config(redis_url))
    async with running(first):

        async def has_set() -> bool:
            return await read_set(redis, MODEL, REPLICA, first.epoch) is not None

        await until(has_set)
        dead = await redis.dump(f"kvasir:v1:{{{MODEL}}}:replica:{REPLICA}")
        members = await redis.smembers(blocks_key(MODEL, REPLICA, first.epoch))
    # As a kill would leave it: the record and the set of the old epoch are still there.
    await redis.restore(f"kvasir:v1:{{{MODEL}}}:replica:{REPLICA}", 60_000, dead)
    await redis.sadd(blocks_key(MODEL, REPLICA, first.epoch), *members)
    other = blocks_key(MODEL, ReplicaId("r1"), Epoch("other"))
    await redis.sadd(other, b"\x00")
    second = ReplicaHost(config(redis_url))
    async with running(second):
        record = await read_record(redis, MODEL, REPLICA)
        assert record is not None
        assert record.epoch == second.epoch != first.epoch
        assert await read_set(redis, MODEL, REPLICA, first.epoch) is None
        assert await redis.exists(other)
        assert second.state is ReplicaState.READY
    await redis.aclose()


async def test_the_older_of_two_replicas_with_one_name_steps_down(redis_url: str) -> None:
    older, newer = ReplicaHost(config(redis_url)), ReplicaHost(config(redis_url))
    redis = connect(redis_url)
    async with running(older), running(newer):
        with pytest.raises(LeaseLost, match="another process"):
            await older.wait_dead()
        assert newer.state is ReplicaState.READY
        record = await read_record(redis, MODEL, REPLICA)
        assert record is not None
        assert record.epoch == newer.epoch
        assert await read_set(redis, MODEL, REPLICA, older.epoch) is None
    await redis.aclose()
