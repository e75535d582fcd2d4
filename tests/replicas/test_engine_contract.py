"""The torch engine and the simulated one keep the contract of engines."""

from collections.abc import Iterator

import pytest

from replicas.config import ReplicaConfig
from replicas.engine import Engine
from replicas.engine_process.build import build_engine
from tests.replicas.engine_contract import EngineContract, run

__all__ = ["run"]


def built(engine: str, *, num_blocks: int = 64, **settings: int | str) -> Iterator[Engine]:
    config = ReplicaConfig(
        engine=engine,
        num_blocks=num_blocks,
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


@pytest.fixture(scope="module")
def sparse_engine() -> Iterator[Engine]:
    yield from built(
        "simulated", num_blocks=128, simulated_groups="window:16:40 full:16", simulated_retention=16
    )


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


class TestSparseSimulatedEngine(EngineContract):
    has_a_model = False
    has_one_cache = False
    num_random_requests = 500

    @pytest.fixture
    def engine(self, sparse_engine: Engine) -> Engine:
        return sparse_engine
