"""LoRA adapters in vLLM: each answers as itself, caches for itself alone, and bears the router's hashes."""

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from replicas.engine import RequestRefused
from replicas.engine_process.build import build_engine
from replicas.errors import StartupError
from replicas.process.settings import SettingsError
from replicas.proof import prove_hashes
from replicas.protocol.blocks import BlockHash, Namespace, hash_blocks, namespace_root
from replicas.protocol.events import BlockStored
from replicas.protocol.frames import RefusalCode, StepFrame, UserTag
from replicas.protocol.status import ModelCard
from tests.replicas.builders import OTHER_ROOT, ROOT
from tests.replicas.engine_contract import EngineRun, prompt_of, run
from tests.replicas.vllm_engine.conftest import OneEngine, vllm_config
from tests.replicas.vllm_engine.lora import write_adapter

__all__ = ["run"]

pytestmark = pytest.mark.vllm

SECRET = b"a secret of sixteen bytes or more"


@pytest.fixture
def engine(one_engine: OneEngine, adapters: Mapping[str, str]) -> Any:
    return one_engine.of(adapters=adapters)


def root_of(card: ModelCard, adapter: str | None, salt: str | None = None) -> BlockHash:
    """As routers make it."""
    fingerprints = {loaded.name: loaded.fingerprint for loaded in card.adapters}
    name = None if adapter is None else f"{adapter}:{fingerprints[adapter]}"
    namespace = Namespace(bytes.fromhex(card.fingerprint), card.block_size, adapter=name, salt=salt)
    return namespace_root(SECRET, namespace)


def choices(card: ModelCard) -> list[str | None]:
    return [None, *(adapter.name for adapter in card.adapters)]


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


def test_blocks_of_an_adapter_bear_the_hashes_that_routers_compute(run: EngineRun) -> None:
    """Of the prompt and of what was decoded, while requests of the others run in the same steps."""
    salt = "ours alone"
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


class Place(NamedTuple):
    block_hash: BlockHash
    position: int


class WitnessedRun(EngineRun):
    """Knows which of our hashes stands for each of vLLM's, by the requests alone."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.places: dict[bytes, Place] = {}

    def step(self) -> StepFrame:
        live = list(self.engine._live.values())  # type: ignore[attr-defined]
        frame = super().step()
        for entry in live:
            self._see(entry.inner, entry.request.submit.root)
        return frame

    def _see(self, inner: Any, root: BlockHash) -> None:
        theirs = [bytes(digest) for digest in inner.block_hashes]
        if theirs and theirs[-1] not in self.places:
            ours = hash_blocks(root, list(inner.all_token_ids), self.engine.card.block_size)
            for position, (digest, block_hash) in enumerate(zip(theirs, ours, strict=False)):
                self.places[digest] = Place(block_hash, position)

    def check(self) -> None:
        """Hold vLLM's own block pool against the events, copy by copy."""
        cached = self.engine.core.cached_hashes().items()  # type: ignore[attr-defined]
        pool = {self.places[digest]: n for digest, n in cached}
        assert Counter({place.block_hash: n for place, n in pool.items()}) == self.balance.held


def test_the_events_equal_the_block_pool_of_vllm_in_a_storm(engine: Any) -> None:
    """Evictions, aborts, resets; several users, salts and adapters."""
    rng, run = random.Random(17), WitnessedRun(engine)
    assert engine.reset_prefix_cache()
    run.finish()
    shared = [prompt_of(engine, 160, n) for n in range(4)]
    namespaces = [(name, root_of(engine.card, name, salt)) for name in choices(engine.card) for salt in "ab"]
    for number in range(12):
        for _ in range(50):
            tail = prompt_of(engine, rng.randrange(1, 40), rng.randrange(10**6))
            # On a CPU, adapters cost vLLM more than the model does.
            adapter, root = rng.choice(namespaces[:2] if number % 4 else namespaces)
            keys = run.add_choices(
                [*rng.choice(shared)[: rng.randrange(160)], *tail],
                max_tokens=rng.choices((1, 2, 40), (80, 15, 5))[0],
                num_choices=2 if rng.random() < 0.05 else 1,
                root=root,
                adapter=adapter,
                user=UserTag(rng.choice((b"ann", b"bob")).ljust(16)),
            )
            if rng.random() < 0.15:
                run.abort(keys[0])
            if rng.random() < 0.2:
                run.step()
        run.finish()
        run.check()
        if rng.random() < 0.3:
            assert engine.reset_prefix_cache()
            run.finish()
            assert not run.balance.held
    assert run.balance.removed


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
    alone: None, tmp_path: Path, adapter: dict[str, Any], engine_args: dict[str, Any], sentence: str
) -> None:
    directory = write_adapter(tmp_path / "adapter", **adapter)
    with pytest.raises((SettingsError, StartupError), match=sentence) as caught:
        build_engine(vllm_config(adapters={"tuned": str(directory)}, engine_args=engine_args))
    assert "\n" not in str(caught.value)


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
