"""PlaceSearch: finds the place in a client's body at which its prompt parts from an earlier one.

Owns how much of a processor that may take, and how many bytes of bodies wait for it. A small body is searched
at once, a larger one in a thread.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from router.explain.places import Place, PlaceKind, PromptPlaces, place_in_prompt
from router.prompt.tokenizer import Tokenizer
from router.shared.instruments import Instrument, counter

MAX_PLACED_BYTES = 2 * 2**20
"""Largest body in which a place is searched."""
SMALL_BYTES = 16 * 2**10
SMALL_QUOTES = 256
SMALL_COMMAS = 512
"""A body with no more of these is small: most are looked through in less time than a thread takes to begin,
and the worst in some milliseconds."""
MAX_WAITING = 8
PLACE_SHARE = 0.02
"""Share of one processor for finding places; unused time of the last seconds is kept."""
MAX_SAVED_SECONDS = 0.1


class Allowance:
    """Processor time that may be spent: a share of what passes, and some that was saved up."""

    def __init__(self, share: float, most: float, clock: Callable[[], float]) -> None:
        self._share = share
        self._clock = clock
        self._most = self._saved = most
        self._since = clock()

    def is_left(self) -> bool:
        now = self._clock()
        self._saved = min(self._most, self._saved + (now - self._since) * self._share)
        self._since = now
        return self._saved > 0

    def spend(self, seconds: float) -> None:
        self._saved -= seconds


class PlaceSearch:
    """For one event loop; `close()` with the router. `max_bytes` bounds the bodies that wait."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_bytes_left = max_bytes
        self._time = Allowance(PLACE_SHARE, MAX_SAVED_SECONDS, clock)
        self._thread: ThreadPoolExecutor | None = None
        self._num_waiting = 0
        self.num_places = self.num_left_out = 0

    def instruments(self) -> Iterator[Instrument]:
        yield counter(
            "router_explain_places_total",
            "Prompts that leave an earlier one, by whether the place was looked for in the client's body: "
            "looked_for or left_out (too large, or no time)",
            lambda: {"looked_for": self.num_places, "left_out": self.num_left_out},
            "result",
        )

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def hold(self, body: bytes) -> bytes | None:
        """Keep a body until it is released; None if it is too large, or too many wait."""
        if len(body) > min(MAX_PLACED_BYTES, self._num_bytes_left):
            return None
        self._num_bytes_left -= len(body)
        return body

    def release(self, body: bytes) -> None:
        self._num_bytes_left += len(body)

    def search(
        self, tokenizer: Tokenizer, body: bytes | None, token_ids: Sequence[int], position: int, number: int
    ) -> "Place | asyncio.Future[Place | None] | None":
        """Search for token `number` of the prompt at `position`; None if there is no body or no time."""
        if body is None or not self._time.is_left():
            self.num_left_out += 1
            return None
        look = functools.partial(_timed_place, tokenizer, body, token_ids, position, number)
        if is_small(body):
            self.num_places += 1
            place, seconds = look()
            self._time.spend(seconds)
            return place
        if self._num_waiting >= MAX_WAITING:
            self.num_left_out += 1
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="places")
        self._num_waiting += 1
        self.num_places += 1
        looking = asyncio.get_running_loop().run_in_executor(self._thread, look)
        return asyncio.ensure_future(self._count(looking))

    async def _count(self, looking: "asyncio.Future[tuple[Place | None, float]]") -> Place | None:
        try:
            place, seconds = await looking
        finally:
            self._num_waiting -= 1
        self._time.spend(seconds)
        return place


def is_small(body: bytes) -> bool:
    return len(body) <= SMALL_BYTES and body.count(b'"') <= SMALL_QUOTES and body.count(b",") <= SMALL_COMMAS


def _timed_place(
    tokenizer: Tokenizer, body: bytes, token_ids: Sequence[int], position: int, number: int
) -> tuple[Place | None, float]:
    start = time.thread_time()
    try:
        return _place(tokenizer, body, token_ids, position, number), time.thread_time() - start
    except Exception:  # the outermost frame of this look: a body of a shape that nothing is known of
        return None, time.thread_time() - start


def _place(
    tokenizer: Tokenizer, body: bytes, token_ids: Sequence[int], position: int, number: int
) -> Place | None:
    """The prompt's text is that of its tokens: where it goes on from remembered ones, no template has written
    it as it is."""
    asked: Any = msgspec.json.decode(body)
    if not isinstance(asked, dict):
        return None
    if "prompt" in asked and "messages" not in asked:
        prompt = asked["prompt"]
        is_tokens = not isinstance(prompt, str) and not (prompt and isinstance(prompt[0], str))
        start = number if is_tokens else len(tokenizer.decode(token_ids[:number]))
        return place_in_prompt(prompt, position, start)
    text, begin, end = tokenizer.text_around(token_ids, number)
    place = PromptPlaces(asked, text).at(begin, end)
    return place if place.path or place.kind is PlaceKind.TEMPLATE else None
