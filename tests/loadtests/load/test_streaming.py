import asyncio
from typing import Any

import pytest

from loadtests.load.streaming import Connection, StreamCut
from tests.loadtests.scripted_server import EVENT, HEAD, chunk, scripted_server, whole


async def test_a_streamed_answer_is_whole_if_it_ends_with_done() -> None:
    async with scripted_server(whole) as port:
        connection = Connection("127.0.0.1", port)
        answer = await connection.post("/v1/completions", b"{}")
        assert answer.is_whole
        assert connection.is_open
        assert answer.num_cached_tokens == 32
        assert 0 < answer.ttft <= answer.e2e
        await connection.close()


async def test_gaps_are_between_events_that_carry_text() -> None:
    async def slow(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(EVENT))
        for event in (EVENT, EVENT, b'data: {"choices":[{"text":""}]}\n\n', b"data: [DONE]\n\n"):
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.write(chunk(event))
        writer.write(b"0\r\n\r\n")

    async with scripted_server(slow) as port:
        connection = Connection("127.0.0.1", port)
        answer = await connection.post("/v1/completions", b"{}")
        assert len(answer.itl_seconds) == 2
        # Who reads late sees one gap shorter and never both of them.
        assert 0.1 < sum(answer.itl_seconds) <= answer.e2e - answer.ttft
        await connection.close()


async def test_a_cut_stream_raises_with_what_had_come() -> None:
    async def cut(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(EVENT) + b"ff\r\n")
        writer.close()

    async with scripted_server(cut) as port:
        connection = Connection("127.0.0.1", port)
        with pytest.raises(StreamCut) as caught:
            await connection.post("/v1/completions", b"{}")
        assert len(caught.value.answer.text_seconds) == 1
        assert caught.value.answer.headers["x-kvasir-replica"] == "replica-7"
        assert not connection.is_open
        connection.abort()


async def test_headers_of_ones_own_are_sent() -> None:
    async def show(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        is_there = b"\r\nauthorization: Bearer k\r\n" in head
        writer.write(b"HTTP/1.1 %d OK\r\ncontent-length: 2\r\n\r\n{}" % (200 if is_there else 401))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(show, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        connection = Connection("127.0.0.1", port, {"authorization": "Bearer k"})
        assert (await connection.post("/v1/completions", b"{}")).status == 200
        await connection.close()
