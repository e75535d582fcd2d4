"""The torch engine and the simulated one keep the contract of engines."""

from collections.abc import Iterator

import pytest

from replicas.config import ReplicaConfig
from replicas.engine import Engine
from replicas.engine_process.build import build_engine
from tests.replicas.engine_contract import EngineContract, run

__all__ = ["run"]


def built(engine: str, **settings: int) -> Iterator[Engine]:
    config = ReplicaConfig(
        engine=engine,
        num_blocks=64,
        device="cpu",
        max_batched_tokens=256,
        max_running=16,
        simulated_hardware="instant",
        **settings,  # type: ignore[arg-type]
    )
    made, _ = build_engine(config)
    yield made
    made.close()


@pytest.fixture(scope="module")
def torch_engine() -> Iterator[Engine]:
    yield from built("torch")


@pytest.fixture(scope="module")
def torch_engine_with_host_memory() -> Iterator[Engine]:
    yield from built("torch", host_kv_bytes=32 * 2**20)


@pytest.fixture(scope="module")
def simulated_engine() -> Iterator[Engine]:
    yield from built("simulated")


class TestTorchEngine(EngineContract):
    @pytest.fixture
    def engine(self, torch_engine: Engine) -> Engine:
        return torch_engine


class TestTorchEngineWithHostMemory(EngineContract):
    @pytest.fixture
    def engine(self, torch_engine_with_host_memory: Engine) -> Engine:
        return torch_engine_with_host_memory


class TestSimulatedEngine(EngineContract):
    has_a_model = False
    num_random_requests = 500

    @pytest.fixture
    def engine(self, simulated_engine: Engine) -> Engine:
        return simulated_engine
