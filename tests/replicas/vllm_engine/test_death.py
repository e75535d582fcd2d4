"""When vLLM dies inside a replica, the replica is gone at once: nobody waits for its lease to run out."""

from typing import Any

import grpc
import pytest

from replicas.config import ReplicaConfig
from replicas.engine import Engine
from replicas.engine_process.build import build_engine
from replicas.errors import EngineDied
from replicas.host import ReplicaHost
from replicas.protocol.frames import FinishReason, RefusalCode, RequestKey
from replicas.protocol.status import ReplicaId, TokenizerBundle
from tests.replicas.mirror import connect, read_record
from tests.replicas.router_client import RouterClient, submit
from tests.replicas.vllm_engine.conftest import vllm_config

pytestmark = pytest.mark.vllm

REPLICA = ReplicaId("vllm-to-die")
MODEL = "toy_model"


@pytest.mark.parametrize("error_name", ["EngineDeadError", "RuntimeError"])
async def test_a_step_that_raises_ends_the_lease_at_once(
    environment: None, redis_url: str, error_name: str
) -> None:
    built: list[Any] = []

    def build(config: ReplicaConfig) -> tuple[Engine, TokenizerBundle]:
        engine, bundle = build_engine(config)
        built.append(engine)
        return engine, bundle

    # The lease outlives the test's time limit, so a record that is gone did not run out.
    config = vllm_config(replica_id=REPLICA, redis_url=redis_url, lease_seconds=600.0, heartbeat_seconds=0.05)
    host = ReplicaHost(config, build=build)
    redis = connect(redis_url)
    await host.start()
    assert await read_record(redis, MODEL, REPLICA) is not None
    _break(built[0], error_name)
    async with grpc.aio.insecure_channel(host.address) as channel:
        client = RouterClient(channel)
        await client.send(submit(1, max_tokens=100))
        last = (await client.finish((1, 0)))[RequestKey(1, 0)][-1]
        assert last.finish_reason is FinishReason.ERROR
        assert last.refusal is not None
        assert last.refusal.code is RefusalCode.ENGINE_FAILED
        with pytest.raises(EngineDied):
            await host.wait_dead()
    assert await read_record(redis, MODEL, REPLICA) is None
    await host.stop()
    await redis.aclose()


def test_an_idle_engine_notices_that_a_process_of_vllms_has_died(environment: None) -> None:
    """In one process there is none; the executor of several says it so."""
    engine: Any = build_engine(vllm_config())[0]
    try:
        executor, woken = engine._core._engine_core.model_executor, []
        executor.register_failure_callback = woken.append
        engine.begin(lambda: None)
        assert len(woken) == 1 and not engine.has_work()
        executor.is_failed = True
        assert engine.has_work()
        with pytest.raises(RuntimeError, match="a process of vLLM's has died"):
            engine.step()
    finally:
        engine.close()


def _break(engine: Any, error_name: str) -> None:
    """From its fourth step on, vLLM raises."""
    from vllm.v1.engine.exceptions import EngineDeadError

    step = engine._vllm.step
    num_steps = 0

    def failing() -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 3:
            raise EngineDeadError if error_name == "EngineDeadError" else RuntimeError("a kernel failed")
        return step()

    engine._vllm.step = failing
