"""Limits of several routers: what they admit together, in exact bounds, and with a real Redis that fails."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

import pytest
import redis.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from router.caller import Caller, Limits, Tenant
from router.errors import LimitReached
from router.features.rate_limits.rate_account import Ask, Owner
from router.features.rate_limits.rate_exchange import STREAM, RateExchange
from router.features.rate_limits.rate_limits import RateLimits, Taken
from router.features.rate_limits.rate_news import QUIET_SECONDS, News, RateNews, decode_news, encode_news
from router.shared.news import FIELD
from tests.examples import examples
from tests.redis_server import RedisServer
from tests.router.raw_client import wait_for

ONE = Ask(10, 0, 1)


def caller(limits: Limits, tenant: str = "acme") -> Caller:
    return Caller(tenant=Tenant(name=tenant, limits=limits), key_id="a" * 12)


steps = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "take", "end", "tell", "wait"]),
        st.integers(0, 2),
        st.integers(1, 40),
    ),
    max_size=120,
)


@settings(max_examples=examples(200), deadline=None)
@given(steps, st.integers(1, 8), st.integers(1, 6))
def test_routers_together_admit_no_more_than_the_limit_and_a_bucket_for_each_other(
    steps: Sequence[tuple[str, int, int]], per_minute: int, max_sequences: int
) -> None:
    who = caller(Limits(requests_per_minute=per_minute, max_sequences=max_sequences))
    routers = [RateLimits() for _ in range(3)]
    news = [RateNews(router, f"router-{number}") for number, router in enumerate(routers)]
    open_: list[tuple[int, Taken]] = []
    now, num_admitted = 0.0, 0

    def tell(number: int) -> None:
        told = news[number].tell(now)
        if told is not None:
            for each in news:
                each.hear(decode_news(encode_news(told)), now)

    for what, number, detail in steps:
        if what == "wait":
            now += detail / 4
        elif what == "tell":
            tell(number)
        elif what == "end" and open_:
            whose, taken = open_.pop(detail % len(open_))
            routers[whose].end(taken, 1, now)
        elif what == "take":
            with contextlib.suppress(LimitReached):
                admitted = routers[number].take(who, ONE, now)
                assert admitted is not None
                open_.append((number, admitted))
                num_admitted += 1
        assert num_admitted <= per_minute * (3 + now / 60) + 1e-6
    for number in range(3):
        tell(number)
    known = [router.known(Owner.TENANT, "acme") for router in routers]
    if num_admitted:
        accounts = [account for account in known if account is not None]
        assert len(accounts) == 3
        for account in accounts:
            assert account.num_sequences + account.num_others_sequences == len(open_)
    for whose, taken in open_:
        routers[whose].end(taken, 1, now)
    for number in range(3):
        tell(number)
    for router in routers:
        account = router.known(Owner.TENANT, "acme")
        assert account is None or account.num_sequences + account.num_others_sequences == 0


def test_what_did_not_get_through_is_told_again() -> None:
    who = caller(Limits(requests_per_minute=2))
    here, there = RateLimits(), RateLimits()
    news, other = RateNews(here, "a"), RateNews(there, "b")
    here.take(who, ONE, 0.0)
    lost = news.tell(0.0)
    assert lost is not None
    news.untell(lost)
    here.take(who, ONE, 0.0)
    told = news.tell(0.0)
    assert told is not None
    other.hear(told, 0.0)
    with pytest.raises(LimitReached):
        there.take(who, ONE, 0.0)


def test_a_router_that_is_not_heard_any_more_serves_nothing() -> None:
    who = caller(Limits(max_sequences=1))
    here, there = RateLimits(), RateLimits()
    news, other = RateNews(here, "a"), RateNews(there, "b")
    here.take(who, ONE, 0.0)
    told = news.tell(0.0)
    assert told is not None
    other.hear(told, 0.0)
    for now in (0.0, QUIET_SECONDS):
        other.forget_quiet(now)
        with pytest.raises(LimitReached):
            there.take(who, ONE, now)
    other.forget_quiet(QUIET_SECONDS + 0.1)
    assert there.take(who, ONE, QUIET_SECONDS + 0.1) is not None


class Routers:
    """Each with its exchange running, and a clock that they share with nobody."""

    def __init__(self, url: str, tasks: asyncio.TaskGroup) -> None:
        self._url, self._tasks = url, tasks
        self.running: list[asyncio.Task[None]] = []
        self.exchanges: list[RateExchange] = []

    def __call__(self) -> RateLimits:
        limits = RateLimits()
        self.exchanges.append(RateExchange(self._url, limits))
        self.running.append(self._tasks.create_task(self.exchanges[-1].run()))
        return limits


@contextlib.asynccontextmanager
async def routers_on(url: str) -> AsyncIterator[Routers]:
    async with asyncio.TaskGroup() as tasks:
        routers = Routers(url, tasks)
        yield routers
        for task in routers.running:
            task.cancel()


def is_refused(limits: RateLimits, who: Caller, ask: Ask = ONE) -> bool:
    """Without taking anything."""
    try:
        taken = limits.take(who, ask, time.perf_counter())
    except LimitReached:
        return True
    assert taken is not None
    limits.give_back(taken, time.perf_counter())
    return False


def use_up(limits: RateLimits, who: Caller, num: int) -> list[Taken]:
    taken = [limits.take(who, ONE, time.perf_counter()) for _ in range(num)]
    return [each for each in taken if each is not None]


@pytest.mark.timeout(60)
async def test_what_is_used_at_one_router_is_refused_at_the_other(redis_url: str) -> None:
    who = caller(Limits(requests_per_minute=3, max_sequences=100))
    async with routers_on(redis_url) as routers:
        first, second = routers(), routers()
        use_up(first, who, 3)
        await wait_for(lambda: is_refused(second, who))
        late = routers()  # one that has just started
        await wait_for(lambda: is_refused(late, who))


@pytest.mark.timeout(60)
async def test_sequences_are_counted_over_all_routers_and_go_with_theirs(redis_url: str) -> None:
    who = caller(Limits(max_sequences=2))
    async with routers_on(redis_url) as routers:
        first, second = routers(), routers()
        taken = use_up(first, who, 2)
        await wait_for(lambda: is_refused(second, who))
        first.end(taken[0], 1, 0.0)
        await wait_for(lambda: not is_refused(second, who))
        assert is_refused(second, who, Ask(1, 0, 2))
        routers.running[0].cancel()  # killed: it says nothing any more
        await wait_for(lambda: not is_refused(second, who, Ask(1, 0, 2)))


@pytest.mark.timeout(90)
async def test_without_redis_each_goes_by_its_own_count_and_tells_afterwards() -> None:
    server = RedisServer()
    server.start()
    try:
        who = caller(Limits(requests_per_minute=3))
        async with routers_on(server.url) as routers:
            first, second = routers(), routers()
            use_up(first, caller(Limits(requests_per_minute=9), "warm"), 1)
            await wait_for(lambda: second.known(Owner.TENANT, "warm") is not None)
            server.kill()
            use_up(first, who, 3)
            assert is_refused(first, who)
            await wait_for(lambda: routers.exchanges[0].stream.num_failed > 0)
            assert not is_refused(second, who)
            server.start()
            await wait_for(lambda: is_refused(second, who))
    finally:
        server.kill()


@pytest.mark.timeout(60)
async def test_nonsense_in_the_stream_is_passed_over(redis_url: str) -> None:
    who = caller(Limits(requests_per_minute=3))
    nonsense = [
        b"",
        b"\xc1",
        encode_news(["x", [[7, "acme", 1, 1, 1]]]),
        encode_news(["x", [[0, "acme", 2**60, 1, 1]]]),
        encode_news(["x", [[0, "acme", 1, 1, -5]]]),
        encode_news(["x" * 100, []]),
        encode_news(["x", [[0, "a" * 1000, 1, 1, 1]]]),
    ]
    async with redis.asyncio.Redis.from_url(redis_url) as client, routers_on(redis_url) as routers:
        first, second = routers(), routers()
        for each in nonsense:
            await client.xadd(STREAM, {FIELD: each})
        await client.xadd(STREAM, {b"other": b"field"})
        use_up(first, who, 3)
        await wait_for(lambda: is_refused(second, who))
        await wait_for(lambda: routers.exchanges[1].stream.num_wrong == len(nonsense) + 1)
        news = News("x", ())
        assert decode_news(encode_news(news)) == news
