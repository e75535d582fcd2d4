"""The start-up proof against a broken translation of vLLM's blocks."""

import random
from typing import TYPE_CHECKING, Any

import pytest

from replicas.errors import StartupError
from replicas.proof import prove_hashes
from replicas.protocol.blocks import BlockHash, hash_blocks
from tests.replicas.builders import OTHER_ROOT
from tests.replicas.engine_contract import EngineRun, run

if TYPE_CHECKING:
    from replicas.vllm_engine.engine import VllmEngine

__all__ = ["run"]

pytestmark = pytest.mark.vllm


@pytest.fixture
def engine(adapted_engine: "VllmEngine") -> "VllmEngine":
    return adapted_engine


def test_a_translation_with_another_root_is_refused(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    from replicas.vllm_engine import translation

    monkeypatch.setattr(translation, "root_in", lambda keys: OTHER_ROOT if keys else None)
    with pytest.raises(StartupError, match="reports another hash for block 0"):
        prove_hashes(run.engine, random.Random(1))


def test_a_translation_that_loses_the_chain_is_refused(
    run: EngineRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from replicas.kvcache import hash_map

    def unchained(root: BlockHash, token_ids: Any, block_size: int, **named: Any) -> list[BlockHash]:
        blocks = [token_ids[at : at + block_size] for at in range(0, len(token_ids), block_size)]
        return [hash_blocks(root, block, block_size)[0] for block in blocks]

    monkeypatch.setattr(hash_map, "hash_blocks", unchained)
    with pytest.raises(StartupError, match="reports another hash for block 1"):
        prove_hashes(run.engine, random.Random(1))


def test_a_translation_that_reports_nothing_is_refused(
    run: EngineRun, engine: "VllmEngine", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.core, "take_events", list)
    with pytest.raises(StartupError, match="did not report block 0"):
        prove_hashes(run.engine, random.Random(1))


def test_the_proof_runs_with_every_adapter(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    add = run.engine.add

    def listening(request: Any) -> None:
        asked.append(request.submit.adapter)
        add(request)

    monkeypatch.setattr(run.engine, "add", listening)
    prove_hashes(run.engine, random.Random(1))
    assert asked == [None, *(adapter.name for adapter in run.engine.card.adapters), None]
    assert not run.engine.has_work()


@pytest.mark.parametrize(
    ("root", "sentence"),
    [
        (lambda keys: OTHER_ROOT, "reports another hash for block 0"),
        (lambda keys: None, "did not report block 0"),
    ],
)
def test_a_mapping_that_is_broken_for_adapters_alone_is_refused_by_the_proof(
    run: EngineRun, monkeypatch: pytest.MonkeyPatch, root: Any, sentence: str
) -> None:
    from replicas.vllm_engine import translation

    right = translation.root_in

    def broken(keys: Any) -> BlockHash | None:
        return root(keys) if keys and len(keys) > 1 else right(keys)

    monkeypatch.setattr(translation, "root_in", broken)
    with pytest.raises(StartupError, match=f"{sentence} of the probe prompt with adapter fine-tuned"):
        prove_hashes(run.engine, random.Random(1))


def test_an_own_root_that_vllm_does_not_hash_is_refused(
    run: EngineRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from replicas.vllm_engine import core_view

    class AnotherSalt(str):
        """What no salt is."""

    monkeypatch.setattr(core_view, "PublishedSalt", AnotherSalt)
    with pytest.raises(StartupError, match="reports another hash for block 1 of the probe prompt"):
        prove_hashes(run.engine, random.Random(1))
