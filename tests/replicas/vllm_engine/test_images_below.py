"""Images whose KV lies below the device: kept, loaded and told apart as text is."""

import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from replicas.engine_process.build import build_engine
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.events import Tier
from tests.replicas.builders import OTHER_ROOT, ROOT
from tests.replicas.engine_run import prompt_of
from tests.replicas.vllm_engine.conftest import vllm_config
from tests.replicas.vllm_engine.test_images import ANN, BLUE, BOB, RED, SMALL, TALL, Images, words
from tests.replicas.vllm_engine.test_images_on_disk import opened_for_images
from tests.replicas.vllm_engine.test_kv_on_disk import (  # noqa: F401 (a fixture)
    _reading_is_always_worth_it,
    settle,
)
from tests.replicas.vllm_engine.tiered_run import TieredRun

pytestmark = pytest.mark.vllm

CHUNK = 128
PLENTY, FEW = 32 << 20, 3 << 20
"""Bytes of host memory: more than a test asks for, and less than that."""


@pytest.fixture
def images(
    environment: None, image_model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Images]:
    """With so many bytes of host memory and files of disk."""
    host_kv_bytes, num_files = getattr(request, "param", (PLENTY, 0))
    if num_files:
        yield from opened_for_images(tmp_path / "kv", image_model, num_files, host_kv_bytes=host_kv_bytes)
        return
    config = vllm_config(
        model=str(image_model),
        num_blocks=40,
        context_length=1024,
        host_kv_bytes=host_kv_bytes,
        chunk_tokens=CHUNK,
    )
    engine: Any = build_engine(config)[0]
    yield Images(engine, TieredRun(engine))
    engine.close()


def test_what_the_device_forgot_of_an_image_is_loaded_and_another_image_is_not(images: Images) -> None:
    engine, run = images.engine, images.run
    assert isinstance(run, TieredRun)
    text = words(engine, 240)
    token_ids, spans = images.prompt(text, [RED])
    hashes = hash_blocks(ROOT, token_ids, engine.card.block_size, media=images.media([RED], spans))
    first = images.add(text, RED, max_tokens=6)
    run.finish()
    ends_of_chunks = hashes[3 : len(token_ids) // 32 : 4]
    assert run.tiers_of(ends_of_chunks) == {(Tier.DEVICE, Tier.HOST)}
    run.evict(Tier.DEVICE, hashes)
    assert run.tiers_of(ends_of_chunks) == {(Tier.HOST,)}
    again = images.add(text, RED, max_tokens=6)
    run.finish()
    usage = run.usage(again)
    assert usage.num_slower_tier_tokens == usage.num_cached_tokens == len(ends_of_chunks) * 128
    assert run.tokens(again) == run.tokens(first)
    run.evict(Tier.DEVICE, hashes)
    (start, _) = spans[0]
    other = images.add(text, BLUE, max_tokens=6)
    run.finish()
    assert run.usage(other).num_cached_tokens == start // 128 * 128
    run.generate(prompt_of(engine, 100), max_tokens=1)
    assert images.num_held == 0


NUM_MIXED = int(os.environ.get("KVASIR_IMAGE_REQUESTS", "60"))


class Predicted(NamedTuple):
    """Leading tokens of a prompt on the device, with those below it, and how many of these only on disk."""

    num_device: int
    num_cached: int
    num_disk: int


def predicted(run: TieredRun, hashes: Sequence[BlockHash], size: int, num_tokens: int) -> Predicted:
    """By what was said to lie where."""
    on_device = next((n for n, name in enumerate(hashes) if (Tier.DEVICE, name) not in run.held), len(hashes))
    device = min(on_device * size, (num_tokens - 1) // size * size)
    end = device // CHUNK * CHUNK
    num_disk = 0
    while end + CHUNK <= num_tokens - 1:
        name = hashes[(end + CHUNK) // size - 1]
        if (Tier.HOST, name) not in run.held:
            if (Tier.DISK, name) not in run.held:
                break
            num_disk += end + CHUNK - max(end, device)
        end += CHUNK
    if end - device < CHUNK:  # less is not worth a load
        return Predicted(device, device, 0)
    return Predicted(device, end, num_disk)


@pytest.mark.parametrize(
    ("images", "forgets"),
    [
        ((PLENTY, 0), [Tier.DEVICE]),
        ((FEW, 0), [Tier.DEVICE, Tier.HOST]),
        ((FEW // 2, 48), list(Tier)),
    ],
    ids=["plenty", "few", "disk"],
    indirect=["images"],
)
def test_predicted_is_cached_by_tier_in_every_one_of_many_mixed_requests(
    images: Images, forgets: list[Tier]
) -> None:
    """Up to four images in any order, two users, two namespaces, aborts, on tiers that forget. The engine
    computes the rest and no more.
    """
    engine, run, rng = images.engine, images.run, random.Random(11)
    assert isinstance(run, TieredRun)
    size = engine.card.block_size
    texts = [words(engine, 240, seed) for seed in range(3)]
    counts: Counter[str] = Counter()
    for _ in range(NUM_MIXED):
        root, user = rng.choice([ROOT, ROOT, OTHER_ROOT]), rng.choice([ANN, BOB])
        contents = rng.sample([RED, BLUE, SMALL, TALL], rng.randrange(5))
        text = rng.choice(texts)
        token_ids, spans = images.prompt(text, contents)
        hashes = hash_blocks(root, token_ids, size, media=images.media(contents, spans, root))
        expected = predicted(run, hashes, size, len(token_ids))
        run.frames.clear()
        key = images.add(text, *contents, root=root, user=user, max_tokens=rng.randrange(1, 4))
        if rng.random() < 0.15:
            run.step()
            run.abort(key)
            run.finish()
            settle(run)
            continue
        run.finish()
        usage = run.usage(key)
        assert (usage.num_device_tokens, usage.num_cached_tokens, usage.num_disk_tokens) == expected
        num_computed = sum(frame.num_prefill_tokens for frame in run.frames)
        assert num_computed == len(token_ids) - expected.num_cached
        settle(run)
        device, cached, disk = expected
        counts += Counter(answered=1, loaded=cached > device, on_device=device > 0, of_disk=disk > 0)
        counts += Counter(mixed=0 < device < cached, with_images=bool(contents) and cached > 0)
        counts += Counter(tokens=len(token_ids), cached_tokens=cached, disk_tokens=disk)
    print(dict(counts), {tier.name: number for tier, number in run.num_removed.items()})  # noqa: T201
    assert min(counts["loaded"], counts["on_device"]) > NUM_MIXED // 10
    assert Tier.DISK not in forgets or counts["of_disk"] > NUM_MIXED // 10
    assert images.num_held == 0
    assert all(run.num_removed[tier] > 0 for tier in forgets)
