"""Images on a real vLLM: what is predicted is cached, and nothing that does not fit is computed."""

import io
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from replicas.engine import RequestRefused
from replicas.engine_process.build import build_engine
from replicas.media.probes import probe_png
from replicas.proof import prove_hashes
from replicas.protocol.blocks import BlockHash, ImageTokens, hash_blocks
from replicas.protocol.frames import RefusalCode, UserTag
from replicas.protocol.image_rules import ImageRule, expand, rule_on_card
from replicas.protocol.images import ImageError, media_hash, read_size
from replicas.protocol.media import ImageQuery, ImageQueryAnswer
from tests.replicas.builders import OTHER_ROOT, ROOT
from tests.replicas.engine_run import EngineRun, prompt_of
from tests.replicas.vllm_engine.conftest import vllm_config

if TYPE_CHECKING:
    from replicas.vllm_engine.engine import VllmEngine

pytestmark = pytest.mark.vllm

RED, BLUE = (probe_png(300, 200, colour) for colour in (b"\xff\0\0", b"\0\0\xff"))
SMALL = probe_png(40, 40, b"\1\2\3")
TALL = probe_png(90, 230, b"\7\7\7")
"""Cut into other tiles than the rest."""
ANN, BOB = (UserTag(name.ljust(16)) for name in (b"ann", b"bob"))


@pytest.fixture(scope="module")
def engine(environment: None, image_model: Path) -> Iterator["VllmEngine"]:
    built: Any = build_engine(vllm_config(model=str(image_model), context_length=1024))[0]
    yield built
    built.close()


