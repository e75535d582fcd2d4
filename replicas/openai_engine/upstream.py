"""BodyServer: HTTP with a server that takes bodies.

Owns which model it has, which forms of bodies it takes, and what of an answer is one piece: a whole event of
a stream, all of an answer that does not stream, or what comes where a route is passed on. Comments in a
stream are left out: routers send their own.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Annotated, NamedTuple

import aiohttp
import msgspec

from replicas.errors import StartupError
from replicas.openai_engine.bodies import (
    MOST_ANSWER_BYTES,
    MOST_STREAM_BYTES,
    PASSED_SECONDS,
    PATHS,
    AnswerReader,
    EventSplitter,
    PassedBody,
    Read,
    SentBody,
    read_passed,
)
from replicas.protocol.frames import BodyForm, Refusal, RefusalCode, ServerError
from replicas.protocol.passed_routes import MOST_TYPE_CHARACTERS
from replicas.remote_engine.dialect import NotThere
from replicas.remote_engine.model_list import MODELS_PATH, read_models
from replicas.remote_engine.server import (
    CONNECT_SECONDS,
    HTTP_ERRORS,
    LIST_SECONDS,
    Ended,
    Listed,
    Server,
    Unreachable,
    check_plain,
    read_whole,
)

logger = logging.getLogger(__name__)

END_SECONDS = 1.0
"""Time that an answer has to end after its last event, so that its connection can be used again."""

NOT_THERE = (404, 405, 501)

BROKEN_OFF = ServerError(502, "server_error", code="server_failed")
"""The client's error, of a body that was passed on and not answered."""


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


class _Properties(msgspec.Struct):
    total_slots: Annotated[int, msgspec.Meta(ge=0, le=2**16)] = 0


