"""Images on a real vLLM: what is predicted is cached by tier, and nothing that does not fit is computed."""

import io
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from replicas.engine import RequestRefused
from replicas.media.probes import probe_png
from replicas.proof import prove_hashes
from replicas.protocol.blocks import BlockHash, ImageTokens, hash_blocks
from replicas.protocol.events import Tier
from replicas.protocol.frames import RefusalCode, UserTag
from replicas.protocol.image_rules import ImageRule, expand, rule_on_card
from replicas.protocol.images import ImageError, media_hash, read_size
from replicas.protocol.media import ImageQuery, ImageQueryAnswer
from tests.replicas.builders import OTHER_ROOT, ROOT, engine_request
from tests.replicas.engine_run import prompt_of
from tests.replicas.vllm_engine.conftest import OneEngine
from tests.replicas.vllm_engine.tiered_run import BLOCK, CHUNK, TieredRun, opened, settle

if TYPE_CHECKING:
    from replicas.vllm_engine.engine import VllmEngine

pytestmark = pytest.mark.vllm

RED, BLUE = (probe_png(300, 200, colour) for colour in (b"\xff\0\0", b"\0\0\xff"))
SMALL = probe_png(40, 40, b"\1\2\3")
TALL = probe_png(90, 230, b"\7\7\7")
"""Cut into other tiles than the rest."""
ANN, BOB = (UserTag(name.ljust(16)) for name in (b"ann", b"bob"))


@pytest.fixture
def engine(one_engine: OneEngine, image_model: Path) -> "VllmEngine":
    engine: VllmEngine = one_engine.of(model=str(image_model), context_length=1024)
    return engine


class Images:
    """Asks about images as a router does: sends them, writes their tokens, and predicts the blocks."""

    def __init__(self, engine: "VllmEngine", run: TieredRun | None = None) -> None:
        self.run = TieredRun(engine) if run is None else run
        self.engine = engine
        rule = rule_on_card(engine.card.image_rule)
        assert rule is not None
        self.rule: ImageRule = rule
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


def test_predicted_is_cached_in_every_one_of_many_mixed_requests(images: Images) -> None:
    answer_mixed(images, [Tier.DEVICE])


def answer_mixed(images: Images, forgets: list[Tier]) -> None:
    """Up to four images in any order, two users, two namespaces, aborts, on tiers that forget. The engine
    computes what is not predicted and no more.
    """
    engine, run, rng = images.engine, images.run, random.Random(11)
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
        counts += Counter(loaded=cached > device, on_device=device > 0, of_disk=disk > 0)
    assert counts["on_device"] > NUM_MIXED // 10
    assert Tier.DISK not in forgets or min(counts["loaded"], counts["of_disk"]) > NUM_MIXED // 10
    assert images.num_held == 0
    assert all(run.num_removed[tier] > 0 for tier in forgets)


def test_a_model_that_takes_images_may_be_served_for_text_alone(
    one_engine: OneEngine, image_model: Path
) -> None:
    engine = one_engine.of(model=str(image_model), context_length=1024, image_bytes=0)
    assert engine.card.image_rule == ""
    assert prove_hashes(engine, random.Random(0)) < 300
    with pytest.raises(RequestRefused, match="reads text only"):
        engine.add(engine_request([5] * 40, media=(ImageTokens(bytes(32), 0, 5),)))


def opened_for_images(folder: Path, model: Path, num_files: int, **settings: Any) -> Iterator[Images]:
    shape = {"model": str(model), "num_blocks": 40, "context_length": 1024}
    for run in opened(folder, num_files, block_bytes=16_384, **shape, **settings):
        images = Images(run.engine, run)
        yield images
        assert images.num_held == 0


def test_images_of_an_earlier_life_are_read_for_the_same_prompt_and_no_other(
    patient_reading: None, tmp_path: Path, image_model: Path
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
        hashes = hash_blocks(ROOT, token_ids, BLOCK, media=images.media([RED], [(start, length)]))[3::4]
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


def test_predicted_is_cached_with_tiers_below(
    patient_reading: None, tmp_path: Path, image_model: Path
) -> None:
    for images in opened_for_images(tmp_path / "kv", image_model, 48, host_kv_bytes=3 << 19):
        answer_mixed(images, list(Tier))
