"""ExplanationStore that another router knows, told for their tenant alone; with a real Redis that fails."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
import redis.asyncio

from replicas.protocol.cluster_secret import ClusterSecret, Purpose
from router.explain.explanation import Earlier, Explanation, ProgramTurn, PromptExplanation
from router.features.explanations import exchange as exchanges
from router.features.explanations.exchange import (
    MAX_ASKED,
    MAX_ASKED_OF_TENANT,
    MAX_EXPLANATION_BYTES,
    STREAM,
    ExplanationExchange,
)
from router.shared.news import FIELD
from router.shared.sealing import Seal
from tests.redis_server import RedisServer

SECRET = ClusterSecret(b"s" * 32)
PROMPT = PromptExplanation(
    num_prompt_tokens=900,
    num_cached_tokens=512,
    num_tier_tokens=(256, 128, 128),
    cause="prefix_changed",
    spans=(("prefix_changed", 512, 880, "replica-1", 12.5), ("below_a_block", 880, 900, None, None)),
    num_lost_tokens=368,
    lost_ms=40.25,
    replica_id="replica-0",
    earlier=Earlier(("req-0", "cmpl-0"), 11.5, 880, 512, 520, ("tools",)),
    path="tools[3].description",
    place_kind="tools",
    is_certain=True,
    sentence="image 2 of message 4 differs",
    block_size=16,
    program=ProgramTurn(
        *("codex", "session-id", "s-1", "agent-1"),
        is_side=True,
        num_turns=7,
        home="replica-2",
        num_beyond=1234,
        waited_seconds=5.5,
        num_admitted=31,
    ),
)
EXPLANATION = Explanation(
    "req-1", "cmpl-1", 1234.5, "toy", "/v1/chat/completions", "ReplicaLost", (PROMPT, PROMPT)
)

pytestmark = pytest.mark.timeout(60)


class Router:
    """What one remembers, and its exchange."""

    def __init__(self, url: str, secret: ClusterSecret = SECRET) -> None:
        self.explanations: dict[tuple[str, str], Explanation] = {}
        self.num_looks = 0
        self.secret = secret
        self.exchange = ExplanationExchange(url, secret, self._find)

    async def told(self, tenant: str, prompt_id: str) -> Explanation | None:
        """Ask for one that there is, or will be: however long that takes."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(exchanges, "ANSWER_SECONDS", 60.0)
            return await self.exchange.ask(tenant, prompt_id)

    def _find(self, tenant: str, prompt_id: str) -> Explanation | None:
        self.num_looks += 1
        return self.explanations.get((tenant, prompt_id))


