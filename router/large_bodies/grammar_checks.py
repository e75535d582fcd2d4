"""GrammarChecks: what answers are to be held to, checked beside the event loop, and remembered.

Owns how many grammars are worked out at once and for whom, how many wait for that and how long, and which are
known. A check takes milliseconds, for the worst that a client can ask seconds: owners take turns. An owner is
a tenant, or without keys an address. Where it is worked out is given.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from typing import NamedTuple

import msgspec

from router.answers.grammar_check import CheckedGrammar, WishedGrammar, checked_grammar
from router.errors import RouterBusy
from router.prompt.engines import TooMuchWork
from router.shared.bounded_cache import BoundedCache
from router.shared.fair_places import FairPlaces, NoPlace

MAX_CHARACTERS = 64 * 1024
"""Longest grammar checked inline; longer ones go to the worker process."""

NUM_PLACES = 3
"""Parallel checks; an owner may use two."""
MAX_WAITING = 64
WAIT_SECONDS = 30.0
RETRY_SECONDS = 2.0
MAX_KNOWN = 128


def check(wished: WishedGrammar) -> CheckedGrammar:
    """Blocks while it is worked out. Raises InvalidRequest."""
    started = time.thread_time()
    followed = checked_grammar(
        wished.text,
        parameter=wished.parameter,
        special_tokens=wished.special_tokens,
        tool_parameter=wished.tool_parameter,
    )
    return CheckedGrammar(followed.text, followed.num_bytes, time.thread_time() - started)


class _KnownGrammar(NamedTuple):
    """`owner` is whose request was the first with it."""

    grammar: CheckedGrammar
    owner: str


_Key = tuple[WishedGrammar, Hashable]


class GrammarChecks:
    """`work_out` does it elsewhere, and raises InvalidRequest and RouterBusy."""

    def __init__(self, work_out: Callable[[WishedGrammar], Awaitable[CheckedGrammar]]) -> None:
        self._work_out = work_out
        self._places = FairPlaces(num_places=NUM_PLACES, most_waiting=MAX_WAITING, wait_seconds=WAIT_SECONDS)
        self._known: BoundedCache[_Key, _KnownGrammar] = BoundedCache(MAX_KNOWN)

    async def checked(
        self, wished: WishedGrammar, namespace: Hashable = None, owner: str = ""
    ) -> CheckedGrammar:
        """Each namespace's are remembered apart: how soon it is checked would tell others that it was asked
        for before. Raises InvalidRequest for what cannot be followed, RouterBusy, and TooMuchWork for what is
        to be checked elsewhere."""
        key = (wished, namespace)
        known = self._known.get(key)
        if known is not None:
            return known.grammar
        if len(wished.text) > MAX_CHARACTERS:
            raise TooMuchWork
        try:
            async with self._places.place(owner):
                known = self._known.get(key)  # the same one may have been before it in the line
                if known is not None:
                    return known.grammar
                grammar = await self._work_out(wished)
        except NoPlace as error:
            raise RouterBusy(
                "Too many schemas and grammars are being worked out. Please try again.",
                retry_after_seconds=RETRY_SECONDS,
            ) from error
        self._remember(key, _KnownGrammar(msgspec.structs.replace(grammar, seconds=0.0), owner))
        return grammar

    def _remember(self, key: _Key, known: _KnownGrammar) -> None:
        """Store a result; a full store evicts the LRU entry of the owner with most."""
        if len(self._known) >= self._known.max_size:
            num_of = Counter(each.owner for _, each in self._known.items())
            num_of[known.owner] += 1
            ((largest, _),) = num_of.most_common(1)
            self._known.pop(next(kept for kept, each in self._known.items() if each.owner == largest))
        self._known.put(key, known)
