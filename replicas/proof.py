"""The start-up proof: an engine's block hashes must be those that routers compute.

Owns the probe. A replica with other hashes would fill the index with names that no router asks for, and
nothing would look broken; so it is refused before it registers.
"""

import random
import time
from collections.abc import Sequence

from replicas.engine import Engine, RequestRefused, expand
from replicas.errors import StartupError
from replicas.media.probes import PROBE_SIZES, has_room, probe_png, room_of
from replicas.protocol.blocks import (
    HASH_BYTES,
    BlockHash,
    ImageTokens,
    PublishedBeginning,
    hash_blocks,
    pack_token_ids,
)
from replicas.protocol.events import BlockStored, CacheEvent, ResumePointsChanged, Tier
from replicas.protocol.frames import FinishReason, SamplingParams, Submit
from replicas.protocol.hits import points_left
from replicas.protocol.image_rules import ImageRule, rule_on_card
from replicas.protocol.image_rules import expand as expand_images
from replicas.protocol.images import ImageFormat, ImageSize
from replicas.protocol.media import ImageQuery
from replicas.protocol.status import ModelCard

NUM_PROBE_BLOCKS = 3
MAX_PROBE_STEPS = 1000
PROBE_IMAGE_SECONDS = 60.0

TEXT_ONLY = "the setting image_bytes 0 serves the model for text only"

_PROBE_SAMPLING = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0)


def prove_hashes(engine: Engine, rng: random.Random) -> int:
    """Run probe prompts and compare: on the model itself, with published blocks, with each adapter, and with
    images if the model takes them.

    Raises StartupError; leaves nothing in the engine if it passes. Returns how many tokens it computed: none
    where the engine takes no tokens, so that nothing can be proven.
    """
    if engine.card.takes_bodies:
        return 0
    adapters = (None, *(adapter.name for adapter in engine.card.adapters))
    num_tokens = sum(_prove(engine, rng, adapter) for adapter in adapters)
    if engine.card.takes_published:
        num_tokens += _prove(engine, rng, None, num_published_blocks=1)
    rule = rule_on_card(engine.card.image_rule)
    if rule is not None:
        num_tokens += _prove_images(engine, rng, rule)
    if not engine.reset_prefix_cache():
        raise StartupError(f"the {engine.card.engine} engine still holds blocks after the probe prompt")
    while engine.has_work():  # what it says of the probe is dropped
        engine.step()
    return num_tokens


