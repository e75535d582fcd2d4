"""Raw sockets: clients that leave, and clients that send too much."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence

import pytest

from replicas.protocol.frames import RequestKey, TokenDelta
from router.generation import Generation
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import NEVER, Step, says

BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}).encode()
STREAMED = BODY[:-1] + b', "stream": true}'


def _head(length: int | None, path: str = "/v1/chat/completions") -> bytes:
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{framing}\r\n\r\n".encode()


@contextlib.asynccontextmanager
async def _connected(server: HttpServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def _one_token_then_silence(generation: Generation) -> Sequence[Step]:
    return [[TokenDelta(RequestKey(1, 0), (80,))], NEVER]


def _silence(generation: Generation) -> Sequence[Step]:
    return [NEVER]


@pytest.mark.parametrize("body", [BODY, STREAMED])
async def test_leaving_before_the_first_token_stops_the_generation(server: HttpServer, body: bytes) -> None:
    server.dispatcher.script = _silence
    async with _connected(server) as (_, writer):
        writer.write(_head(len(body)) + body)
        await server.dispatcher.has_started.wait()
        assert not server.is_idle
    await server.wait_idle()


async def test_leaving_in_mid_stream_stops_the_generation(server: HttpServer) -> None:
    server.dispatcher.script = _one_token_then_silence
    async with _connected(server) as (reader, writer):
        writer.write(_head(len(STREAMED)) + STREAMED)
        await reader.readuntil(b'"finish_reason":null')
        assert not server.is_idle
    await server.wait_idle()
    counted = server.context.metrics.render().decode()
    assert 'router_requests_total{model="tiny",route="chat_completions",code="499"} 1.0' in counted


async def test_leaving_while_several_prompts_run_stops_them_all(server: HttpServer) -> None:
    server.dispatcher.script = _silence
    body = json.dumps({"model": "tiny", "prompt": ["a", "b", "c"]}).encode()
    async with _connected(server) as (_, writer):
        writer.write(_head(len(body), "/v1/completions") + body)
        await server.dispatcher.has_started.wait()
    await server.wait_idle()


async def test_leaving_while_sending_leaves_nothing_behind(server: HttpServer) -> None:
    async with _connected(server) as (_, writer):
        writer.write(_head(len(BODY)) + BODY[: len(BODY) // 2])
        await writer.drain()
    async with _connected(server) as (reader, writer):
        server.dispatcher.script = says([2])
        writer.write(_head(len(BODY)) + BODY)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert len(server.dispatcher.generations) == 1
    assert server.is_idle


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("length", [len(BODY), None])
async def test_a_body_that_comes_too_slowly_is_given_up_and_takes_no_place_in_flight(
    path: str, length: int | None
) -> None:
    async with http_server(upload_seconds=0.3) as server, _connected(server) as (reader, writer):
        writer.write(_head(length, path) + (b"1\r\n{\r\n" if length is None else b"{"))
        while not server.context.bodies.num_bytes:  # noqa: ASYNC110 (nobody else can tell)
            await asyncio.sleep(0.005)
        assert server.context.in_flight.num == 0
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"code":"request_timeout"' in answer
        assert server.is_idle


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/compl", _head(2)[:-2]])
async def test_a_connection_that_brings_no_request_is_closed(sent: bytes) -> None:
    async with http_server(head_seconds=0.3) as server, _connected(server) as (reader, writer):
        writer.write(sent)
        assert await reader.read() == b""


async def test_a_long_answer_outlives_the_time_for_uploads() -> None:
    async with http_server(upload_seconds=0.2) as server, _connected(server) as (reader, writer):
        server.dispatcher.script = _one_token_then_silence
        writer.write(_head(len(STREAMED)) + STREAMED)
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.5)
        assert server.dispatcher.num_open == 1


async def test_an_announced_giant_is_refused_before_it_is_sent() -> None:
    async with http_server(max_body_bytes=1000) as server, _connected(server) as (reader, writer):
        writer.write(_head(10**12))
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 413")
        assert b'"code":"request_too_large"' in answer


async def test_a_giant_in_chunks_is_refused_while_it_is_read() -> None:
    async with http_server(max_body_bytes=100_000) as server, _connected(server) as (reader, writer):
        writer.write(_head(None))
        for _ in range(20):
            writer.write(b"2710\r\n" + b" " * 10_000 + b"\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 413")
        assert server.is_idle


async def test_a_body_in_many_chunks_is_read_whole(server: HttpServer) -> None:
    server.dispatcher.script = says([2])
    async with _connected(server) as (reader, writer):
        writer.write(_head(None))
        for byte in BODY:
            writer.write(b"1\r\n" + bytes([byte]) + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_one_connection_serves_many_requests(server: HttpServer) -> None:
    server.dispatcher.script = says([80, 2])
    async with _connected(server) as (reader, writer):
        for body in (BODY, STREAMED, BODY):
            writer.write(_head(len(body)) + body)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            if b"chunked" in head:
                assert b"[DONE]" in await reader.readuntil(b"0\r\n\r\n")
            else:
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
    assert server.is_idle
