"""Images whose KV lies below the device: kept, loaded and told apart as text is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replicas.engine_process.build import build_engine
from replicas.protocol.blocks import hash_blocks
from replicas.protocol.events import Tier
from tests.replicas.builders import ROOT
from tests.replicas.engine_run import prompt_of
from tests.replicas.vllm_engine.conftest import vllm_config
from tests.replicas.vllm_engine.test_images import BLUE, RED, Images, words
from tests.replicas.vllm_engine.tiered_run import TieredRun

pytestmark = pytest.mark.vllm


@pytest.fixture
def images(environment: None, tmp_path: Path) -> Iterator[Images]:
    from replicas.toy_model.make_image_model import write_image_model

    write_image_model(tmp_path)
    config = vllm_config(
        model=str(tmp_path), num_blocks=40, context_length=1024, host_kv_bytes=32 << 20, chunk_tokens=128
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
