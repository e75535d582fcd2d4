"""The raw HTTP side of the hot endpoints: reading a body, noticing that the client has left, answering.

Owns limits on what is read. Knows no dialect: errors are raised, not written.
"""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol

from starlette.types import Receive, Scope, Send

from replicas.process.trace_parent import TraceParent, parse_trace_parent
from router.edge.inflating import GZIP, inflated
from router.errors import BodiesFull, BodyTooLarge, UploadTooSlow
from router.limits.body_budget import BodyHold

Header = tuple[bytes, bytes]

DISCARD_SECONDS = 1.0

UPLOAD_GRACE_SECONDS = 5.0
"""Before a body's pace counts."""

_SANE_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")


CONNECTION = "kvasir.connection"
"""Key of the ClientConnection in a scope's extensions."""

_SIGN_SECONDS = (0.2, 0.2, 1.0, 5.0)


def sign_seconds(number: int) -> float:
    """How long to wait for the next write to a client that has ended its side: those who have left answer
    the first with a reset, and the next one meets it."""
    return _SIGN_SECONDS[min(number, len(_SIGN_SECONDS) - 1)]


class ClientConnection(Protocol):
    """The part of a connection that an answer uses."""

    @property
    def is_backed_up(self) -> bool:
        """The client reads more slowly than it is written to."""
        ...

    @property
    def is_half_closed(self) -> bool:
        """The client sends nothing more; it may wait for its answer, or have left."""
        ...

    @property
    def has_whole_body(self) -> bool:
        """All of the request that is answered has come: reading its body waits for nothing."""
        ...

    def begin_answer(
        self, send: Send, status: int, headers: Iterable[Header], body: bytes, *, is_whole: bool
    ) -> bool:
        """Write an answer's head and its body, or the first part of a stream, in one piece. False, without a
        byte, where that is left to `send`: it adds to answers, or has to wait for the client."""
        ...

    @property
    def takes_parts(self) -> bool:
        """A stream is under way and its client keeps up: `write_part` may be called."""
        ...

    def write_part(self, part: bytes) -> None:
        """A part of a stream's body, as sending it would write it, but at once."""

    async def drained(self) -> None:
        """Until it is not backed up, or gone."""

    def give_up(self) -> None:
        """End it, since its client does not read."""

    def watch(self, watcher: "Watcher | None") -> None:
        """Calls `watcher` with what becomes of it, at once if it has ended already; one watcher at a time."""


class Watcher(Protocol):
    def left(self) -> None: ...
    def half_closed(self) -> None: ...


def connection_of(scope: Scope) -> ClientConnection | None:
    """None where a server other than ours runs the application."""
    connection: ClientConnection | None = scope.get("extensions", {}).get(CONNECTION)
    return connection


class ClientGone(Exception):
    """The client has closed the connection; an answer would not be read."""


def header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def client_request_id(scope: Scope) -> str | None:
    """Return the client's own X-Request-Id if it can be echoed safely. It is never a key to anything."""
    value = header(scope, b"x-request-id")
    if value is None or _SANE_REQUEST_ID.fullmatch(value) is None:
        return None
    return value.decode("ascii")


def client_trace_parent(scope: Scope) -> TraceParent | None:
    """Return the client's span, if it names one. Several headers of its state are one list."""
    value = header(scope, b"traceparent")
    if value is None:
        return None
    states = b",".join(state for name, state in scope["headers"] if name == b"tracestate")
    return parse_trace_parent(value.decode("latin-1"), states.decode("latin-1"))


async def read_body(
    scope: Scope,
    receive: Receive,
    held: BodyHold,
    *,
    max_bytes: int,
    max_seconds: float,
    bytes_per_second: int,
) -> bytes:
    """Return the whole body, as it was before its client compressed it. Raises BodyTooLarge or BodiesFull
    (before reading, if the client announces it), UploadTooSlow, ClientGone, or InvalidRequest for what is no
    gzip."""
    connection = connection_of(scope)
    if connection is not None and connection.has_whole_body:
        body = await _read(scope, receive, held, max_bytes)
    else:
        try:
            body = await _read_in_time(scope, receive, held, max_bytes, max_seconds, bytes_per_second)
        except TimeoutError as error:
            raise UploadTooSlow(
                f"The request body did not arrive within {max_seconds:g} seconds, or came more slowly than"
                f" {bytes_per_second} bytes per second."
            ) from error
    is_compressed = (header(scope, b"content-encoding") or b"").lower() == GZIP
    return await inflated(body, held, max_bytes) if is_compressed else body


