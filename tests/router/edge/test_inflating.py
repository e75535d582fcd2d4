"""Bodies that come as gzip: read as they were, and bounded in what they become."""

import gzip
import json
import tracemalloc
import zlib

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.edge.inflating import INLINE_BYTES, inflated
from router.errors import BodiesFull, BodyTooLarge, InvalidRequest
from router.limits.body_budget import BodyBudget
from tests.router import tiny_model
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import says

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
PACKED = {"content-encoding": "gzip", "content-type": "application/json"}
MIB = 2**20


def budget(num_bytes: int = 64 * MIB) -> BodyBudget:
    return BodyBudget(num_bytes, address_share=1.0)


async def inflate(body: bytes, max_bytes: int = MIB, of: BodyBudget | None = None) -> bytes:
    with (of or budget()).hold("1.2.3.4") as held:
        return await inflated(body, held, max_bytes)


@given(st.binary(max_size=5000), st.integers(0, 9), st.integers(1, 40))
async def test_what_was_packed_comes_back(content: bytes, level: int, times: int) -> None:
    assert await inflate(gzip.compress(content * times, level)) == content * times


@given(st.binary(max_size=200), st.integers(0, 60), st.binary(max_size=4))
async def test_whatever_is_no_gzip_is_refused(content: bytes, cut: int, more: bytes) -> None:
    packed = gzip.compress(content)
    for body in (content, packed[:cut], packed + b"x" + more, packed[:cut] + more + packed[cut:]):
        try:
            assert await inflate(body) == gzip.decompress(body)
        except InvalidRequest as error:
            assert error.code == "invalid_encoding"


async def test_a_bomb_is_refused_in_bounded_memory() -> None:
    pack = zlib.compressobj(9, wbits=31)
    bomb = b"".join(pack.compress(bytes(MIB)) for _ in range(256)) + pack.flush()
    assert len(bomb) > INLINE_BYTES
    whole = budget()
    tracemalloc.start()
    with pytest.raises(BodyTooLarge):
        await inflate(bomb, 2 * MIB, whole)
    assert tracemalloc.get_traced_memory()[1] < 6 * MIB
    tracemalloc.stop()
    assert whole.num_bytes == 0
    with pytest.raises(BodiesFull):
        await inflate(bomb, 64 * MIB, budget(MIB))


async def test_a_packed_request_is_answered_as_any_other(server: HttpServer, http: httpx.AsyncClient) -> None:
    server.dispatcher.script = says([tiny_model.END_OF_TURN])
    large = CHAT | {"unknown": list(range(20_000))}
    for body in (CHAT, large):
        packed = gzip.compress(json.dumps(body).encode())
        answer = await http.post("/v1/chat/completions", content=packed, headers=PACKED)
        assert answer.status_code == 200, answer.text
    plain = await http.post("/tokenize", json=CHAT)
    packed = gzip.compress(json.dumps(CHAT).encode())
    assert (await http.post("/tokenize", content=packed, headers=PACKED)).json() == plain.json()
    torn = await http.post("/v1/chat/completions", content=packed[:-9], headers=PACKED)
    assert (torn.status_code, torn.json()["error"]["code"]) == (400, "invalid_encoding")
    assert server.is_idle


async def test_what_a_packed_body_becomes_is_bounded_as_other_bodies_are() -> None:
    async with (
        http_server(max_body_bytes=1000) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as http,
    ):
        packed = gzip.compress(json.dumps(CHAT | {"user": "a" * 1000}).encode())
        assert len(packed) < 1000
        answer = await http.post("/v1/chat/completions", content=packed, headers=PACKED)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert server.is_idle
