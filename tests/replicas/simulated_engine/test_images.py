"""Images at a simulated engine: blocks, refusals and times as a real one has them, and no picture decoded."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from replicas.engine import RequestRefused
from replicas.engines import build_engine_here
from replicas.media.probes import probe_png
from replicas.proof import prove_hashes
from replicas.protocol.blocks import BlockHash, ImageTokens
from replicas.protocol.frames import RefusalCode, StepFrame, UserTag
from replicas.protocol.image_rules import CellRule, expand, written_rule
from replicas.protocol.images import media_hash, read_size
from replicas.protocol.media import ImageQuery, ImageQueryAnswer
from replicas.protocol.status import ModelCard
from replicas.simulated_engine.engine import SimulatedEngine
from replicas.simulated_engine.hardware import CostModel
from tests.replicas.builders import OTHER_ROOT, ROOT
from tests.replicas.engine_run import EngineRun
from tests.replicas.whole_replica import config

PLACEHOLDER = 7
RULE = CellRule(PLACEHOLDER, cell=28, min_pixels=784, max_pixels=784 * 400)
RED, BLUE = (probe_png(280, 168, colour) for colour in (b"\xff\0\0", b"\0\0\xff"))
NUM_IMAGE_TOKENS = 60
CARD = ModelCard("m", "f", "simulated", 16, 199, 4096, 1000, (2,), image_rule=written_rule(RULE))
COST = CostModel(a=0.0, b=1.0, c=0.0, d0=0.0, d1=0.0, encode=100.0)
ANN, BOB = (UserTag(name.ljust(16)) for name in (b"ann", b"bob"))


def engine(sleep: Callable[[float], None] = lambda _: None, image_bytes: int = 1 << 20) -> SimulatedEngine:
    return SimulatedEngine(
        CARD,
        COST,
        num_blocks=200,
        max_batched_tokens=64,
        max_running=16,
        max_waiting=64,
        sleep=sleep,
        image_bytes=image_bytes,
    )


def put(run: EngineRun, content: bytes, root: BlockHash = ROOT) -> ImageQueryAnswer:
    run.engine.take_media(ImageQuery(3, root, content))
    assert run.engine.has_work()
    (answer,) = run.step().media
    assert answer.number == 3 and not run.engine.has_work()
    return answer


def add(run: EngineRun, *contents: bytes, root: BlockHash = ROOT, last: int = 220, **fields: Any) -> Any:
    """24 tokens, then the images, then 20 more."""
    with_places = [*range(100, 124), *[PLACEHOLDER] * len(contents), *range(200, 219), last]
    token_ids, spans = expand(with_places, [read_size(content) for content in contents], RULE)
    media = [
        ImageTokens(media_hash(root, content), *span) for content, span in zip(contents, spans, strict=True)
    ]
    return run.add(token_ids, root=root, media=tuple(media), **fields)


def num_encoded(frames: Sequence[StepFrame]) -> int:
    return sum(frame.num_encoded_tokens for frame in frames)


def test_the_same_image_is_cached_and_another_misses_from_it_on() -> None:
    run = EngineRun(engine())
    for root in (ROOT, OTHER_ROOT):
        assert put(run, RED, root).content_hash == media_hash(root, RED)
    put(run, BLUE)
    cached = []
    for content, root, user in (
        (RED, ROOT, ANN),
        (RED, ROOT, BOB),
        (BLUE, ROOT, BOB),
        (RED, OTHER_ROOT, BOB),
    ):
        key = add(run, content, root=root, user=user)
        run.finish()
        usage = run.usage(key)
        cached.append((usage.num_cached_tokens, usage.num_cross_user_tokens))
    assert cached == [(0, 0), (96, 96), (16, 16), (0, 0)]


def test_images_are_encoded_whole_with_the_first_of_their_tokens_and_once() -> None:
    naps: list[float] = []
    run = EngineRun(engine(naps.append))
    put(run, RED)
    put(run, BLUE)
    add(run, RED, BLUE, max_tokens=1)
    assert run.engine.step().load.num_pending_image_tokens == NUM_IMAGE_TOKENS  # the second one's
    run.finish()
    assert naps == [64 + 100 * NUM_IMAGE_TOKENS, 64 + 100 * NUM_IMAGE_TOKENS, 36]
    run.frames.clear()
    add(run, RED, BLUE, max_tokens=1)
    run.finish()
    assert num_encoded(run.frames) == 0
    assert run.frames[-1].load.num_pending_image_tokens == 0


def test_an_image_of_which_some_is_cached_is_encoded_whole() -> None:
    run = EngineRun(engine())
    for content in (RED, BLUE):
        put(run, content)
    add(run, RED, max_tokens=1)
    run.finish()
    run.frames.clear()
    add(run, RED, BLUE, max_tokens=1)  # 80 are the same, and the red one has 4 more
    run.finish()
    assert num_encoded(run.frames) == 2 * NUM_IMAGE_TOKENS


@pytest.mark.parametrize("ending", ["finished", "aborted", "refused"])
def test_images_are_held_until_their_prompt_has_ended(ending: str) -> None:
    simulated = engine(image_bytes=len(RED))
    run = EngineRun(simulated)
    put(run, RED)
    if ending == "refused":
        with pytest.raises(RequestRefused):
            add(run, RED, last=CARD.vocab_size)
    else:
        key = add(run, RED, max_tokens=3)
        assert put_while_running(run, BLUE).is_full
        if ending == "aborted":
            run.abort(key)
    run.finish()
    assert simulated._images is not None and simulated._images.num_held == 0
    assert put(run, BLUE).content_hash
    with pytest.raises(RequestRefused) as refused:
        add(run, RED)
    assert refused.value.code is RefusalCode.MEDIA_MISSING


def put_while_running(run: EngineRun, content: bytes) -> ImageQueryAnswer:
    run.engine.take_media(ImageQuery(4, ROOT, content))
    (answer,) = run.step().media
    return answer


def test_what_is_no_image_is_told() -> None:
    run = EngineRun(engine())
    assert put(run, b"GIF89a").problem
    assert put(run, RED[:20]).problem


def test_a_span_that_is_not_that_image_is_refused() -> None:
    run = EngineRun(engine())
    put(run, RED)
    span = ImageTokens(media_hash(ROOT, RED), 5, NUM_IMAGE_TOKENS)
    with pytest.raises(RequestRefused) as refused:
        run.add(range(100, 200), media=(span,))
    assert refused.value.code is RefusalCode.INVALID_REQUEST
    assert run.engine._images.num_held == 0  # type: ignore[attr-defined]


def test_a_checkpoint_with_a_vision_part_lends_its_rule(tmp_path: Path) -> None:
    from replicas.toy_model.make_image_model import write_image_model

    write_image_model(tmp_path / "pictures")
    for image_bytes in (1 << 20, 0):
        settings = config("", engine="simulated", model=str(tmp_path / "pictures"), image_bytes=image_bytes)
        built, _ = build_engine_here(settings)
        assert bool(built.card.image_rule) == bool(image_bytes)
        assert prove_hashes(built, random.Random(0)) > (300 if image_bytes else 0)
        built.close()