async def _read_in_time(
    scope: Scope,
    receive: Receive,
    held: BodyHold,
    max_bytes: int,
    max_seconds: float,
    bytes_per_second: int,
) -> bytes:
    started = asyncio.get_running_loop().time()
    last = started + max_seconds
    async with asyncio.timeout_at(min(last, started + UPLOAD_GRACE_SECONDS)) as deadline:

        def arrived(num_bytes: int) -> None:
            seconds = UPLOAD_GRACE_SECONDS + num_bytes / bytes_per_second
            deadline.reschedule(min(last, started + seconds))

        return await _read(scope, receive, held, max_bytes, arrived)


async def _read(
    scope: Scope,
    receive: Receive,
    held: BodyHold,
    max_bytes: int,
    arrived: Callable[[int], None] = lambda _: None,
) -> bytes:
    announced = header(scope, b"content-length")
    if announced is not None and announced.isdigit():
        if int(announced) > max_bytes:
            raise _too_large(max_bytes)
        try:
            held.expect(int(announced))
        except BodiesFull:
            if header(scope, b"expect") is None:
                await _discard(scope, receive, max_bytes)
            raise
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        body: bytes = message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        held.take(len(body))
        return body
    content = bytearray()
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        try:
            if len(content) + len(part) > max_bytes:
                raise _too_large(max_bytes)
            held.take(len(part))
        except (BodyTooLarge, BodiesFull):
            content.clear()
            held.give_back()
            await _discard(scope, receive, max_bytes)
            raise
        content += part
        if not message.get("more_body", False):
            return bytes(content)
        arrived(len(content))
        message = await receive()


async def _discard(scope: Scope, receive: Receive, max_bytes: int) -> None:
    """Read on for a moment: answering a client that still sends resets its connection before it has read
    the answer. A gateway's stream, which is no client's, takes an answer at any time."""
    if scope.get("client") is None:
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            num_bytes = 0
            while num_bytes <= max_bytes:
                message = await receive()
                if not message.get("more_body", False):
                    return
                num_bytes += len(message.get("body", b""))


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than the {max_bytes} bytes that are accepted.")


class WhileConnected:
    """`async with`: what is inside is cancelled when the client leaves, and ClientGone is raised.

    `beat` is awaited now and then: every `beat_seconds`, and more often once the client has ended its side.
    A connection tells by itself that its client has left; without one, the ASGI server is asked.
    """

    __slots__ = (
        "_beat",
        "_beat_seconds",
        "_beating",
        "_connection",
        "_gone",
        "_listener",
        "_loop",
        "_num_signs",
        "_receive",
        "_task",
        "_timer",
    )

    def __init__(
        self,
        receive: Receive,
        connection: ClientConnection | None,
        *,
        beat: Callable[[], Awaitable[None]],
        beat_seconds: float,
    ) -> None:
        self._receive = receive
        self._connection = connection
        self._beat = beat
        self._beat_seconds = beat_seconds
        self._num_signs = 0
        self._gone = False
        self._beating: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._beat_seconds, self._on_timer)
        if self._connection is None:
            self._listener = asyncio.create_task(self._listen())
        else:
            self._connection.watch(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._connection is not None:
            self._connection.watch(None)
        for task in (self._beating, self._listener):
            if task is not None:
                task.cancel()
        if self._gone and (self._task.uncancel() == 0 or kind is not asyncio.CancelledError):
            raise ClientGone from error

    def left(self) -> None:
        """The client is gone."""
        if not self._gone:
            self._gone = True
            self._task.cancel()

    def half_closed(self) -> None:
        """The client has ended its side: from now on it is looked after more often."""
        self._wait()

    def _wait(self) -> None:
        self._timer.cancel()
        seconds = self._beat_seconds
        if self._connection is not None and self._connection.is_half_closed:
            seconds = min(seconds, sign_seconds(self._num_signs))
            self._num_signs += 1
        self._timer = self._loop.call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._beating = asyncio.create_task(self._beat_once())

    async def _beat_once(self) -> None:
        await self._beat()
        self._wait()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.left()


async def send_first(
    send: Send, connection: ClientConnection | None, headers: Sequence[Header], part: bytes
) -> None:
    """The head of a stream, and its first part."""
    if connection is None or not connection.begin_answer(send, 200, headers, part, is_whole=False):
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": part, "more_body": True})


async def send_whole(
    send: Send,
    status: int,
    headers: Iterable[Header],
    body: bytes,
    connection: ClientConnection | None = None,
) -> None:
    if connection is not None and connection.begin_answer(send, status, headers, body, is_whole=True):
        return
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, (b"content-length", b"%d" % len(body))],
        }
    )
    await send({"type": "http.response.body", "body": body})
