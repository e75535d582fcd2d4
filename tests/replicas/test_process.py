"""`python -m replicas` as a real process: signals, exit codes, and what it says on the way."""

import asyncio
import signal
import sys
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

import grpc
import pytest

from replicas.protocol.frames import FinishReason, RequestKey
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.status import ReplicaId, ReplicaState
from tests.replicas.mirror import connect, read_record
from tests.replicas.router_client import RouterClient, submit

REPOSITORY = Path(__file__).parents[2]


async def launch(*arguments: str, environment: dict[str, str] | None = None) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "replicas",
        *arguments,
        stderr=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY)} | (environment or {}),
    )


async def output_of(process: Process) -> str:
    _, stderr = await process.communicate()
    return stderr.decode()


async def registered(redis: Any, process: Process) -> ReplicaRecord:
    while True:
        assert process.returncode is None, await output_of(process)
        record = await read_record(redis, "toy_model", ReplicaId("r0"))
        if record is not None:
            return record
        await asyncio.sleep(0.02)


def settings(redis_url: str, hardware: str = "h100-8b") -> list[str]:
    return [
        "--replica-id",
        "r0",
        "--engine",
        "simulated",
        "--simulated-hardware",
        hardware,
        "--redis-url",
        redis_url,
    ]


async def test_sigterm_finishes_what_runs_and_leaves_nothing_behind(redis_url: str) -> None:
    redis = connect(redis_url)
    process = await launch(*settings(redis_url))
    record = await registered(redis, process)
    async with grpc.aio.insecure_channel(record.address) as channel:
        client = RouterClient(channel)
        await client.send(submit(1, [77] * 40, max_tokens=150))
        frame = await client.read()
        while frame is not None and not frame.deltas:
            frame = await client.read()
        process.send_signal(signal.SIGTERM)
        found = await client.finish((1, 0))
        assert found[RequestKey(1, 0)][-1].finish_reason is FinishReason.LENGTH
    log = await output_of(process)
    assert process.returncode == 0, log
    assert "draining requests=1" in log
    assert "Traceback" not in log
    assert "77, 77" not in log
    left = {key.decode() for key in await redis.keys("*")}
    assert {key.rpartition(":")[2] for key in left} <= {"models", "events", "registrations"}
    await redis.aclose()


async def test_a_second_signal_stops_at_once(redis_url: str) -> None:
    redis = connect(redis_url)
    process = await launch(*settings(redis_url))
    record = await registered(redis, process)
    async with grpc.aio.insecure_channel(record.address) as channel:
        client = RouterClient(channel)
        await client.send(submit(1, max_tokens=8000))
        frame = await client.read()
        while frame is not None and not frame.deltas:
            frame = await client.read()
        process.send_signal(signal.SIGTERM)
        while record is not None and record.state is not ReplicaState.DRAINING:
            record = await read_record(redis, "toy_model", ReplicaId("r0"))  # type: ignore[assignment]
        process.send_signal(signal.SIGTERM)
        while await client.read() is not None:
            pass
    log = await output_of(process)
    assert process.returncode == 0, log
    assert "stopping at once" in log
    await redis.aclose()


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (["--engine", "abacus"], {}, "setting engine is torch, vllm, simulated, remote, openai, not abacus"),
        ([], {"KVASIR_REPLICA_BLOK_SIZE": "16"}, "did you mean block_size?"),
        (["--engine", "simulated", "--model", "/nowhere"], {}, "no checkpoint directory /nowhere"),
        (
            ["--engine", "simulated", "--redis-url", "nonsense"],
            {},
            "redis_url is not a Redis address",
        ),
        (["--engine", "simulated", "--host", "203.0.113.1"], {}, "cannot listen"),
        (
            ["--engine", "simulated", "--engine-process", "true", "--build-seconds", "0.001"],
            {},
            "the engine was not ready within 0.001 seconds",
        ),
        (["--tls-certificate", "x"], {}, "settings tls_certificate and tls_key go together"),
        (
            ["--tls-certificate", "/nowhere", "--tls-key", "/nowhere"],
            {},
            "cannot read /nowhere: No such file",
        ),
        (
            ["--engine", "simulated", "--health-socket", "/nowhere/health.sock"],
            {},
            "cannot listen on the Unix socket /nowhere/health.sock",
        ),
    ],
)
async def test_what_keeps_it_from_starting_is_one_sentence_and_exit_code_2(
    arguments: list[str], environment: dict[str, str], sentence: str
) -> None:
    process = await launch(*arguments, environment=environment)
    log = await output_of(process)
    assert process.returncode == 2
    assert sentence in log.splitlines()[-1]
    assert "Traceback" not in log


async def test_a_simulated_replica_never_imports_torch() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys, replicas.__main__, replicas.config as c, replicas.engine_process.build as e;"
        "e.build_engine(c.ReplicaConfig(engine='simulated'));"
        "sys.exit('torch' in sys.modules)",
        cwd=REPOSITORY,
    )
    assert await process.wait() == 0
