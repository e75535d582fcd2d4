"""The torch engine and the simulated one hold answers to grammars."""

from collections.abc import Iterator

import pytest

from replicas.config import ReplicaConfig
from replicas.engine import Engine
from replicas.engine_process.build import build_engine
from tests.replicas.engine_run import run
from tests.replicas.grammar_contract import GrammarContract

__all__ = ["run"]


def built(engine: str) -> Iterator[Engine]:
    settings = {"max_batched_tokens": 256, "max_running": 16, "num_blocks": 64}
    made, _ = build_engine(
        ReplicaConfig(engine=engine, device="cpu", simulated_hardware="instant", num_threads=1, **settings)
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def torch_engine() -> Iterator[Engine]:
    yield from built("torch")


@pytest.fixture(scope="module")
def simulated_engine() -> Iterator[Engine]:
    yield from built("simulated")


class TestTorchEngine(GrammarContract):
    @pytest.fixture
    def engine(self, torch_engine: Engine) -> Engine:
        return torch_engine


class TestSimulatedEngine(GrammarContract):
    num_schemas = 20

    @pytest.fixture
    def engine(self, simulated_engine: Engine) -> Engine:
        return simulated_engine