@contextlib.asynccontextmanager
async def running(*routers: Router) -> AsyncIterator[None]:
    """Once each has heard the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(router.exchange.run()) for router in routers]
        for router in routers:
            for other in routers:
                if other is not router and router.secret == other.secret:
                    await heard(router, other)
        yield
        for task in tasks:
            task.cancel()


async def heard(router: Router, other: Router) -> None:
    other.explanations["warm", "up"] = EXPLANATION
    while await router.exchange.ask("warm", "up") is None:
        pass
    del other.explanations["warm", "up"]


async def test_what_one_router_knows_another_can_tell_to_its_owner_alone(redis_url: str) -> None:
    here, there = Router(redis_url), Router(redis_url)
    there.explanations["acme", "req-1"] = EXPLANATION
    async with running(here, there):
        answered, unanswered = here.exchange.num_answered, here.exchange.num_unanswered
        told = there.exchange.num_told
        assert await here.told("acme", "req-1") == EXPLANATION
        assert await there.told("acme", "req-1") == EXPLANATION
        assert await here.exchange.ask("beta", "req-1") is None
        assert await here.exchange.ask("acme", "req-2") is None
    asked = here.exchange
    assert (asked.num_answered - answered, asked.num_unanswered - unanswered, asked.stream.num_wrong) == (
        1,
        2,
        0,
    )
    assert there.exchange.num_told - told == 1
    assert not here.exchange._asked


async def test_one_that_is_not_remembered_yet_is_waited_for_wherever_it_comes(redis_url: str) -> None:
    here, there = Router(redis_url), Router(redis_url)
    async with running(here, there):
        for router in (here, there):
            asked = asyncio.create_task(here.told("acme", "req-1"))
            await asyncio.sleep(0.05)
            router.explanations["acme", "req-1"] = EXPLANATION
            assert await asked == EXPLANATION
            router.explanations.clear()


async def test_routers_without_a_secret_in_common_say_nothing_to_each_other(redis_url: str) -> None:
    here, there = Router(redis_url), Router(redis_url, ClusterSecret(b"t" * 32))
    next_one = Router(redis_url, ClusterSecret(b"n" * 32, (b"s" * 32,)))  # its secret is being changed
    for router in (there, next_one):
        router.explanations["acme", "req-1"] = EXPLANATION
    async with running(here, there):
        while there.exchange.stream.num_wrong == 0:
            assert await here.exchange.ask("acme", "req-1") is None
        assert there.exchange.num_told == 0
    here = Router(redis_url, ClusterSecret(b"s" * 32, (b"n" * 32,)))
    next_one.explanations["warm", "up"] = EXPLANATION
    async with running(here, next_one):
        while await here.exchange.ask("warm", "up") is None:
            pass
        assert await here.told("acme", "req-1") == EXPLANATION


async def test_redis_holds_nothing_that_can_be_read_and_not_for_long(redis_url: str) -> None:
    here, there = Router(redis_url), Router(redis_url)
    there.explanations["acme-and-sons", "req-1"] = EXPLANATION
    async with redis.asyncio.Redis.from_url(redis_url) as client, running(here, there):
        assert await here.told("acme-and-sons", "req-1") == EXPLANATION
        entries = [fields[FIELD] for _, fields in await client.xrange(STREAM)]
        assert len(entries) >= 2
        for word in (b"acme", b"req-1", b"tools", b"replica-1", b"prefix_changed"):
            assert not any(word in entry for entry in entries)
        assert 0 < await client.ttl(STREAM) <= exchanges.KEPT_SECONDS


async def test_what_is_not_ours_is_passed_over(redis_url: str) -> None:
    here, there = Router(redis_url), Router(redis_url)
    there.explanations["acme", "req-1"] = EXPLANATION
    there.explanations["acme", "long"] = Explanation(
        "x" * MAX_EXPLANATION_BYTES, None, 1.0, None, "", None, ()
    )
    async with redis.asyncio.Redis.from_url(redis_url) as client, running(here, there):
        sealing = await asyncio.to_thread(Seal, SECRET, Purpose.EXPLANATIONS)
        question = msgspec.msgpack.encode(exchanges.Question(b"n" * 16, "acme", "req-1"))
        nonsense = [
            *(b"", b"\xc1", sealing.seal(STREAM, b"\x93\xc1")),
            *(sealing.seal("elsewhere", question), Seal(SECRET).seal(STREAM, question)),
        ]
        for each in nonsense:
            await client.xadd(STREAM, {FIELD: each})
        await client.xadd(STREAM, {b"other": b"field"})
        assert await here.exchange.ask("acme", "long") is None
        assert await here.told("acme", "req-1") == EXPLANATION
        assert there.exchange.stream.num_wrong == len(nonsense) + 1


async def test_answers_that_lie_are_not_believed(redis_url: str) -> None:
    """One who can write to Redis, and seal: no other explanation than one of the right shape."""
    here = Router(redis_url)
    async with running(here):
        asked = asyncio.create_task(here.exchange.ask("acme", "req-1"))
        await asyncio.sleep(0.1)
        (number,) = here.exchange._asked
        await here.exchange.stream.send(exchanges.Answer(number, b"\xc1"))
        assert await asked is None
        assert here.exchange.stream.num_wrong == 1


@pytest.mark.parametrize(
    ("num_tenants", "each", "num_waiting"),
    [
        (3, 2 * MAX_ASKED_OF_TENANT, 3 * MAX_ASKED_OF_TENANT),
        (MAX_ASKED // MAX_ASKED_OF_TENANT + 1, MAX_ASKED_OF_TENANT, MAX_ASKED),
    ],
)
async def test_only_so_many_questions_wait_at_once_for_each_tenant_and_in_all(
    redis_url: str, num_tenants: int, each: int, num_waiting: int
) -> None:
    here = Router(redis_url)
    here.explanations["acme", "mine"] = EXPLANATION
    async with running(here):
        asked = [
            asyncio.create_task(here.exchange.ask(f"tenant-{tenant}", str(number)))
            for tenant in range(num_tenants)
            for number in range(each)
        ]
        await asyncio.sleep(0.05)
        assert await here.told("acme", "mine") == EXPLANATION
        assert here.exchange.num_not_asked == len(asked) - num_waiting
        assert await asyncio.gather(*asked) == [None] * len(asked)
    assert here.exchange.num_unanswered == num_waiting
    assert not here.exchange._asked and not here.exchange._num_asked_of


async def test_one_who_goes_away_while_waiting_leaves_nothing_behind(redis_url: str) -> None:
    here = Router(redis_url)
    async with running(here):
        asked = asyncio.create_task(here.exchange.ask("acme", "req-1"))
        await asyncio.sleep(0.05)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert not here.exchange._asked


async def test_without_redis_each_has_its_own_and_afterwards_they_ask_again() -> None:
    server = RedisServer()
    server.start()
    try:
        here, there = Router(server.url), Router(server.url)
        here.explanations["acme", "mine"] = there.explanations["acme", "req-1"] = EXPLANATION
        async with running(here, there):
            server.kill()
            before = time.monotonic()
            assert await here.told("acme", "mine") == EXPLANATION
            while here.exchange.stream.num_failed == 0:
                assert await here.exchange.ask("acme", "req-1") is None
            assert time.monotonic() - before < 30
            server.start()
            while await here.exchange.ask("acme", "req-1") is None:
                pass
    finally:
        server.kill()
