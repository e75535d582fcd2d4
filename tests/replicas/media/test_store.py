"""The store of images: what its thread answers, whatever it reads."""

import threading

import pytest

from replicas.media.image_cache import CachedImage
from replicas.media.store import BROKEN_IMAGE, ImageStore
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
