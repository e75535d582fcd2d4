"""KV of vLLM on our own disk: read while a request waits, there after a restart, and never wrong."""

import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replicas.engine_process.build import build_engine
from replicas.kvstore.layout import HEADER_BYTES, ChunkHeader, WrongChecksum, file_bytes
from replicas.kvstore.on_disk.chunk_files import ChunkFiles
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.events import AllBlocksCleared, Tier
from replicas.protocol.frames import PromptUsage, UserTag
from tests.replicas.builders import ROOT
from tests.replicas.engine_run import prompt_of
from tests.replicas.vllm_engine.conftest import vllm_config
from tests.replicas.vllm_engine.tiered_run import TieredRun

pytestmark = pytest.mark.vllm

BLOCK, CHUNK = 32, 128
SLOT_BYTES = file_bytes(4 * 40_960)
NUM_SLOTS = 8

ANN, BOB = (UserTag(name.ljust(16)) for name in (b"ann", b"bob"))


@pytest.fixture(autouse=True)
def _reading_is_always_worth_it(environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.kvstore.plan.MIN_PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(
        "replicas.scheduling.speed_meter.SpeedMeter.prefill_seconds_per_token", property(lambda _: 1.0)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


def opened(
    folder: Path,
    num_files: int = 200,
    *,
    num_slots: int = NUM_SLOTS,
    slot_bytes: int = SLOT_BYTES,
    **settings: Any,
) -> Iterator[TieredRun]:
    """An engine over what is in the folder, as a replica's loop would begin with it."""
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


def test_what_an_earlier_life_has_left_is_hit_at_once(folder: Path) -> None:
    for run in opened(folder):
        prompt = prompt_of(run.engine, 300)
        hashes = hash_blocks(ROOT, prompt, BLOCK)
        first = run.tokens(run.generate(prompt, max_tokens=5, user=ANN))
    for run in opened(folder):
        assert run.tiers_of(hashes[3::4]) == {(Tier.DISK,)}, "before any request"
        again = run.generate(prompt, max_tokens=5, user=BOB)
        assert run.usage(again) == PromptUsage(
            300,
            2 * CHUNK,
            BLOCK,
            num_cross_user_tokens=2 * CHUNK,
            num_slower_tier_tokens=2 * CHUNK,
            num_disk_tokens=2 * CHUNK,
        )
        assert run.tokens(again) == first
        assert run.tiers_of(hashes[3::4]) == {tuple(Tier)}
        frame = run.step()
        assert frame.load.disk_seconds_per_token > 0 and frame.load.host_seconds_per_token > 0
        settle(run)
        assert run.engine.reset_prefix_cache()
        assert run.step().events == [AllBlocksCleared(tier) for tier in Tier]
    for run in opened(folder):
        assert not run.held, "a reset erases"


def test_every_fifth_read_that_fails_costs_time_and_no_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count(1)
    read = ChunkFiles.read

    def fail_often(self: ChunkFiles, key: BlockHash, slot: memoryview) -> ChunkHeader:
        header = read(self, key, slot)
        if next(numbers) % 5 == 0:
            slot[HEADER_BYTES : HEADER_BYTES + 1000] = bytes(1000)
            raise WrongChecksum("no")
        return header

    monkeypatch.setattr(ChunkFiles, "read", fail_often)
    rng = random.Random(4)
    for run in opened(folder):
        shared = [prompt_of(run.engine, 600, n) for n in range(4)]
        expected: dict[tuple[int, ...], list[int]] = {}
        num_disk_tokens = 0
        for _ in range(60):
            stem = rng.choice(shared)[: rng.randrange(200, 600)]
            prompts = [[*stem, *prompt_of(run.engine, 9, n)] for n in range(2)]
            keys = [run.add(prompt, max_tokens=4) for prompt in prompts]
            if rng.random() < 0.2:
                run.step()
                run.abort(keys.pop())
            run.finish()
            settle(run)
            for prompt, key in zip(prompts, keys, strict=False):
                assert run.tokens(key) == expected.setdefault(tuple(prompt), run.tokens(key))
                usage = run.usage(key)
                assert usage.num_disk_tokens <= usage.num_slower_tier_tokens
                num_disk_tokens += usage.num_disk_tokens
        assert num_disk_tokens > 20 * CHUNK
        assert next(numbers) > 20
        store = run.engine._tier.store  # type: ignore[attr-defined]
        assert store.directory.num_quarantined == 0
        run.engine.reset_prefix_cache()
        for prompt, tokens in expected.items():
            assert run.tokens(run.generate(list(prompt), max_tokens=4)) == tokens, "computed anew"