class BodyServer(Server):
    """Once it runs, it is gone when it no longer has `served_name`."""

    served_name = ""
    refused: frozenset[str] = frozenset()
    """Fields of ours that it does not take."""

    def forms(self, served_name: str) -> tuple[BodyForm, ...]:
        """Ask with bodies that have no prompt, which a server refuses. Raises StartupError."""
        return tuple(form for form, path in PATHS.items() if self._takes(path, served_name))

    def num_places(self) -> int:
        """Ask llama.cpp how many requests it computes at a time; 0 of others, which do not tell."""
        try:
            told = msgspec.json.decode(self.ask("/props"), type=_Properties)
        except (StartupError, msgspec.MsgspecError):
            return 0
        return told.total_slots

    def _takes(self, path: str, served_name: str) -> bool:
        answer = self.try_ask(path, {"model": served_name})
        return answer.status_code not in NOT_THERE and not answer.has_redirect_location

    def _looking(self) -> list[Coroutine[None, None, None]]:
        return [self._list()]

    async def _list(self) -> None:
        while True:
            await asyncio.sleep(LIST_SECONDS)
            try:
                answer = await self._whole(MODELS_PATH, CONNECT_SECONDS)
                if answer.status_code >= 500:
                    raise ValueError(f"it answers {answer.status_code}")
                is_list = answer.status_code == 200  # a vendor refuses those who ask often
                self._tell(Listed(read_models(answer.content, self.served_name)) if is_list else Alive())
            except NotThere as error:
                self._tell(Unreachable(str(error), is_refused=True))
            except Exception as error:  # of any kind: it is told, and the next look follows
                self._tell(self._unreachable(error))

    async def _stream(self, name: str, sent: SentBody | PassedBody) -> None:
        if isinstance(sent, PassedBody):
            await self._pass(name, sent)
            return
        reader = AnswerReader(sent)
        try:
            refusal = await self._answer(name, sent, reader)
            while refusal is not None and (field := _refused_field(sent, refusal, reader)) is not None:
                sent = sent.without(field)
                reader = AnswerReader(sent)
                refusal = await self._answer(name, sent, reader)
        except asyncio.CancelledError:
            return
        except Exception as error:  # of any kind: it ends this request and no other
            refusal = self._breaks_off(error)
            if reader.has_ended:
                refusal = None
        if refusal is not None and (end := reader.missing_end()):
            self._tell(BodyPiece(name, end, 0, time.monotonic()))
            refusal = None
        self._tell(Answered(name, reader.read) if refusal is None else Ended(name, refusal))

    async def _answer(self, name: str, sent: SentBody, reader: AnswerReader) -> Refusal | None:
        """Tell an answer's pieces; returns why it is none, or not a whole one. Raises HTTP_ERRORS and
        ValueError."""
        async with self._post(sent.path, sent.content) as answer:
            if answer.status != 200:
                return await self._refusal(answer, sent.form)
            check_plain(answer.headers)
            if not self.refused.issuperset(sent.left_out):
                self.refused = self.refused.union(sent.left_out)
                logger.warning("the server refuses fields, which it is no longer sent: %s", sent.left_out)
            pieces = _events if sent.streams else _whole
            async for content, num_tokens in pieces(answer.content.iter_any(), reader):
                piece = BodyPiece(name, content, num_tokens, time.monotonic())
                self._tell(piece if content else Alive())
            with suppress(*HTTP_ERRORS):
                async with asyncio.timeout(END_SECONDS):
                    async for _ in answer.content.iter_any():
                        pass
        return reader.refusal(self._without_key)

    async def _pass(self, name: str, sent: PassedBody) -> None:
        """Pass on a body, and its answer as it comes. Once it may have been sent, it is not tried elsewhere:
        what a route does is not known, so once must be enough."""
        try:
            async with asyncio.timeout(PASSED_SECONDS), self._post(*sent) as answer:
                if answer.status != 200:
                    self._tell(Ended(name, await self._refusal(answer, BodyForm.CHAT)))
                    return
                check_plain(answer.headers)
                self._tell(Answered(name, await self._pieces(name, answer)))
        except asyncio.CancelledError:
            return
        except Exception as error:  # of any kind: it ends this request and no other
            message = f"the server's answer breaks off: {self._named(error)}"
            refusal = Refusal(RefusalCode.INVALID_REQUEST, message, BROKEN_OFF)
            if isinstance(error, aiohttp.ClientConnectorError):
                refusal = Refusal(RefusalCode.INTERNAL, self._named(error))
            self._tell(Ended(name, refusal))

    async def _pieces(self, name: str, answer: aiohttp.ClientResponse) -> Read:
        """Tell an answer's content type, then its pieces. Raises HTTP_ERRORS, and ValueError if it is too
        long."""
        content_type = answer.headers.get("content-type") or "application/octet-stream"
        self._tell(BodyPiece(name, content_type[:MOST_TYPE_CHARACTERS].encode(), 0, time.monotonic()))
        kept, num_bytes = bytearray(), 0
        is_read = content_type.lower().startswith("application/json")
        async for piece in answer.content.iter_any():
            num_bytes += len(piece)
            if num_bytes > MOST_ANSWER_BYTES:
                raise ValueError(f"more than {MOST_ANSWER_BYTES} bytes")
            if is_read:
                kept += piece
            self._tell(BodyPiece(name, piece, 0, time.monotonic()))
        return read_passed(bytes(kept))


def _refused_field(sent: SentBody, refusal: Refusal, reader: AnswerReader) -> str | None:
    """Return the field for which a server refuses a body, if it is one that we have added."""
    if reader.has_begun or refusal.error is None or refusal.error.status not in (400, 422):
        return None
    return sent.refused_in(refusal.message)


async def _events(pieces: AsyncIterator[bytes], reader: AnswerReader) -> AsyncIterator[tuple[bytes, int]]:
    """Yield whole events and their tokens; nothing for a comment or part of an event. Raises ValueError."""
    splitter, num_bytes = EventSplitter(), 0
    async for piece in pieces:
        num_bytes += len(piece)
        if num_bytes > MOST_STREAM_BYTES:
            raise ValueError(f"more than {MOST_STREAM_BYTES} bytes")
        has_said = False
        for event in splitter.add(piece):
            content, num_tokens = reader.event(event)
            if content:
                yield content, num_tokens
                has_said = True
            if reader.is_over:
                return
        if not has_said:
            yield b"", 0
    if splitter.rest:
        yield reader.rest(splitter.rest)


async def _whole(pieces: AsyncIterator[bytes], reader: AnswerReader) -> AsyncIterator[tuple[bytes, int]]:
    """Yield all of it. Raises ValueError."""
    yield reader.whole(await read_whole(pieces, MOST_ANSWER_BYTES))
