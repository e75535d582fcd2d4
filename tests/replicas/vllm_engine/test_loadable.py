"""What is said of a model for vLLM before vLLM has seen it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from replicas.loadable import complaint
from replicas.toy_model import toy_model_path
from tests.replicas.vllm_engine.conftest import vllm_config

pytestmark = pytest.mark.vllm


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("*.py", "corpus", "__pycache__")
    return Path(shutil.copytree(toy_model_path(), tmp_path / "copy", ignore=ignored))


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_model_that_vllm_serves(environment: None, checkpoint: Path) -> None:
    assert complaint(vllm_config(model=str(checkpoint))) is None
    edit(checkpoint, architectures=["MixtralForCausalLM"])
    assert complaint(vllm_config(model=str(checkpoint))) is None, "which torch would not take"


def test_what_vllm_would_refuse_is_told_in_its_words(environment: None, checkpoint: Path) -> None:
    edit(checkpoint, architectures=["AbacusForCausalLM"])
    assert complaint(vllm_config(model=str(checkpoint))) == (
        f"vLLM does not serve the model in {checkpoint}: it has no architecture AbacusForCausalLM"
    )
    assert "no checkpoint directory /nowhere" in str(complaint(vllm_config(model="/nowhere")))
    adapters = vllm_config(adapters={"tuned": "/nowhere"})
    assert complaint(adapters) == "adapter tuned: there is no directory /nowhere"
    typo = vllm_config(engine_args={"max_model_leng": 3})
    assert "vLLM does not have an engine argument max_model_leng; did you mean" in str(complaint(typo))
