"""Images of an engine: read, kept, and encoded once."""

import random
import threading

import pytest

from replicas.media.encoding import Encoding
from replicas.media.image_cache import CachedImage, ImageCache
from replicas.media.store import BROKEN_IMAGE, ImageStore
from replicas.protocol.blocks import ImageTokens
from replicas.protocol.images import ImageError, media_hash
from replicas.protocol.media import ImageQuery, ImageQueryAnswer
from tests.replicas.builders import OTHER_ROOT, ROOT


class Reader:
    """Reads bytes as an image of so many tokens; some words stand for accidents."""

    def __init__(self) -> None:
        self.read_contents: list[bytes] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self, content: bytes) -> CachedImage[bytes]:
        assert self.may_go_on.wait(30)
        self.read_contents.append(content)
        if content == b"unreadable":
            raise ImageError("this is no picture")
        if content == b"crash":
            raise RuntimeError("0x7f0012345678")
        return CachedImage((7,) * len(content), len(content), content)


def answers(store: ImageStore[bytes], number: int) -> list[ImageQueryAnswer]:
    got: list[ImageQueryAnswer] = []
    while len(got) < number:
        store.wait(30)
        came = store.take_answers()
        assert came, "there was no answer in time"
        got += came
    return got


def test_an_image_is_named_under_its_root_and_read_once_for_each() -> None:
    reader = Reader()
    store = ImageStore(reader, 100)
    for number, root in enumerate([ROOT, ROOT, OTHER_ROOT], 1):
        store.put(ImageQuery(number, root, b"picture"))
    first, again, other = answers(store, 3)
    assert first.content_hash == again.content_hash == media_hash(ROOT, b"picture")
    assert other.content_hash == media_hash(OTHER_ROOT, b"picture")
    assert reader.read_contents == [b"picture", b"picture"]
    assert (first.number, again.number, other.number) == (1, 2, 3)
    assert not store.has_news
    held = store.hold([first.content_hash])
    assert held is not None and held[0].content == b"picture"
    store.close()


@pytest.mark.parametrize(
    ("content", "problem"), [(b"unreadable", "this is no picture"), (b"crash", BROKEN_IMAGE)]
)
def test_what_cannot_be_read_is_said_in_our_own_words_and_the_next_one_is_read(
    content: bytes, problem: str
) -> None:
    store = ImageStore(Reader(), 100)
    store.put(ImageQuery(1, ROOT, content))
    store.put(ImageQuery(2, ROOT, b"picture"))
    broken, taken = answers(store, 2)
    assert (broken.problem, broken.content_hash) == (problem, b"")
    assert taken.content_hash and store.num_bytes == len(b"picture")
    store.close()


def test_a_full_store_says_so_and_keeps_what_is_held() -> None:
    store = ImageStore(Reader(), 10)
    store.put(ImageQuery(1, ROOT, b"12345678"))
    (first,) = answers(store, 1)
    store.hold([first.content_hash])
    store.put(ImageQuery(2, ROOT, b"abc"))
    (full,) = answers(store, 1)
    assert full.is_full and not full.content_hash
    store.release([first.content_hash])
    store.put(ImageQuery(3, ROOT, b"abc"))
    (taken,) = answers(store, 1)
    assert taken.content_hash and store.num_bytes == 3 and store.num_held == 0
    store.close()


def test_there_is_news_from_the_question_on_until_the_answer_is_taken() -> None:
    reader = Reader()
    reader.may_go_on.clear()
    store = ImageStore(reader, 100)
    assert not store.has_news
    store.put(ImageQuery(1, ROOT, b"picture"))
    assert store.has_news and store.take_answers() == []
    store.wait(0.0)
    reader.may_go_on.set()
    answers(store, 1)
    assert not store.has_news
    store.close()


def test_what_can_never_fit_is_for_another_replica_and_pushes_nothing_out() -> None:
    store = ImageStore(Reader(), 100)
    store.put(ImageQuery(1, ROOT, b"picture"))
    store.put(ImageQuery(2, ROOT, b"p" * 101))
    first, second = answers(store, 2)
    assert second.is_full and not second.problem
    assert store.hold([first.content_hash]) is not None
    store.close()


def test_what_was_asked_too_long_ago_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader()
    reader.may_go_on.clear()
    store = ImageStore(reader, 100)
    store.put(ImageQuery(1, ROOT, b"first"))
    store.put(ImageQuery(2, ROOT, b"second"))
    monkeypatch.setattr("replicas.media.store.MAX_MEDIA_SECONDS", 0.0)
    reader.may_go_on.set()
    _, late = answers(store, 2)
    assert late.is_full and not late.content_hash
    assert b"second" not in reader.read_contents
    assert not store.has_news
    store.close()


def item(num_bytes: int) -> CachedImage[int]:
    return CachedImage((1, 2), num_bytes, num_bytes)


def name(number: int) -> bytes:
    return bytes([number]) * 32


