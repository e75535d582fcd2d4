"""Offers to speak another protocol on a connection: passed over, and what follows the head is its body."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from tests.router.http_server import HttpServer, http_server
from tests.router.raw_client import CHAT, connected, post
from tests.router.scripted_dispatch import says

BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": b'{"model": "tiny", "prompt": "Hello"}',
    "/v1/messages": CHAT[:-1] + b', "max_tokens": 4}',
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": b'{"model": "tiny", "input": "Hello"}',
    "/v1/responses/input_tokens": b'{"model": "tiny", "input": "Hello"}',
    "/v1beta/models/tiny:generateContent": b'{"contents": [{"parts": [{"text": "Hello"}]}]}',
    "/v1beta/models/tiny:streamGenerateContent?alt=sse": b'{"contents": [{"parts": [{"text": "Hello"}]}]}',
    "/v1beta/models/tiny:countTokens": b'{"contents": [{"parts": [{"text": "Hello"}]}]}',
    "/tokenize": b'{"model": "tiny", "prompt": "Hello"}',
    "/detokenize": b'{"model": "tiny", "tokens": [80]}',
}
OFFERS = [
    "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk",
    "connection: keep-alive, upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13",
    "Upgrade: TLS/1.0, h2c\r\nUpgrade: foo/2\r\nConnection: UPGRADE",
]
LAST = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with http_server(head_seconds=5.0) as running:
        running.dispatcher.script = says([80, 2])
        yield running


def offering(head_and_body: bytes, offer: str) -> bytes:
    line, rest = head_and_body.split(b"\r\n", 1)
    return line + b"\r\n" + offer.encode() + b"\r\n" + rest


def chunked(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    parts = (body[:7], body[7:], b"")
    return head.encode() + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


async def answers(port: int, packets: Sequence[bytes]) -> list[int]:
    """The status of each, up to the connection's end."""
    async with connected(port) as (reader, writer):
        for packet in packets:
            writer.write(packet)
            await writer.drain()
            await asyncio.sleep(0.002)
        received = await reader.read()
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("path", BODIES)
async def test_an_offered_upgrade_is_passed_over_and_one_request_has_one_answer(
    server: HttpServer, path: str
) -> None:
    requests = post(BODIES[path], path=path), chunked(path, BODIES[path])
    for offered in (offering(request, offer) for request in requests for offer in OFFERS):
        head, _, rest = offered.partition(b"\r\n\r\n")
        head += b"\r\n\r\n"
        for packets in (
            [offered + LAST],
            [head, rest, LAST],
            [head[:-1], head[-1:] + rest[:5], rest[5:] + LAST],
            [offered, LAST],
        ):
            assert await answers(server.port, packets) == [200, 200], packets


@pytest.mark.parametrize("make", [post, lambda body: chunked("/v1/chat/completions", body)])
async def test_an_offer_may_come_byte_by_byte(server: HttpServer, make: object) -> None:
    request = offering(make(CHAT), OFFERS[0]) + LAST  # type: ignore[operator]
    assert await answers(server.port, [request[at : at + 1] for at in range(len(request))]) == [200, 200]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_body_that_looks_like_a_request_is_a_body(server: HttpServer, version: str) -> None:
    hidden = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    request = offering(post(hidden, version=version), OFFERS[0])
    head = request[: -len(hidden)]
    for packets in ([request], [head, hidden]):
        packets = [*packets, LAST] if version == "1.1" else packets
        expected = [400, 200] if version == "1.1" else [400]
        assert await answers(server.port, packets) == expected


async def test_requests_without_a_body_that_offer_one_are_answered_in_order(server: HttpServer) -> None:
    offered = offering(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", OFFERS[1])
    assert await answers(server.port, [offered * 20 + LAST]) == [200] * 21
    assert await answers(server.port, [offered, post() + LAST]) == [200, 200, 200]


async def test_what_closes_the_connection_closes_it_though_it_offers_an_upgrade(server: HttpServer) -> None:
    offer = "connection: close, Upgrade\r\nupgrade: h2c"
    request = offering(post(), offer)
    head, _, body = request.partition(b"\r\n\r\n")
    for packets in ([request], [head + b"\r\n\r\n", body]):
        assert await answers(server.port, packets) == [200]


async def test_an_offer_with_two_lengths_is_refused_as_without_it(server: HttpServer) -> None:
    for lengths in (
        "content-length: 3\r\ntransfer-encoding: chunked",
        "content-length: 3\r\ncontent-length: 4",
    ):
        request = f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n{OFFERS[0]}\r\n{lengths}\r\n\r\n{{}} "
        assert await answers(server.port, [request.encode() + LAST]) == [400]


@pytest.mark.parametrize("target", ["localhost:443", "localhost:80", "[::1]:80"])
async def test_a_tunnel_is_refused_and_nothing_behind_it_read(server: HttpServer, target: str) -> None:
    request = f"CONNECT {target} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
    assert await answers(server.port, [request + LAST]) == [400]
    assert await answers(server.port, [request]) == [400]


async def test_a_trailer_is_no_header(server: HttpServer) -> None:
    request = chunked("/v1/chat/completions", CHAT)
    request = request.removesuffix(b"\r\n") + b"x-request-id: from-a-trailer\r\n\r\n"
    async with connected(server.port) as (reader, writer):
        writer.write(request)
        answer = await reader.readuntil(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200") and b"x-request-id: req_" in answer
