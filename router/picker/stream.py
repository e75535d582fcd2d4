"""GatewayStream: one HTTP request at a gateway, as an ASGI application sees it.

Owns the order in which a gateway must be answered: a request's headers only when its body has come and a
server is chosen, unless the gateway holds the body back until then; of the answer each part, as it is.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from starlette.types import Message as AsgiMessage
from starlette.types import Scope

from router.edge.http import ClientGone
from router.picker.messages import (
    Body,
    BodyMode,
    Change,
    Head,
    Header,
    Message,
    Trailers,
    destined,
    destined_buffered,
    go_on,
    immediate,
    same_piece,
)

STREAM = "kvasir.gateway_stream"
"""Key of the stream in a scope's extensions."""

WRITE_SECONDS = 30.0
"""Longest time for an answer, or a request on its way to a server, to be taken by the gateway."""

MOST_AFTER_END = 16
"""Messages that may follow the end of a request's body. Envoy repeats the end at times."""

_LEFT_OUT = frozenset((b"content-length", b"connection", b"transfer-encoding"))
"""Headers that a gateway sets itself in an answer that is not a server's."""


Write = Callable[[bytes], Awaitable[None]]


class Unsupported(Exception):
    """The gateway is configured so that its requests cannot be answered."""


class Listener(Protocol):
    """Hears the answer of a server, before the gateway is told to go on with it."""

    def answer_begins(self, head: Head) -> None: ...
    def answer_part(self, piece: bytes) -> None: ...


class Tally:
    """Counts of a picker's streams."""

    def __init__(self) -> None:
        self.num_open = self.num_forwarded = self.num_answered = self.num_other_renderings = 0
        self.num_broken = 0

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


