"""A whole replica with TLS: whom it serves, how its health is asked, and what it does not start with."""

import asyncio
import os
import socket
import sys
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from replicas.config import ReplicaConfig
from replicas.engine import Engine
from replicas.host import ReplicaHost
from replicas.process.settings import SettingsError
from replicas.protocol.frames import RequestKey
from replicas.protocol.status import ReplicaState, TokenizerBundle
from replicas.protocol.wire import DescribeRequest
from tests.certificates import REPLICA_NAME, Authority, Pair, copied, self_signed
from tests.replicas.router_client import RouterClient, submit
from tests.replicas.scripted_engine import ScriptedEngine
from tests.replicas.whole_replica import config, running, scripted

REPOSITORY = Path(__file__).parents[3]
CHECK = REPOSITORY / "deploy" / "images" / "check_replica.py"


def with_tls(redis_url: str, ca: Authority, **settings: object) -> ReplicaConfig:
    pair = ca.replica()
    tls = {"tls_certificate": pair.certificate, "tls_key": pair.key, "tls_client_ca": ca.certificate}
    return config(redis_url, **{**tls, **settings})


def channel_to(host: ReplicaHost, ca: Authority, pair: Pair | None) -> grpc.aio.Channel:
    files = (
        (None, None) if pair is None else (Path(pair.key).read_bytes(), Path(pair.certificate).read_bytes())
    )
    credentials = grpc.ssl_channel_credentials(Path(ca.certificate).read_bytes(), *files)
    options = [("grpc.ssl_target_name_override", REPLICA_NAME)]
    return grpc.aio.secure_channel(host.address, credentials, options=options)


async def is_served(channel: grpc.aio.Channel) -> bool:
    async with channel:
        client = RouterClient(channel)
        try:
            await client.send(submit(1))
            return bool(await client.finish((1, 0)))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return False


async def test_only_who_shows_a_certificate_of_the_ca_is_served(
    ca: Authority, redis_url: str, tmp_path: Path
) -> None:
    host = ReplicaHost(with_tls(redis_url, ca), build=scripted(ScriptedEngine()))
    async with running(host):
        foreign = Authority(tmp_path, "foreign")
        assert await is_served(channel_to(host, ca, ca.router()))
        assert not await is_served(channel_to(host, ca, None))
        assert not await is_served(channel_to(host, ca, foreign.router()))
        assert not await is_served(channel_to(host, ca, ca.replica())), "a replica is no router"
        assert not await is_served(grpc.aio.insecure_channel(host.address))
        assert await is_served(channel_to(host, ca, ca.router()))


async def test_without_a_client_ca_whoever_believes_the_replica_is_served(
    ca: Authority, redis_url: str
) -> None:
    host = ReplicaHost(with_tls(redis_url, ca, tls_client_ca=None), build=scripted(ScriptedEngine()))
    async with running(host):
        assert await is_served(channel_to(host, ca, None))
        assert not await is_served(grpc.aio.insecure_channel(host.address))


