"""The processes of a local cluster: services, Redis, the watch over a fleet."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from cluster.config import FleetSpec
from cluster.local import fleet_watch, redis_server
from cluster.local.fleet_watch import FleetWatch
from cluster.local.local_cluster import _shared_settings
from cluster.local.processes import MARK, Service, find_marked, kill_marked
from cluster.local.redis_server import PrivateRedis, redis_binary
from replicas.config import ReplicaConfig
from replicas.process.settings import load_settings
from router.config import RouterConfig

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
PARENT = """
import asyncio, os, sys
from pathlib import Path
from cluster.local.processes import Service
async def main():
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    service = Service("child", command, Path(sys.argv[1]), os.environ)
    await service.start()
    print(service.pid, flush=True)
    await service.wait()
asyncio.run(main())
"""


async def started(tmp_path: Path, program: str, environment: dict[str, str] | None = None) -> Service:
    log = tmp_path / "log"
    service = Service("it", [sys.executable, "-c", program], log, environment or {})
    await service.start()
    while "up" not in await service.complaint():
        assert not service.has_ended()
    return service


@pytest.fixture
async def sleeper(tmp_path: Path) -> AsyncIterator[Service]:
    service = await started(tmp_path, SLEEP, {MARK: str(tmp_path)})
    yield service
    await service.stop(5)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def test_a_service_ends_when_asked(sleeper: Service) -> None:
    await sleeper.stop(10)
    assert sleeper.has_ended()
    assert await sleeper.wait() == -signal.SIGTERM


async def test_a_service_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    service = await started(tmp_path, STUBBORN)
    await service.stop(0.05)
    assert await service.wait() == -signal.SIGKILL


async def test_a_service_complains_with_the_end_of_its_log(tmp_path: Path) -> None:
    service = Service(
        "it", [sys.executable, "-c", "for i in range(9): print('line', i)"], tmp_path / "log", {}
    )
    await service.start()
    assert await service.wait() == 0
    assert (await service.complaint()).splitlines() == [f"line {number}" for number in range(4, 9)]


async def test_marked_processes_are_found_and_killed_and_others_spared(
    tmp_path: Path, sleeper: Service
) -> None:
    other = await started(tmp_path / "..", SLEEP, {MARK: f"{tmp_path}-other"})
    try:
        assert await asyncio.to_thread(find_marked, tmp_path, tmp_path / "ray") == [sleeper.pid]
        assert await asyncio.to_thread(kill_marked, tmp_path, tmp_path / "ray") == 1
        await sleeper.wait()
        assert await asyncio.to_thread(find_marked, tmp_path, tmp_path / "ray") == []
        assert not other.has_ended()
    finally:
        await other.stop(5)


@pytest.mark.parametrize("folder", ["logs", "ray/session/logs"])
async def test_a_process_that_has_lost_its_mark_is_found_by_where_it_writes(
    tmp_path: Path, folder: str
) -> None:
    directory = tmp_path / folder
    await asyncio.to_thread(directory.mkdir, parents=True)
    service = await started(directory, SLEEP)
    try:
        assert await asyncio.to_thread(find_marked, tmp_path, tmp_path / "ray") == [service.pid]
    finally:
        await service.stop(5)


async def test_whoever_reads_a_log_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "logs/router.log"
    await asyncio.to_thread(log.parent.mkdir)
    reader = await started(tmp_path, f"file = open({str(log)!r}, 'a+'); {SLEEP}")
    try:
        assert await asyncio.to_thread(find_marked, tmp_path, tmp_path / "ray") == []
    finally:
        await reader.stop(5)


def test_nobody_counts_itself_or_its_ancestors_as_a_leftover(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from cluster.local.processes import find_marked\n"
        f"print(find_marked(Path({str(tmp_path)!r}), Path('/none')))"
    )
    shell = f'{sys.executable} -c "$SCRIPT"; true'
    environment = {**os.environ, MARK: str(tmp_path), "SCRIPT": script}
    found = subprocess.run(
        ["/bin/sh", "-c", shell], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]", found.stderr


def test_a_service_dies_with_its_parent_even_if_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert runs(child)
        parent.kill()
    while runs(child):  # the test's own timeout is the limit
        time.sleep(0.01)


async def test_a_log_that_cannot_be_opened_is_no_reason_not_to_start(tmp_path: Path) -> None:
    service = Service("it", ["true"], tmp_path / "gone" / "log", {})
    await service.start()
    assert await service.wait() == 0
    assert "cannot be read" in await service.complaint()


async def test_a_private_redis_serves_and_comes_back_empty_at_its_socket(tmp_path: Path) -> None:
    server = await asyncio.to_thread(PrivateRedis, tmp_path, tmp_path / "log", {})
    await server.start()
    try:
        async with Redis.from_url(server.url, protocol=2) as client:
            await client.set("key", "value")
        await server.service.stop(5)
        await server.start()
        async with Redis.from_url(server.url, protocol=2) as client:
            assert await client.get("key") is None
    finally:
        await server.service.stop(5)
    left = set(await asyncio.to_thread(os.listdir, tmp_path))
    assert left <= {"log", "redis.sock"}, "nothing is kept on disk"


def test_without_the_package_the_machines_own_redis_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server.importlib.util, "find_spec", lambda name: None)
    own = tmp_path / "redis-server"
    own.touch(mode=0o755)
    assert redis_binary({"PATH": str(tmp_path)}) == str(own)


async def test_a_watch_that_is_cancelled_has_left_ray_before_ray_is_shut_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, may_return, left = threading.Event(), threading.Event(), threading.Event()

    def create(spec: FleetSpec) -> None:
        entered.set()
        may_return.wait()
        left.set()

    monkeypatch.setattr(fleet_watch, "_find_or_create", create)
    keeping = asyncio.create_task(FleetWatch(FleetSpec(()), lambda view: None).keep(lambda text: None))
    await asyncio.to_thread(entered.wait)
    keeping.cancel()
    asyncio.get_running_loop().call_later(0.05, may_return.set)
    with pytest.raises(asyncio.CancelledError):
        await keeping
    assert left.is_set()


def test_how_replicas_log_and_where_they_send_traces_holds_for_the_router_too() -> None:
    replica = ReplicaConfig(
        log_format="json", log_level="debug", otlp_endpoint="http://collector:4318", trace_sample_ratio=0.25
    )
    router = load_settings(
        RouterConfig,
        arguments=_shared_settings(replica),
        environment={},
        prefix="X_",
        program="router",
        description="",
    )
    assert (router.log_format, router.log_level) == ("json", "debug")
    assert (router.otlp_endpoint, router.trace_sample_ratio) == ("http://collector:4318", 0.25)
