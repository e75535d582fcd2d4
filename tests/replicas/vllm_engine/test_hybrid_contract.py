"""vLLM keeps the contract of engines with a model whose layers keep different caches."""

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
def engine(environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator["VllmEngine"]:
    from replicas.toy_model.make_hybrid_model import write_hybrid_model

    model = tmp_path_factory.mktemp("model") / "gpt-oss"
    write_hybrid_model("gpt_oss", model)
    options = {"prefix_cache_retention_interval": None}
    built: Any = build_engine(vllm_config(model=str(model), num_blocks=128, engine_args=options))[0]
    yield built
    built.close()


class TestSparseVllmEngine(EngineContract):
    resumes_samples = False
    has_one_cache = False
