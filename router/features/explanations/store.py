"""ExplanationStore: what a router remembers of its requests to explain them, and the search for places.

Owns how much of a processor the search may take. Knows nothing of how a request runs;
`request_explanation.py` does.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from router.explain.explanation import Explanation, compared, packed, unpacked
from router.explain.places import Place, PlaceKind, PromptPlaces, place_in_prompt
from router.explain.remembered_prompts import RememberedPrompts
from router.generation import Generation
from router.prompt.tokenizer import Tokenizer
from router.shared.instruments import Instrument, counter, gauge

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
NO_LOSS_SHARE = 0.002
NO_LOSS_SAVED_SECONDS = 0.005
"""The same, of small bodies whose prompts have lost nothing: there the place only says where they are new."""


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


class ExplanationStore:
    """A router's memory of its requests. For one event loop; `close()` with the router."""

    def __init__(self, max_bytes: int, key: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self.remembered = RememberedPrompts(max_bytes, key)
        self._time = Allowance(PLACE_SHARE, MAX_SAVED_SECONDS, clock)
        self._time_without_loss = Allowance(NO_LOSS_SHARE, NO_LOSS_SAVED_SECONDS, clock)
        self._thread: ThreadPoolExecutor | None = None
        self._num_waiting = 0
        self.num_places = self.num_places_left_out = 0

    def instruments(self) -> Iterator[Instrument]:
        remembered = self.remembered
        yield gauge(
            "router_explain_bytes",
            "Memory of what is kept of requests to explain their cache misses",
            lambda: remembered.num_bytes,
        )
        yield gauge(
            "router_explain_prompts",
            "Prompts that can be explained and compared with",
            lambda: remembered.num_prompts,
        )
        yield counter(
            "router_explain_forgotten_total",
            "Prompts that made room for others and can be explained no more",
            lambda: remembered.num_forgotten,
        )
        yield counter(
            "router_explain_places_total",
            "Prompts that leave an earlier one, by whether the place was looked for in the client's body: "
            "looked_for or left_out (too large, or no time)",
            lambda: {"looked_for": self.num_places, "left_out": self.num_places_left_out},
            "result",
        )

    def find(self, tenant: str, prompt_id: str) -> Explanation | None:
        """One of that tenant's."""
        found = self.remembered.find(tenant, prompt_id)
        if found is None or not found.explanation:
            return None
        explanation = unpacked(found.explanation)
        if found.is_compared or not explanation.prompts:
            return explanation
        facts, nearest = self.remembered.nearest_before(tenant, found)
        explanation = msgspec.structs.replace(
            explanation, prompts=(compared(explanation.prompts[0], facts, nearest),)
        )
        found.is_compared = True
        self.remembered.tell(found, tenant, packed(explanation))
        return explanation

    def may_place(self, *, has_lost: bool) -> bool:
        """Whether there is time to find a place in a small body; otherwise it is counted as left out."""
        time_left = self._time if has_lost else self._time_without_loss
        if time_left.is_left():
            return True
        self.num_places_left_out += 1
        return False

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def place_soon(
        self, tokenizer: Tokenizer, body: bytes, generation: Generation, position: int, number: int
    ) -> "asyncio.Future[Place | None] | None":
        """Search, in a thread, for the place of token `number` of the prompt at `position`; None without time
        for it."""
        if len(body) > MAX_PLACED_BYTES or self._num_waiting >= MAX_WAITING or not self._time.is_left():
            self.num_places_left_out += 1
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="places")
        self._num_waiting += 1
        self.num_places += 1
        look = functools.partial(_timed_place, tokenizer, body, generation.token_ids, position, number)
        looking = asyncio.get_running_loop().run_in_executor(self._thread, look)
        return asyncio.ensure_future(self._count(looking))

    def place_now(
        self,
        tokenizer: Tokenizer,
        body: bytes,
        generation: Generation,
        position: int,
        number: int,
        *,
        has_lost: bool,
    ) -> Place | None:
        """The same at once, in a small body, of a prompt of which it is known whether it `has_lost` any."""
        if not self.may_place(has_lost=has_lost):
            return None
        time_left = self._time if has_lost else self._time_without_loss
        self.num_places += 1
        place, seconds = _timed_place(tokenizer, body, generation.token_ids, position, number)
        time_left.spend(seconds)
        return place

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
