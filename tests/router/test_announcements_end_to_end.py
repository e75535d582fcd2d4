"""Two routers, two replicas, real gRPC and Redis: what one router has caused, the other knows at once."""

import asyncio
import contextlib
import functools
import random
import threading
import time
from collections.abc import AsyncIterator, Mapping

import grpc
import pytest
from msgspec.structs import replace

from replicas.config import ReplicaConfig
from replicas.engine_process.build import build_engine
from replicas.host import ReplicaHost
from replicas.protocol.affinity import AffinityRanking
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.status import ReplicaId
from replicas.simulated_engine.engine import SimulatedEngine
from router.dispatch.dispatcher import Dispatcher
from router.errors import UnknownModel
from router.fleet.index_mirror import IndexMirror
from router.fleet.membership import Membership
from router.fleet.registry_source import RegistrySource
from router.generation import Generation
from router.queue.held import QueueRules
from router.queue.holding import Holding
from router.routing.cost import CostParameters
from router.routing.overlap import PrefixIndex
from router.routing.table import LINGER_SECONDS, RoutingTable
from tests.redis_server import RedisServer
from tests.replicas.mirror import connect, read_set
from tests.replicas.router_client import RouterClient, submit
from tests.router.dispatched_fleet import changed
from tests.router.scripted_replica import asking, eventually

MODEL = "toy_model"
ROOT = BlockHash(b"one namespace !!")
BLOCK_SIZE = 16
STRIDE = 64
VOCABULARY = 2000


class Router:
    """The parts of a router that decide and follow, without its HTTP face."""

    def __init__(self, redis_url: str, seed: int, tasks: asyncio.TaskGroup) -> None:
        self._redis_url = redis_url
        self._tasks = tasks
        self._mirror: IndexMirror | None = None
        rng = random.Random(seed)
        self.table = RoutingTable("kvasir", CostParameters(), rng, clock=time.monotonic)
        self.membership = Membership(
            RegistrySource(redis_url, 0.05),
            self.table,
            index_stride=STRIDE,
            on_model=lambda card, bundle: None,
            on_records=self._set_live,
        )
        # Nobody is held: while engines do not step, a follower would wait in the queue until it is too late.
        holding = Holding(self.table, QueueRules(target_seconds=1000.0))
        self.dispatcher = Dispatcher(self.table, self.membership.client, rng=rng, holding=holding)
        self._running = [tasks.create_task(self.membership.run())]

    @property
    def index(self) -> PrefixIndex:
        return self.table.index(MODEL)

    def num_replicas(self) -> int:
        try:
            return len(self.table.replica_ids(MODEL))
        except UnknownModel:
            return 0

    def stop(self) -> None:
        for task in self._running:
            task.cancel()

    def is_at_rest(self) -> bool:
        """Nothing is reserved, sent, announced or counted."""
        loads = [self.table.load(replica_id) for replica_id in self.table.replica_ids(MODEL)]
        clients = [self.membership.client(replica_id) for replica_id in self.table.replica_ids(MODEL)]
        return (
            self.table.loads.num_reserved == 0
            and self.index.num_predictions == 0
            and self.dispatcher.num_running == 0
            and all(
                (load.num_requests, load.num_pending_tokens, load.num_context_tokens) == (0, 0, 0)
                for load in loads
            )
            and all(client is not None and client.num_inflight == 0 for client in clients)
        )

    def _set_live(self, model: str, records: Mapping[ReplicaId, ReplicaRecord]) -> None:
        if self._mirror is None:
            self._mirror = IndexMirror(self._redis_url, model, self.index, audit_seconds=0.1)
            self._running.append(self._tasks.create_task(self._mirror.run()))
        self._mirror.set_live(records)