async def check(environment: Mapping[str, str]) -> tuple[int | None, str]:
    """The exit status and the complaint of an image's health check."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(CHECK)),
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"], **environment},
    )
    _, stderr = await process.communicate()
    return process.returncode, stderr.decode()


async def test_the_health_check_needs_no_certificate_and_knows_ready_from_draining(
    ca: Authority, redis_url: str, tmp_path: Path
) -> None:
    engine = ScriptedEngine()
    path = str(tmp_path / "health.sock")
    replica_config = with_tls(redis_url, ca, health_socket=path)
    assert replica_config.tls_certificate is not None
    environment = {
        "KVASIR_REPLICA_TLS_CERTIFICATE": replica_config.tls_certificate,
        "KVASIR_REPLICA_HEALTH_SOCKET": path,
    }
    assert (await check(environment))[0] == 1
    host = ReplicaHost(replica_config, build=scripted(engine))
    async with running(host):
        assert await check(environment) == (0, "")
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await RouterClient(channel).stub.describe(DescribeRequest())
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
        async with channel_to(host, ca, ca.router()) as channel:
            client = RouterClient(channel)
            engine.gate.clear()
            num_probes = len(engine.added)
            await client.send(submit(1))
            while len(engine.added) == num_probes:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            draining = asyncio.create_task(host.drain())
            while host.state is not ReplicaState.DRAINING:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            assert (await check(environment))[0] == 1
            engine.gate.set()
            assert RequestKey(1, 0) in await client.finish((1, 0))
        await draining


def expiries(host: ReplicaHost) -> dict[str, float]:
    """What it shows to Prometheus, by file."""
    with urllib.request.urlopen(f"http://{host.metrics_address}/metrics") as answer:
        text = answer.read().decode()
    lines = [line for line in text.splitlines() if line.startswith("replica_tls_expiry_timestamp_seconds{")]
    return {line.partition('file="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_its_metrics_tell_when_the_files_in_force_expire(
    ca: Authority, redis_url: str, tmp_path: Path
) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    files = copied(ca.replica().trusting(ca), tmp_path / "tls")
    tls = {"tls_certificate": files.certificate, "tls_key": files.key, "tls_client_ca": files.ca}
    host = ReplicaHost(config(redis_url, metrics_port=0, **tls), build=scripted(ScriptedEngine()))
    async with running(host):
        begun = await asyncio.to_thread(expiries, host)
        assert set(begun) == {"certificate", "ca"}
        assert abs(begun["certificate"] - (now + timedelta(days=2)).timestamp()) < 3600
        renewed = self_signed(tmp_path, now - timedelta(days=1), now + timedelta(days=77))
        copied(renewed.trusting(ca), tmp_path / "tls")
        found = await asyncio.to_thread(expiries, host)
        assert found == begun | {"certificate": (now + timedelta(days=77)).timestamp()}
        assert not await is_served(channel_to(host, ca, ca.router())), "the new one, which nobody trusts"


async def test_without_tls_its_metrics_tell_of_no_end(redis_url: str) -> None:
    host = ReplicaHost(config(redis_url, metrics_port=0), build=scripted(ScriptedEngine()))
    async with running(host):
        assert await asyncio.to_thread(expiries, host) == {}


async def test_a_replica_with_an_expired_certificate_does_not_start(
    ca: Authority, redis_url: str, tmp_path: Path
) -> None:
    now = datetime.now(UTC)
    pair = self_signed(tmp_path, now - timedelta(days=9), now - timedelta(days=1))
    tls = {"tls_certificate": pair.certificate, "tls_key": pair.key, "tls_client_ca": ca.certificate}
    host = ReplicaHost(config(redis_url, **tls), build=scripted(ScriptedEngine()))
    with pytest.raises(SettingsError, match=f"the certificate in {pair.certificate} expired on "):
        await host.start()


async def test_a_socket_that_a_killed_replica_left_behind_is_replaced(
    ca: Authority, redis_url: str, tmp_path: Path
) -> None:
    path = tmp_path / "health.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert path.is_socket()
    host = ReplicaHost(with_tls(redis_url, ca, health_socket=str(path)), build=scripted(ScriptedEngine()))
    async with running(host):
        assert await check({"KVASIR_REPLICA_HEALTH_SOCKET": str(path)}) == (0, "")


async def test_the_health_check_of_a_replica_with_tls_says_which_setting_it_needs(ca: Authority) -> None:
    status, complaint = await check({"KVASIR_REPLICA_TLS_CERTIFICATE": "x", "KVASIR_REPLICA_PORT": "50051"})
    assert status == 1
    assert complaint == "a replica with TLS tells its health at KVASIR_REPLICA_HEALTH_SOCKET only\n"


async def test_a_health_check_without_tls_asks_the_port(redis_url: str) -> None:
    host = ReplicaHost(config(redis_url), build=scripted(ScriptedEngine()))
    async with running(host):
        port = host.address.rpartition(":")[2]
        assert await check({"KVASIR_REPLICA_PORT": port}) == (0, "")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tls_key": "a"}, "settings tls_certificate and tls_key go together"),
        ({"tls_client_ca": "a"}, "setting tls_client_ca needs tls_certificate and tls_key"),
    ],
)
def test_half_a_set_of_files_is_refused(settings: Mapping[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        ReplicaConfig(**settings)  # type: ignore[arg-type]


async def test_files_are_looked_at_before_the_model_is_loaded(ca: Authority, redis_url: str) -> None:
    def build(_: ReplicaConfig) -> tuple[Engine, TokenizerBundle]:
        raise AssertionError("the model was loaded")

    host = ReplicaHost(with_tls(redis_url, ca, tls_client_ca="/nowhere/ca.crt"), build=build)
    with pytest.raises(SettingsError, match=r"cannot read /nowhere/ca\.crt: No such file or directory"):
        await host.start()