class Images:
    """Asks about images as a router does: sends them, writes their tokens, and predicts the blocks."""

    def __init__(self, engine: "VllmEngine", run: EngineRun | None = None) -> None:
        self.run = EngineRun(engine) if run is None else run
        self.engine = engine
        rule = rule_on_card(engine.card.image_rule)
        assert rule is not None
        self.rule: ImageRule = rule
        self.writers: dict[BlockHash, UserTag] = {}
        self.next_number = 0

    def put(self, content: bytes, root: BlockHash = ROOT) -> ImageQueryAnswer:
        self.next_number += 1
        self.engine.take_media(ImageQuery(self.next_number, root, content))
        for _ in range(2000):
            for answer in self.run.step().media:
                assert answer.number == self.next_number
                return answer
        raise AssertionError("the image is not read")

    def prompt(
        self, text: Sequence[int], contents: Sequence[bytes]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """With the images in the middle, one behind the other."""
        half = len(text) // 2
        with_places = [*text[:half], *[self.rule.placeholder] * len(contents), *text[half:]]
        token_ids, spans = expand(with_places, [read_size(content) for content in contents], self.rule)
        return token_ids, [tuple(span) for span in spans]

    def media(
        self, contents: Sequence[bytes], spans: Sequence[tuple[int, int]], root: BlockHash = ROOT
    ) -> tuple[ImageTokens, ...]:
        return tuple(
            ImageTokens(media_hash(root, content), *span)
            for content, span in zip(contents, spans, strict=True)
        )

    def add(self, text: Sequence[int], *contents: bytes, root: BlockHash = ROOT, **fields: Any) -> Any:
        for content in contents:
            assert self.put(content, root).content_hash == media_hash(root, content)
        token_ids, spans = self.prompt(text, contents)
        return self.run.add(token_ids, root=root, media=self.media(contents, spans, root), **fields)

    def cached(self, *arguments: Any, **fields: Any) -> int:
        key = self.add(*arguments, **fields)
        self.run.finish()
        return self.run.usage(key).num_cached_tokens

    @property
    def num_held(self) -> int:
        store = self.engine._images
        assert store is not None
        return store.num_held


@pytest.fixture
def images(engine: "VllmEngine") -> Iterator[Images]:
    images = Images(engine)
    yield images
    for key in images.run.deltas:
        engine.abort(key)
    images.run.finish()
    assert images.num_held == 0
    assert engine.reset_prefix_cache()
    images.run.finish()


def words(engine: Any, number: int, seed: int = 0) -> list[int]:
    """Without the word that stands for an image."""
    rule = rule_on_card(engine.card.image_rule)
    assert rule is not None
    return [token for token in prompt_of(engine, number, seed) if token != rule.placeholder]


def test_the_proof_of_hashes_holds_with_images(engine: "VllmEngine") -> None:
    assert prove_hashes(engine, random.Random(0)) > 300


def test_the_same_image_is_cached_and_another_misses_from_it_on(images: Images, engine: Any) -> None:
    text = words(engine, 140)
    size = engine.card.block_size
    token_ids, ((start, length),) = images.prompt(text, [RED])
    assert images.cached(text, RED, user=ANN) == 0
    again = images.add(text, RED, user=BOB)
    images.run.finish()
    usage = images.run.usage(again)
    assert usage.num_cached_tokens == usage.num_cross_user_tokens == (len(token_ids) - 1) // size * size
    assert images.cached(text, BLUE) == start // size * size
    assert images.cached(text, RED, root=OTHER_ROOT) == 0
    assert start // size < (start + length) // size


def test_predicted_is_cached_in_every_one_of_many_mixed_requests(images: Images, engine: Any) -> None:
    """Up to four images in any order, two users, two namespaces, on a cache that forgets."""
    rng = random.Random(7)
    pictures = [RED, BLUE, SMALL, TALL]
    texts = [words(engine, 100, seed) for seed in range(3)]
    size = engine.card.block_size
    num_hits = 0
    for _ in range(60):
        root = rng.choice([ROOT, ROOT, OTHER_ROOT])
        contents = rng.sample(pictures, rng.randrange(5))
        text, user = rng.choice(texts), rng.choice([ANN, BOB])
        token_ids, spans = images.prompt(text, contents)
        hashes = hash_blocks(root, token_ids, size, media=images.media(contents, spans, root))
        held = {block_hash for block_hash, number in images.run.balance.held.items() if number}
        predicted = next((i for i, name in enumerate(hashes) if name not in held), len(hashes))
        predicted = min(predicted, (len(token_ids) - 1) // size)
        key = images.add(text, *contents, root=root, user=user, max_tokens=rng.randrange(1, 4))
        if rng.random() < 0.15:
            images.run.step()
            images.run.abort(key)
            images.run.finish()
            continue
        images.run.finish()
        assert images.run.usage(key).num_cached_tokens == predicted * size
        num_hits += bool(predicted)
    assert num_hits > 20
    assert images.num_held == 0


def test_what_is_to_be_encoded_is_counted_and_what_was(images: Images, engine: Any) -> None:
    text = words(engine, 140)
    _, ((_, red), (_, tall)) = images.prompt(text, [RED, TALL])
    images.add(text, RED, TALL, max_tokens=2)
    assert engine._load().num_pending_image_tokens == red + tall
    images.run.finish()
    assert sum(frame.num_encoded_tokens for frame in images.run.frames) == red + tall
    assert engine._load().num_pending_image_tokens == 0
    images.add(text, RED, TALL, max_tokens=2)
    assert engine._load().num_pending_image_tokens == 0
    images.add(text, RED, BLUE, max_tokens=2)  # they share a block, so some of the red one is computed again
    assert engine._load().num_pending_image_tokens == 2 * red
    images.run.finish()
    assert sum(frame.num_encoded_tokens for frame in images.run.frames) == red + tall + red


def test_each_tenant_pays_for_its_own_encoding_and_its_users_share_one(
    images: Images, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM's vision part really computes is counted, beside what the scheduler says of it."""
    model: Any = engine._vllm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    num_runs = 0
    encode = model.embed_multimodal

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal num_runs
        num_runs += 1
        return encode(*arguments, **named)

    monkeypatch.setattr(model, "embed_multimodal", counted)
    _, ((_, length),) = images.prompt([], [RED])
    paid = []
    for user, root, seed in (
        (ANN, ROOT, 1),
        (BOB, ROOT, 2),  # other words before the picture: no block of hers, only the encoder's cache
        (BOB, OTHER_ROOT, 1),
        (ANN, OTHER_ROOT, 2),
    ):
        before = num_runs, sum(frame.num_encoded_tokens for frame in images.run.frames)
        assert images.cached(words(engine, 60, seed), RED, root=root, user=user, max_tokens=1) == 0
        after = num_runs, sum(frame.num_encoded_tokens for frame in images.run.frames)
        paid.append((after[0] - before[0], after[1] - before[1]))
    assert paid == [(1, length), (0, 0)] * 2


@pytest.mark.parametrize("change", ["shifted", "short", "long", "outside", "twice", "of another", "swapped"])
def test_a_span_that_does_not_fit_is_refused_before_anything_is_computed(
    images: Images, engine: Any, change: str
) -> None:
    contents = [RED, TALL]
    for content in contents:
        images.put(content)
    token_ids, [(first, length), other] = images.prompt(words(engine, 60), contents)
    spans = {
        "shifted": [(first + 1, length), other],
        "short": [(first, length - 1), other],
        "long": [(first, length + 1), other],
        "outside": [(first, length), (len(token_ids) - 1, other[1])],
        "twice": [(first, length), (first, length)],
        "of another": [(first, other[1]), other],
        "swapped": [other, (first, length)],
    }[change]
    with pytest.raises(RequestRefused) as refused:
        images.run.add(token_ids, media=images.media(contents, spans))
    assert refused.value.code is RefusalCode.INVALID_REQUEST
    assert images.num_held == 0


def test_an_image_that_never_came_or_is_forgotten_is_missing(images: Images, engine: Any) -> None:
    token_ids, spans = images.prompt(words(engine, 60), [RED])
    images.put(RED, OTHER_ROOT)
    with pytest.raises(RequestRefused) as refused:
        images.run.add(token_ids, media=images.media([RED], spans))
    assert refused.value.code is RefusalCode.MEDIA_MISSING
    images.put(RED)
    assert images.cached(words(engine, 60), RED) == 0
    assert engine.reset_prefix_cache()
    images.run.finish()
    with pytest.raises(RequestRefused) as refused:
        images.run.add(token_ids, media=images.media([RED], spans))
    assert refused.value.code is RefusalCode.MEDIA_MISSING


def test_an_answer_that_goes_on_from_its_own_tokens_reads_the_same(images: Images, engine: Any) -> None:
    text = words(engine, 60)
    key = images.add(text, RED, max_tokens=12)
    images.run.finish()
    whole = images.run.tokens(key)
    token_ids, spans = images.prompt(text, [RED])
    rest = images.run.add(
        [*token_ids, *whole[:5]], media=images.media([RED], spans), max_tokens=12, num_output_tokens=5
    )
    images.run.finish()
    assert images.run.tokens(rest) == whole[5:]


def test_choices_of_one_prompt_share_its_images(images: Images, engine: Any) -> None:
    images.put(RED)
    token_ids, spans = images.prompt(words(engine, 60), [RED])
    keys = images.run.add_choices(token_ids, media=images.media([RED], spans), num_choices=3)
    assert images.num_held == 3
    images.run.abort(keys[1])
    assert images.num_held == 2
    images.run.finish()
    assert images.num_held == 0


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "1"])
def test_formats_and_colours_are_read_and_turned_as_their_headers_say(
    images: Images, engine: Any, kind: str, mode: str
) -> None:
    from PIL import Image

    if kind == "JPEG" and mode in ("RGBA", "P"):
        pytest.skip("there are no such files")
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    options: dict[str, Any] = {} if kind == "GIF" else {"exif": exif}
    Image.effect_noise((300, 120), 50).convert(mode).save(file, kind, **options)
    content = file.getvalue()
    size = read_size(content)
    assert (size.width, size.height) == ((300, 120) if kind == "GIF" else (120, 300))
    answer = images.put(content)
    assert answer.content_hash and not answer.problem
    assert images.cached(words(engine, 50), content) == 0


def test_greys_of_sixteen_bits_are_not_all_white(engine: Any) -> None:
    import numpy as np
    from PIL import Image

    from replicas.vllm_engine.images import _decoded

    shades = np.linspace(0, 65_535, 256 * 4).astype(np.uint16).reshape(4, 256)
    file = io.BytesIO()
    Image.fromarray(shades).save(file, "PNG")
    content = file.getvalue()
    pixels = np.asarray(_decoded(content, read_size(content)))
    assert pixels.shape == (4, 256, 3)
    assert (pixels == (shades >> 8)[:, :, None]).all()


def test_what_has_another_size_than_its_header_says_is_not_decoded(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import ImageFile

    from replicas.vllm_engine.images import _decoded

    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("it was decoded"))
    said = replace(read_size(RED), width=299)
    with pytest.raises(ImageError, match="another size"):
        _decoded(RED, said)


def test_no_step_that_has_something_to_say_waits_for_an_image(
    images: Images, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = engine._images
    waits: list[float] = []
    monkeypatch.setattr(store, "wait", waits.append)
    may_go_on = threading.Event()
    read = store._read
    monkeypatch.setattr(store, "_read", lambda content: (may_go_on.wait(60), read(content))[1])
    engine.take_media(ImageQuery(9000, ROOT, TALL))
    key = images.run.add(words(engine, 40), max_tokens=1)
    while not images.run.deltas[key]:
        assert images.run.step() is not None
        assert not waits, "it has computed something"
    while not waits:
        images.run.step()
    may_go_on.set()
    monkeypatch.undo()
    while not images.run.step().media:
        pass


def broken_files() -> list[bytes]:
    bomb = probe_png(16, 16, b"\0\0\0").replace((16).to_bytes(4, "big") * 2, (20_000).to_bytes(4, "big") * 2)
    lying = probe_png(300, 200, b"\1\1\1").replace((300).to_bytes(4, "big"), (301).to_bytes(4, "big"))
    return [RED[: len(RED) // 2], RED[:-20], bomb, lying, b"", b"text", probe_png(1, 1, b"\0\0\0")]


@pytest.mark.parametrize("content", broken_files())
def test_what_cannot_be_read_is_said_and_the_next_one_is_read(images: Images, content: bytes) -> None:
    answer = images.put(content)
    assert answer.problem and not answer.content_hash
    assert "0x" not in answer.problem
    assert images.put(SMALL).content_hash
