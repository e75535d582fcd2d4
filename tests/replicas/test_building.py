"""An engine that is never ready does not keep its replica starting for ever."""

import threading
import time

import pytest

from replicas import building
from replicas.engine import Engine
from replicas.engine_process.parent import EngineProcess
from replicas.errors import BuiltTooSlowly
from replicas.host import ReplicaHost
from replicas.protocol.status import TokenizerBundle
from tests.replicas.engine_process.engine_children import engine_children
from tests.replicas.scripted_engine import ScriptedEngine
from tests.replicas.whole_replica import config, scripted


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
