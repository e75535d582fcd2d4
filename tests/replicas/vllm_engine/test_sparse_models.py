"""Models whose layers keep different caches, and vLLM as people start it: every hit is foretold."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtests.stacks.local_stack import local_stack
from replicas.protocol.blocks import HASH_BYTES, BlockHash, PublishedBeginning
from replicas.protocol.frames import UserTag
from replicas.protocol.prefix_leases import PrefixLease
from replicas.toy_model import toy_model_path
from tests.examples import examples
from tests.replicas.vllm_engine.conftest import OneEngine
from tests.replicas.vllm_engine.foretold import BLOCKS, Run, assert_foretold, write_model
from tests.replicas.vllm_engine.killed_run import KilledRun
from tests.replicas.vllm_engine.lora import GEMMA3, write_adapter
from tests.replicas.vllm_engine.variants import write_drafter, write_mtp_model, write_quantized

pytestmark = pytest.mark.vllm

SIZES: dict[str, Any] = {"context_length": 1024, "max_batched_tokens": 512}
NUM_PROMPTS = int(os.environ.get("KVASIR_PROMPTS") or examples(100))


@pytest.mark.parametrize("family", ["gpt_oss", "gemma4", "lfm2"])
def test_every_hit_of_the_engine_is_foretold(family: str, one_engine: OneEngine, tmp_path: Path) -> None:
    engine = one_engine.of(model=str(write_model(family, tmp_path)), num_blocks=BLOCKS[family], **SIZES)
    assert engine.card.is_sparse
    assert engine.card.retention_interval == (0 if family == "lfm2" else 2048)
    assert engine.card.capacity_tokens >= engine.card.context_length
    assert_foretold(engine, NUM_PROMPTS)
    assert_shares(engine)
    assert_published(engine)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["llama4", "mistral", "qwen3_next"])
def test_every_hit_of_another_family_is_foretold(family: str, one_engine: OneEngine, tmp_path: Path) -> None:
    context_length = 4224 if family == "qwen3_next" else 1024  # one block has 1,056 tokens
    engine = one_engine.of(
        model=str(write_model(family, tmp_path)),
        num_blocks=BLOCKS[family],
        context_length=context_length,
        max_batched_tokens=context_length // 2,
    )
    assert engine.card.is_sparse
    assert_foretold(engine, NUM_PROMPTS, longest=context_length * 7 // 8)


def assert_shares(engine: Any) -> None:
    """The third user of a beginning hits what the first computed; the second found it, but not to resume."""
    run, size = Run(engine), engine.card.block_size
    assert engine.reset_prefix_cache()
    shared = [each % 1000 + 10 for each in range(8 * size)]
    users = [UserTag(each * 16) for each in (b"a", b"b", b"c")]
    usages = [
        run.prompt(shared + [1100 + place] * (2 * size + 5), 2, user=user, leases=(PrefixLease(4, 60),))[0]
        for place, user in enumerate(users)
    ]
    first, second, third = usages
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    assert second.num_unresumable_tokens == 8 * size
    assert third.num_cached_tokens == 8 * size and third.num_unresumable_tokens == 0
    assert (third.num_cross_user_tokens, third.num_own_tokens) == (8 * size, 0)
    assert all(answer.refusal is not None for usage in usages for answer in usage.leases)


def assert_published(engine: Any) -> None:
    """Tenants share the published beginning of a prompt, in our blocks whatever vLLM's are, and no more."""
    run, size = Run(engine), engine.card.block_size
    assert engine.reset_prefix_cache()
    prompt = [each % 900 + 20 for each in range(10 * size + 5)]
    published = PublishedBeginning(BlockHash(bytes(HASH_BYTES)), 4)
    roots = [BlockHash(bytes([tenant]) * HASH_BYTES) for tenant in range(1, 4)]
    found = [run.prompt(prompt, 2, root, published=published)[0].num_cached_tokens for root in roots]
    assert found == [0, 0, 4 * size]
    assert run.prompt(prompt, 2, roots[0], published=published)[0].num_cached_tokens == 10 * size


