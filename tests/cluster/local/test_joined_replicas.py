"""`kvasir join`: which replicas run, where, and what becomes of them."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, start_http_server

from cluster.config import BackoffSpec, FleetSpec, FoundServer
from cluster.local import joined_replicas
from cluster.local.joined_replicas import JoinedReplicas, environment_of, plan_slots
from cluster.registry import read_registry
from loadtests.stacks.local_stack import free_port
from replicas.config import ENVIRONMENT_PREFIX, ReplicaConfig
from replicas.process.settings import load_settings
from replicas.toy_model import checkpoint_directory
from tests.cluster.finding import finding
from tests.cluster.kvasir_command import COMMAND, wait_until
from tests.redis_server import RedisServer
from tests.replicas.remote_engine.stand_in import SERVED_NAME, StandIn

NAMES = st.sets(st.sampled_from("abcdef"))


@given(st.lists(st.tuples(NAMES, NAMES), max_size=8))
def test_every_wanted_server_has_one_slot_of_its_own_and_the_lowest(
    steps: list[tuple[set[str], set[str]]],
) -> None:
    taken: dict[str, int] = {}
    for wanted, ended in steps:
        starting, ending = plan_slots(wanted, taken)
        assert not starting.keys() & taken.keys(), "one that still drains has its name and its ports"
        assert set(ending) == taken.keys() - wanted
        taken |= starting
        assert wanted <= taken.keys()
        assert len(set(taken.values())) == len(taken)
        assert plan_slots(wanted, taken)[0] == {}
        taken = {name: slot for name, slot in taken.items() if name in wanted or name not in ended}
        if not taken:
            assert sorted(plan_slots({"x", "y"}, taken)[0].values()) == [0, 1]


def test_a_replica_has_the_settings_of_its_pool_from_its_environment() -> None:
    config = ReplicaConfig(
        engine="vllm",
        engine_args={"seed": None, "ratio": 0.5, "name": "a,b=c"},
        trust_code=True,
        redis_url="redis://:pass word@redis:6379/1",
        host_kv_bytes=2**40,
        model_aliases=("gpt-4o", "a,b"),
    )
    read = load_settings(
        ReplicaConfig,
        arguments=[],
        environment=environment_of(config),
        prefix=ENVIRONMENT_PREFIX,
        program="",
        description="",
    )
    assert read == config
    assert environment_of(ReplicaConfig()) == {}


@contextmanager
def joining(folder: Path, *, redis_url: str, port: int) -> Iterator["subprocess.Popen[str]"]:
    pool = {
        "name": "p",
        "engines": {"file": str(folder / "servers")},
        "settings": {"model": str(checkpoint_directory(None))},
    }
    (folder / "fleet.yaml").write_text(yaml.safe_dump({"pools": [pool], "drain_seconds": 5}))
    command = [*COMMAND, "join", str(folder / "fleet.yaml")]
    command += ["--port", str(port), "--metrics-port", str(port + 10)]
    with (folder / "out").open("w") as output:
        variables = {**os.environ, "REDIS_URL": redis_url}
        process = subprocess.Popen(command, stdout=output, stderr=output, text=True, env=variables)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.cluster
def test_replicas_of_found_servers_come_and_go(tmp_path: Path) -> None:
    servers, redis, port = [StandIn() for _ in range(3)], RedisServer(), free_port()
    redis.start()
    said = (tmp_path / "out").read_text

    def becomes(*expected: StandIn) -> None:
        ids = {f"p_at_127.0.0.1-{server.port}-0" for server in expected}
        wait_until(lambda: set(read_registry(redis.url).records) == ids, said, 60)

    def listed(*named: StandIn) -> None:
        (tmp_path / "servers").write_text("".join(f"{server.url}\n" for server in named))

    try:
        a, b, c = servers
        listed(a, b)
        with joining(tmp_path, redis_url=redis.url, port=port) as process:
            becomes(a, b)
            metrics = httpx.get(f"http://127.0.0.1:{port + 10}/metrics", trust_env=False).text
            for server in (a, b):
                labels = f'pool="p",replica="p_at_127.0.0.1-{server.port}-0"'
                assert f"replica_steps_total{{{labels}}}" in metrics
                assert f'replica_info{{engine="remote",model="{SERVED_NAME}",{labels},' in metrics
            listed(a, c)
            becomes(a, c)
            a.started_at += 1
            wait_until(
                lambda: f"p_at_127.0.0.1-{a.port}-0 ended with code 1; starting it again in 0 s" in said(),
                said,
            )
            becomes(a, c)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, said()
            becomes()
    finally:
        for server in servers:
            server.close()
        redis.kill()


async def test_a_replica_that_cannot_be_started_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "no more processes")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    said: list[str] = []
    spec = FleetSpec((finding("p"),), backoff=BackoffSpec(0.1))
    replicas = JoinedReplicas(spec, {}, said.append, host="127.0.0.1", port=1, metrics_port=2)
    await replicas._take("p", [FoundServer("http://a:1")])
    await asyncio.sleep(0.5)
    assert "p_at_a-1-0 cannot be started ([Errno 11] no more processes); starting it again in 0.1 s" in said
    assert len(said) < 8
    (task,) = replicas._tasks.values()
    replicas._is_ending = True
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_replicas_that_hang_and_a_proxy_keep_no_metrics_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_replicas, "SCRAPE_SECONDS", 1.0)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    registry = CollectorRegistry()
    Counter("asked", "", registry=registry).inc()
    server, thread = start_http_server(0, "127.0.0.1", registry)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        urls = [f"http://127.0.0.1:{hanging.getsockname()[1]}", f"http://127.0.0.1:{server.server_port}"]
        addresses = {f"r{number}-0": ("p", url) for number, url in enumerate([urls[0]] * 8 + urls[1:])}
        began = time.monotonic()
        families = list(joined_replicas._ReplicasMetrics(lambda: addresses).collect())
        assert time.monotonic() - began < 4.0
    found = {sample.name: sample.labels for family in families for sample in family.samples}
    assert found["asked_total"] == {"replica": "r8-0", "pool": "p"}
    server.shutdown()
    server.server_close()
    thread.join()


def test_only_pools_that_find_servers_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    pools = [{"name": "own", "settings": {"model": "toy"}}]
    file.write_text(yaml.safe_dump({"redis_url": "redis://127.0.0.1:1", "pools": pools}))
    done = subprocess.run([*COMMAND, "join", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "kvasir: pool own has no engines, and kvasir join starts no others\n",
    )
