"""A real torch engine whose memory below the device is short: what tenants have within their shares stays."""

import random
from pathlib import Path

import pytest

from replicas.protocol.frames import PromptUsage
from replicas.protocol.prefix_leases import LeaseRefusal, PrefixLease
from tests.replicas.torch_engine.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.replicas.torch_engine.driving import Driver, greedy

SIZES = {
    "block_size": 4,
    "num_blocks": 60,
    "context_length": 200,
    "chunk_tokens": 16,
    "index_stride": 16,
    "max_batched_tokens": 48,
}
ADA, EVE = b"ada-0000", b"eve-0000"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("random-llama"), "llama")


def tiered(checkpoint: Path, num_chunks: int, **settings: object) -> Driver:
    """An engine whose host memory has room for so many chunks."""
    probe = Driver(checkpoint, **SIZES, host_kv_bytes=2**20)
    tiers = probe.engine._scheduler._lower_tiers
    assert tiers is not None
    slot_bytes = tiers._store.arena.slot_bytes
    driver = Driver(checkpoint, **SIZES, host_kv_bytes=num_chunks * slot_bytes, **settings)
    driver.always_load()
    return driver


def prompt(seed: int, num_tokens: int = 160) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def ask(driver: Driver, tokens: list[int], **fields: object) -> PromptUsage:
    key = driver.add(tokens, greedy(1), **fields)
    usage = driver.finish()[key].usage
    assert usage is not None
    for _ in range(3):
        driver.step()
    return usage


@pytest.mark.parametrize("has_share", [True, False])
def test_a_flood_of_another_tenant_leaves_what_is_within_a_share(checkpoint: Path, has_share: bool) -> None:
    driver = tiered(checkpoint, 24)
    share = {"tenant": ADA, "store_share": 0.5 if has_share else 0.0}
    ask(driver, prompt(1), **share)
    for seed in range(100, 112):
        ask(driver, prompt(seed), tenant=EVE)
    again = ask(driver, prompt(1), **share)
    assert again.num_host_tokens == (156 if has_share else 0)


def test_a_lease_of_an_aborted_request_takes_nothing_of_another_tenants_share(checkpoint: Path) -> None:
    driver = tiered(checkpoint, 24, lease_share=0.5)
    lease = (PrefixLease(40, 60),)
    key = driver.add(prompt(1), greedy(50), tenant=EVE, lease_share=0.4, leases=lease)
    driver.engine.abort(key)
    driver.finish()
    refused = ask(driver, prompt(2), tenant=EVE, lease_share=0.4, leases=lease)
    granted = ask(driver, prompt(3), tenant=ADA, lease_share=0.6, leases=(PrefixLease(28, 60),))
    assert [answer.refusal for answer in refused.leases] == [LeaseRefusal.TENANT_SHARE]
    assert [answer.refusal for answer in granted.leases] == [None]
