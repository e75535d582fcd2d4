"""Replicas that leave under load, real routers before them: nobody's request is in the way."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest

import replicas.host
from replicas.config import ReplicaConfig
from replicas.host import ReplicaHost
from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import Abort, RefusalCode
from replicas.protocol.status import ReplicaId, ReplicaState
from router.dispatch.dispatcher import Dispatcher
from router.fleet.inflight import ReplicaLost
from router.fleet.membership import Membership
from router.fleet.registry_source import RegistrySource
from router.generation import Generation
from router.routing.cost import CostParameters
from router.routing.table import RoutingTable
from tests.own_log import own_records
from tests.replicas.router_client import RouterClient, submit
from tests.router.scripted_replica import asking, eventually

MODEL = "toy_model"
ROOT = BlockHash(b"one namespace !!")
NOTHING_LOST = (0, 0, 0, 0)


@pytest.fixture(autouse=True)
def a_busy_machine_is_no_deaf_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas.host, "TELL_SECONDS", 60.0)


class Router:
    """Looks at the registry once and then not again for a long time: the rest it must hear from replicas."""

    def __init__(self, redis_url: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.table = RoutingTable("kvasir", CostParameters(), self.rng, clock=time.monotonic)
        self.membership = Membership(
            RegistrySource(redis_url, poll_seconds=600),
            self.table,
            index_stride=64,
            on_model=lambda card, bundle: None,
        )
        self.dispatcher = Dispatcher(self.table, self.membership.client, rng=self.rng)
        self.num_answered = 0

    async def ask_on(self) -> None:
        """One short request after the other, until cancelled."""
        while True:
            prompt = [self.rng.randrange(2000) for _ in range(self.rng.randrange(1, 80))]
            generation = Generation(
                model=MODEL,
                token_ids=prompt,
                submit=asking(prompt, max_tokens=2),
                block_hashes=(),
                bucket=bytes(self.rng.randrange(256) for _ in range(8)),
            )
            async with self.dispatcher.run(generation) as run:
                async for _ in run:
                    pass
            self.num_answered += 1


def replica(redis_url: str, name: str, **settings: object) -> ReplicaHost:
    defaults = {"engine": "simulated", "simulated_hardware": "instant", "drain_seconds": 20.0}
    return ReplicaHost(ReplicaConfig(replica_id=name, redis_url=redis_url, **(defaults | settings)))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def started(*hosts: ReplicaHost) -> AsyncIterator[None]:
    try:
        for host in hosts:
            await host.start()
        yield
    finally:
        for host in hosts:
            await host.stop()


@contextlib.asynccontextmanager
async def under_load(routers: Sequence[Router], num_replicas: int) -> AsyncIterator[None]:
    """Several requests of each router at any time."""
    async with asyncio.TaskGroup() as group:
        following = [group.create_task(router.membership.run()) for router in routers]
        for router in routers:
            await eventually(lambda router=router: router.membership.num_routed == num_replicas)  # type: ignore[misc]
        asking = [group.create_task(router.ask_on()) for router in routers for _ in range(4)]
        yield
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        for task in following:
            task.cancel()


async def test_replicas_that_drain_under_load_cost_no_request_a_second_attempt_and_no_stream_is_lost(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = [replica(redis_url, f"r{number}") for number in range(6)]
    routers = [Router(redis_url, seed) for seed in range(2)]
    async with started(*hosts), under_load(routers, len(hosts)):
        caplog.clear()  # they have started, and said that they have no secret
        for host in hosts[1:]:
            begun = [router.num_answered for router in routers]
            await eventually(
                lambda begun=begun: all(
                    router.num_answered > n + 20 for router, n in zip(routers, begun, strict=True)
                )  # type: ignore[misc]
            )
            await host.drain()
            assert host.state is ReplicaState.STOPPED
            for router in routers:
                await eventually(lambda router=router, host=host: has_drained(router, host))  # type: ignore[misc]
    assert [router.membership.num_lost_streams for router in routers] == [0] * 2
    assert [item.getMessage() for item in own_records(caplog, logging.WARNING)] == []
    counted = [router.dispatcher for router in routers]
    assert [(c.num_running, c.num_retries, c.num_resumes, c.num_lost) for c in counted] == [NOTHING_LOST] * 2


def has_drained(router: Router, host: ReplicaHost) -> bool:
    """It is not routed to, and the router knows why."""
    complaints = {member.record.epoch: member.complaint for member in router.membership.members()}
    return complaints[host.epoch] == "it has drained"


async def until_told(client: RouterClient) -> None:
    while (frame := await client.read()) is not None:
        if frame.is_draining:
            return
    raise AssertionError("the stream ended, and the router was not told")


async def test_what_a_router_sends_before_it_has_heard_of_the_drain_is_still_answered(redis_url: str) -> None:
    host = replica(redis_url, "r0", simulated_hardware="h100-8b")
    async with started(host), grpc.aio.insecure_channel(host.address) as channel:
        client = RouterClient(channel)
        await client.read()
        draining = asyncio.create_task(host.drain())
        await until_told(client)
        await client.send(submit(1))
        (deltas,) = (await client.finish((1, 0))).values()
        assert [delta.refusal for delta in deltas] == [None] * 3
        assert not draining.done(), "it left without an answer of the router's"
        await client.send(submit(2, max_tokens=8000))
        await client.say_that_it_knows()
        await client.send(submit(3))
        (deltas,) = (await client.finish((3, 0))).values()
        assert deltas[-1].refusal is not None and deltas[-1].refusal.code is RefusalCode.DRAINING
        await client.send(Abort(2))
        await draining


async def test_a_router_that_comes_during_a_drain_is_told_with_its_first_frame(redis_url: str) -> None:
    host = replica(redis_url, "r0")
    async with started(host), grpc.aio.insecure_channel(host.address) as channel:
        early = RouterClient(channel)
        await early.read()
        draining = asyncio.create_task(host.drain())
        await until_told(early)
        late = RouterClient(channel)
        frame = await late.read()
        assert frame is not None and frame.is_draining
        await early.say_that_it_knows()
        await late.say_that_it_knows()
        await draining


async def test_a_router_that_never_answers_is_refused_after_a_while_and_holds_nobody_up(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas.host, "TELL_SECONDS", 0.2)
    host = replica(redis_url, "r0", simulated_hardware="h100-8b")
    async with started(host), grpc.aio.insecure_channel(host.address) as channel:
        client = RouterClient(channel)
        await client.send(submit(1, max_tokens=8000))
        await client.read()
        draining = asyncio.create_task(host.drain())
        await until_told(client)
        await asyncio.sleep(0.5)
        await client.send(submit(2))
        (deltas,) = (await client.finish((2, 0))).values()
        assert deltas[-1].refusal is not None and deltas[-1].refusal.code is RefusalCode.DRAINING
        await client.send(Abort(1))
        await draining


async def test_a_replica_that_is_killed_while_it_drains_is_lost_with_what_runs_there(redis_url: str) -> None:
    slow = replica(redis_url, "r0", simulated_hardware="h100-8b")
    router = Router(redis_url, 0)
    async with started(slow):
        following = asyncio.create_task(router.membership.run())
        await eventually(lambda: router.membership.num_routed == 1)
        client = router.membership.client(ReplicaId("r0"))
        assert client is not None
        inflight = client.submit(asking([1, 2, 3], max_tokens=8000))
        await inflight.batch()
        draining = asyncio.create_task(slow.drain())
        await eventually(lambda: client.is_draining)
        assert slow._parts is not None
        for stream in slow._parts.server._streams:
            stream.overflowed.set()  # so it is cut off, as by a kill
        with pytest.raises(ReplicaLost):
            while await inflight.batch():
                pass
        assert router.membership.num_lost_streams == 1
        await draining
        following.cancel()
        await asyncio.wait([following])


async def test_a_drain_goes_on_when_who_asked_for_it_is_gone(redis_url: str) -> None:
    host = replica(redis_url, "r0")
    async with started(host), grpc.aio.insecure_channel(host.address) as channel:
        client = RouterClient(channel)
        await client.read()
        asking = asyncio.create_task(host.drain())
        await until_told(client)
        asking.cancel()
        await client.say_that_it_knows()
        await host.wait_dead()


@pytest.mark.parametrize("num_turns", range(1, 5))
async def test_a_stop_is_not_held_up_by_a_drain_that_is_asked_for_then(
    redis_url: str, num_turns: int
) -> None:
    host = replica(redis_url, "r0", simulated_hardware="h100-8b", drain_seconds=600.0)
    async with started(host), grpc.aio.insecure_channel(host.address) as channel:
        client = RouterClient(channel)
        await client.send(submit(1, max_tokens=8000))
        assert host._parts is not None
        await eventually(lambda: host._parts.server.num_requests == 1)  # type: ignore[union-attr]
        stopping = asyncio.create_task(host.stop())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        host.begin_drain()
        await stopping
        assert host.state is ReplicaState.STOPPED


async def test_a_router_that_goes_away_is_not_waited_for(redis_url: str) -> None:
    host = replica(redis_url, "r0")
    async with started(host):
        async with grpc.aio.insecure_channel(host.address) as channel:
            client = RouterClient(channel)
            await client.read()
            assert host._parts is not None
            draining = asyncio.create_task(host._parts.server.tell_draining())
            await until_told(client)
            assert not draining.done()
        await draining
