"""Programs of several routers over a real Redis: who knows them, and when Redis or a router is away."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest
import redis.asyncio

from replicas.protocol.cluster_secret import ClusterSecret, Purpose
from replicas.protocol.status import ReplicaId
from router.features.programs.exchange import STREAM, ProgramExchange
from router.programs import news as news_module
from router.programs.book import Program, ProgramBook, Turn
from router.programs.name import ProgramName
from router.programs.news import encode_news
from router.shared.news import FIELD
from router.shared.sealing import Seal
from tests.redis_server import RedisServer
from tests.router.raw_client import wait_for

SECRET = ClusterSecret(b"s" * 32)
HOME = ReplicaId("replica-1")

pytestmark = pytest.mark.timeout(90)


class Router:
    def __init__(self, url: str, tasks: asyncio.TaskGroup, secret: ClusterSecret = SECRET) -> None:
        self.book = ProgramBook()
        self.exchange = ProgramExchange(url, self.book, time.perf_counter, secret)
        self.running = tasks.create_task(self.exchange.run())

    def begin(self, session: str) -> Turn:
        turn = self.book.begin("toy", "acme", _named(session), 500, [], time.perf_counter())
        self.book.admit(turn.program, 500, time.perf_counter())
        self.book.routed(turn, HOME, time.perf_counter())
        return turn

    def end(self, turn: Turn) -> None:
        self.book.end(turn, time.perf_counter())

    def program(self, session: str) -> Program | None:
        return self.book.known("toy", "acme", _named(session))

    def state(self, session: str) -> str | None:
        program = self.program(session)
        return None if program is None else program.state


def _named(session: str) -> ProgramName:
    return ProgramName("codex", "session-id", session)


@contextlib.asynccontextmanager
async def routers_on(url: str) -> AsyncIterator[Callable[..., Router]]:
    routers: list[Router] = []
    async with asyncio.TaskGroup() as tasks:

        def router(secret: ClusterSecret = SECRET) -> Router:
            routers.append(Router(url, tasks, secret))
            return routers[-1]

        yield router
        for each in routers:
            each.running.cancel()


async def test_a_program_is_known_at_every_router_and_to_nobody_without_the_secret(redis_url: str) -> None:
    async with routers_on(redis_url) as new_router:
        here, there, stranger = new_router(), new_router(), new_router(ClusterSecret(b"o" * 32))
        turn = here.begin("secret-session")
        await wait_for(lambda: there.state("secret-session") == "active")
        here.end(turn)
        await wait_for(lambda: there.state("secret-session") == "paused")
        program = there.program("secret-session")
        assert program is not None
        assert (program.home, program.num_tokens, program.num_turns) == (HOME, 500, 1)
        assert there.book.admitted("toy").num_tokens == 500
        late = new_router()  # one that has just started
        await wait_for(lambda: late.state("secret-session") == "paused")
        await wait_for(lambda: stranger.exchange.stream.num_wrong > 0)
        assert len(stranger.book) == 0
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            assert "secret-session" not in repr(await client.xrange(STREAM))
            assert 0 < await client.ttl(STREAM) <= 120


async def test_programs_of_a_killed_router_pause_and_go_on_at_another(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(news_module, "HEARTBEAT_SECONDS", 0.3)
    monkeypatch.setattr(news_module, "QUIET_SECONDS", 1.0)
    async with routers_on(redis_url) as new_router:
        here, there = new_router(), new_router()
        here.begin("s")
        await wait_for(lambda: there.state("s") == "active")
        await asyncio.sleep(2.0)
        assert there.state("s") == "active"
        here.running.cancel()
        await wait_for(lambda: there.state("s") == "paused")
        there.end(there.begin("s"))
        program = there.program("s")
        assert program is not None
        assert (program.num_turns, program.home, program.num_running) == (2, HOME, 0)
        assert there.exchange.news.num_routers == 0


async def test_while_redis_is_away_each_knows_its_own_and_tells_of_them_afterwards() -> None:
    server = RedisServer()
    server.start()
    try:
        async with routers_on(server.url) as new_router:
            here, there = new_router(), new_router()
            here.end(here.begin("before"))
            await wait_for(lambda: there.state("before") == "paused")
            server.kill()
            here.end(here.begin("meanwhile"))
            there.end(there.begin("before"))
            await wait_for(lambda: here.exchange.stream.num_failed > 0)
            assert there.state("meanwhile") is None
            server.start()
            await wait_for(lambda: there.state("meanwhile") == "paused")
            await wait_for(lambda: getattr(here.program("before"), "num_turns", 0) == 2)
    finally:
        server.kill()


async def test_nonsense_in_the_stream_is_passed_over_and_counted(redis_url: str) -> None:
    seal = Seal(SECRET, Purpose.PROGRAMS)
    nonsense = [
        b"",
        encode_news(["x", []]),
        seal.seal("kvasir-stories:news", encode_news(["x", []])),
        seal.seal(STREAM, b"\xc1"),
        seal.seal(STREAM, encode_news(["x", [["toy", "acme"]]])),
    ]
    async with redis.asyncio.Redis.from_url(redis_url) as client, routers_on(redis_url) as new_router:
        here, there = new_router(), new_router()
        for each in nonsense:
            await client.xadd(STREAM, {FIELD: each})
        here.begin("s")
        await wait_for(lambda: there.state("s") == "active")
        await wait_for(lambda: there.exchange.stream.num_wrong == len(nonsense))
        text = "".join(each.text() for each in there.exchange.instruments())
        assert f'router_program_news_total{{outcome="wrong"}} {len(nonsense)}' in text
        assert "router_program_exchange_routers 1" in text
