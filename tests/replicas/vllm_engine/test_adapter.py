"""The adapter between vLLM's blocks and ours: proven at the start, equal to vLLM's own pool ever after."""

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from replicas.engine import RequestRefused
from replicas.engines import build_engine
from replicas.errors import StartupError
from replicas.proof import prove_hashes
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.frames import RefusalCode, RequestKey
from replicas.protocol.settings import SettingsError
from replicas.residency import Residency
from tests.replicas.builders import OTHER_ROOT, ROOT
from tests.replicas.engine_contract import Run, prompt_of, run
from tests.replicas.vllm_engine.conftest import vllm_config

if TYPE_CHECKING:
    from replicas.vllm_engine.engine import VllmEngine

__all__ = ["run"]

pytestmark = pytest.mark.vllm

NUM_STORM_REQUESTS = 2000


def test_an_adapter_with_another_root_is_refused_by_the_proof(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from replicas.vllm_engine import engine as module

    monkeypatch.setattr(module, "_root", lambda extra_keys: OTHER_ROOT)
    with pytest.raises(StartupError, match="reports another hash for block 0"):
        prove_hashes(run.engine, random.Random(1))


def test_an_adapter_that_loses_the_chain_is_refused_by_the_proof(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from replicas.vllm_engine import hash_map

    def unchained(parent: BlockHash, token_ids: Any, block_size: int, **named: Any) -> list[BlockHash]:
        blocks = [token_ids[at : at + block_size] for at in range(0, len(token_ids), block_size)]
        return [hash_blocks(parent, block, block_size)[0] for block in blocks]

    monkeypatch.setattr(hash_map, "hash_blocks", unchained)
    with pytest.raises(StartupError, match="reports another hash for block 1"):
        prove_hashes(run.engine, random.Random(1))


def test_an_adapter_that_reports_nothing_is_refused_by_the_proof(
    run: Run, engine: "VllmEngine", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.core, "take_events", list)
    with pytest.raises(StartupError, match="did not report block 0"):
        prove_hashes(run.engine, random.Random(1))


@pytest.mark.timeout(600)
def test_the_index_equals_the_block_pool_of_vllm_after_a_storm(run: Run, engine: "VllmEngine") -> None:
    """What an index that keeps every block makes of the events, against vLLM's pool, block by block."""
    block_size = engine.card.block_size
    index = Residency(block_size, index_stride=block_size)
    names: dict[bytes, BlockHash] = {}
    rng = random.Random(17)
    shared = [prompt_of(engine, 300, n) for n in range(4)]
    live: list[RequestKey] = []
    num_unknown = num_resets = 0

    def step() -> None:
        nonlocal num_unknown
        num_unknown += index.observe(run.step().events)

    def compare() -> None:
        """vLLM's own hashes, computed from the tokens of its requests, translated independently."""
        truth = engine.core.cached_hashes()
        assert sum(truth.values()) == sum(run.balance.held.values())
        assert Counter(truth.values()) == Counter(run.balance.held.values())
        assert {names[digest] for digest in truth} == index.kept == set(run.balance.held)
        assert all(run.balance.held[names[digest]] == copies for digest, copies in truth.items())

    for number in range(NUM_STORM_REQUESTS):
        prefix = rng.choice(shared)[: rng.randrange(300)]
        prompt = [*prefix, *prompt_of(engine, rng.randrange(1, 70), rng.randrange(10**6))]
        root = rng.choice((ROOT, OTHER_ROOT))
        live.append(run.add(prompt, root=root, max_tokens=rng.randrange(1, 40)))
        inner = engine._live[f"{live[-1].request_id}-0"].inner
        remember(names, inner, root, block_size)
        if rng.random() < 0.15:
            run.abort(live.pop(rng.randrange(len(live))))
        for _ in range(rng.randrange(5)):
            step()
            for entry in engine._live.values():
                remember(names, entry.inner, entry.request.root, block_size)
        if number % 50 == 49:
            while engine.has_work():
                for entry in engine._live.values():
                    remember(names, entry.inner, entry.request.root, block_size)
                watched = [(entry.inner, entry.request.root) for entry in engine._live.values()]
                step()
                for inner, root in watched:
                    remember(names, inner, root, block_size)
            compare()
            if rng.random() < 0.3:
                assert engine.reset_prefix_cache()
                num_resets += 1
        run.frames.clear()
    run.finish()
    assert num_unknown == 0
    assert num_resets
    assert run.balance.removed


def remember(names: dict[bytes, BlockHash], inner: Any, root: BlockHash, block_size: int) -> None:
    """Which of our hashes stands for each of vLLM's, from the tokens that vLLM has for the request."""
    theirs = [bytes(digest) for digest in inner.block_hashes]
    if theirs and theirs[-1] not in names:
        ours = hash_blocks(root, list(inner.all_token_ids), block_size)
        names.update(zip(theirs, ours, strict=False))


def test_presence_of_resumed_output_is_penalised(run: Run) -> None:
    prompt = prompt_of(run.engine, 20)
    first = run.tokens(run.generate(prompt, max_tokens=1))[0]
    key = run.generate([*prompt, first], max_tokens=2, num_output_tokens=1, frequency_penalty=2.0)
    plain = run.generate(prompt, max_tokens=2, frequency_penalty=2.0)
    assert run.tokens(key) == run.tokens(plain)[1:]


def test_what_only_vllm_refuses_is_refused_as_invalid(run: Run) -> None:
    with pytest.raises(RequestRefused) as caught:
        run.add(prompt_of(run.engine, 20), temperature=5.0)
    assert caught.value.code is RefusalCode.INVALID_REQUEST
    assert "temperature" in caught.value.message
    assert not run.engine.has_work()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"block_size": 16}, "needs a multiple of 32"),
        ({"engine_args": {"tensor_paralel_size": 2}}, "did you mean tensor_parallel_size"),
        ({"engine_args": {"block_size": 64}}, "use the setting block_size"),
        ({"engine_args": {"enable_prefix_caching": False}}, "a replica needs it as it is"),
        ({"device": "cuda"}, "setting device is cuda"),
        ({"num_blocks": 3}, "raise num_blocks or kv_cache_bytes"),
        ({"context_length": 4096, "num_blocks": 20}, "or lower context_length"),
        ({"num_blocks": None, "kv_cache_bytes": 10}, "or lower context_length"),
        ({"engine_args": {"quantization": "awq"}}, "vLLM does not serve"),
        ({"model": "/nowhere"}, "tokenizer.json"),
    ],
)
def test_settings_that_do_not_fit_are_one_clear_sentence(
    environment: None, settings: dict[str, Any], sentence: str
) -> None:
    from replicas.torch_engine.model_config import CheckpointError

    with pytest.raises((SettingsError, StartupError, CheckpointError), match=sentence) as caught:
        build_engine(vllm_config(**settings))
    assert "\n" not in str(caught.value)


def test_an_environment_that_vllm_would_misread_is_refused(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(StartupError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        build_engine(vllm_config())
