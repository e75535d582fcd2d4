"""vLLM holds answers to grammars."""

import pytest

from tests.replicas.engine_run import run
from tests.replicas.grammar_contract import GrammarContract

__all__ = ["run"]

pytestmark = pytest.mark.vllm


class TestVllmEngine(GrammarContract):
    resumes_samples = False
