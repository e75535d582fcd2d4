"""Models whose layers keep different caches, in vLLM: every hit is foretold by what the engine reported."""

import os
from pathlib import Path
from typing import Any

import pytest

from replicas.process.settings import SettingsError
from replicas.protocol.blocks import HASH_BYTES, BlockHash, PublishedBeginning
from replicas.protocol.frames import UserTag
from replicas.protocol.prefix_leases import PrefixLease
from tests.examples import examples
from tests.replicas.vllm_engine.replayed import BLOCKS, Run, assert_foretold, build, write_model

pytestmark = pytest.mark.vllm

NUM_PROMPTS = int(os.environ.get("KVASIR_PROMPTS") or examples(100))


@pytest.mark.parametrize("family", ["gpt_oss", "gemma4", "lfm2"])
def test_every_hit_of_the_engine_is_foretold(family: str, environment: None, tmp_path: Path) -> None:
    engine = build(model=str(write_model(family, tmp_path)), num_blocks=BLOCKS[family])
    try:
        assert engine.card.is_sparse
        assert engine.card.retention_interval == (0 if family == "lfm2" else 2048)
        assert engine.card.capacity_tokens >= engine.card.context_length
        assert_foretold(engine, NUM_PROMPTS)
        assert_shares(engine)
        assert_published(engine)
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["gemma3", "llama4", "mistral", "qwen3_next"])
def test_every_hit_of_another_family_is_foretold(family: str, environment: None, tmp_path: Path) -> None:
    context_length = 4224 if family == "qwen3_next" else 1024  # one block has 1,056 tokens
    engine = build(
        model=str(write_model(family, tmp_path)),
        num_blocks=BLOCKS[family],
        context_length=context_length,
        max_batched_tokens=context_length // 2,
    )
    try:
        assert engine.card.is_sparse
        assert_foretold(engine, NUM_PROMPTS, longest=context_length * 7 // 8)
    finally:
        engine.close()


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


def test_a_tier_below_the_device_is_refused_and_it_says_that_the_model_is_served_without(
    environment: None, tmp_path: Path
) -> None:
    model = write_model("mistral", tmp_path)
    with pytest.raises(SettingsError, match="served without host_kv_bytes"):
        build(model=str(model), num_blocks=BLOCKS["mistral"], host_kv_bytes=10**7)