NUM_BLOCKS = 60


def drafts(method: str, num_tokens: int = 3, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": num_tokens, **more}}


def toy(**engine_args: Any) -> dict[str, Any]:
    return {"engine_args": engine_args}


def drafted_gpt_oss(folder: Path) -> dict[str, Any]:
    model = write_model("gpt_oss", folder / "model")
    drafter = write_drafter(folder / "drafter", model)
    blocks = BLOCKS["gpt_oss"]
    return {"model": str(model), "num_blocks": blocks, **toy(**drafts("eagle3", model=str(drafter)))}


STARTS: dict[str, tuple[int, Callable[[Path], dict[str, Any]]]] = {
    "a draft model": (0, lambda folder: toy(**drafts("draft_model", model=str(toy_model_path())))),
    "EAGLE 3 beside windows": (32, drafted_gpt_oss),
    "MTP": (32, lambda folder: {"model": str(write_mtp_model(folder / "model")), **toy(**drafts("mtp", 1))}),
    "weights of 4 bits, GPTQ": (0, lambda folder: {"model": str(write_quantized(folder / "model"))}),
    "a cache of 8 bits": (0, lambda folder: toy(kv_cache_dtype="fp8")),
}
"""How each is started, and the tokens by which its hits are shorter."""


@pytest.mark.parametrize("name", STARTS)
def test_every_hit_of_vllm_as_people_start_it_is_foretold(
    name: str, one_engine: OneEngine, tmp_path: Path
) -> None:
    peek_tokens, settings = STARTS[name]
    engine = one_engine.of(**{"num_blocks": NUM_BLOCKS, **SIZES, **settings(tmp_path)})
    assert engine.card.peek_tokens == peek_tokens
    assert_foretold(engine, 25)


def test_adapters_of_a_model_with_windows_hit_each_its_own(one_engine: OneEngine, tmp_path: Path) -> None:
    model = write_model("gemma3", tmp_path / "model")
    adapters = {
        name: write_adapter(tmp_path / name, seed=seed, shapes=GEMMA3, num_layers=6)
        for seed, name in enumerate(("one", "two"))
    }
    named = {name: str(path) for name, path in adapters.items()}
    engine = one_engine.of(model=str(model), num_blocks=BLOCKS["gemma3"], adapters=named, **SIZES)
    run, size = Run(engine), engine.card.block_size
    roots = {name: BlockHash(bytes([seed]) * HASH_BYTES) for seed, name in enumerate((None, *named))}
    prompt = list(range(10, 10 + 3 * size))
    answers = [run.prompt([*prompt, 9], 12, root, adapter=name) for name, root in roots.items()]
    assert len({tuple(tokens) for _, tokens in answers}) == len(roots)
    assert [usage.num_cached_tokens for usage, _ in answers] == [0, 0, 0]
    assert_foretold(engine, 75, adapters=roots)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hits_are_foretold_and_answers_go_on_while_replicas_are_killed(tmp_path: Path) -> None:
    settings = {
        "engine": "vllm",
        "model": write_model("gpt_oss", tmp_path),
        "model_name": "gpt-oss",
        "num_blocks": 90,  # so few that they are evicted
        "context_length": 1100,
        "max_batched_tokens": 512,
        "num_threads": 1,
    }
    with (
        local_stack(num_replicas=2, replica_settings=settings) as stack,
        httpx.Client(base_url=stack.url, timeout=120) as client,
    ):
        run = KilledRun(stack, client, "gpt-oss", 32)
        run.go(60, num_kills=2)
    assert not run.wrong, (run.wrong, run.figures)
    assert run.figures["hit tokens"] > 0.1 * run.figures["prompt tokens"], run.figures
    assert run.figures["resumed"] >= 2 and not run.figures["other than asked again"], run.figures
