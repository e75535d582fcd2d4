"""vLLM keeps the contract of engines with a tier below its device, too."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from replicas.engine_process.build import build_engine
from tests.replicas.engine_contract import EngineContract, run
from tests.replicas.vllm_engine.conftest import vllm_config

if TYPE_CHECKING:
    from replicas.vllm_engine.engine import VllmEngine

__all__ = ["run"]

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine(environment: None) -> Iterator["VllmEngine"]:
    built: Any = build_engine(vllm_config(host_kv_bytes=8 * 2**20))[0]
    yield built
    built.close()


class TestVllmEngineWithATier(EngineContract):
    resumes_samples = False
