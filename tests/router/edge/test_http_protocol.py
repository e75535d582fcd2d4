"""Clients that take without asking: of heads, of time, of connections, of answers that they do not read."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from replicas.protocol.frames import FinishReason, RequestKey, TokenDelta
from router.edge.connections import Connections, Ended, address_of
from router.edge.http_protocol import MAX_HEAD_BYTES, MAX_QUEUED
from router.generation import Generation
from tests.router.http_server import HttpServer, http_server
from tests.router.raw_client import CHAT, STREAMED, connected, post, status_of, wait_for
from tests.router.scripted_dispatch import NEVER, Step, says

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with http_server(head_seconds=1.0, write_seconds=0.6) as running:
        yield running


def num_ended(server: HttpServer, reason: Ended) -> int:
    return server.context.connections.num_ended[reason]


def silence(generation: Generation) -> Sequence[Step]:
    return [NEVER]


def then_silence(num_tokens: int) -> Sequence[Step]:
    return [*[[TokenDelta(RequestKey(1, 0), (80,))] for _ in range(num_tokens)], NEVER]


async def flood(port: int, beginning: bytes, part: bytes) -> bytes:
    """Send a part again and again before reading. Return the answer, or nothing after a reset."""
    async with connected(port) as (reader, writer):
        writer.write(beginning)
        with contextlib.suppress(ConnectionError):
            for _ in range(2**23 // len(part)):
                writer.write(part)
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            return await reader.read()
    return b""


@pytest.mark.parametrize(
    ("beginning", "part"),
    [
        (GET + b"x: ", b"y" * 4096),
        (GET, b"x: y\r\n" * 1000),
        (b"GET /", b"y" * 4096),
        (b"", b"\r\n" * 2048),
        (b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n" * 1000),
        (b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1;x=", b"y" * 4096),
    ],
    ids=["value", "headers", "path", "blank lines", "trailers", "chunk extension"],
)
async def test_whatever_is_no_body_is_refused_beyond_64_kib(
    server: HttpServer, beginning: bytes, part: bytes
) -> None:
    answer = await flood(server.port, beginning, part)
    assert answer == b"" or b"431 Request Header Fields Too Large" in answer
    assert num_ended(server, Ended.HEAD_TOO_LARGE) == 1
    await server.wait_idle()


async def test_a_head_that_is_too_large_is_told_so(server: HttpServer) -> None:
    async with connected(server.port) as (reader, writer):
        writer.write(GET + b"x: " + b"y" * MAX_HEAD_BYTES)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 431")
    assert b'"code":"request_header_fields_too_large"' in answer


async def test_a_head_of_nearly_64_kib_and_a_body_of_a_megabyte_are_fine(server: HttpServer) -> None:
    server.dispatcher.script = says([2])
    body = CHAT[:-1] + b" " * 2**20 + b"}"
    padding = b"x: " + b"y" * (MAX_HEAD_BYTES - 200) + b"\r\n"
    head, _, _ = post(body).partition(b"\r\n\r\n")
    async with connected(server.port) as (reader, writer):
        for _ in range(2):
            writer.write(head + b"\r\n" + padding + b"\r\n" + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")
            await reader.readexactly(int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))


async def test_a_body_in_many_small_chunks_is_no_head(server: HttpServer) -> None:
    server.dispatcher.script = says([2])
    body = CHAT[:-1] + b" " * 50_000 + b"}"
    async with connected(server.port) as (reader, writer):
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        for start in range(0, len(body), 1000):
            writer.write(b"".join(b"1\r\n%c\r\n" % byte for byte in body[start : start + 1000]))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_a_head_that_drips_is_closed_in_time_however_steadily(server: HttpServer) -> None:
    async with connected(server.port) as (reader, writer):

        async def drip() -> None:
            writer.write(GET)
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"x: y\r\n")
                    await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        dripping.cancel()
    assert num_ended(server, Ended.HEAD_TOO_SLOW) == 1


@pytest.mark.parametrize(("rest", "more"), [(b"\r\n", b"\r\n"), (b"content-length: 100\r\n\r\n.", b".")])
async def test_blank_lines_and_a_body_that_nobody_reads_keep_no_connection(
    server: HttpServer, rest: bytes, more: bytes
) -> None:
    async with connected(server.port) as (reader, writer):
        writer.write(GET + rest)
        await reader.readuntil(b"}")
        writer.write(more)
        assert await reader.read() == b""
    assert num_ended(server, Ended.HEAD_TOO_SLOW) == 1 or rest != b"\r\n"


async def test_one_address_cannot_take_all_connections() -> None:
    async with (
        http_server(max_connections=6, head_seconds=30) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(3):
            await stack.enter_async_context(connected(server.port, local_host="127.0.0.2"))
        await wait_for(lambda: server.context.connections.num_open == 3)
        assert await status_of(server.port, local_host="127.0.0.2") == 503
        assert await status_of(server.port) == 200
        assert num_ended(server, Ended.TOO_MANY_OF_ADDRESS) == 1
        for _ in range(3):
            await stack.enter_async_context(connected(server.port, local_host="127.0.0.3"))
        await wait_for(lambda: server.context.connections.num_open == 6)
        assert await status_of(server.port) == 503
        assert num_ended(server, Ended.TOO_MANY) == 1
        await stack.aclose()
        await wait_for(lambda: server.context.connections.num_open == 0)
        assert await status_of(server.port, local_host="127.0.0.2") == 200


def test_addresses_count_by_what_one_client_has_of_them() -> None:
    assert address_of(("10.0.0.1", 1)) == address_of(("10.0.0.1", 2)) != address_of(("10.0.0.2", 1))
    assert address_of(("2001:db8::1", 1)) == address_of(("2001:db8::ffff:2", 1))
    assert address_of(("2001:db8::1", 1)) != address_of(("2001:db8:0:1::1", 1))
    assert address_of(("::ffff:10.0.0.1", 1)) == "10.0.0.1"
    assert address_of(None) is address_of(("", 0)) is None
    connections = Connections(4, address_share=0.5, head_seconds=1, write_seconds=1)
    assert [connections.enter(None) for _ in range(5)] == [None] * 4 + [Ended.TOO_MANY]


@pytest.mark.parametrize("body", [CHAT, STREAMED])
async def test_a_client_that_ends_its_side_still_gets_its_whole_answer(
    server: HttpServer, body: bytes
) -> None:
    go_on = asyncio.Event()
    server.dispatcher.script = lambda generation: [go_on, *says([80, 81, 2])(generation)]
    async with connected(server.port) as (reader, writer):
        writer.write(post(body))
        writer.write_eof()
        await server.dispatcher.has_started.wait()
        await asyncio.sleep(0.5)
        assert not server.is_idle
        go_on.set()
        answer = await reader.read()
    *signs, head, content = answer.split(b"\r\n\r\n", answer.count(b"100 Continue") + 1)
    assert set(signs) == {b"HTTP/1.1 100 Continue"}
    assert head.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" in content if body is STREAMED else b'"finish_reason":"stop"' in content
    assert server.is_idle


async def test_a_client_that_ends_its_side_gets_all_answers_to_what_it_has_sent(server: HttpServer) -> None:
    server.dispatcher.script = says([80, 2])
    async with connected(server.port) as (reader, writer):
        writer.write(post() * 3)
        writer.write_eof()
        answer = await reader.read()
    assert answer.count(b"HTTP/1.1 200") == 3
    assert server.context.connections.num_open == 0


async def test_a_client_that_ends_its_side_within_a_request_has_left(server: HttpServer) -> None:
    async with connected(server.port) as (reader, writer):
        writer.write(post()[:-5])
        writer.write_eof()
        assert await reader.read() == b""
    await server.wait_idle()


@pytest.mark.parametrize("script", [silence, lambda generation: then_silence(3)])
async def test_a_client_that_leaves_a_silent_stream_is_noticed(server: HttpServer, script: object) -> None:
    server.dispatcher.script = script  # type: ignore[assignment]
    async with connected(server.port) as (_, writer):
        writer.write(post(STREAMED))
        await wait_for(lambda: server.dispatcher.is_silent)
    await server.wait_idle()


@pytest.mark.parametrize("wrong", [b"\x00\x01\r\n\r\n", b"CONNECT localhost:80 HTTP/1.1\r\n\r\n"])
async def test_what_is_no_request_writes_nothing_into_an_answer_that_has_begun(
    server: HttpServer, wrong: bytes
) -> None:
    server.dispatcher.script = lambda generation: then_silence(3)
    async with connected(server.port) as (reader, writer):
        writer.write(post(STREAMED))
        received = await reader.readuntil(b"delta")
        writer.write(wrong)
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(4096):
                received += part
    assert received.startswith(b"HTTP/1.1 200") and received.count(b"HTTP/1.1") == 1
    await server.wait_idle()


@pytest.mark.parametrize("num_requests", [3, MAX_QUEUED // 2])
async def test_a_client_that_leaves_with_requests_queued_stops_them_all_without_an_error(
    server: HttpServer, num_requests: int, caplog: pytest.LogCaptureFixture
) -> None:
    server.dispatcher.script = silence
    async with connected(server.port) as (_, writer):
        writer.write(post() * num_requests)
        await server.dispatcher.has_started.wait()
        writer.transport.abort()
    await server.wait_idle()
    assert len(server.dispatcher.generations) == 1
    assert caplog.records == []


async def test_requests_sent_ahead_are_answered_in_order_and_bounded(server: HttpServer) -> None:
    async with connected(server.port) as (reader, writer):
        writer.write((GET + b"\r\n") * MAX_QUEUED)
        for _ in range(MAX_QUEUED):
            await reader.readuntil(b'"ok"}')
    server.dispatcher.script = silence
    async with connected(server.port) as (reader, writer):
        writer.write(post() + (GET + b"\r\n") * 1000)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    assert num_ended(server, Ended.TOO_MANY_QUEUED) == 1
    await server.wait_idle()


@pytest.mark.parametrize("body", [CHAT, STREAMED])
async def test_http_1_0_gets_no_chunks_and_the_answer_ends_with_the_connection(
    server: HttpServer, body: bytes
) -> None:
    server.dispatcher.script = says([80, 81, 2])
    async with connected(server.port) as (reader, writer):
        writer.write(post(body, version="1.0"))
        answer = await reader.read()
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    if body is STREAMED:
        assert content.startswith(b"data: ") and content.endswith(b"data: [DONE]\n\n")
    else:
        assert content.endswith(b"}")


async def test_a_stream_that_is_never_read_is_given_up_and_everything_given_back(server: HttpServer) -> None:
    server.dispatcher.script = lambda generation: then_silence(20_000)
    async with connected(server.port, receive_bytes=4096) as (_, writer):
        writer.write(post(STREAMED))
        await wait_for(lambda: num_ended(server, Ended.NOT_READ) == 1)
        await server.wait_idle()
    assert not server.dispatcher.is_silent


async def test_a_whole_answer_that_is_never_read_does_not_keep_its_connection(server: HttpServer) -> None:
    async with connected(server.port, receive_bytes=4096) as (_, writer):
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * MAX_QUEUED)
        await wait_for(lambda: num_ended(server, Ended.NOT_READ) == 1)
    await wait_for(lambda: server.context.connections.num_open == 0)


async def test_a_client_that_reads_slowly_gets_all_of_it(server: HttpServer) -> None:
    ends = TokenDelta(RequestKey(1, 0), (2,), finish_reason=FinishReason.STOP)
    server.dispatcher.script = lambda generation: [*then_silence(3000)[:-1], [ends]]
    num_read = 0
    async with connected(server.port, receive_bytes=2**16) as (reader, writer):
        writer.write(post(STREAMED))
        end = b""
        while b"[DONE]" not in end:
            read = await reader.read(4096)
            assert read
            num_read += len(read)
            end = end[-20:] + read
            await asyncio.sleep(0.002)
    assert num_read > 300_000


async def test_what_waits_for_a_client_that_reads_too_slowly_is_bounded() -> None:
    async with http_server(write_seconds=600) as server:
        server.dispatcher.num_waiting = 100_000
        server.dispatcher.script = lambda generation: then_silence(20_000)
        async with connected(server.port, receive_bytes=4096) as (_, writer):
            writer.write(post(STREAMED))
            await wait_for(lambda: num_ended(server, Ended.NOT_READ) == 1)
            await server.wait_idle()


async def test_a_client_that_does_not_read_does_not_delay_the_end_of_the_router() -> None:
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as client:
        async with http_server(write_seconds=600, drain_seconds=60) as server:
            server.dispatcher.script = lambda generation: then_silence(20_000)
            _, writer = await client.enter_async_context(connected(server.port, receive_bytes=4096))
            writer.write(post(STREAMED))
            await server.dispatcher.has_started.wait()
            await asyncio.sleep(0.2)
            stopped_at = loop.time()
        assert loop.time() - stopped_at < 30


async def test_a_silent_stream_gets_comments_before_and_between_tokens() -> None:
    async with http_server(stream_comment_seconds=0.2) as server:
        go_on = asyncio.Event()
        server.dispatcher.script = lambda generation: [go_on, *then_silence(1)]
        async with connected(server.port) as (reader, writer):
            writer.write(post(STREAMED))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"x-kvasir-replica: replica-7" in head
            assert b"100 Continue" not in head
            for _ in range(3):
                assert b": still working\n" in await reader.readuntil(b"\n\n")
            go_on.set()
            await reader.readuntil(b'"finish_reason":null')
            await reader.readuntil(b": still working\n\n")
            await reader.readuntil(b": still working\n\n")
        await server.wait_idle()


async def test_an_answer_that_is_no_stream_gets_no_comments() -> None:
    async with http_server(stream_comment_seconds=0.1) as server:
        go_on = asyncio.Event()
        server.dispatcher.script = lambda generation: [go_on, *says([80, 2])(generation)]
        async with connected(server.port) as (reader, writer):
            writer.write(post())
            await server.dispatcher.has_started.wait()
            await asyncio.sleep(0.4)
            go_on.set()
            answer = await reader.readuntil(b'"stop"')
            assert b": still" not in answer
