"""Images whose KV lies below the device: kept, loaded and told apart as text is."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from replicas.engine_process.build import build_engine
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.events import Tier
from replicas.scheduling.speed_meter import SpeedMeter
from tests.replicas.builders import OTHER_ROOT, ROOT
from tests.replicas.engine_run import prompt_of
from tests.replicas.vllm_engine.conftest import vllm_config
from tests.replicas.vllm_engine.test_images import ANN, BLUE, BOB, RED, SMALL, TALL, Images, words
from tests.replicas.vllm_engine.tiered_run import TieredRun

pytestmark = pytest.mark.vllm

CHUNK = 128
PLENTY, FEW = 32 << 20, 3 << 20
"""Bytes of host memory: more than a test asks for, and less than that."""


@pytest.fixture
def images(environment: None, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Images]:
    from replicas.toy_model.make_image_model import write_image_model

    write_image_model(tmp_path)
    config = vllm_config(
        model=str(tmp_path),
        num_blocks=40,
        context_length=1024,
        host_kv_bytes=getattr(request, "param", PLENTY),
        chunk_tokens=CHUNK,
    )
    engine: Any = build_engine(config)[0]
    images = Images(engine)
    images.run = TieredRun(engine)
    yield images
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


NUM_MIXED = 60


def predicted(run: TieredRun, hashes: Sequence[BlockHash], size: int, num_tokens: int) -> tuple[int, int]:
    """Leading tokens on the device, and with those below it, by what was said to lie where."""
    on_device = next((n for n, name in enumerate(hashes) if (Tier.DEVICE, name) not in run.held), len(hashes))
    end = on_device * size // CHUNK * CHUNK
    while end + CHUNK <= len(hashes) * size and (Tier.HOST, hashes[(end + CHUNK) // size - 1]) in run.held:
        end += CHUNK
    findable = (num_tokens - 1) // size * size
    device = min(on_device * size, findable)
    end = min(end, findable)
    return device, end if end - device >= CHUNK else device  # less is not worth a load


@pytest.mark.parametrize(
    ("images", "host_forgets"), [(PLENTY, False), (FEW, True)], ids=["plenty", "few"], indirect=["images"]
)
def test_predicted_is_cached_by_tier_in_every_one_of_many_mixed_requests(
    images: Images, host_forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to four images in any order, two users, two namespaces, aborts, on a device that forgets."""
    monkeypatch.setattr(SpeedMeter, "prefill_seconds_per_token", 1.0)  # what can be loaded is
    engine, run, rng = images.engine, images.run, random.Random(11)
    assert isinstance(run, TieredRun)
    size = engine.card.block_size
    texts = [words(engine, 240, seed) for seed in range(3)]
    num_loaded = num_on_device = num_mixed = 0
    for _ in range(NUM_MIXED):
        root, user = rng.choice([ROOT, ROOT, OTHER_ROOT]), rng.choice([ANN, BOB])
        contents = rng.sample([RED, BLUE, SMALL, TALL], rng.randrange(5))
        text = rng.choice(texts)
        token_ids, spans = images.prompt(text, contents)
        hashes = hash_blocks(root, token_ids, size, media=images.media(contents, spans, root))
        device, cached = predicted(run, hashes, size, len(token_ids))
        key = images.add(text, *contents, root=root, user=user, max_tokens=rng.randrange(1, 4))
        if rng.random() < 0.15:
            run.step()
            run.abort(key)
            run.finish()
            continue
        run.finish()
        usage = run.usage(key)
        assert (usage.num_device_tokens, usage.num_cached_tokens) == (device, cached)
        num_loaded += cached > device
        num_on_device += device > 0
        num_mixed += 0 < device < cached
    assert num_loaded > NUM_MIXED // 10 and num_on_device > NUM_MIXED // 10
    assert images.num_held == 0
    assert run.num_removed[Tier.DEVICE] > 0
    assert run.num_removed[Tier.HOST] > 0 or not host_forgets
