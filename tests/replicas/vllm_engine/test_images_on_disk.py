"""Images whose KV lies on disk: read after a restart for the same prompt alone, and leased as text is."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replicas.kvstore.layout import file_bytes
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.events import Tier
from replicas.protocol.prefix_leases import HOUR_SECONDS, LeaseAnswer, PrefixLease
from tests.replicas.builders import OTHER_ROOT, ROOT
from tests.replicas.vllm_engine.test_images import ANN, BLUE, BOB, RED, Images, words
from tests.replicas.vllm_engine.test_kv_on_disk import (  # noqa: F401 (a fixture)
    BLOCK,
    CHUNK,
    _reading_is_always_worth_it,
    opened,
    settle,
)

pytestmark = pytest.mark.vllm

SLOT_BYTES = file_bytes(4 * 16_384)
"""Keys and values of a chunk in two layers of two heads of 32, in bfloat16."""


def opened_for_images(folder: Path, model: Path, num_files: int, **settings: Any) -> Iterator[Images]:
    shape = {"model": str(model), "num_blocks": 40, "context_length": 1024}
    for run in opened(folder, num_files, slot_bytes=SLOT_BYTES, **shape, **settings):
        images = Images(run.engine, run)
        yield images
        assert images.num_held == 0


def ends_of_chunks(images: Images, text: list[int], content: bytes) -> list[BlockHash]:
    token_ids, spans = images.prompt(text, [content])
    return hash_blocks(ROOT, token_ids, BLOCK, media=images.media([content], spans))[3::4]


def test_images_of_an_earlier_life_are_read_for_the_same_prompt_and_no_other(
    tmp_path: Path, image_model: Path
) -> None:
    for images in opened_for_images(tmp_path / "kv", image_model, num_files=200):
        run = images.run
        texts = [words(run.engine, 300, seed) for seed in range(3)]
        keys = []
        for text in texts:
            keys.append(images.add(text, RED, max_tokens=6, user=ANN))
            run.finish()
        answers = [run.tokens(key) for key in keys]
    for images in opened_for_images(tmp_path / "kv", image_model, num_files=200):
        run = images.run
        token_ids, ((start, length),) = images.prompt(texts[0], [RED])
        whole, before = len(token_ids) // CHUNK * CHUNK, start // CHUNK * CHUNK
        assert 0 < before < start + length < whole
        hashes = ends_of_chunks(images, texts[0], RED)
        assert run.tiers_of(hashes) == {(Tier.DISK,)}, "before any request"
        again = images.add(texts[0], RED, max_tokens=6, user=BOB)
        run.finish()
        usage = run.usage(again)
        assert usage.num_cached_tokens == usage.num_disk_tokens == usage.num_slower_tier_tokens == whole
        assert usage.num_cross_user_tokens == whole
        assert run.tokens(again) == answers[0]
        assert run.tiers_of(hashes) == {tuple(Tier)}
        assert sum(frame.num_encoded_tokens for frame in run.frames) == 0
        other = images.add(texts[1], BLUE, max_tokens=6)
        run.finish()
        assert run.usage(other).num_cached_tokens == run.usage(other).num_disk_tokens == before
        for text, content, expected in ((texts[2], RED, answers[2]), (texts[1], BLUE, run.tokens(other))):
            elsewhere = images.add(text, content, root=OTHER_ROOT, max_tokens=6)
            run.finish()
            assert run.usage(elsewhere).num_cached_tokens == run.usage(elsewhere).num_disk_tokens == 0
            assert run.tokens(elsewhere) == expected, "computed anew"
        assert run.tokens(other) != answers[1]


def test_a_leased_prompt_with_an_image_outlasts_others_until_its_hour_is_over(
    tmp_path: Path, image_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for images in opened_for_images(tmp_path / "kv", image_model, num_files=18):
        engine, run = images.engine, images.run
        assert engine._tier is not None
        store = engine._tier.store
        text, unleased = words(engine, 300), words(engine, 300, 1)
        whole = len(images.prompt(text, [RED])[0]) // CHUNK * CHUNK

        def press(first: int) -> None:
            for seed in range(first, first + 12):
                images.cached(words(engine, 300, seed), RED, max_tokens=1)  # noqa: B023
                settle(run)  # noqa: B023

        first = images.add(text, RED, max_tokens=6, leases=(PrefixLease(whole // BLOCK, HOUR_SECONDS),))
        run.finish()
        assert run.usage(first).leases == (LeaseAnswer(HOUR_SECONDS, whole),)
        assert images.cached(unleased, RED) == 0
        settle(run)
        leased_hashes, other_hashes = (ends_of_chunks(images, each, RED) for each in (text, unleased))
        assert all(Tier.DISK in tiers for tiers in run.tiers_of(leased_hashes))
        assert () not in run.tiers_of(other_hashes)
        press(100)
        assert run.tiers_of(other_hashes) == {()}
        assert images.cached(unleased, RED) == 0
        again = images.add(text, RED, max_tokens=6)
        run.finish()
        usage = run.usage(again)
        assert usage.num_cached_tokens == usage.num_slower_tier_tokens == whole
        assert usage.num_evicted_early_tokens == 0
        assert run.tokens(again) == run.tokens(first)
        settle(run)
        monkeypatch.setattr(store.leases, "_clock", lambda: time.monotonic() + HOUR_SECONDS + 1)
        press(200)
        assert run.tiers_of(leased_hashes) == {()}
        (*_, totals) = [frame.leases for frame in run.frames if frame.leases is not None]
        assert (totals.num_leased_tokens, totals.num_kept_tokens) == (0, whole)
        assert sum(totals.num_broken_tokens.values()) == 0
        assert images.cached(text, RED) == 0
