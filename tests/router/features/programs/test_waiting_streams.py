"""Streams of turns that wait until their program may run: they are kept alive before a replica has them."""

import asyncio

import pytest

from router.errors import Overloaded
from tests.router.http_server import http_server
from tests.router.raw_client import CHAT, STREAMED, connected, post, wait_for
from tests.router.scripted_dispatch import ScriptedDispatcher, ScriptedRun, says

COMMENT = b": still working\n"


class Waiting(ScriptedDispatcher):
    """Holds each run until `may_go`, and refuses it then if that is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go, self.is_refused, self.num_held = asyncio.Event(), False, 0
        dispatcher = self

        class Run(ScriptedRun):
            async def __aenter__(self) -> ScriptedRun:
                dispatcher.num_held += 1
                try:
                    await dispatcher.may_go.wait()
                finally:
                    dispatcher.num_held -= 1
                if dispatcher.is_refused:
                    raise Overloaded("This request would wait for about 400 s.", retry_after_seconds=9.0)
                return await super().__aenter__()

        self.run_type = Run


def of_program(body: bytes, name: bytes = b"x-kvasir-program: s\r\n") -> bytes:
    head, _, content = post(body).partition(b"\r\n\r\n")
    return head + b"\r\n" + name + b"\r\n" + content


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_turn_that_waits_gets_comments_and_then_its_answer_or_an_error(is_refused: bool) -> None:
    async with http_server(stream_comment_seconds=0.2) as server:
        server.dispatcher = held = Waiting()
        server.context.dispatcher = held
        held.script = says([65, 66])
        held.is_refused = is_refused
        async with connected(server.port) as (reader, writer):
            writer.write(of_program(STREAMED))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200") and b"x-kvasir-replica" not in head
            for _ in range(2):
                assert COMMENT in await reader.readuntil(b"\n\n")
            held.may_go.set()
            rest = await reader.readuntil(b'"error"' if is_refused else b"[DONE]")
            assert (b"finish_reason" in rest) != is_refused


@pytest.mark.parametrize(
    "request_bytes",
    [post(STREAMED), of_program(CHAT), of_program(STREAMED, b"x-claude-code-session-id: s\r\n")],
)
async def test_what_is_no_streamed_turn_can_be_refused_with_a_status(request_bytes: bytes) -> None:
    async with http_server(stream_comment_seconds=0.1) as server:
        server.dispatcher = held = Waiting()
        server.context.dispatcher = held
        held.script, held.is_refused = says([65]), True
        async with connected(server.port) as (reader, writer):
            writer.write(request_bytes)
            await asyncio.sleep(0.4)
            held.may_go.set()
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 429") and b"retry-after: 9" in head


async def test_a_client_that_leaves_while_its_turn_waits_takes_it_along() -> None:
    async with http_server(stream_comment_seconds=0.2) as server:
        server.dispatcher = held = Waiting()
        server.context.dispatcher = held
        async with connected(server.port) as (reader, writer):
            writer.write(of_program(STREAMED))
            await reader.readuntil(COMMENT)
            assert held.num_held == 1
        async with asyncio.timeout(10):
            await wait_for(lambda: held.num_held == 0)
