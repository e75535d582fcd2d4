"""KV of vLLM on our own disk: read while a request waits, there after a restart, leased, and never wrong."""

import itertools
import random
from pathlib import Path

import pytest

from replicas.kvstore.layout import HEADER_BYTES, ChunkHeader, WrongChecksum
from replicas.kvstore.on_disk.chunk_files import ChunkFiles
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.events import AllBlocksCleared, Tier
from replicas.protocol.frames import PromptUsage, UserTag
from replicas.protocol.prefix_leases import MAX_LEASE_SECONDS, LeaseAnswer, LeaseRefusal, PrefixLease
from tests.replicas.builders import ROOT
from tests.replicas.engine_run import prompt_of
from tests.replicas.vllm_engine.tiered_run import BLOCK, CHUNK, opened, settle

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("patient_reading")]

ANN, BOB = (UserTag(name.ljust(16)) for name in (b"ann", b"bob"))


def test_what_an_earlier_life_has_left_is_hit_at_once(tmp_path: Path) -> None:
    for run in opened(tmp_path):
        prompt = prompt_of(run.engine, 300)
        hashes = hash_blocks(ROOT, prompt, BLOCK)
        first = run.tokens(run.generate(prompt, max_tokens=5, user=ANN))
    for run in opened(tmp_path):
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


def test_every_fifth_read_that_fails_costs_time_and_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    for run in opened(tmp_path):
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


def test_a_leased_prompt_outlasts_the_tiers_and_a_restart(tmp_path: Path) -> None:
    for run in opened(tmp_path):
        prompt = prompt_of(run.engine, 300)
        wishes = (
            PrefixLease(9, MAX_LEASE_SECONDS),
            PrefixLease(3, 60),
            PrefixLease(9, MAX_LEASE_SECONDS + 1),
        )
        first = run.generate(prompt, max_tokens=2, leases=wishes)
        assert run.usage(first).leases == (
            LeaseAnswer(MAX_LEASE_SECONDS, 256),
            LeaseAnswer(refusal=LeaseRefusal.NO_WHOLE_CHUNK),
            LeaseAnswer(refusal=LeaseRefusal.TOO_LONG),
        )
        settle(run)
        assert any(frame.leases is not None and frame.leases.num_granted == 1 for frame in run.frames)
        for seed in range(50, 62):
            run.generate(prompt_of(run.engine, 300, seed), max_tokens=1)
            settle(run)
    for run in opened(tmp_path):
        for seed in range(70, 78):
            run.generate(prompt_of(run.engine, 300, seed), max_tokens=1)
            settle(run)
        usage = run.usage(run.generate(prompt, max_tokens=2))
        assert usage.num_disk_tokens == 256 and usage.num_evicted_early_tokens == 0
        assert usage.leases == ()
