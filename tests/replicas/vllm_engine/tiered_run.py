"""Driving a vLLM that has tiers below its device: where each block lies, by what the engine said of it."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from replicas.engine_process.build import build_engine
from replicas.kvstore.layout import file_bytes
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, Tier
from replicas.protocol.frames import StepFrame
from tests.replicas.engine_run import EngineRun, prompt_of
from tests.replicas.vllm_engine.conftest import vllm_config

BLOCK, CHUNK = 32, 128
BLOCK_BYTES = 40_960
"""Keys and values of the toy model's blocks, in five layers of two heads of 32, in bfloat16."""


class TieredRun(EngineRun):
    """Counts copies by tier."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.held: Counter[tuple[Tier, BlockHash]] = Counter()
        self.num_removed: Counter[Tier] = Counter()

    def step(self) -> StepFrame:
        frame = super().step()
        self.apply(frame.events)
        return frame

    def apply(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            match event:
                case BlockStored(block_hashes, tier=tier):
                    self.held.update((tier, block_hash) for block_hash in block_hashes)
                case BlockRemoved(block_hashes, tier=tier):
                    self.held.subtract((tier, block_hash) for block_hash in block_hashes)
                    self.num_removed[tier] += len(block_hashes)
                    assert min(self.held.values()) >= 0
                case AllBlocksCleared(tier):
                    self.held = Counter({key: n for key, n in self.held.items() if key[0] is not tier})
        self.held = +self.held

    def tiers_of(self, block_hashes: Iterable[BlockHash]) -> set[tuple[Tier, ...]]:
        """Where these blocks lie: every different answer."""
        return {
            tuple(tier for tier in Tier if (tier, block_hash) in self.held) for block_hash in block_hashes
        }

    def evict(self, tier: Tier, block_hashes: Iterable[BlockHash]) -> None:
        """Ask for other things until none of these blocks is left in the tier."""
        wanted = set(block_hashes)
        for seed in range(1000, 1020):
            if not any((tier, block_hash) in self.held for block_hash in wanted):
                return
            self.generate(prompt_of(self.engine, 600, seed), max_tokens=1)
        raise AssertionError(f"the {tier} keeps everything")


def tiered_run(engine: Any) -> Iterator[TieredRun]:
    run = TieredRun(engine)
    yield run
    for key in run.deltas:
        engine.abort(key)
    run.finish()
    assert engine.reset_prefix_cache()
    run.finish()
    assert not any(tier is not Tier.DISK for tier, _ in run.held)


def opened(
    folder: Path,
    num_files: int = 200,
    *,
    num_slots: int = 8,
    block_bytes: int = BLOCK_BYTES,
    **settings: Any,
) -> Iterator[TieredRun]:
    """An engine over what is in the folder, as a replica's loop would begin with it."""
    slot_bytes = file_bytes(4 * block_bytes)
    defaults = {
        "num_blocks": 32,
        "host_kv_bytes": num_slots * slot_bytes,
        "disk_kv_bytes": num_files * slot_bytes,
        "kv_folder": str(folder),
        "disk_reserve_bytes": 0,
        "spill_seconds": 60.0,
    }
    engine: Any = build_engine(vllm_config(**{**defaults, **settings}))[0]
    engine.begin(lambda: None)
    run = TieredRun(engine)
    run.finish()
    while not run.step().load.disk_seconds_per_token:
        time.sleep(0.01)
    yield run
    run.finish()
    engine.close()


def settle(run: TieredRun) -> None:
    """Step until the disk has written what it will."""
    while run.step().look_again_seconds is not None:
        run.engine._tier.store.wait(0.05)  # type: ignore[attr-defined]
