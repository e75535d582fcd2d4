"""vLLM keeps the contract of engines."""

import pytest

from tests.replicas.engine_contract import EngineContract, run

__all__ = ["run"]

pytestmark = pytest.mark.vllm


class TestVllmEngine(EngineContract):
    resumes_samples = False