class GatewayStream:
    """`write` sends one encoded message, and raises ClientGone. Raises Unsupported for a first message that
    cannot begin a request."""

    def __init__(self, first: Message, write: Write, tally: Tally) -> None:
        if not isinstance(first.part, Head) or first.is_response:
            raise Unsupported("the first message has to be a request's headers")
        self._modes = first.request_mode, first.response_mode
        has_body = not first.part.is_last
        if has_body and first.request_mode not in (BodyMode.FULL_DUPLEX, BodyMode.BUFFERED):
            mode = first.request_mode.name
            raise Unsupported(f"request_body_mode is {mode}: set it to FULL_DUPLEX_STREAMED (or BUFFERED)")
        self.subset = first.subset
        """The only endpoints that may be chosen; None: all may."""
        self.tally = tally
        self._write = write
        self._first = first
        self._head = first.part
        self._parts = deque([Body(b"", is_last=True)] if first.part.is_last else ())
        self._has_body_ended = first.part.is_last
        self._num_after_end = 0
        self._owed: list[bytes] = []
        self._is_wanted, self._news = asyncio.Event(), asyncio.Event()
        self._trailers: Message | None = None
        self._listener: Listener | None = None
        self._status = 0
        self._error_headers: Sequence[Header] = ()
        self._error_body = b""
        self._has_left = False
        self._answered = asyncio.Event()
        self.was_forwarded = False
        self.was_answered = False
        """The client was answered in the place of a server."""
        self.body_ended_at: float | None = None
        """By the event loop's clock."""

    # What ASGI asks for.

    def scope(self) -> Scope:
        pseudo = {name: value for name, value in self._head.headers if name.startswith(b":")}
        path, _, query = pseudo.get(b":path", b"/").partition(b"?")
        headers = [(name, value) for name, value in self._head.headers if not name.startswith(b":")]
        if b":authority" in pseudo:
            headers.insert(0, (b"host", pseudo[b":authority"]))
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": pseudo.get(b":method", b"GET").decode("latin-1"),
            "scheme": pseudo.get(b":scheme", b"http").decode("latin-1"),
            "path": path.decode("latin-1"),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "client": None,  # the gateway's address is that of all of them
            "server": None,
            "extensions": {STREAM: self},
        }

    async def receive(self) -> AsgiMessage:
        """Return the next part of the body; after its end, wait until the client has left."""
        while True:
            if self._parts:
                part = self._parts.popleft()
                if part.is_last:
                    self.body_ended_at = asyncio.get_running_loop().time()
                return {"type": "http.request", "body": part.content, "more_body": not part.is_last}
            if self._has_left:
                return {"type": "http.disconnect"}
            self._is_wanted.set()
            self._news.clear()
            await self._news.wait()

    async def send(self, message: Mapping[str, Any]) -> None:
        """Answer the client in the place of a server; nothing if one answers already."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._error_headers = [each for each in message["headers"] if each[0].lower() not in _LEFT_OUT]
            return
        self._error_body += message.get("body", b"")
        if not message.get("more_body", False) and not (self.was_forwarded or self._has_left):
            self.was_answered = True
            self.tally.num_answered += 1
            with contextlib.suppress(ClientGone):
                await self._tell([immediate(self._status, self._error_headers, self._error_body)])

    async def _tell(self, messages: Iterable[bytes]) -> None:
        """Raises ClientGone if it is not taken."""
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                for message in messages:
                    await self._write(message)
        except TimeoutError as error:
            self.leave()
            raise ClientGone from error

    # What the gateway says.

    async def until_wanted(self) -> None:
        """Wait until the next message may be read. No part of a body is read before the application asks for
        it, and has counted the one before."""
        if not (self._has_body_ended or self._has_left):
            await self._is_wanted.wait()

    async def begin(self) -> None:
        if not self._has_body_ended and self._modes[0] is BodyMode.BUFFERED:
            await self._write(go_on(self._first))

    async def take(self, message: Message) -> None:
        """Take the next message. Raises ValueError for one out of order."""
        if message.is_response:
            await self._take_answer(message)
            return
        part = message.part
        if isinstance(part, Head):
            raise ValueError("a request's headers come twice")
        if self._has_body_ended:
            await self._pass_over(message)
            return
        if isinstance(part, Trailers):
            self._trailers, part = message, Body(b"", is_last=True)
        self._has_body_ended = part.is_last
        if not self._has_left:
            self._parts.append(part)
            self._is_wanted.clear()
            self._news.set()

    async def _pass_over(self, message: Message) -> None:
        """A gateway that sends whole bodies waits for a reply to each; in full duplex a reply after the one
        to the end would be an error."""
        self._num_after_end += 1
        if self._num_after_end > MOST_AFTER_END:
            raise ValueError(f"more than {MOST_AFTER_END} messages follow the end of a request's body")
        if self._modes[0] is BodyMode.BUFFERED:
            if self.was_forwarded:
                await self._write(go_on(message))
            else:
                self._owed.append(go_on(message))

    async def _take_answer(self, message: Message) -> None:
        part = message.part
        if not self.was_forwarded:
            self.leave()  # the gateway has answered by itself
        elif self._listener is not None:
            if isinstance(part, Head):
                self._listener.answer_begins(part)
            elif isinstance(part, Body) and part.content:
                self._listener.answer_part(part.content)
        is_duplex = isinstance(part, Body) and self._modes[1] is BodyMode.FULL_DUPLEX
        is_last = isinstance(part, Trailers) or part.is_last
        if is_last or (isinstance(part, Head) and self._modes[1] is BodyMode.NONE):
            self._answered.set()  # a client that leaves with the last piece has had its answer
        await self._write(same_piece(message) if is_duplex else go_on(message))

    def leave(self) -> None:
        """The gateway says nothing more: the client has left, unless all is answered."""
        if not self._answered.is_set():
            self._has_left = True
            self._news.set()
            self._is_wanted.set()

    @property
    def has_ended(self) -> bool:
        """All of a server's answer has gone to the client."""
        return self._answered.is_set()

    # What the application does.

    async def forward(
        self, endpoint: str, headers: Sequence[Change], body: bytes, listener: Listener
    ) -> None:
        """Send the request to an endpoint, with this body and these headers in place of its own."""
        self._listener = listener
        self.was_forwarded = True
        self.tally.num_forwarded += 1
        headers = [*headers, (b"content-length", b"%d" % len(body))]
        if self._modes[0] is BodyMode.BUFFERED:
            await self._tell([destined_buffered(endpoint, headers, body), *self._owed])
            return
        await self._tell(destined(endpoint, headers, body, ends=self._trailers is None))
        if self._trailers is not None:
            await self._tell([go_on(self._trailers)])

    async def answered(self) -> None:
        """Wait for the end of the server's answer."""
        await self._answered.wait()
