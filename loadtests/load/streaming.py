"""Reads and times the answers that a streaming client gets, and a lean HTTP/1.1 client for them on asyncio.

Owns one answer, whatever socket it comes from, and asyncio's keep-alive connection. It parses just enough of
HTTP and SSE, so that on a small machine the load generator is not what is measured.

Times are of this client's clock, in seconds: first token = the first event that carries text.
"""

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

MOST_IDLE_SECONDS = 1.0
"""Servers close idle connections; one that is younger than this is certainly still there."""
REFUSALS = (429, 503)

_TEXT = re.compile(rb'"(?:content|text|reasoning_content|reasoning)":\s*"(?!")|"tool_calls":\s*\[(?!\])')
_FACT = re.compile(rb'"(?:usage|error)":\s*[{"]')


class StreamCut(Exception):
    """The connection ended in mid-answer; `answer` is what had come until then."""

    def __init__(self, answer: "Answer") -> None:
        super().__init__("the answer was cut short")
        self.answer = answer


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None
    cross_user_cached_tokens: int | None = None
    host_cached_tokens: int | None = None
    disk_cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The API's own object."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class _Facts(msgspec.Struct):
    """Facts in an event, or in an answer that is no stream."""

    id: str | None = None
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Facts).decode


@dataclass(frozen=True, slots=True)
class Answer:
    """One timed answer."""

    status: int
    headers: Mapping[str, str]
    sent_seconds: float = 0.0
    done_seconds: float = 0.0
    text_seconds: tuple[float, ...] = ()
    """Times of the events that carry text."""
    usage: Usage = field(default_factory=Usage)
    response_id: str | None = None
    has_failed: bool = False
    """Has an event with an error."""
    is_whole: bool = True
    """Not a stream, or one that ended with [DONE]."""
    events: tuple[bytes, ...] = ()
    """Data of the stream's events, from a connection that keeps them."""

    @property
    def ttft(self) -> float:
        return (self.text_seconds[0] if self.text_seconds else self.done_seconds) - self.sent_seconds

    @property
    def e2e(self) -> float:
        return self.done_seconds - self.sent_seconds

    @property
    def itl_seconds(self) -> tuple[float, ...]:
        """Gaps between the events that carry text."""
        return tuple(later - earlier for earlier, later in pairwise(self.text_seconds))

    @property
    def num_cached_tokens(self) -> int:
        details = self.usage.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0

    @property
    def error(self) -> str | None:
        """Name what is wrong with it, in a word or two."""
        if self.status in REFUSALS:
            return f"refused ({self.status})"
        if self.status != 200:
            return f"status {self.status}"
        return "failed" if self.has_failed else None if self.is_whole else "truncated"


class Reading:
    """One answer so far. Fed with what comes and with the time, whatever the socket."""

    def __init__(
        self, status: int, headers: Mapping[str, str], sent_seconds: float, *, keeps_events: bool = False
    ) -> None:
        self._status, self._headers, self._sent = status, headers, sent_seconds
        self._keeps_events = keeps_events
        self._pending = b""
        self._facts = _Facts()
        self._text_seconds: list[float] = []
        self._events: list[bytes] = []
        self._is_whole = False

    def feed(self, data: bytes, now: float) -> None:
        """Read a part of a stream, cut anywhere. Raises ValueError."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take_event(line[5:].strip(), now)

    def take_whole(self, body: bytes) -> None:
        """Read an answer that is no stream. Raises ValueError."""
        self._take_facts(body)
        self._is_whole = True

    def _take_event(self, data: bytes, now: float) -> None:
        if self._keeps_events:
            self._events.append(data)
        if data == b"[DONE]":
            self._is_whole = True
            return
        if _TEXT.search(data):
            self._text_seconds.append(now)
        if self._facts.id is None or _FACT.search(data):
            self._take_facts(data)

    def _take_facts(self, data: bytes) -> None:
        new, old = _decode(data), self._facts
        self._facts = _Facts(old.id or new.id, new.usage or old.usage, new.error or old.error)

    def answer(self) -> Answer:
        facts = self._facts
        return Answer(
            status=self._status,
            headers=self._headers,
            sent_seconds=self._sent,
            done_seconds=time.perf_counter(),
            text_seconds=tuple(self._text_seconds),
            usage=facts.usage or Usage(),
            response_id=facts.id,
            has_failed=facts.error is not None,
            is_whole=self._is_whole,
            events=tuple(self._events),
        )


class Connection:
    """One keep-alive connection; one request at a time."""

    def __init__(
        self, host: str, port: int, headers: Mapping[str, str] | None = None, *, keeps_events: bool = False
    ) -> None:
        self._host, self._port = host, port
        self._keeps_events = keeps_events
        self._headers = _lines(headers)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def is_open(self) -> bool:
        """False once the server has closed it."""
        return self._reader is not None and not self._reader.at_eof()

    async def get(self, path: str) -> bytes:
        """Return the body of the answer, which says its length. Raises OSError or EOFError."""
        reader, writer = await self._open()
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {self._host}\r\n\r\n".encode())
        headers = _headers(await reader.readuntil(b"\r\n\r\n"))
        return await reader.readexactly(int(headers["content-length"]))

    async def post(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> Answer:
        """Send `body` (JSON) and read the whole answer, streamed or not. `headers` are of this request alone.

        Raises OSError or EOFError where none came, StreamCut where it ended early.
        """
        reader, writer = await self._open()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"{self._headers}{_lines(headers)}content-length: {len(body)}\r\n\r\n"
        )
        sent = time.perf_counter()
        writer.write(head.encode() + body)
        raw = await reader.readuntil(b"\r\n\r\n")
        received = _headers(raw)
        reading = Reading(int(raw[9:12]), received, sent, keeps_events=self._keeps_events)
        if received.get("transfer-encoding") == "chunked":
            await self._read_stream(reader, reading)
        else:
            reading.take_whole(await reader.readexactly(int(received["content-length"])))
        return reading.answer()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        return self._reader, self._writer

    async def _read_stream(self, reader: asyncio.StreamReader, reading: Reading) -> None:
        try:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                chunk = await reader.readexactly(size + 2)
                reading.feed(chunk[:-2], time.perf_counter())
            await reader.readline()
        except (EOFError, OSError) as error:
            raise StreamCut(reading.answer()) from error

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            await self._writer.wait_closed()

    def abort(self) -> None:
        """End it at once, whatever is under way."""
        if self._writer is not None:
            self._writer.transport.abort()


def _lines(headers: Mapping[str, str] | None) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())


def _headers(raw: bytes) -> dict[str, str]:
    lines = raw.decode("latin-1").split("\r\n")[1:]
    return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
