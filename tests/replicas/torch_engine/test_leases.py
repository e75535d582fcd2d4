"""A day-long lease on a torch engine with host memory and a disk below it, over a restart."""

import random
from pathlib import Path

from replicas.protocol.frames import PromptUsage
from replicas.protocol.prefix_leases import MAX_LEASE_SECONDS, LeaseAnswer, LeaseRefusal, PrefixLease
from tests.replicas.torch_engine.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.replicas.torch_engine.driving import Driver, greedy

DAY = MAX_LEASE_SECONDS
TIERS = {
    "block_size": 4,
    "num_blocks": 40,
    "context_length": 140,
    "chunk_tokens": 16,
    "index_stride": 16,
    "host_kv_bytes": 8 * 20_480,
    "disk_kv_bytes": 24 * 20_480,
}


def ask(driver: Driver, prompt: list[int], *seconds: int) -> PromptUsage:
    leases = tuple(PrefixLease(len(prompt) // 4, each) for each in seconds)
    key = driver.add(prompt, greedy(1), leases=leases)
    usage = driver.finish()[key].usage
    assert usage is not None
    return usage


def num_leased_on_disk(driver: Driver) -> int:
    assert driver.engine.store is not None
    directory = driver.engine.store.directory
    return sum(directory.leases.holds(name.key) for name in directory.on_disk())


def test_a_leased_prompt_outlasts_the_tiers_and_a_restart(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(70)] for _ in range(60)]
    driver = Driver(checkpoint, **TIERS, kv_folder=str(tmp_path / "kv"))
    driver.engine.begin(lambda: None)
    leased, *others = prompts
    assert ask(driver, leased, DAY).leases == (LeaseAnswer(DAY, 64),)
    assert ask(driver, leased, 10 * DAY).leases == (LeaseAnswer(refusal=LeaseRefusal.TOO_LONG),)
    for prompt in others:
        ask(driver, prompt)
    assert num_leased_on_disk(driver) == 4
    assert ask(driver, leased).num_evicted_early_tokens == 0
    driver.engine.close()

    again = Driver(checkpoint, **TIERS, kv_folder=str(tmp_path / "kv"))
    again.engine.begin(lambda: None)
    for prompt in others:
        ask(again, prompt)
    assert num_leased_on_disk(again) == 4
    again.engine.close()