def _prove(engine: Engine, rng: random.Random, adapter: str | None, *, num_published_blocks: int = 0) -> int:
    card = engine.card
    num_blocks = min(NUM_PROBE_BLOCKS, room_of(card) // card.block_size)
    if num_blocks < 1:
        raise StartupError(
            f"a context of {card.context_length} tokens and {card.num_blocks} blocks of {card.block_size}"
            " leave no room for a single cached block"
        )
    root = BlockHash(rng.randbytes(HASH_BYTES))
    prompt = [rng.randrange(card.vocab_size) for _ in range(num_blocks * card.block_size + 1)]
    published = None
    if num_published_blocks:
        published = PublishedBeginning(BlockHash(rng.randbytes(HASH_BYTES)), num_published_blocks)
    submit = Submit(0, pack_token_ids(prompt), _PROBE_SAMPLING, root, adapter=adapter, published=published)
    probe = "the probe prompt" if adapter is None else f"the probe prompt with adapter {adapter}"
    _compare(engine, submit, probe)
    return len(prompt)


def _prove_images(engine: Engine, rng: random.Random, rule: ImageRule) -> int:
    """Prompts with an image, small and large, upright and flat: the engine makes the tokens of it that
    routers write, and names its blocks as they do."""
    card = engine.card
    num_tokens = 0
    for width, height in PROBE_SIZES:
        size = ImageSize(ImageFormat.PNG, width, height)
        if not has_room(card, rule, size):
            continue
        root = BlockHash(rng.randbytes(HASH_BYTES))
        content_hash = _take_image(engine, root, probe_png(width, height, rng.randbytes(3)))
        text = [rng.randrange(card.vocab_size) for _ in range(card.block_size // 2)]
        text = [token for token in text if token != rule.placeholder]
        prompt, spans = expand_images([*text, rule.placeholder, *text], [size], rule)
        media = tuple(ImageTokens(content_hash, span.offset, span.length) for span in spans)
        submit = Submit(0, pack_token_ids(prompt), _PROBE_SAMPLING, root, media=media)
        _compare(engine, submit, f"the probe prompt with an image of {width} by {height} pixels")
        num_tokens += len(prompt)
    return num_tokens


def _take_image(engine: Engine, root: BlockHash, content: bytes) -> bytes:
    """Return the engine's name for an image."""
    engine.take_media(ImageQuery(1, root, content))
    ends_at = time.monotonic() + PROBE_IMAGE_SECONDS
    while time.monotonic() < ends_at:
        for answer in engine.step().media:
            if answer.problem or answer.is_full:
                problem = answer.problem or "there is no room for it"
                raise StartupError(f"the engine does not take the probe image, {problem}: {TEXT_ONLY}")
            return answer.content_hash
    raise StartupError(f"the engine does not read the probe image in {PROBE_IMAGE_SECONDS:g} s: {TEXT_ONLY}")


def _compare(engine: Engine, submit: Submit, probe: str) -> None:
    card, prompt = engine.card, submit.token_ids()
    output, events = _run(engine, submit)
    expected = hash_blocks(
        submit.root, prompt + output, card.block_size, media=submit.media, published=submit.published
    )
    reported = {
        event.first_block_index + offset: block_hash
        for event in events
        if isinstance(event, BlockStored) and event.tier is Tier.DEVICE
        for offset, block_hash in enumerate(event.block_hashes)
    }
    if card.is_sparse:
        _compare_points(card, len(prompt), expected, events, probe)
    for position in range(len(prompt) // card.block_size):
        if position not in reported and (reported or not card.is_sparse):  # no layer may be of full attention
            raise StartupError(
                f"the {card.engine} engine did not report block {position} of {probe} as stored"
            )
    for position, block_hash in sorted(reported.items()):
        if position >= len(expected) or expected[position] != block_hash:
            raise StartupError(
                f"the {card.engine} engine reports another hash for block {position} of {probe}"
                " than routers compute: this replica would never be found, and does not serve"
            )


def _compare_points(
    card: ModelCard,
    num_tokens: int,
    expected: Sequence[BlockHash],
    events: Sequence[CacheEvent],
    probe: str,
) -> None:
    added = {each for event in events if isinstance(event, ResumePointsChanged) for each in event.added}
    if not added.issubset(expected):
        raise StartupError(
            f"the {card.engine} engine reports resume points of {probe} with other hashes than routers"
            " compute: this replica would never be found, and does not serve"
        )
    for end in points_left(card, num_tokens):
        if expected[end - 1] not in added:
            raise StartupError(
                f"the {card.engine} engine cannot resume {probe} behind block {end}, as its card says"
            )


def _run(engine: Engine, submit: Submit) -> tuple[list[int], list[CacheEvent]]:
    """Return the tokens that the engine adds to the prompt, and all events meanwhile."""
    try:
        (request,) = expand(submit, serial=0)
        engine.add(request)
    except RequestRefused as refused:
        raise StartupError(f"the engine refuses the probe prompt: {refused.message}") from refused
    output: list[int] = []
    events: list[CacheEvent] = []
    for _ in range(MAX_PROBE_STEPS):
        frame = engine.step()
        events.extend(frame.events)
        for delta in frame.deltas:
            output.extend(delta.token_ids)
            if delta.finish_reason is FinishReason.ERROR:
                raise StartupError("the engine fails on the probe prompt")
            if delta.finish_reason is not None:
                return output, events
    raise StartupError(f"the engine does not finish the probe prompt in {MAX_PROBE_STEPS} steps")
