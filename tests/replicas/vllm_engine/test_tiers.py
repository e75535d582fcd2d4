"""Blocks that vLLM keeps in the host's memory and on disk: reported by tier, found again, counted right."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from replicas.proof import prove_hashes
from replicas.protocol.blocks import hash_blocks
from replicas.protocol.events import BlockStored, Tier
from replicas.protocol.frames import PromptUsage, UserTag
from tests.replicas.builders import OTHER_ROOT, ROOT
from tests.replicas.engine_contract import prompt_of
from tests.replicas.vllm_engine.conftest import OneEngine
from tests.replicas.vllm_engine.tiered_run import BLOCK_BYTES, TieredRun, tiered_run

if TYPE_CHECKING:
    from replicas.vllm_engine.engine import VllmEngine

pytestmark = pytest.mark.vllm

NUM_HOST_BLOCKS = 48

ANN, BOB = (UserTag(name.ljust(16)) for name in (b"ann", b"bob"))


def settings(disk: Path | None = None) -> dict[str, Any]:
    """With the host's tier, and perhaps a disk behind it, set up as a user would: by engine_args alone."""
    tier: dict[str, Any] = {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "tests.replicas.vllm_engine.host_tier",
        "cpu_bytes_to_use": NUM_HOST_BLOCKS * BLOCK_BYTES,
    }
    if disk is not None:
        tier["self_describing_kv_events"] = True
        tier["secondary_tiers"] = [{"type": "fs", "root_dir": str(disk), "enable_kv_events": True}]
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": tier,
    }
    return {"num_blocks": 32, "engine_args": {"kv_transfer_config": transfer}, "trust_code": True}


@pytest.fixture
def tiered_engine(one_engine: OneEngine) -> "VllmEngine":
    engine: VllmEngine = one_engine.of(**settings())
    return engine


@pytest.fixture
def run(tiered_engine: "VllmEngine") -> Iterator[TieredRun]:
    yield from tiered_run(tiered_engine)


def test_what_leaves_the_device_stays_in_the_host_and_comes_back(run: TieredRun) -> None:
    prove_hashes(run.engine, random.Random(1))
    block_size = run.engine.card.block_size
    prompt = prompt_of(run.engine, 300)
    hashes = hash_blocks(ROOT, prompt, block_size)
    first = run.generate(prompt, max_tokens=5)
    assert run.tiers_of(hashes) == {(Tier.DEVICE, Tier.HOST)}
    positions = {
        block_hash: event.first_block_index + offset
        for event in run.events
        if isinstance(event, BlockStored) and event.tier is Tier.HOST
        for offset, block_hash in enumerate(event.block_hashes)
    }
    assert positions == {block_hash: position for position, block_hash in enumerate(hashes)}
    run.evict(Tier.DEVICE, hashes)
    assert run.tiers_of(hashes) == {(Tier.HOST,)}
    again = run.generate(prompt, max_tokens=5)
    num_tokens = 9 * block_size
    assert run.usage(again) == PromptUsage(300, num_tokens, 0, num_slower_tier_tokens=num_tokens)
    # Now it lies on the device again, and is read from there.
    assert run.usage(run.generate(prompt, max_tokens=1)) == PromptUsage(300, num_tokens, 0)
    assert run.tokens(again) == run.tokens(first)
    assert run.tiers_of(hashes) == {(Tier.DEVICE, Tier.HOST)}


def test_a_copy_that_is_reported_after_its_block_has_left_the_device_is_named(run: TieredRun) -> None:
    block_size = run.engine.card.block_size
    tenant = run.add(prompt_of(run.engine, 20 * block_size, 1), max_tokens=60)
    while len(run.tokens(tenant)) < 5:
        run.step()
    prompt = prompt_of(run.engine, 7 * block_size)
    hashes = hash_blocks(ROOT, prompt, block_size)
    key = run.add(prompt, max_tokens=1)
    while not run.deltas[key]:
        run.step()
    assert run.tiers_of(hashes) == {(Tier.DEVICE,)}
    run.add(prompt_of(run.engine, 7 * block_size, 2), max_tokens=1)
    run.step()
    assert run.tiers_of(hashes[-2:]) == {(Tier.HOST,)}, "in one step evicted and reported"
    run.finish()
    assert (Tier.HOST,) in run.tiers_of(hashes)
    assert all(Tier.HOST in tiers for tiers in run.tiers_of(hashes))


def test_the_events_of_every_tier_are_what_vllm_holds_after_a_storm(
    run: TieredRun, tiered_engine: "VllmEngine"
) -> None:
    rng = random.Random(3)
    shared = [prompt_of(tiered_engine, 500, n) for n in range(3)]
    live = []
    for _ in range(150):
        prompt = [
            *rng.choice(shared)[: rng.randrange(500)],
            *prompt_of(tiered_engine, rng.randrange(1, 60), rng.randrange(10**6)),
        ]
        live.append(run.add(prompt, root=rng.choice((ROOT, OTHER_ROOT)), max_tokens=rng.randrange(1, 20)))
        if rng.random() < 0.2:
            run.abort(live.pop(rng.randrange(len(live))))
        for _ in range(rng.randrange(4)):
            run.step()
        if rng.random() < 0.03:
            run.finish()
            assert tiered_engine.reset_prefix_cache()
    run.finish()
    name = tiered_engine._cache.hashes.names
    truth = {(Tier.DEVICE, *name([key])): n for key, n in tiered_engine.core.cached_hashes().items()}
    truth |= {(Tier.HOST, *name([key])): 1 for key in host_hashes(tiered_engine)}
    assert truth == run.held
    assert run.num_removed[Tier.DEVICE] and run.num_removed[Tier.HOST]


def host_hashes(engine: "VllmEngine") -> list[bytes]:
    """vLLM's hash of every block that its host tier holds, in its own books."""
    from vllm.v1.kv_offload.base import get_offload_block_hash

    manager = engine.core._scheduler.connector.connector_scheduler.manager
    return [bytes(get_offload_block_hash(key)) for key in manager.primary_tier._policy.chunks]


def test_what_an_earlier_process_left_on_disk_is_found_and_named_when_it_comes_back(
    one_engine: OneEngine, tmp_path: Path
) -> None:
    engine = one_engine.of(**settings(tmp_path))
    prompt = prompt_of(engine, 300)
    hashes = hash_blocks(ROOT, prompt, engine.card.block_size)
    for run in tiered_run(engine):
        assert run.usage(run.generate(prompt, max_tokens=1, user=ANN)) == PromptUsage(300, 0, 288)
        assert run.tiers_of(hashes) == {tuple(Tier)}
        run.evict(Tier.HOST, hashes)
        run.evict(Tier.DEVICE, hashes)
        assert run.tiers_of(hashes) == {(Tier.DISK,)}
        assert run.usage(run.generate(prompt, max_tokens=1, user=BOB)) == PromptUsage(
            300, 288, 0, 288, num_slower_tier_tokens=288
        )
        assert run.tiers_of(hashes) == {tuple(Tier)}
    one_engine.close()
    engine = one_engine.of(**settings(tmp_path))
    for run in tiered_run(engine):
        assert run.usage(run.generate(prompt, max_tokens=1, user=ANN)) == PromptUsage(
            300, 288, 0, num_slower_tier_tokens=288
        )
        assert run.tiers_of(hashes) == {(Tier.DEVICE, Tier.HOST)}, "of the disk, vLLM does not say"
        # Who computed it, this process cannot know: not who read it back first.
        assert run.usage(run.generate(prompt, max_tokens=1, user=BOB)) == PromptUsage(300, 288, 0)
