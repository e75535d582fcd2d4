"""An engine in a process of its own: the same contract, and what holds when either process dies."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.checkpoints.model_config import CheckpointError
from replicas.config import ReplicaConfig
from replicas.engine import Engine
from replicas.engine_process import parent
from replicas.engine_process.build import build_engine
from replicas.engine_process.parent import EngineProcess
from replicas.errors import EngineDied, StartupError
from replicas.process.settings import SettingsError
from replicas.protocol.frames import FinishReason, StepFrame
from replicas.protocol.pulls import PullHint
from tests.examples import examples
from tests.replicas.builders import engine_request
from tests.replicas.engine_contract import EngineContract, run
from tests.replicas.engine_process.engine_children import built, config, engine_children, process, wait_gone
from tests.replicas.protocol.filled import filled

__all__ = ["process", "run"]

REPOSITORY = Path(__file__).parents[3]

few = settings(max_examples=examples(20))
"""Enough where every example fills every field."""

VLLM_MARKS = [
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed: ./kvasir test --all installs it",
    ),
]


@pytest.fixture(scope="module")
def simulated_engine() -> Iterator[EngineProcess]:
    yield from built()


@pytest.fixture(scope="module")
def vllm_engine() -> Iterator[EngineProcess]:
    yield from built(engine="vllm", num_threads=1)


class TestSimulatedEngineInAProcess(EngineContract):
    has_a_model = False

    @pytest.fixture
    def engine(self, simulated_engine: Engine) -> Engine:
        return simulated_engine


class TestVllmEngineInAProcess:
    """A few of the contract: the engine has kept all of it already, and the pipe is the same."""

    pytestmark = VLLM_MARKS

    @pytest.fixture
    def engine(self, vllm_engine: Engine) -> Engine:
        return vllm_engine

    test_passes_the_start_up_proof = EngineContract.test_passes_the_start_up_proof
    test_every_choice_streams_its_tokens_in_order_and_ends_once = (
        EngineContract.test_every_choice_streams_its_tokens_in_order_and_ends_once
    )
    test_an_aborted_request_says_nothing_more_and_gives_its_blocks_back = (
        EngineContract.test_an_aborted_request_says_nothing_more_and_gives_its_blocks_back
    )
    test_logprobs_name_the_sampled_token_and_the_likeliest = (
        EngineContract.test_logprobs_name_the_sampled_token_and_the_likeliest
    )
    test_what_can_never_run_is_refused = EngineContract.test_what_can_never_run_is_refused

    def test_this_process_has_not_started_vllm(self, engine: Engine) -> None:
        assert isinstance(engine, EngineProcess)
        assert any("libtorch" in each.path for each in psutil.Process(engine.pid).memory_maps())


@pytest.mark.parametrize("kind", get_args(parent.ToChild) + get_args(parent.FromChild))
@given(data=st.data())
@few
def test_every_field_of_every_message_survives_the_pipe(kind: type, data: st.DataObject) -> None:
    whole = config(engine="vllm", engine_args={"seed": 1}, port=9)
    special = {ReplicaConfig: st.just(whole), PullHint: st.just(PullHint("r-1", "e1", "host-1:80", 7))}
    message = data.draw(filled(kind, special))
    decoder = parent.QUESTIONS if kind in get_args(parent.ToChild) else parent.ANSWERS
    assert decoder.decode(parent.ENCODER.encode(message)) == message


@given(filled(StepFrame))
@few
def test_a_frame_arrives_as_it_was_sent(frame: StepFrame) -> None:
    sent = parent.ENCODER.encode(parent.Stepped(frame, has_work=True, seconds=0.5))
    arrived = parent.ANSWERS.decode(sent)
    assert isinstance(arrived, parent.Stepped)
    assert (arrived.frame, arrived.seconds) == (frame, 0.5)


@pytest.mark.parametrize(
    ("settings", "kind", "sentence"),
    [
        ({"simulated_speed": 0.0}, SettingsError, "simulated_speed must be above 0"),
        ({"model": "/nowhere"}, CheckpointError, "no checkpoint directory /nowhere"),
        pytest.param(
            {"engine": "vllm", "engine_args": {"quantization": "awq"}},
            StartupError,
            "vLLM cannot serve",
            marks=VLLM_MARKS,
        ),
    ],
)
def test_what_keeps_an_engine_from_starting_arrives_as_itself(
    settings: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    before = engine_children()
    with pytest.raises(kind, match=sentence) as caught:
        build_engine(config(**settings))
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert engine_children() <= before


def test_a_child_that_dies_while_it_starts_is_a_start_up_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StartupError, match=r"the engine did not start: its process \d+ ended with status 1"):
        build_engine(config())


def test_an_engine_that_raises_names_its_error_and_shows_its_traceback() -> None:
    # So slow that the pause of its first step is infinite, which no clock can sleep.
    engine, _ = build_engine(config(simulated_hardware="h100-8b", simulated_speed=1e-320))
    with closing(engine):
        engine.add(engine_request([5] * 20))
        with pytest.raises(EngineDied, match="OverflowError") as caught:
            engine.step()
    assert "simulated_engine/engine.py" in caught.value.__notes__[0]


def test_a_killed_child_makes_the_next_call_raise(process: EngineProcess) -> None:
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="was ended by SIGKILL"):
        process.step()
    with pytest.raises(EngineDied, match="was ended by SIGKILL"):
        process.add(engine_request([5] * 20))


def test_signals_that_are_meant_for_the_replica_do_not_end_its_engine(process: EngineProcess) -> None:
    assert os.getpgid(process.pid) != os.getpgid(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
    process.add(engine_request([5] * 20, max_tokens=1))
    assert process.step().deltas[0].finish_reason is FinishReason.LENGTH


def test_closing_kills_a_child_that_hangs(process: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "CLOSE_SECONDS", 0.1)
    os.kill(process.pid, signal.SIGSTOP)
    process.close()
    assert not psutil.pid_exists(process.pid)


ENDLESS_STEP = """
import os, signal, sys, threading, time
from replicas.config import ReplicaConfig
from replicas.engine_process.build import build_engine
from tests.replicas.builders import engine_request

engine, _ = build_engine(ReplicaConfig(engine="simulated", simulated_speed=1e-6, engine_process=True))
engine.add(engine_request([5] * 20))
threading.Thread(target=engine.step, daemon=True).start()
time.sleep(0.1)
print(engine.pid, flush=True)
"""
"""A program whose engine process is in a step that takes hours."""

HUNG_CHILD = """#!{executable}
import sys
from replicas.engine_process import child
child._end_with_parent = lambda descriptor: None
child.main(sys.argv[3:])
"""
"""In place of the interpreter: a child that cannot see that its parent has gone, while it is in a step."""


@pytest.mark.parametrize("end", ["sys.exit()", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_the_child_goes_with_its_parent_whatever_ends_that(end: str) -> None:
    wait_gone(int(output_of(ENDLESS_STEP + end)))


def test_a_child_that_hangs_is_killed_when_its_parent_exits(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(HUNG_CHILD.format(executable=sys.executable))
    python.chmod(0o700)
    wait_gone(int(output_of(f"import sys; sys.executable = {str(python)!r}" + ENDLESS_STEP)))


def output_of(program: str) -> bytes:
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=REPOSITORY, check=False
    )
    return done.stdout