def test_the_oldest_goes_first_and_what_is_looked_at_is_new() -> None:
    shelf: ImageCache[int] = ImageCache(30)
    assert all(shelf.put(name(number), item(10)) for number in range(3))
    assert shelf.has(name(0))
    assert shelf.put(name(3), item(10))
    assert [shelf.has(name(number)) for number in range(4)] == [True, False, True, True]
    assert shelf.num_bytes == 30


def test_what_is_held_is_never_forgotten_and_leaves_no_room_for_more() -> None:
    shelf: ImageCache[int] = ImageCache(20)
    shelf.put(name(0), item(10))
    shelf.put(name(1), item(10))
    held = shelf.hold([name(0), name(1), name(0)])
    assert held is not None and [each.num_bytes for each in held] == [10, 10, 10]
    assert not shelf.put(name(2), item(1))
    shelf.clear()
    assert (len(shelf), shelf.num_held) == (2, 3)
    shelf.release([name(0), name(1)])
    assert not shelf.put(name(2), item(11)), "one hold of the first is left"
    assert shelf.put(name(2), item(10)) and not shelf.has(name(1))
    shelf.release([name(0)])
    shelf.clear()
    assert (len(shelf), shelf.num_bytes, shelf.num_held) == (0, 0, 0)


def test_nothing_is_held_if_one_is_missing() -> None:
    shelf: ImageCache[int] = ImageCache(20)
    shelf.put(name(0), item(10))
    assert shelf.hold([name(0), name(1)]) is None
    assert shelf.num_held == 0


def test_what_does_not_fit_pushes_nothing_out() -> None:
    shelf: ImageCache[int] = ImageCache(50)
    for number in range(5):
        shelf.put(name(number), item(10))
    shelf.hold([name(0), name(0)])
    assert not shelf.put(name(9), item(41))
    assert len(shelf) == 5
    shelf.release([name(0)])
    assert not shelf.put(name(9), item(41)), "one hold is left"
    assert shelf.put(name(9), item(40)) and len(shelf) == 2


def test_what_is_larger_than_the_shelf_does_not_fit() -> None:
    shelf: ImageCache[int] = ImageCache(20)
    assert not shelf.put(name(0), item(21))
    assert (len(shelf), shelf.num_bytes) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_it_does_what_a_list_does(seed: int) -> None:
    rng = random.Random(seed)
    shelf: ImageCache[int] = ImageCache(50)
    slow: list[tuple[bytes, int]] = []
    holds: list[list[bytes]] = []

    def num_holders(key: bytes) -> int:
        return sum(hold.count(key) for hold in holds)

    def touch(key: bytes) -> None:
        slow.sort(key=lambda kept: kept[0] == key)

    for _ in range(400):
        key, size = name(rng.randrange(8)), rng.randrange(1, 30)
        match rng.choice(["put", "hold", "release"]):
            case "put":
                known = any(kept == key for kept, _ in slow)
                fits = known or sum(one for kept, one in slow if num_holders(kept)) + size <= 50
                for kept in list(slow):
                    if known or not fits or sum(one for _, one in slow) + size <= 50:
                        break
                    if not num_holders(kept[0]):
                        slow.remove(kept)
                if known:
                    touch(key)
                elif fits:
                    slow.append((key, size))
                assert shelf.put(key, item(size)) == fits
            case "hold":
                wanted = [name(rng.randrange(8)) for _ in range(rng.randrange(1, 4))]
                there = all(any(kept == each for kept, _ in slow) for each in wanted)
                if there:
                    holds.append(wanted)
                    for each in wanted:
                        touch(each)
                assert (shelf.hold(wanted) is not None) == there
            case "release" if holds:
                shelf.release(holds.pop(rng.randrange(len(holds))))
        assert shelf.num_bytes == sum(one for _, one in slow) <= 50
        assert shelf.num_held == sum(map(len, holds))


FIRST, SECOND = ImageTokens(b"a" * 32, 10, 20), ImageTokens(b"b" * 32, 40, 5)


def test_an_image_is_encoded_whole_for_the_first_of_its_tokens_and_once() -> None:
    encoding = Encoding([FIRST, SECOND])
    assert [encoding.encode(start, start + 8) for start in range(0, 48, 8)] == [0, 20, 0, 0, 0, 5]
    assert encoding.num_tokens_left == 0
    assert encoding.encode(0, 48) == 0  # preempted, and computed again


def test_an_image_that_is_cached_whole_is_not_encoded_and_one_that_is_not_is() -> None:
    assert Encoding([FIRST, SECOND]).encode(30, 48) == 5
    assert Encoding([FIRST, SECOND]).encode(29, 48) == 25
    assert Encoding([FIRST, SECOND]).encode(45, 48) == 0


def test_what_is_expected_to_be_cached_is_not_left_until_the_computing_tells() -> None:
    encoding = Encoding([FIRST, SECOND])
    assert encoding.num_tokens_left == 25
    encoding.expect(32)
    assert encoding.num_tokens_left == 5
    assert encoding.encode(16, 20) == 20  # less was cached than expected
    encoding.expect(48)
    assert encoding.num_tokens_left == 5
