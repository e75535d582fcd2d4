"""ImageStore: an image cache and the one thread that decodes images for it.

Owns that thread, and the questions and answers between it and the engine's.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from replicas.media.image_cache import CachedImage, ImageCache
from replicas.protocol.images import ImageError, media_hash
from replicas.protocol.media import MAX_MEDIA_SECONDS, ImageQuery, ImageQueryAnswer

logger = logging.getLogger(__name__)

Content = TypeVar("Content")

BROKEN_IMAGE = "the image cannot be read"


class ImageStore(Generic[Content]):
    """`read` makes an item of an image's bytes, in the thread; it raises ImageError with a sentence for the
    client."""

    def __init__(self, read: Callable[[bytes], CachedImage[Content]], max_bytes: int) -> None:
        self._read = read
        self._shelf: ImageCache[Content] = ImageCache(max_bytes)
        self._questions: deque[tuple[ImageQuery, float]] = deque()
        """With when they came."""
        self._answers: list[ImageQueryAnswer] = []
        self._num_unanswered = 0
        self._is_closed = False
        self._changed = threading.Condition()
        """Guards all of it."""
        threading.Thread(target=self._run, name="images", daemon=True).start()

    @property
    def num_bytes(self) -> int:
        return self._shelf.num_bytes

    @property
    def num_held(self) -> int:
        return self._shelf.num_held

    @property
    def has_news(self) -> bool:
        """Whether an image is being read, or was and has not been reported."""
        return self._num_unanswered > 0

    def put(self, question: ImageQuery) -> None:
        with self._changed:
            self._questions.append((question, time.monotonic()))
            self._num_unanswered += 1
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """For an answer, and no longer."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._answers), seconds)

    def take_answers(self) -> list[ImageQueryAnswer]:
        with self._changed:
            answers, self._answers = self._answers, []
            self._num_unanswered -= len(answers)
        return answers

    def hold(self, hashes: Iterable[bytes]) -> list[CachedImage[Content]] | None:
        """Hold images as an ImageCache does."""
        with self._changed:
            return self._shelf.hold(hashes)

    def release(self, hashes: Iterable[bytes]) -> None:
        with self._changed:
            self._shelf.release(hashes)

    def clear(self) -> None:
        with self._changed:
            self._shelf.clear()

    def close(self) -> None:
        """Close without waiting for reads in progress."""
        with self._changed:
            self._is_closed = True
            self._questions.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or bool(self._questions))
                if self._is_closed:
                    return
                question, asked_at = self._questions.popleft()
            answer = self._answer(question, asked_at)
            with self._changed:
                self._answers.append(answer)
                self._changed.notify_all()

    def _answer(self, question: ImageQuery, asked_at: float) -> ImageQueryAnswer:
        started = time.monotonic()
        if started - asked_at > MAX_MEDIA_SECONDS:  # whoever asked has gone
            return ImageQueryAnswer(question.number, is_full=True)
        content_hash = media_hash(question.root, question.content)
        with self._changed:
            if self._shelf.has(content_hash):
                return ImageQueryAnswer(question.number, content_hash)
        try:
            item = self._read(question.content)
        except ImageError as error:
            return ImageQueryAnswer(question.number, problem=str(error))
        except Exception:  # a decoder's own words may tell of this process's memory
            logger.exception("an image cannot be read")
            return ImageQueryAnswer(question.number, problem=BROKEN_IMAGE)
        with self._changed:
            is_full = not self._shelf.put(content_hash, item)
        if is_full:
            return ImageQueryAnswer(question.number, is_full=True)
        return ImageQueryAnswer(question.number, content_hash, seconds=time.monotonic() - started)
