"""An engine in a process of its own, and which such processes this one has."""

import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from replicas.config import ReplicaConfig
from replicas.engine_process.build import build_engine
from replicas.engine_process.parent import EngineProcess


def config(**settings: Any) -> ReplicaConfig:
    defaults: dict[str, Any] = {
        "engine": "simulated",
        "simulated_hardware": "instant",
        "num_blocks": 64,
        "max_batched_tokens": 256,
        "max_running": 16,
        "engine_process": True,
    }
    return ReplicaConfig(**(defaults | settings))


def built(**settings: Any) -> Iterator[EngineProcess]:
    engine, _ = build_engine(config(**settings))
    assert isinstance(engine, EngineProcess)
    yield engine
    engine.close()


@pytest.fixture
def process() -> Iterator[EngineProcess]:
    yield from built()


def engine_children() -> set[psutil.Process]:
    """Dead ones that nobody has waited for among them."""
    return {child for child in psutil.Process().children() if is_engine(child)}


def is_engine(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_ZOMBIE or "replicas.engine_process.child" in process.cmdline()


def wait_gone(pid: int) -> None:
    """Returns when there is no such process, or only its last trace where nobody reaps orphans."""
    try:
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    except psutil.NoSuchProcess:
        return
