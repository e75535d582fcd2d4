"""A lean HTTP/1.1 client that times what a streaming client sees, on asyncio.

Owns one keep-alive connection and the timing of one answer. It parses just enough of HTTP and SSE, so that on
a small machine the load generator is not what is measured.

Times are of this client's clock, in seconds: first token = the first event that carries text.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise


class StreamCut(Exception):
    """The connection ended in mid-answer; `answer` is what had come until then."""

    def __init__(self, answer: "Answer") -> None:
        super().__init__("the answer was cut short")
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Answer:
    """One timed answer. `usage` is the API's own object."""

    status: int
    sent_seconds: float
    first_token_seconds: float
    done_seconds: float
    usage: dict[str, object]
    headers: dict[str, str]
    num_events: int
    is_whole: bool
    """Not a stream, or one that ended with [DONE]."""
    itl_seconds: tuple[float, ...] = ()
    """Gaps between the events that carry text."""
    events: tuple[bytes, ...] = ()
    """The stream's, from a connection that keeps them."""

    @property
    def ttft(self) -> float:
        return self.first_token_seconds - self.sent_seconds

    @property
    def e2e(self) -> float:
        return self.done_seconds - self.sent_seconds

    @property
    def num_cached_tokens(self) -> int:
        details = self.usage.get("prompt_tokens_details")
        return int(details.get("cached_tokens", 0)) if isinstance(details, dict) else 0


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
        status = int(raw[9:12])
        received = _headers(raw)
        if received.get("transfer-encoding") == "chunked":
            return await self._streamed(status, received, sent)
        text = await reader.readexactly(int(received["content-length"]))
        done = time.perf_counter()
        usage = json.loads(text).get("usage") or {}
        return Answer(status, sent, done, done, usage, received, 1, True)

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        return self._reader, self._writer

    async def _streamed(self, status: int, headers: dict[str, str], sent: float) -> Answer:
        assert self._reader is not None
        text_seconds: list[float] = []
        num_events = 0
        usage: dict[str, object] = {}
        kept: list[bytes] = []
        pending = b""
        is_whole = was_cut = False
        try:
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                chunk = await self._reader.readexactly(size + 2)
                pending += chunk[:-2]
                *events, pending = pending.split(b"\n\n")
                if self._keeps_events:
                    kept += events
                for event in events:
                    num_events += 1
                    if _carries_text(event):
                        text_seconds.append(time.perf_counter())
                    if b'"usage":{' in event:
                        usage = json.loads(event.removeprefix(b"data: "))["usage"]
                    is_whole = event == b"data: [DONE]"
            await self._reader.readline()
        except (EOFError, OSError):
            was_cut = True
        done = time.perf_counter()
        first = text_seconds[0] if text_seconds else done
        gaps = tuple(later - earlier for earlier, later in pairwise(text_seconds))
        answer = Answer(status, sent, first, done, usage, headers, num_events, is_whole, gaps, tuple(kept))
        if was_cut:
            raise StreamCut(answer)
        return answer

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            await self._writer.wait_closed()

    def abort(self) -> None:
        """End it at once, whatever is under way."""
        if self._writer is not None:
            self._writer.transport.abort()


def _carries_text(event: bytes) -> bool:
    return (b'"content":"' in event and b'"content":""' not in event) or (
        b'"text":"' in event and b'"text":""' not in event
    )


def _lines(headers: Mapping[str, str] | None) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())


def _headers(raw: bytes) -> dict[str, str]:
    lines = raw.decode("latin-1").split("\r\n")[1:]
    return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
