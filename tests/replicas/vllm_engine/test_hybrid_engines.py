"""Models whose layers keep different caches, in vLLM: every hit is foretold by what the engine reported."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from replicas.engine import expand
from replicas.engine_process.build import build_engine
from replicas.process.settings import SettingsError
from replicas.proof import prove_hashes
from replicas.protocol.blocks import HASH_BYTES, BlockHash, PublishedBeginning, pack_token_ids
from replicas.protocol.frames import PromptUsage, SamplingParams, Submit, UserTag
from replicas.protocol.prefix_leases import PrefixLease
from tests.examples import examples
from tests.replicas.vllm_engine.conftest import vllm_config
from tests.replicas.vllm_engine.sparse_router import ROOT, Prompts, SparseRouter

pytestmark = pytest.mark.vllm

NUM_PROMPTS = examples(100)
LONGEST = 900
BLOCKS = {"gpt_oss": 90, "gemma3": 220, "gemma4": 150, "llama4": 150, "mistral": 80, "lfm2": 110}


def write_model(family: str, directory: Path) -> Path:
    from replicas.toy_model.make_hybrid_model import write_hybrid_model

    write_hybrid_model(family, directory)
    return directory


def build(model: Path, family: str, **settings: Any) -> Any:
    defaults = {"num_blocks": BLOCKS[family], "context_length": 1024, "max_batched_tokens": 512}
    return build_engine(vllm_config(model=str(model), **{**defaults, **settings}))[0]


class Run:
    """One prompt after another, and a router that hears of them."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.router = SparseRouter(engine.card)
        self.serial = 0

    def prompt(
        self, prompt: list[int], num_output_tokens: int, root: BlockHash = ROOT, **fields: Any
    ) -> tuple[PromptUsage, list[int]]:
        """`fields` are those of the submit."""
        self.serial += 1
        sampling = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True, temperature=0.0)
        submit = Submit(self.serial, pack_token_ids(prompt), sampling, root, **fields)
        (request,) = expand(submit, self.serial)
        self.engine.add(request)
        usage: PromptUsage | None = None
        output: list[int] = []
        while self.engine.has_work():
            frame = self.engine.step()
            self.router.hear(frame.events)
            for delta in frame.deltas:
                usage = usage or delta.usage
                output += delta.token_ids
        assert usage is not None
        return usage, output


def replay(engine: Any, num_prompts: int, longest: int = LONGEST) -> Counter[str]:
    run, prompts = Run(engine), Prompts(7, engine.card.block_size, longest)
    figures: Counter[str] = Counter()
    for _ in range(num_prompts):
        prompt = prompts.next()
        foretold = run.router.hit(prompt)
        usage, output = run.prompt(prompt, prompts.num_output_tokens())
        figures["wrong"] += usage.num_cached_tokens != foretold
        figures["tokens"] += len(prompt)
        figures["hit tokens"] += foretold
        figures["unresumable"] += usage.num_unresumable_tokens > 0
        prompts.ran(prompt, output)
    figures["points"], figures["blocks"] = len(run.router.points), engine._cache.num_copies
    return figures


@pytest.mark.parametrize("family", ["gpt_oss", "gemma4", "lfm2"])
def test_every_hit_of_the_engine_is_foretold(family: str, environment: None, tmp_path: Path) -> None:
    engine = build(write_model(family, tmp_path), family)
    try:
        assert engine.card.is_sparse and engine.card.retention_interval == 0
        assert engine.card.capacity_tokens >= engine.card.context_length
        prove_hashes(engine, random.Random(0))
        figures = replay(engine, NUM_PROMPTS)
        assert not figures["wrong"] and figures["hit tokens"] > 0.1 * figures["tokens"], figures
        assert_shares(engine)
        assert_published(engine)
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
        build(model, "mistral", host_kv_bytes=10**7)
