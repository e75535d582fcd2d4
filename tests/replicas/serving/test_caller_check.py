"""Who may call a replica, over real gRPC."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from replicas.host import ReplicaHost
from replicas.protocol.call_tokens import METADATA_KEY, Audience, Caller, Role
from replicas.protocol.cluster_secret import Purpose, derive
from replicas.protocol.service import ReplicaStub, path
from replicas.protocol.status import Epoch, ReplicaId
from replicas.protocol.wire import DescribeRequest, Nothing
from replicas.serving import caller_check
from tests.replicas.served_engine import Harness, serving
from tests.replicas.whole_replica import config, running

SECRET, OLD_SECRET, FOREIGN_SECRET = b"s" * 32, b"o" * 32, b"f" * 32
KEY, OLD_KEY, FOREIGN_KEY = (derive(secret, Purpose.CALLS) for secret in (SECRET, OLD_SECRET, FOREIGN_SECRET))
HERE = Audience(ReplicaId("r0"), Epoch("e1"))
ROUTER = Caller(KEY, Role.ROUTER, HERE)
CONTROLLER = Caller(KEY, Role.CONTROLLER, HERE)
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
REPLICA = Caller(KEY, Role.REPLICA, HERE)
METHODS = ("Serve", "Describe", "ListBlocks", "Drain")


@pytest.fixture
async def guarded() -> AsyncIterator[Harness]:
    async with serving(Harness(call_keys=(KEY, OLD_KEY))) as harness:
        yield harness


@pytest.fixture
async def channel(guarded: Harness) -> AsyncIterator[grpc.aio.Channel]:
    options = [("grpc.max_receive_message_length", 64 * 2**20)]
    async with grpc.aio.insecure_channel(guarded.address, options=options) as channel:
        yield channel


def shown(caller: Caller | None, method: str, nonce: bytes) -> list[tuple[str, str]]:
    """What a caller sends along."""
    if caller is None:
        return []
    called = method if method.startswith("/") else path(method)
    return [(METADATA_KEY, caller.token(called, nonce))]


async def call(channel: grpc.aio.Channel, method: str, metadata: list[tuple[str, str]]) -> grpc.StatusCode:
    """How a call of the method ends; a stream is left once it has brought something."""
    stub = ReplicaStub(channel)
    try:
        match method:
            case "Serve":
                stream = stub.serve(metadata=metadata, timeout=30)
                await stream.read()
                stream.cancel()
            case "Describe":
                await stub.describe(DescribeRequest(), metadata=metadata, timeout=30)
            case "ListBlocks":
                blocks = [each async for each in stub.list_blocks(Nothing(), metadata=metadata)]
                assert blocks
            case "Drain":
                await stub.drain(Nothing(), metadata=metadata, timeout=30)
            case "reflection":
                reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
                question = reflection_pb2.ServerReflectionRequest(list_services="")
                stream = reflection.ServerReflectionInfo(metadata=metadata, timeout=30)
                with contextlib.suppress(asyncio.InvalidStateError):  # it may have been refused already
                    await stream.write(question)
                assert await stream.read() is not grpc.aio.EOF
                stream.cancel()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def refused(harness: Harness, reason: str) -> float:
    value = harness.metrics.registry.get_sample_value("replica_refused_calls_total", {"reason": reason})
    assert value is not None
    return value


@pytest.mark.parametrize("method", [*METHODS, "reflection"])
async def test_a_caller_without_a_token_is_refused_everything_and_logged_once(
    guarded: Harness, channel: grpc.aio.Channel, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert await call(channel, method, []) is grpc.StatusCode.UNAUTHENTICATED
    assert refused(guarded, "no_token") == 3
    assert len([record for record in caplog.records if "refused a call" in record.message]) == 1
    assert (guarded.drains, guarded.server.num_streams) == (0, 0)


@pytest.mark.parametrize(
    ("caller", "code"), [(ROUTER, grpc.StatusCode.PERMISSION_DENIED), (CONTROLLER, grpc.StatusCode.OK)]
)
async def test_only_the_controller_may_drain(
    guarded: Harness, channel: grpc.aio.Channel, caller: Caller, code: grpc.StatusCode
) -> None:
    for number, method in enumerate(("Serve", "Describe", "ListBlocks")):
        assert await call(channel, method, shown(caller, method, bytes([number]) * 16)) is grpc.StatusCode.OK
    assert await call(channel, "Drain", shown(caller, "Drain", b"d" * 16)) is code
    assert guarded.drains == (code is grpc.StatusCode.OK)
    assert refused(guarded, "wrong_role") == (code is not grpc.StatusCode.OK)


@pytest.mark.parametrize(
    "caller",
    [
        Caller(FOREIGN_KEY, Role.CONTROLLER, HERE),
        Caller(KEY, Role.CONTROLLER, Audience(ReplicaId("r1"), Epoch("e1"))),
        Caller(KEY, Role.CONTROLLER, Audience(ReplicaId("r0"), Epoch("e0"))),
    ],
    ids=["another secret", "another replica", "the incarnation before"],
)
async def test_a_token_of_another_secret_replica_or_incarnation_is_refused(
    guarded: Harness, channel: grpc.aio.Channel, caller: Caller
) -> None:
    for number, method in enumerate(METHODS, 1):
        metadata = shown(caller, method, bytes(16))
        assert await call(channel, method, metadata) is grpc.StatusCode.UNAUTHENTICATED
        assert refused(guarded, "wrong_token") == number
    assert guarded.drains == 0


async def test_a_token_is_for_one_method_and_no_other_role_can_be_written_over_its_own(
    guarded: Harness, channel: grpc.aio.Channel
) -> None:
    [(_, token)] = shown(ROUTER, "Describe", bytes(16))
    for forged in (token, token.replace("router", "controller")):
        assert await call(channel, "Drain", [(METADATA_KEY, forged)]) is grpc.StatusCode.UNAUTHENTICATED
    assert guarded.drains == 0


async def test_a_token_is_good_for_one_call_however_it_is_spelled(
    guarded: Harness, channel: grpc.aio.Channel
) -> None:
    [(_, token)] = shown(ROUTER, "Describe", b"\xab" * 16)
    role, nonce, mac = token.split(" ")
    assert await call(channel, "Describe", [(METADATA_KEY, token)]) is grpc.StatusCode.OK
    for again in (token, f"{role} {nonce.upper()} {mac}", f"{role} {nonce} {mac.upper()}"):
        assert await call(channel, "Describe", [(METADATA_KEY, again)]) is grpc.StatusCode.UNAUTHENTICATED
    assert refused(guarded, "used_token") == 3


async def test_what_is_remembered_of_tokens_is_bounded(
    guarded: Harness, channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller_check, "MAX_KNOWN_NONCES", 2)
    for number in (0, 1, 2, 0):  # the first has been forgotten
        metadata = shown(ROUTER, "Describe", bytes([number]) * 16)
        assert await call(channel, "Describe", metadata) is grpc.StatusCode.OK
    metadata = shown(ROUTER, "Describe", bytes([2]) * 16)
    assert await call(channel, "Describe", metadata) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "token",
    ["", "router", "router  ", "king 00 00", "router zz zz", f"router {'00' * 15} {'00' * 16}", "x" * 200],
)
async def test_a_malformed_token_is_refused_like_a_wrong_one(
    guarded: Harness, channel: grpc.aio.Channel, token: str
) -> None:
    assert await call(channel, "Describe", [(METADATA_KEY, token)]) is grpc.StatusCode.UNAUTHENTICATED


async def test_a_token_of_the_secret_before_is_believed_while_the_file_has_it(
    guarded: Harness, channel: grpc.aio.Channel
) -> None:
    old = Caller(OLD_KEY, Role.ROUTER, HERE)
    assert await call(channel, "Serve", shown(old, "Serve", bytes(16))) is grpc.StatusCode.OK


async def test_health_is_for_everybody_and_reflection_for_any_role(
    guarded: Harness, channel: grpc.aio.Channel
) -> None:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    metadata = shown(ROUTER, REFLECTION, bytes(16))
    assert await call(channel, "reflection", metadata) is grpc.StatusCode.OK


async def test_a_whole_replica_demands_tokens_of_the_secret_in_its_file(
    redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text(SECRET.hex())
    host = ReplicaHost(config(redis_url, secret_file=str(tmp_path / "secret")))
    async with running(host), grpc.aio.insecure_channel(host.address) as channel:
        for method in METHODS:
            assert await call(channel, method, []) is grpc.StatusCode.UNAUTHENTICATED
        router = Caller(KEY, Role.ROUTER, Audience(ReplicaId("r0"), host.epoch))
        assert await call(channel, "Serve", shown(router, "Serve", bytes(16))) is grpc.StatusCode.OK


async def test_a_replica_without_a_secret_serves_whoever_comes_and_says_so(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    host = ReplicaHost(config(redis_url))
    async with running(host), grpc.aio.insecure_channel(host.address) as channel:
        assert "no cluster secret" in caplog.text
        assert await call(channel, "Serve", []) is grpc.StatusCode.OK
        assert await call(channel, "Serve", [(METADATA_KEY, "anything")]) is grpc.StatusCode.OK
