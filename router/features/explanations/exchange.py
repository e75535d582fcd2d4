"""ExplanationExchange: asks the router that served a request why its prompt was not read from cache.

Owns the question and the answer. All routers of a cluster can read and make them, and only they: both are
sealed under the cluster secret. A router answers from its memory of the named tenant. Idle unless asked; only
explain requests ever wait on it.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from replicas.protocol.cluster_secret import ClusterSecret, Purpose
from router.explain.explanation import Explanation, packed, unpacked
from router.feature import Feature
from router.shared.instruments import Instrument, counter
from router.shared.news import NewsStream
from router.shared.sealing import LazySeal

STREAM = "kvasir-stories:news"
MAX_NEWS = 256
KEPT_SECONDS = 30
MAX_EXPLANATION_BYTES = 256 * 2**10
"""A longer explanation is not sent."""
ANSWER_SECONDS = 1.0
"""Deadline of a question."""
LOOK_SECONDS = 0.02
"""Between two lookups in our own memory: a explanation is there a moment after its answer has ended."""
ASK_AGAIN_SECONDS = 0.2
"""A router that does not know an id looks once more after this time."""
MAX_ASKED = 64
MAX_ASKED_OF_TENANT = 4
"""Questions that wait at once; beyond, only our own memory is searched."""
MAX_TELLING = 256
"""Questions of others that are answered at once; more are dropped."""

Find = Callable[[str, str], Explanation | None]
"""The explanation of a tenant's prompt by its id, if it is known here."""


class Question(msgspec.Struct, frozen=True, array_like=True, tag="?"):
    number: bytes
    tenant: str
    prompt_id: str


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="!"):
    number: bytes
    explanation: bytes


class ExplanationExchange(Feature):
    """For one event loop: have `run()` run. Raises ValueError if that is not a Redis address.

    Routers without a common secret ignore each other.
    """

    def __init__(self, redis_url: str, secret: ClusterSecret, find: Find) -> None:
        self._find = find
        self.stream = NewsStream(
            redis_url,
            STREAM,
            msgspec.msgpack.Decoder(Question | Answer).decode,
            seal=LazySeal(secret, Purpose.EXPLANATIONS),
            max_messages=MAX_NEWS,
            kept_seconds=KEPT_SECONDS,
            while_away="routers cannot ask each other for explanations, each has those of its own requests",
            once_back="routers can ask each other again for explanations",
        )
        self._asked: dict[bytes, asyncio.Future[Explanation]] = {}
        self._num_asked_of: Counter[str] = Counter()
        self._telling: set[asyncio.Task[None]] = set()
        self.num_answered = self.num_unanswered = self.num_not_asked = 0
        self.num_told = 0

    def instruments(self) -> Iterator[Instrument]:
        yield counter(
            "router_explain_questions_total",
            "Explanations that were asked of other routers: answered, unanswered, or not_asked as too many "
            "waited; told to other routers; messages between them that were wrong, and Redis that failed",
            lambda: {
                "answered": self.num_answered,
                "unanswered": self.num_unanswered,
                "not_asked": self.num_not_asked,
                "told": self.num_told,
                "wrong": self.stream.num_wrong,
                "failed": self.stream.num_failed,
            },
            "outcome",
        )

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async for message, _ in self.stream.messages(0.0):
                self._take(message)
        finally:
            for task in self._telling:
                task.cancel()
            await self.stream.close()

    async def ask(self, tenant: str, prompt_id: str) -> Explanation | None:
        """Our own explanation, else that of the router that knows it; None if none has answered in time."""
        explanation = self._find(tenant, prompt_id)
        if explanation is not None:
            return explanation
        if len(self._asked) >= MAX_ASKED or self._num_asked_of[tenant] >= MAX_ASKED_OF_TENANT:
            self.num_not_asked += 1
            return None
        number = secrets.token_bytes(16)
        self._asked[number] = asyncio.get_running_loop().create_future()
        self._num_asked_of[tenant] += 1
        try:
            explanation = await self._answer(Question(number, tenant, prompt_id), self._asked[number])
        finally:
            del self._asked[number]
            self._num_asked_of -= Counter((tenant,))  # and no name stays that has none
        if explanation is None:
            self.num_unanswered += 1
        else:
            self.num_answered += 1
        return explanation

    async def _answer(self, question: Question, answer: "asyncio.Future[Explanation]") -> Explanation | None:
        sending = asyncio.create_task(self.stream.send(question))
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                while True:
                    await asyncio.wait([answer], timeout=LOOK_SECONDS)
                    explanation = answer.result() if answer.done() else self._find_for(question)
                    if explanation is not None:
                        return explanation
                    if sending.done() and not sending.result():
                        return None
        except TimeoutError:
            return None
        finally:
            sending.cancel()

    def _find_for(self, question: Question) -> Explanation | None:
        return self._find(question.tenant, question.prompt_id)

    def _take(self, message: Question | Answer) -> None:
        if isinstance(message, Answer):
            self._hear(message)
        elif message.number not in self._asked and len(self._telling) < MAX_TELLING:
            task = asyncio.create_task(self._tell(message))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    def _hear(self, message: Answer) -> None:
        asked = self._asked.get(message.number)
        if asked is not None and not asked.done():
            try:
                asked.set_result(unpacked(message.explanation))
            except msgspec.MsgspecError:
                self.stream.num_wrong += 1

    async def _tell(self, question: Question) -> None:
        explanation = self._find_for(question)
        if explanation is None:
            await asyncio.sleep(ASK_AGAIN_SECONDS)
            explanation = self._find_for(question)
        data = b"" if explanation is None else packed(explanation)
        if 0 < len(data) <= MAX_EXPLANATION_BYTES:
            self.num_told += await self.stream.send(Answer(question.number, data))
