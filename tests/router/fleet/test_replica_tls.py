"""Routers and replicas over TLS, and with a cluster secret: who is believed, and what is said of others."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from replicas.host import ReplicaHost
from replicas.process.tls import FollowedFiles, RouterTls, TlsFiles, server_credentials
from replicas.protocol.blocks import BlockHash
from replicas.protocol.cluster_secret import ClusterSecret
from replicas.protocol.status import ReplicaId
from router.fleet.inflight import ReplicaLost
from router.fleet.registry_source import RegistrySource, ReplicaRecords
from router.fleet.replica_client import ReplicaClient
from tests.certificates import REPLICA_NAME, Authority, copied
from tests.own_log import own_records
from tests.replicas.whole_replica import MODEL, config
from tests.router.scripted_replica import ScriptedReplica, asking, eventually, token_at
from tests.router.watched_fleet import POLL_SECONDS, Registry, World, watching

ROOT = BlockHash(bytes(16))
Start = Callable[[str, TlsFiles | None], Awaitable[ScriptedReplica]]


@pytest.fixture
async def start(registry: Registry) -> AsyncIterator[Start]:
    """A replica that routers find; None is one without TLS."""
    replicas: list[ScriptedReplica] = []

    async def start(replica_id: str, files: TlsFiles | None) -> ScriptedReplica:
        followed = None if files is None else await asyncio.to_thread(FollowedFiles, files)
        credentials = None if followed is None else server_credentials(followed)
        replica = ScriptedReplica(replica_id, credentials=credentials)
        await replica.start()
        replicas.append(replica)
        await registry.put(replica)
        return replica

    yield start
    for replica in replicas:
        await replica.kill()


@contextlib.asynccontextmanager
async def router(redis_url: str, files: TlsFiles | None, name: str = REPLICA_NAME) -> AsyncIterator[World]:
    tls = None if files is None else await asyncio.to_thread(RouterTls, files, name)
    async with watching(RegistrySource(redis_url, POLL_SECONDS), tls=tls) as world:
        yield world


def client_of(world: World, replica: ScriptedReplica) -> ReplicaClient:
    client = world.membership.client(replica.replica_id)
    assert client is not None
    return client


async def tokens(client: ReplicaClient, num_tokens: int) -> list[int]:
    inflight = client.submit(asking([1, 2, 3], max_tokens=num_tokens, seed=9))
    found: list[int] = []
    while len(found) < num_tokens:
        found += [token for delta in await inflight.batch() for token in delta.token_ids]
    return found


async def test_a_request_is_served_between_two_that_show_each_other_certificates(
    ca: Authority, redis_url: str, start: Start
) -> None:
    replica = await start("r0", ca.replica().trusting(ca))
    async with router(redis_url, ca.router().trusting(ca)) as world:
        await world.wait_routed("r0")
        assert await tokens(client_of(world, replica), 5) == [token_at(9, n) for n in range(5)]


Kind = Callable[[Authority, Authority], TlsFiles | None]


def no_tls(ca: Authority, other_ca: Authority) -> TlsFiles | None:
    return None


def mutual_replica(ca: Authority, other_ca: Authority) -> TlsFiles | None:
    return ca.replica().trusting(ca)


def open_replica(ca: Authority, other_ca: Authority) -> TlsFiles | None:
    pair = ca.replica()
    return TlsFiles(pair.certificate, pair.key, None)


def misnamed_replica(ca: Authority, other_ca: Authority) -> TlsFiles | None:
    return ca.replica("somebody-else").trusting(ca)


def foreign_replica(ca: Authority, other_ca: Authority) -> TlsFiles | None:
    return other_ca.replica().trusting(ca)


def replica_of_other_routers(ca: Authority, other_ca: Authority) -> TlsFiles | None:
    return ca.replica().trusting(other_ca)


def replica_with_a_routers_certificate(ca: Authority, other_ca: Authority) -> TlsFiles | None:
    return ca.router().trusting(ca)


def mutual_router(ca: Authority, other_ca: Authority) -> TlsFiles | None:
    return ca.router().trusting(ca)


def anonymous_router(ca: Authority, other_ca: Authority) -> TlsFiles | None:
    return TlsFiles(None, None, ca.certificate)


def router_with_a_replicas_certificate(ca: Authority, other_ca: Authority) -> TlsFiles | None:
    return ca.replica().trusting(ca)


@pytest.mark.parametrize(
    ("router_kind", "good", "bad", "reason"),
    [
        (no_tls, no_tls, mutual_replica, "this router has no replica_tls_ca"),
        (no_tls, no_tls, open_replica, "this router has no replica_tls_ca"),
        (mutual_router, mutual_replica, no_tls, "it does not speak TLS"),
        (mutual_router, mutual_replica, foreign_replica, "its certificate is not believed: unable to get"),
        (mutual_router, mutual_replica, misnamed_replica, "its certificate is not for kvasir-replica"),
        (mutual_router, mutual_replica, replica_with_a_routers_certificate, "its certificate is not "),
        (mutual_router, mutual_replica, replica_of_other_routers, "another certificate of this router"),
        (anonymous_router, open_replica, mutual_replica, "another certificate of this router, or one at all"),
        (
            router_with_a_replicas_certificate,
            open_replica,
            mutual_replica,
            "another certificate of this router",
        ),
    ],
)
async def test_who_does_not_fit_is_never_used_the_log_says_why_once_and_the_others_serve(
    ca: Authority,
    other_ca: Authority,
    redis_url: str,
    start: Start,
    caplog: pytest.LogCaptureFixture,
    router_kind: Kind,
    good: Kind,
    bad: Kind,
    reason: str,
) -> None:
    kept = await start("good", good(ca, other_ca))
    refused = await start("bad", bad(ca, other_ca))

    def complaints() -> list[str]:
        return [
            record.getMessage()
            for record in own_records(caplog, logging.WARNING)
            if record.name == "router.fleet.membership"
        ]

    async with router(redis_url, router_kind(ca, other_ca)) as world:
        await world.wait_routed("good")
        await eventually(lambda: bool(complaints()))
        # Several more tries are made meanwhile.
        assert len(await tokens(client_of(world, kept), 200)) == 200
        await asyncio.sleep(0.3)
        assert world.routed() == {"good"}
        (complaint,) = complaints()
    assert complaint.startswith("replica bad: ")
    assert reason in complaint
    assert refused.num_describes == 0


async def test_a_renewal_of_everything_is_followed_and_cuts_no_stream(
    ca: Authority, other_ca: Authority, redis_url: str, start: Start, tmp_path: Path
) -> None:
    """Even the CA is another one afterwards: each side must have read both its certificate and its CA."""
    replica_files = copied(ca.replica().trusting(ca), tmp_path / "replica")
    router_files = copied(ca.router().trusting(ca), tmp_path / "router")
    replica = await start("r0", replica_files)
    async with router(redis_url, router_files) as world:
        await world.wait_routed("r0")
        old = client_of(world, replica)
        replica.script.holding = True
        inflight = old.submit(asking([1, 2, 3], max_tokens=5, seed=9))
        await eventually(lambda: len(replica.submits) == 1)

        stale = await asyncio.to_thread(lambda: RouterTls(router_files, REPLICA_NAME).current())
        copied(other_ca.replica().trusting(other_ca), tmp_path / "replica")
        copied(other_ca.router().trusting(other_ca), tmp_path / "router")

        late = ReplicaClient(ReplicaId("r0"), replica.address, lambda *_: None, tls=stale)
        with pytest.raises(ReplicaLost, match="certificate is not believed"):
            await late.describe(include_tokenizer=False)
        await late.close()
        async with router(redis_url, router_files) as another:
            await another.wait_routed("r0")

        replica.script.holding = False
        found: list[int] = []
        while len(found) < 5:
            found += [token for delta in await inflight.batch() for token in delta.token_ids]
        assert found == [token_at(9, n) for n in range(5)]
        assert client_of(world, replica) is old, "the stream was never cut"

        await old.close()
        await eventually(lambda: world.membership.client(replica.replica_id) not in (None, old))
        assert await tokens(client_of(world, replica), 3) == [token_at(9, n) for n in range(3)]


async def test_broken_renewals_on_both_sides_leave_the_old_certificates_in_force(
    ca: Authority,
    redis_url: str,
    start: Start,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    replica = await start("r0", copied(ca.replica().trusting(ca), tmp_path / "replica"))
    async with router(redis_url, copied(ca.router().trusting(ca), tmp_path / "router")) as world:
        await world.wait_routed("r0")
        (tmp_path / "replica" / "tls.key").write_text("half of a ke")
        (tmp_path / "router" / "ca.crt").write_text("half of a certif")
        for _ in range(2):
            old = client_of(world, replica)
            await old.close()
            await eventually(
                lambda old=old: world.membership.client(replica.replica_id) not in (None, old)  # type: ignore[misc]
            )
        assert len(await tokens(client_of(world, replica), 3)) == 3
    messages = [record.getMessage() for record in own_records(caplog, logging.ERROR)]
    assert len(messages) == 2, "one line of each side"
    assert all("are broken; the previous ones stay in force" in message for message in messages)


async def test_a_plain_channel_gets_nothing_of_a_replica_with_tls(ca: Authority, start: Start) -> None:
    replica = await start("r0", ca.replica().trusting(ca))
    async with grpc.aio.insecure_channel(replica.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=30)
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE


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
