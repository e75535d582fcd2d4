"""Two replicas of vLLM, and prompts with images whose KV the other has."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import PromptUsage
from replicas.protocol.images import media_hash
from replicas.protocol.pulls import PullHint
from tests.redis_server import RedisServer
from tests.replicas.router_client import ROOT
from tests.replicas.vllm_engine.peer_replica import CHUNK, PeerReplica, Two, two_replicas
from tests.replicas.vllm_engine.test_images import BLUE, RED, TALL, Images, words
from tests.replicas.vllm_engine.test_peer_pull import another_root, two  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(environment: None, shared_redis: RedisServer, image_model: Path) -> AsyncIterator[Two]:
    async with two_replicas(shared_redis.url, model=str(image_model)) as both:
        yield both


async def ask(
    replica: PeerReplica,
    text: Sequence[int],
    *contents: bytes,
    images: Images,
    root: BlockHash = ROOT,
    pull: PullHint | None = None,
) -> tuple[list[int], PromptUsage]:
    for content in contents:
        assert await replica.put(content, root) == media_hash(root, content)
    token_ids, spans = images.prompt(text, contents)
    return await replica.ask(token_ids, pull, root=root, media=images.media(contents, spans, root))


async def test_a_prompt_with_images_is_pulled_and_one_with_another_image_as_far_as_they_agree(
    two: Two,  # noqa: F811
) -> None:
    there, here = two
    images = Images(here.engine)
    text = words(here.engine, 500)
    token_ids, ((first, _), (start, length)) = images.prompt(text, [TALL, RED])
    whole, before = len(token_ids) // CHUNK * CHUNK, start // CHUNK * CHUNK
    assert first < before < start + length < whole
    computed, usage = await ask(there, text, TALL, RED, images=images)
    assert usage.num_cached_tokens == 0
    hint = there.hint(whole)
    blue, usage = await ask(here, text, TALL, BLUE, images=images, pull=hint)
    assert usage.num_pulled_tokens == usage.num_slower_tier_tokens == usage.num_cached_tokens == before
    here.frames.clear()
    red, usage = await ask(here, text, TALL, RED, images=images, pull=hint)
    on_device = start // here.engine.card.block_size * here.engine.card.block_size
    assert (usage.num_cached_tokens, usage.num_pulled_tokens) == (whole, whole - on_device)
    assert sum(frame.num_encoded_tokens for frame in here.frames) == 0
    assert sum(frame.num_prefill_tokens for frame in here.frames) == len(token_ids) - whole
    assert red == computed
    assert [images.num_held, here.engine._load().num_pending_image_tokens] == [0, 0]
    for content, expected in ((RED, red), (BLUE, blue)):
        root = another_root(1 + (content is BLUE))
        answer, usage = await ask(here, text, TALL, content, images=images, root=root, pull=hint)
        assert (usage.num_cached_tokens, usage.num_pulled_tokens) == (0, 0), "the other has it for others"
        assert answer == expected
    assert red != blue
