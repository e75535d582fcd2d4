"""An answer's head goes out with what follows it, unless something has yet to be added or waited for."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from router.edge.connections import Connections
from router.edge.http import connection_of, send_first, send_whole
from router.edge.http_protocol import protocol_of

REQUEST = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n"
HEADERS = [(b"content-type", b"text/plain")]

Answer = Callable[[Scope, Send], Awaitable[None]]


class Written(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytes] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.parts.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def protocol_over(app: Any) -> Any:
    connections = Connections(8, address_share=1.0, head_seconds=10.0, write_seconds=10.0)
    config = uvicorn.Config(app, http=protocol_of(connections), lifespan="off", log_config=None)
    config.load()
    make = cast(Any, config.http_protocol_class)
    return make(config=config, server_state=ServerState(), app_state={})


async def written(answer: Answer, request: bytes = REQUEST + b"\r\n") -> Written:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(scope, send)

    protocol, transport = protocol_over(app), Written()
    protocol.connection_made(transport)
    protocol.data_received(request)
    await asyncio.gather(*protocol.tasks)
    was_closed = transport.is_closed
    protocol.connection_lost(None)
    transport.is_closed = was_closed
    return transport


async def whole(scope: Scope, send: Send) -> None:
    await send_whole(send, 200, HEADERS, b"Hello.", connection_of(scope))


async def test_a_whole_answer_is_one_write() -> None:
    transport = await written(whole)
    (answer,) = transport.parts
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and body == b"Hello."
    assert b"\r\ncontent-type: text/plain\r\ncontent-length: 6" in head
    assert not transport.is_closed


async def test_a_client_that_wants_no_other_answer_is_told_and_closed() -> None:
    transport = await written(whole, REQUEST + b"connection: close\r\n\r\n")
    assert b"\r\nconnection: close\r\n" in transport.parts[0]
    assert transport.is_closed


async def test_a_stream_begins_with_its_first_part() -> None:
    async def stream(scope: Scope, send: Send) -> None:
        await send_first(send, connection_of(scope), HEADERS, b"One.")
        await send({"type": "http.response.body", "body": b"Two.", "more_body": False})

    first, last = (await written(stream)).parts
    assert first.endswith(b"transfer-encoding: chunked\r\n\r\n4\r\nOne.\r\n")
    assert last == b"4\r\nTwo.\r\n0\r\n\r\n"


async def test_an_empty_first_part_does_not_end_a_stream() -> None:
    async def stream(scope: Scope, send: Send) -> None:
        await send_first(send, connection_of(scope), HEADERS, b"")
        await send({"type": "http.response.body", "body": b"Two.", "more_body": False})

    assert b"".join((await written(stream)).parts).endswith(b"chunked\r\n\r\n4\r\nTwo.\r\n0\r\n\r\n")


async def test_who_adds_headers_is_not_passed_over() -> None:
    async def marked(scope: Scope, send: Send) -> None:
        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-marked", b"yes")]
            await send(message)

        await whole(scope, send_marked)

    assert b"\r\nx-marked: yes\r\n" in b"".join((await written(marked)).parts)


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\x00b"])
async def test_a_value_never_becomes_a_header_of_its_own(value: bytes) -> None:
    async def split(scope: Scope, send: Send) -> None:
        headers = [*HEADERS, (b"x-replica", value)]
        with pytest.raises(RuntimeError, match="header value"):
            await send_whole(send, 200, headers, b"Hello.", connection_of(scope))

    transport = await written(split)
    assert b"Hello." not in b"".join(transport.parts)


@pytest.mark.parametrize(("rest", "is_timed"), [(b"", False), (b"POST / HT", True)])
async def test_only_a_head_that_is_not_whole_has_a_deadline(rest: bytes, is_timed: bool) -> None:
    protocol = protocol_over(whole)
    protocol.connection_made(Written())
    protocol.data_received(REQUEST + b"\r\n" + rest)
    assert (protocol._deadline is not None) == is_timed
    protocol.connection_lost(None)
