"""ClientProtocol: one client's connection, on top of uvicorn's HTTP.

Owns a connection's bounds: bytes and time of a request's head, pipelined requests, and the time to read an
answer; and its end, which a client may announce for its own side alone. A stopping router closes no
connection with a request on its way. `http.py` watches bodies, uvicorn idle time between requests.

A client that has closed its sending side may have left, or may wait for its answer: only writing tells. So
until the answer begins it gets `100 Continue` now and then, which clients skip; the system of a departed one
resets the connection.

Only HTTP/1 is spoken: an offer of another protocol, which Java's client makes with every request, is ignored
(RFC 9110, 7.8), and a tunnel is refused.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, ClassVar

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.types import Send
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from router.edge.connections import MAX_FAREWELLS, Connections, Ended, address_of
from router.edge.http import CONNECTION, Header, Watcher, sign_seconds
from router.edge.http_error import HttpError

MAX_HEAD_BYTES = 64 * 1024
"""For a request line and headers; also for trailers and all else outside the body."""

CHUNK_HEAD_BYTES = 24
"""Framing bytes of a chunk that are free of the limit above."""

MAX_QUEUED = 32
"""Requests that a client may send before its earlier ones are answered."""

READ_AHEAD = 4
"""While at most this many are queued the connection is read, so that its end is noticed."""

WRITE_BUFFER_BYTES = 16 * 1024
"""An answer pauses when this much of it waits in front of a full socket."""

FAREWELL_SECONDS = 1.0
"""To close a connection that still receives resets it, before its client has read the answer."""

LINGER_SECONDS = 1
"""Seconds that a stopping router waits for a next request on an idle connection. That answer says that it is
the last, so that the client sends its next request to another router."""

LEAVING_WRITE_SECONDS = 4.0
"""Replaces the setting once the router is stopping: it does not wait for clients that do not read."""


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
_CONTROLS = bytes((*range(0x09), *range(0x0A, 0x20), 0x7F))
"""Bytes that no header may have."""

_REFUSALS = {
    Ended.TOO_MANY: HttpError(
        503,
        "The router has reached its limit of connections.",
        "server_error",
        None,
        "too_many_connections",
        1,
    ),
    Ended.TOO_MANY_OF_ADDRESS: HttpError(
        503, "Too many connections come from this address.", "server_error", None, "too_many_connections", 1
    ),
    Ended.HEAD_TOO_LARGE: HttpError(
        431,
        f"The request's headers are larger than the {MAX_HEAD_BYTES} bytes that are accepted.",
        "invalid_request_error",
        None,
        "request_header_fields_too_large",
    ),
}


class ClientProtocol(HttpToolsProtocol):
    """`protocol_of` makes the class of a listener; requests find their connection in the scope."""

    peers: ClassVar[Connections]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._address: str | None = None
        self._is_counted = False
        self._is_refused = False
        self._is_leaving = False
        self._awaits_head = True
        self._has_begun = False  # a head that is not there yet
        self._framing = 0  # bytes since the last of a body that were none of a body's
        self._deadline: asyncio.TimerHandle | None = None
        self._write_watch: asyncio.TimerHandle | None = None
        self._unwritten: int | None = None
        self._write_seconds = self.peers.write_seconds
        self._probe: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None
        self._extensions: dict[str, Any] = {CONNECTION: self}
        self._watcher: Watcher | None = None
        self._is_lost = False
        self.is_half_closed = False

    # For those who answer.

    @property
    def is_backed_up(self) -> bool:
        """The client reads more slowly than it is written to."""
        return self.flow.write_paused

    @property
    def has_whole_body(self) -> bool:
        return self._answering is not None and not self._answering.more_body

    def begin_answer(
        self, send: Send, status: int, headers: Iterable[Header], body: bytes, *, is_whole: bool
    ) -> bool:
        cycle = self._answering
        if cycle is None or cycle.response_started or cycle.disconnected or self.flow.write_paused:
            return False
        is_bare = getattr(send, "__self__", None) is cycle  # nothing around it adds to answers
        if not is_bare or not (is_whole or body):  # an empty part would end a stream
            return False
        lines = [*cycle.default_headers, *headers]
        if not cycle.keep_alive:
            lines.append((b"connection", b"close"))
        values = b"".join([value for _, value in lines])
        if cycle.scope["method"] == "HEAD" or len(values.translate(None, _CONTROLS)) < len(values):
            return False
        framing = b"content-length: %d\r\n\r\n%b" if is_whole else CHUNKED + b"\r\n%x\r\n%b\r\n"
        head = [b"%b: %b\r\n" % line for line in lines]
        self.transport.write(b"".join((STATUS_LINE[status], *head, framing % (len(body), body))))
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        cycle.chunked_encoding = not is_whole
        if is_whole:
            cycle.response_complete = True
            cycle.message_event.set()
            if not cycle.keep_alive:
                self.transport.close()
            cycle.on_response()
        return True

    @property
    def takes_parts(self) -> bool:
        cycle = self._answering
        return (
            cycle is not None
            and cycle.response_started
            and bool(cycle.chunked_encoding)
            and not (cycle.response_complete or cycle.disconnected or self.flow.write_paused)
        )

    def write_part(self, part: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    async def drained(self) -> None:
        await self.flow.drain()

    def give_up(self) -> None:
        """End a connection whose client does not read."""
        self._abort(Ended.NOT_READ)

    def watch(self, watcher: Watcher | None) -> None:
        self._watcher = watcher
        if watcher is not None and self._is_lost:
            watcher.left()

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        self._address = address_of(self.client)
        refusal = self.peers.enter(self._address)
        if refusal is not None:
            self._refuse(refusal)
            return
        self._is_counted = True
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        if self._watcher is not None:
            self._watcher.left()
        if self._is_counted:
            self.peers.leave(self._address)
        if self._is_refused:
            self.peers.num_farewells -= 1
        for timer in (self._deadline, self._write_watch, self._probe):
            if timer is not None:
                timer.cancel()
        self._extensions.clear()
        self.pipeline.clear()
        cycle = self._answering
        if cycle is not None and not cycle.response_complete:  # uvicorn tells only the request that came last
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """True keeps our side open, for the answers to all that came whole."""
        if self.is_half_closed:
            return True
        if not self._is_answering() or not self._awaits_head:
            return False
        self.is_half_closed = True
        self._send_signs(0)
        if self._watcher is not None:
            self._watcher.half_closed()  # an answer that streams looks after it from now on
        return True

    def shutdown(self) -> None:
        self._is_leaving = True
        self.timeout_keep_alive = LINGER_SECONDS
        cycle = self._answering
        if cycle is None or cycle.response_complete:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                LINGER_SECONDS, self.timeout_keep_alive_handler
            )
        elif not self.cycle.response_started:
            self.cycle.keep_alive = False
        self._write_seconds = min(self._write_seconds, LEAVING_WRITE_SECONDS)
        if self._write_watch is not None:
            self._write_watch.cancel()
            self._write_watch = None
        self._watch_writes()

    # What arrives.

    def data_received(self, data: bytes) -> None:
        while len(data) > (room := MAX_HEAD_BYTES - self._framing):
            if self._is_refused or self.transport.is_closing():
                return
            if not room:
                self._refuse(Ended.HEAD_TOO_LARGE)
                return
            self._feed(data[:room])
            data = data[room:]
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        self._framing += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except (HttpParserError, HttpParserUpgrade):
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._awaits_head and self._deadline is None and (self._framing or self._has_begun):
            self._start_deadline()

    def _parse(self, data: bytes) -> None:
        """Parse data. After the head of an upgrade offer the parser would not read a body. So another parser
        reads that head without the offer, and continues from there. Raises HttpParserError; HttpParserUpgrade
        for a tunnel."""
        rest: bytes | memoryview = data
        while rest and not self.transport.is_closing():
            try:
                self.parser.feed_data(rest)
                return
            except HttpParserUpgrade as offer:
                rest = memoryview(rest)[offer.args[0] :]
            head = self._head_without_offer()
            self.parser = HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            self.parser.feed_data(head)

    def send_400_response(self, msg: str) -> None:
        """Close in the middle of an answer, when nothing else can be sent."""
        cycle = self._answering
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def _head_without_offer(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        headers = (b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(headers))

    def on_message_begin(self) -> None:
        self._stop_deadline()  # its head has a time of its own, unless it has come whole
        self._has_begun = True
        super().on_message_begin()
        self.scope["extensions"] = self._extensions

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._stop_deadline()
        self._framing = 0
        self._awaits_head = self._has_begun = False
        if len(self.pipeline) >= MAX_QUEUED:
            if not self.transport.is_closing():
                self._abort(Ended.TOO_MANY_QUEUED)
            return
        super().on_headers_complete()
        self.headers = []  # trailers are none of the request's
        if self._is_leaving:
            self.cycle.keep_alive = False
        if 0 < len(self.pipeline) <= READ_AHEAD:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._framing = max(0, self._framing - len(body))
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self._framing = max(0, self._framing - CHUNK_HEAD_BYTES)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._framing = 0
        self._awaits_head = True
        self._stop_deadline()
        super().on_message_complete()

    # What is answered.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        if cycle.scope["http_version"] < "1.1":
            cycle.keep_alive = False
            app = _until_close(cycle, app)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_writes()
        if self.transport.is_closing() or self._is_answering():
            return
        if self.is_half_closed:
            self.transport.close()
        elif not self._awaits_head:
            self._start_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()

    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    # Deadlines and ends.

    def _start_deadline(self) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(self.peers.head_seconds, self._miss_deadline)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _miss_deadline(self) -> None:
        self._deadline = None
        self.peers.count(Ended.HEAD_TOO_SLOW)
        if self._is_answering():
            assert self._answering is not None
            self._answering.keep_alive = False
            self.pipeline.clear()
        else:
            self.transport.close()

    def _watch_writes(self) -> None:
        if self._write_watch is None and self.transport.get_write_buffer_size():
            self._unwritten = None
            self._write_watch = self.loop.call_later(self._write_seconds / 2, self._look_at_writes)

    def _look_at_writes(self) -> None:
        """Disconnect after two looks without progress and without new data."""
        self._write_watch = None
        num_bytes = self.transport.get_write_buffer_size()
        if not num_bytes:
            return
        grows = self._is_answering() and not self.flow.write_paused
        if not grows and self._unwritten is not None and num_bytes >= self._unwritten:
            self._abort(Ended.NOT_READ)
            return
        self._unwritten = num_bytes
        self._write_watch = self.loop.call_later(self._write_seconds / 2, self._look_at_writes)

    def _send_signs(self, number: int) -> None:
        """Once an answer has begun, its writer does that."""
        cycle = self._answering
        if self.transport.is_closing() or cycle is None or cycle.response_complete:
            return
        if number and not cycle.response_started and cycle.scope["http_version"] == "1.1":
            self.transport.write(CONTINUE)
        self._probe = self.loop.call_later(sign_seconds(number), self._send_signs, number + 1)

    def _refuse(self, reason: Ended) -> None:
        """Send the reason and close; later data is ignored."""
        self.peers.count(reason)
        if self._is_answering() or self.peers.num_farewells >= MAX_FAREWELLS:
            self.transport.abort()
            return
        self._is_refused = True
        self.peers.num_farewells += 1
        error = _REFUSALS[reason]
        body = error.body()
        headers = [*error.headers(), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        head = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(b"".join((STATUS_LINE[error.status], head, b"\r\n", body)))
        self._stop_deadline()
        self._deadline = self.loop.call_later(FAREWELL_SECONDS, self.transport.close)

    def _abort(self, reason: Ended) -> None:
        self.peers.count(reason)
        self.transport.abort()


def protocol_of(connections: Connections) -> type[asyncio.Protocol]:
    """Return the protocol of one listener's connections."""
    return type("ListenerProtocol", (ClientProtocol,), {"peers": connections})


def _until_close(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Delimit an answer without a length by the connection's end, for HTTP/1.0, which has no chunks."""

    async def unframed(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        has_length = False

        async def send_unframed(message: ASGISendEvent) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif message["type"] == "http.response.body" and not has_length:
                # Uvicorn compares the two, and so an answer ends when it says so.
                cycle.expected_content_length = len(message.get("body", b""))
                if message.get("more_body", False):
                    cycle.expected_content_length += 1
            await send(message)

        await app(scope, receive, send_unframed)

    return unframed
