"""vLLM as people start it: draft models, quantised weights, a quantised cache. Every hit is foretold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.toy_model import toy_model_path
from tests.replicas.vllm_engine.lora import GEMMA3, write_adapter
from tests.replicas.vllm_engine.replayed import BLOCKS, Run, assert_foretold, build, write_model
from tests.replicas.vllm_engine.variants import write_drafter, write_mtp_model, write_quantized

pytestmark = pytest.mark.vllm

NUM_PROMPTS = 25
NUM_BLOCKS = 60


def drafts(method: str, num_tokens: int = 3, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": num_tokens, **more}}


def toy(**engine_args: Any) -> dict[str, Any]:
    return {"engine_args": engine_args}


def drafted_gpt_oss(folder: Path) -> dict[str, Any]:
    model = write_model("gpt_oss", folder / "model")
    drafter = write_drafter("eagle3", folder / "drafter", model)
    blocks = BLOCKS["gpt_oss"]
    return {"model": str(model), "num_blocks": blocks, **toy(**drafts("eagle3", model=str(drafter)))}


STARTS: dict[str, tuple[int, Callable[[Path], dict[str, Any]]]] = {
    # It compiles for a minute, and vLLM starts no other engine in a process that has loaded its compiler.
    "n-grams": (0, lambda folder: {"engine_process": True, **toy(**drafts("ngram", prompt_lookup_max=4))}),
    "a draft model": (0, lambda folder: toy(**drafts("draft_model", model=str(toy_model_path())))),
    "EAGLE": (
        32,
        lambda folder: toy(**drafts("eagle", model=str(write_drafter("eagle", folder / "drafter")))),
    ),
    "EAGLE 3": (
        32,
        lambda folder: toy(**drafts("eagle3", model=str(write_drafter("eagle3", folder / "drafter")))),
    ),
    "EAGLE 3 beside windows": (32, drafted_gpt_oss),
    "MTP": (32, lambda folder: {"model": str(write_mtp_model(folder / "model")), **toy(**drafts("mtp", 1))}),
    "weights of 8 bits": (0, lambda folder: {"model": str(write_quantized("int8", folder / "model"))}),
    "weights of 4 bits, GPTQ": (0, lambda folder: {"model": str(write_quantized("gptq", folder / "model"))}),
    "weights of 4 bits, AWQ": (0, lambda folder: {"model": str(write_quantized("awq", folder / "model"))}),
    "a cache of 8 bits": (0, lambda folder: toy(kv_cache_dtype="fp8")),
}
"""How each is started, and the tokens by which its hits are shorter."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "n-grams")) for name in STARTS]
)
def test_every_hit_is_foretold(name: str, environment: None, tmp_path: Path) -> None:
    peek_tokens, settings = STARTS[name]
    engine = build(**{"num_blocks": NUM_BLOCKS, **settings(tmp_path)})
    try:
        assert engine.card.peek_tokens == peek_tokens
        assert_foretold(engine, NUM_PROMPTS)
    finally:
        engine.close()


def test_adapters_of_a_model_with_windows_hit_each_its_own(environment: None, tmp_path: Path) -> None:
    model = write_model("gemma3", tmp_path / "model")
    adapters = {
        name: write_adapter(tmp_path / name, seed=seed, shapes=GEMMA3, num_layers=6)
        for seed, name in enumerate(("one", "two"))
    }
    named = {name: str(path) for name, path in adapters.items()}
    engine = build(model=str(model), num_blocks=BLOCKS["gemma3"], adapters=named)
    try:
        run, size = Run(engine), engine.card.block_size
        roots = {name: BlockHash(bytes([seed]) * HASH_BYTES) for seed, name in enumerate((None, *named))}
        prompt = list(range(10, 10 + 3 * size))
        answers = [run.prompt([*prompt, 9], 12, root, adapter=name) for name, root in roots.items()]
        assert len({tuple(tokens) for _, tokens in answers}) == len(roots)
        assert [usage.num_cached_tokens for usage, _ in answers] == [0, 0, 0]
        assert_foretold(engine, 3 * NUM_PROMPTS, adapters=roots)
    finally:
        engine.close()
