"""vLLM in the test process: its environment, and one small engine for all tests of this folder."""

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from replicas.config import ReplicaConfig
from replicas.engine_process.build import build_engine
from replicas.vllm_engine.environment import vllm_environment
from tests.replicas.vllm_engine.lora import write_adapter

if TYPE_CHECKING:
    pass

NUM_BLOCKS = 64


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    installed = importlib.util.find_spec("vllm") is not None
    for item in items:
        if "vllm" in item.keywords:
            # It warns of its own dependencies, at the import and afterwards.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.timeout(400))
            if not installed:
                item.add_marker(
                    pytest.mark.skip(reason="vLLM is not installed: ./kvasir test --all installs it")
                )


@pytest.fixture(scope="package")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vllm_environment(1).items():
            patch.setenv(name, value)
        yield


def vllm_config(**settings: Any) -> ReplicaConfig:
    """In this process, where tests can look inside."""
    defaults = {
        "num_blocks": NUM_BLOCKS,
        "max_batched_tokens": 256,
        "max_running": 16,
        "engine_process": False,
    }
    return ReplicaConfig(engine="vllm", **{**defaults, **settings})


@pytest.fixture(scope="package")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Two, under names that no part of the way may change."""
    directory = tmp_path_factory.mktemp("adapters")
    return {
        "fine-tuned": str(write_adapter(directory / "one", seed=1)),
        "fine_tuned.2": str(write_adapter(directory / "two", seed=2, rank=8)),
    }


@pytest.fixture(scope="package")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model that takes images."""
    from replicas.toy_model.make_image_model import write_image_model

    path = tmp_path_factory.mktemp("model") / "images"
    write_image_model(path)
    return path


class OneEngine:
    """The engine of this process: vLLM shares its state with all engines of a process, and closing one takes
    it from the others. It lives until a test asks for another.
    """

    def __init__(self) -> None:
        self._engine: Any = None
        self._settings: dict[str, Any] = {}

    def of(self, **settings: Any) -> Any:
        """Return the engine with these settings, and build it where the present one has others."""
        if self._engine is None or self._settings != settings:
            self.close()
            self._engine, self._settings = build_engine(vllm_config(**settings))[0], settings
        return self._engine

    def close(self) -> None:
        """Close it, and clear what an engine that did not start has left in the process."""
        from vllm.distributed import cleanup_dist_env_and_memory

        engine, self._engine = self._engine, None
        if engine is None:
            cleanup_dist_env_and_memory()
        else:
            engine.close()


@pytest.fixture(scope="package")
def one_engine(environment: None) -> Iterator[OneEngine]:
    one = OneEngine()
    yield one
    one.close()


@pytest.fixture
def alone(one_engine: OneEngine) -> None:
    """Close the shared engine, since the test builds its own."""
    one_engine.close()


@pytest.fixture
def patient_reading(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is always worth it."""
    monkeypatch.setattr("replicas.kvstore.plan.MIN_PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(
        "replicas.scheduling.speed_meter.SpeedMeter.prefill_seconds_per_token", property(lambda _: 1.0)
    )