class World:
    """`gate` cleared holds every step of every engine up."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.hosts: list[ReplicaHost] = []
        self.routers: list[Router] = []

    def build(self, config: ReplicaConfig) -> tuple[SimulatedEngine, object]:
        engine, bundle = build_engine(config)
        assert isinstance(engine, SimulatedEngine)
        engine._sleep = lambda seconds: self.gate.wait(20) and None
        return engine, bundle

    def is_followed(self) -> bool:
        """Every router follows every replica: what is announced from now on reaches it."""
        return all(
            router.num_replicas() == len(self.hosts)
            and all(router.index.epoch(host.record().replica_id) == host.epoch for host in self.hosts)
            for router in self.routers
        )

    def num_announcements(self) -> int:
        return sum(host._parts.index.num_announcements for host in self.hosts if host._parts is not None)

    async def assert_at_rest(self, redis_url: str) -> None:
        """And Redis, replicas and routers agree on what is cached."""
        await eventually(lambda: self.num_announcements() == 0)
        await eventually(lambda: all(host._parts.index.is_settled for host in self.hosts if host._parts))
        await eventually(self.is_followed)
        await asyncio.sleep(1.5 * LINGER_SECONDS)
        for router in self.routers:  # what lingered ends with the next decision
            async with router.dispatcher.run(generation(range(3))) as run:
                async for _ in run:
                    pass
        for router in self.routers:
            await eventually(router.is_at_rest)
        redis = connect(redis_url)
        for host in self.hosts:
            assert host._parts is not None
            replica_id, kept = host.record().replica_id, host._parts.index.block_hashes
            for router in self.routers:
                stored = functools.partial(router.index.stored, replica_id)
                await eventually(lambda stored=stored, kept=kept: stored() == kept)  # type: ignore[misc]
            assert await read_set(redis, MODEL, replica_id, host.epoch) == kept
        await redis.aclose()


@contextlib.asynccontextmanager
async def world(redis_url: str, num_blocks: int = 4000, num_replicas: int = 2) -> AsyncIterator[World]:
    world = World()
    async with asyncio.TaskGroup() as tasks:
        try:
            for number in range(num_replicas):
                config = ReplicaConfig(
                    replica_id=f"r{number}",
                    redis_url=redis_url,
                    engine="simulated",
                    num_blocks=num_blocks,
                    block_size=BLOCK_SIZE,
                    index_stride=STRIDE,
                    max_batched_tokens=512,
                    heartbeat_seconds=0.1,
                    lease_seconds=30.0,
                )
                world.hosts.append(ReplicaHost(config, build=world.build))  # type: ignore[arg-type]
                await world.hosts[-1].start()
            world.routers = [Router(redis_url, seed, tasks) for seed in range(2)]
            await eventually(world.is_followed)
            yield world
        finally:
            world.gate.set()
            for router in world.routers:
                router.stop()
            for host in world.hosts:
                await host.stop()


def generation(tokens: range | list[int], bucket: bytes = b"bucket", max_tokens: int = 2) -> Generation:
    token_ids = list(tokens)
    return Generation(
        model=MODEL,
        token_ids=token_ids,
        submit=asking(token_ids, max_tokens=max_tokens, root=ROOT),
        block_hashes=hash_blocks(ROOT, token_ids, BLOCK_SIZE),
        bucket=bucket,
    )


def bucket_at_home(replica_id: str) -> bytes:
    """One whose home is this replica."""
    names = [ReplicaId("r0"), ReplicaId("r1")]
    ranking = AffinityRanking(names)
    return next(key for key in (bytes([n]) for n in range(99)) if ranking.of(key).whole()[0] == replica_id)


@pytest.mark.timeout(60)
async def test_another_router_follows_a_long_prefill_before_its_first_token(redis_url: str) -> None:
    async with world(redis_url) as here:
        first, second = here.routers
        here.gate.clear()
        prompt = [n % VOCABULARY for n in range(6000)]
        async with first.dispatcher.run(generation(prompt, bucket_at_home("r0"))) as leader:
            assert leader.replica_id == "r0"
            num_blocks = len(prompt) // BLOCK_SIZE
            hashes = hash_blocks(ROOT, prompt, BLOCK_SIZE)
            await eventually(lambda: second.index.overlaps(hashes) == {"r0": num_blocks})
            assert second.index.num_entries == 0  # it is announced, and nothing of it is stored
            assert first.index.num_predictions == second.index.num_predictions == 1
            async with second.dispatcher.run(generation(prompt, bucket_at_home("r1"))) as follower:
                assert follower.replica_id == "r0"
                assert follower.decision.overlap_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
                here.gate.set()
                usages = [
                    delta.usage
                    for run in (leader, follower)
                    for delta in [one async for batch in run for one in batch]
                    if delta.usage is not None
                ]
        assert [usage.num_cached_tokens for usage in usages] == [0, (num_blocks - 1) * BLOCK_SIZE]
        await here.assert_at_rest(redis_url)


@pytest.mark.timeout(60)
async def test_a_follower_is_still_expected_where_the_leader_gave_up(redis_url: str) -> None:
    # One replica: to wait for a prompt's leader takes as long as to compute it elsewhere.
    async with world(redis_url, num_replicas=1) as here:
        first, second = here.routers
        here.gate.clear()
        prompt = [n % VOCABULARY for n in range(3000)]
        hashes = hash_blocks(ROOT, prompt, BLOCK_SIZE)
        async with contextlib.AsyncExitStack() as following:
            async with first.dispatcher.run(generation(prompt)) as leader:
                await eventually(lambda: leader.replica_id in second.index.overlaps(hashes))
                follower = await following.enter_async_context(second.dispatcher.run(generation(prompt)))
                assert follower.replica_id == leader.replica_id
                await eventually(lambda: first.index.num_predictions == 2)
            await eventually(lambda: first.index.num_predictions == second.index.num_predictions == 1)
            for router in here.routers:
                assert router.index.overlaps(hashes) == {follower.replica_id: len(hashes)}
        await eventually(lambda: here.num_announcements() == 0)
        for router in here.routers:
            await eventually(lambda router=router: router.index.num_predictions == 0)  # type: ignore[misc]
            assert router.index.overlaps(hashes) == {}
        here.gate.set()
        await here.assert_at_rest(redis_url)


async def ask(router: Router, rng: random.Random) -> None:
    """One request, that its client may give up at any time."""
    tokens = [rng.randrange(6) * 100 + n for n in range(rng.randrange(1, 900))]
    asked = generation(tokens, bytes([rng.randrange(8)]), max_tokens=rng.randrange(1, 12))
    asked = changed(asked, num_choices=rng.randrange(1, 4))
    patience = rng.choice([0.0, 0.002, 0.01, 0.05, 60.0])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience), router.dispatcher.run(asked) as run:
            async for _ in run:
                pass


async def cut(host: ReplicaHost, rng: random.Random, number: int) -> None:
    """A third router that asks for much and vanishes."""
    async with grpc.aio.insecure_channel(host.address) as channel:
        client = RouterClient(channel)
        for submit_id in range(1, 6):
            bare = submit(submit_id, [number % VOCABULARY] * rng.randrange(64, 700), max_tokens=1000)
            hashes = tuple(hash_blocks(ROOT, bare.token_ids(), BLOCK_SIZE)[::4])
            await client.send(replace(bare, announcement_id=number * 10 + submit_id, announced_hashes=hashes))
        await asyncio.sleep(rng.random() * 0.01)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_redis_killed", [False, True])
async def test_after_a_storm_of_cancels_nothing_is_announced_and_all_agree(
    own_redis: RedisServer, is_redis_killed: bool
) -> None:
    rng = random.Random(9)
    async with world(own_redis.url, num_blocks=150) as here:
        num_announced = 0
        async with asyncio.TaskGroup() as requests:
            for number in range(400):
                requests.create_task(ask(rng.choice(here.routers), rng))
                if number % 20 == 0:
                    requests.create_task(cut(rng.choice(here.hosts), rng, number))
                num_announced = max(num_announced, here.num_announcements())
                if number % 50 == 0:
                    here.gate.clear()
                if rng.random() < 0.2:
                    await asyncio.sleep(rng.random() * 0.02)
                    here.gate.set()
                if is_redis_killed and number in (100, 250):
                    own_redis.kill()
                if is_redis_killed and number in (150, 300):
                    await asyncio.to_thread(own_redis.start)
            here.gate.set()
        assert num_announced > 2
        await here.assert_at_rest(own_redis.url)
