"""StoreQuestions: questions to the store below an engine, and the waiters for answers.

Owns the numbers of questions. Answers come with the engine's frames, in any order, or never: each question
has a deadline.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

from replicas.protocol.hand_overs import (
    HandOverOutcome,
    KeepChunks,
    LeasedChunk,
    ListLeases,
    StoreAnswer,
    StoreQuestion,
    TakeOver,
)


class StoreInbox(Protocol):
    """The part of the engine loop that is used here."""

    def ask_store(self, question: StoreQuestion) -> None: ...


class StoreQuestions:
    """On the event loop."""

    def __init__(self, inbox: StoreInbox) -> None:
        self._inbox = inbox
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[StoreAnswer]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def leased(self, seconds: float) -> Sequence[LeasedChunk]:
        """Raises TimeoutError."""
        return (await self._ask(ListLeases, seconds)).leased

    async def keep(self, take_over: TakeOver, seconds: float) -> Sequence[HandOverOutcome]:
        """Ask the store to keep chunks. Raises TimeoutError; the store continues regardless."""
        return (await self._ask(lambda number: KeepChunks(number, take_over), seconds)).outcomes

    def take(self, answers: Sequence[StoreAnswer]) -> None:
        for answer in answers:
            future = self._waiting.get(answer.number)
            if future is not None and not future.done():
                future.set_result(answer)

    async def _ask(self, question: Callable[[int], StoreQuestion], seconds: float) -> StoreAnswer:
        number = next(self._numbers)
        future: asyncio.Future[StoreAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._inbox.ask_store(question(number))
            async with asyncio.timeout(seconds):
                return await future
        finally:
            del self._waiting[number]
