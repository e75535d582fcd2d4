"""A router and a replica that have the same cluster secret, or not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from replicas.host import ReplicaHost
from replicas.protocol.cluster_secret import ClusterSecret
from replicas.protocol.status import ReplicaId
from router.fleet.registry_source import ReplicaRecords
from tests.replicas.whole_replica import MODEL, config
from tests.router.scripted_replica import eventually
from tests.router.watched_fleet import World, watching

OURS, NEXT, FOREIGN = b"s" * 32, b"n" * 32, b"f" * 32


class KnownReplica:
    """A source that has found this one."""

    def __init__(self, host: ReplicaHost) -> None:
        self._host = host

    async def views(self) -> AsyncIterator[ReplicaRecords]:
        record = self._host.record()
        while True:
            yield {MODEL: {record.replica_id: record}}
            await asyncio.sleep(0.05)


@asynccontextmanager
async def seen_by_router(
    redis_url: str, *, replica: str | None, router: ClusterSecret | None
) -> AsyncIterator[World]:
    host = ReplicaHost(config(redis_url, secret=replica))
    await host.start()
    try:
        async with watching(KnownReplica(host), secret=router) as world:
            yield world
    finally:
        await host.stop()


def complaint(world: World) -> str | None:
    return next((member.complaint for member in world.membership.members()), None)


@pytest.mark.parametrize(
    ("replica", "router"),
    [
        (OURS.hex(), ClusterSecret(OURS)),
        (f"{OURS.hex()}\n{NEXT.hex()}", ClusterSecret(NEXT, (OURS,))),
        (f"{NEXT.hex()}\n{OURS.hex()}", ClusterSecret(OURS)),
        (None, ClusterSecret(OURS)),
        (None, None),
    ],
    ids=["the same", "the next one in the router first", "in the replica first", "only one has it", "none"],
)
async def test_a_router_is_served_by_replicas_that_believe_its_secret_or_have_none(
    redis_url: str, replica: str | None, router: ClusterSecret | None
) -> None:
    async with seen_by_router(redis_url, replica=replica, router=router) as world:
        await eventually(lambda: world.membership.client(ReplicaId("r0")) is not None)


@pytest.mark.parametrize(
    ("router", "words"),
    [(ClusterSecret(FOREIGN), "another cluster secret"), (None, "this router has none: set secret_file")],
)
async def test_a_router_with_another_secret_or_none_says_so_and_routes_nothing_there(
    redis_url: str, router: ClusterSecret | None, words: str
) -> None:
    async with seen_by_router(redis_url, replica=OURS.hex(), router=router) as world:
        await eventually(lambda: complaint(world) is not None)
        assert words in (complaint(world) or "")
        assert world.membership.client(ReplicaId("r0")) is None
