"""BodyServer: HTTP with a server that takes bodies.

Owns which forms of bodies it takes, and what of an answer is one piece: a whole event of a stream, or all of
an answer that does not stream.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from replicas.openai_engine.bodies import (
    MOST_ANSWER_BYTES,
    PATHS,
    AnswerReader,
    EventSplitter,
    Read,
    SentBody,
    data_of,
    is_only_usage,
)
from replicas.protocol.frames import BodyForm, Refusal, RefusalCode
from replicas.remote_engine.server import EVENT_STREAM, HTTP_ERRORS, Ended, Server, named, unreachable

ALIVE_SECONDS = 2.0
"""Time between looks whether the server still answers."""

NOT_THERE = (404, 405, 501)


class BodyPiece(NamedTuple):
    """`num_tokens` that its content is taken for; `at` is when it came, by the monotonic clock."""

    name: str
    content: bytes
    num_tokens: int
    at: float


class Answered(NamedTuple):
    """An answer is over by its own end, and this is what it has said of itself."""

    name: str
    read: Read


class Alive(NamedTuple):
    """The server answers."""


class BodyServer(Server):
    def forms(self, served_name: str) -> tuple[BodyForm, ...]:
        """Ask with bodies that have no prompt, which a server refuses. Raises StartupError."""
        return tuple(form for form in BodyForm if self._takes(PATHS[form], served_name))

    def _takes(self, path: str, served_name: str) -> bool:
        answer = self.try_ask(path, {"model": served_name})
        return answer.status_code not in NOT_THERE and not answer.has_redirect_location

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            try:
                await self._get("/v1/models")
                self._tell(Alive())
            except HTTP_ERRORS as error:
                self._tell(unreachable(error))

    async def _stream(self, name: str, sent: SentBody) -> None:
        refusal: Refusal | None = None
        reader = AnswerReader()
        try:
            async with self._post(sent.path, sent.content) as answer:
                refusal = await self._refusal(answer, EVENT_STREAM if sent.streams else "application/json")
                if refusal is None:
                    pieces = _events if sent.streams else _whole
                    async for content, num_tokens in pieces(answer.content.iter_any(), reader, sent):
                        self._tell(BodyPiece(name, content, num_tokens, time.monotonic()))
        except asyncio.CancelledError:
            return
        except (*HTTP_ERRORS, ValueError) as error:
            refusal = Refusal(RefusalCode.INTERNAL, f"the server's answer breaks off: {named(error)}")
        if refusal is None and reader.read.complaint is not None:
            refusal = Refusal(RefusalCode.INTERNAL, reader.read.complaint)
        self._tell(Answered(name, reader.read) if refusal is None else Ended(name, refusal))


async def _events(
    pieces: AsyncIterator[bytes], reader: AnswerReader, sent: SentBody
) -> AsyncIterator[tuple[bytes, int]]:
    """Yield whole events, and a token for each that says something. Raises ValueError."""
    splitter = EventSplitter()
    async for piece in pieces:
        for event in splitter.add(piece):
            data = data_of(event)
            said = None if data is None else reader.take(data)
            if reader.read.problem is not None:
                return
            if said is None or not (sent.hides_usage and is_only_usage(said)):
                yield event, int(said is not None and bool(said.choices or said.delta))
    if splitter.has_rest:
        raise ValueError("its last event has no end")


async def _whole(
    pieces: AsyncIterator[bytes], reader: AnswerReader, sent: SentBody
) -> AsyncIterator[tuple[bytes, int]]:
    """Yield all of it. Raises ValueError."""
    content = bytearray()
    async for piece in pieces:
        content += piece
        if len(content) > MOST_ANSWER_BYTES:
            raise ValueError(f"more than {MOST_ANSWER_BYTES} bytes")
    reader.take(bytes(content))
    yield bytes(content), reader.read.num_output_tokens or 0
