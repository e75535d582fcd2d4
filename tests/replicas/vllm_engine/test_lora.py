"""LoRA adapters in vLLM: each answers as itself, caches for itself alone, and bears the router's hashes."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from replicas.engine import RequestRefused
from replicas.engine_process.build import build_engine
from replicas.errors import StartupError
from replicas.process.settings import SettingsError
from replicas.protocol.blocks import BlockHash, Namespace, hash_blocks, namespace_root
from replicas.protocol.events import BlockStored
from replicas.protocol.frames import RefusalCode
from replicas.protocol.status import ModelCard
from tests.replicas.builders import ROOT
from tests.replicas.engine_contract import EngineRun, prompt_of, run
from tests.replicas.vllm_engine.conftest import vllm_config
from tests.replicas.vllm_engine.lora import write_adapter

if TYPE_CHECKING:
    from replicas.vllm_engine.engine import VllmEngine

__all__ = ["run"]

pytestmark = pytest.mark.vllm

SECRET = b"a secret of sixteen bytes or more"


@pytest.fixture
def engine(adapted_engine: "VllmEngine") -> "VllmEngine":
    return adapted_engine


def root_of(card: ModelCard, adapter: str | None, salt: str | None = None) -> BlockHash:
    """As routers make it."""
    fingerprints = {loaded.name: loaded.fingerprint for loaded in card.adapters}
    name = None if adapter is None else f"{adapter}:{fingerprints[adapter]}"
    namespace = Namespace(bytes.fromhex(card.fingerprint), card.block_size, adapter=name, salt=salt)
    return namespace_root(SECRET, namespace)


def choices(card: ModelCard) -> list[str | None]:
    return [None, *(adapter.name for adapter in card.adapters)]


def test_the_card_names_the_adapters(run: EngineRun, adapters: Mapping[str, str]) -> None:
    card = run.engine.card
    assert [adapter.name for adapter in card.adapters] == sorted(adapters)
    assert len({adapter.fingerprint for adapter in card.adapters}) == 2


def test_adapters_and_the_model_answer_each_as_itself_alone_or_together(run: EngineRun) -> None:
    card = run.engine.card
    prompt = prompt_of(run.engine, 70)
    alone = {
        name: run.tokens(run.generate(prompt, max_tokens=12, adapter=name, root=root_of(card, name)))
        for name in choices(card)
    }
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    together = {
        name: run.add(prompt, max_tokens=12, adapter=name, root=root_of(card, name, "together"))
        for name in choices(card)
    }
    run.finish()
    assert {name: run.tokens(key) for name, key in together.items()} == alone
    assert not any(run.usage(key).num_cached_tokens for key in together.values())


@pytest.mark.parametrize("salt", [None, "ours alone"])
def test_blocks_of_an_adapter_bear_the_hashes_that_routers_compute(run: EngineRun, salt: str | None) -> None:
    """Of the prompt and of what was decoded, while requests of the others run in the same steps."""
    card = run.engine.card
    prompt = prompt_of(run.engine, 2 * card.block_size + 3)
    keys = {
        name: run.add(prompt, max_tokens=2 * card.block_size, adapter=name, root=root_of(card, name, salt))
        for name in choices(card)
    }
    run.finish()
    stored = [
        block_hash
        for event in run.events
        if isinstance(event, BlockStored)
        for block_hash in event.block_hashes
    ]
    expected = [
        block_hash
        for name, key in keys.items()
        for block_hash in hash_blocks(
            root_of(card, name, salt), [*prompt, *run.tokens(key)][:-1], card.block_size
        )
    ]
    assert len(expected) == len(set(expected)) == 3 * 4
    assert sorted(stored) == sorted(expected)


def test_an_adapter_finds_its_own_blocks_and_those_of_nobody_else(run: EngineRun) -> None:
    card = run.engine.card
    prompt = prompt_of(run.engine, 3 * card.block_size + 1)
    for name in choices(card):
        root = root_of(card, name)
        assert run.usage(run.generate(prompt, adapter=name, root=root)).num_cached_tokens == 0
    for name in choices(card):
        root = root_of(card, name)
        assert (
            run.usage(run.generate(prompt, adapter=name, root=root)).num_cached_tokens == 3 * card.block_size
        )


def test_not_even_under_one_root_do_adapters_and_the_model_share_a_block(run: EngineRun) -> None:
    prompt = prompt_of(run.engine, 100)
    for name in choices(run.engine.card):
        assert run.usage(run.generate(prompt, adapter=name, root=ROOT)).num_cached_tokens == 0


def test_an_adapter_that_is_not_there_is_refused_by_name(run: EngineRun) -> None:
    with pytest.raises(RequestRefused) as caught:
        run.add(prompt_of(run.engine, 20), adapter="absent")
    assert caught.value.code is RefusalCode.INVALID_REQUEST
    assert caught.value.message == ("there is no adapter 'absent'; this replica has fine-tuned, fine_tuned.2")
    assert not run.engine.has_work()


@pytest.mark.parametrize(
    ("adapter", "engine_args", "sentence"),
    [
        ({"rank": 600}, {}, "adapter tuned has rank 600; vLLM takes up to 512"),
        ({}, {"max_lora_rank": 1}, "max_lora_rank to 1, but adapter tuned has rank 4"),
        ({}, {"enable-lora": False}, "turns enable_lora off, but the setting adapters names adapters"),
        ({}, {"max_loras": 1}, "must set max_loras to 2 or not at all"),
        ({}, {"max_cpu_loras": 1}, r"max_cpu_loras \(1\) must be >= max_loras \(2\)"),
        ({"use_dora": True}, {}, "vLLM refuses adapter tuned: vLLM does not yet support DoRA"),
        ({"width": 256}, {}, "vLLM refuses adapter tuned: "),
    ],
)
def test_an_adapter_that_vllm_does_not_take_is_one_clear_sentence(
    environment: None, tmp_path: Path, adapter: dict[str, Any], engine_args: dict[str, Any], sentence: str
) -> None:
    directory = write_adapter(tmp_path / "adapter", **adapter)
    with pytest.raises((SettingsError, StartupError), match=sentence) as caught:
        build_engine(vllm_config(adapters={"tuned": str(directory)}, engine_args=engine_args))
    assert "\n" not in str(caught.value)
