"""What was used, in a real Redis that is killed, paused and emptied, as several routers write and read it."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest
import redis.asyncio

from replicas.protocol.frames import PromptUsage
from router.caller import Caller, Tenant
from router.errors import UsageUnavailable
from router.features.usage import store as store_module
from router.features.usage.amounts import Amount, num_prompt_tokens
from router.features.usage.ledger import Ledger
from router.features.usage.redis_usage import PREFIX, RedisUsage, amounts_key
from router.features.usage.store import UsageStore
from router.features.usage.sums import Group, TooManyGroups, UsageQuery
from router.shared.tenant_tags import TenantTags
from tests.redis_server import RedisServer
from tests.router.features.usage.test_ledger import served

HOUR = 500_000
NOON = HOUR * 3600.0
EVERYTHING = UsageQuery(HOUR - 100, HOUR + 100, None)

Open = Callable[[], UsageStore]


@pytest.fixture
async def routers(redis_url: str) -> AsyncIterator[Open]:
    async with opened(redis_url) as open_store:
        yield open_store


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Open]:
    stores: list[UsageStore] = []

    def router() -> UsageStore:
        stores.append(UsageStore(url, 744, wall_clock=lambda: NOON))
        return stores[-1]

    yield router
    for store in stores:
        await store.close()


def ask(store: UsageStore, tenant: str = "acme", num: int = 1, at: float = NOON, key: str = "k") -> None:
    for _ in range(num):
        caller = Caller(tenant=Tenant(name=tenant), key_id=key)
        store.observe(served(PromptUsage(100, 60, 30), caller=caller, at=at))


async def requests(store: UsageStore, query: UsageQuery = EVERYTHING) -> dict[str, int]:
    found: Counter[str] = Counter()
    for group, amounts in (await store.read(query)).items():
        found[group.tenant] += amounts[Amount.REQUESTS]
        assert num_prompt_tokens(amounts) == 100 * amounts[Amount.REQUESTS]
    return dict(found)


async def test_each_router_sees_what_all_have_counted_and_its_own_at_once(routers: Open) -> None:
    first, second = routers(), routers()
    ask(first, num=3)
    assert await requests(first) == {"acme": 3}
    assert await requests(second) == {}
    await first.write()
    ask(first)
    ask(second, num=5)
    ask(second, "other")
    assert await requests(first) == {"acme": 4}
    assert await requests(second) == {"acme": 8, "other": 1}
    await second.write()
    assert await requests(first) == {"acme": 9, "other": 1}
    assert await requests(second) == {"acme": 8, "other": 1}
    await first.write()
    assert await requests(second) == await requests(first) == {"acme": 9, "other": 1}


async def test_what_is_asked_for_is_a_part_and_its_groups(routers: Open) -> None:
    store = routers()
    for hour in (0, 1, 30):
        for key in ("k1", "k2"):
            ask(store, at=NOON + 3600 * hour, key=key)
            ask(store, "other", at=NOON + 3600 * hour)
    await store.write()
    one = await store.read(UsageQuery(HOUR, HOUR + 2, "acme", by_key=True, by_model=True))
    starts = (int(NOON), int(NOON) + 3600)
    assert list(one) == [Group(start, "acme", key, "m") for start in starts for key in ("k1", "k2")]
    (key,) = (await store.read(UsageQuery(HOUR, HOUR + 1, "acme", key_id="k2"))).values()
    assert key[Amount.REQUESTS] == 1
    by_day = await store.read(UsageQuery(HOUR, HOUR + 40, "acme", bucket="day"))
    assert [group.start % 86_400 for group in by_day] == [0, 0]
    assert sum(amounts[Amount.REQUESTS] for amounts in by_day.values()) == 6


async def test_clocks_that_jump_lose_nothing(routers: Open) -> None:
    store = routers()
    for hour in (0, 50, 0, -50, 50, -50, 0):
        ask(store, at=NOON + 3600 * hour)
        await store.write()
        await store.write()
    assert store.ledger.num_entries == 1, "hours that are over are written and let go"
    assert await requests(store) == {"acme": 7}
    assert await requests(routers()) == {"acme": 7}


async def test_a_redis_that_dies_in_the_middle_gets_all_of_it_later(own_redis: RedisServer) -> None:
    async with opened(own_redis.url) as open_store:
        store = open_store()
        ask(store, num=3)
        await store.write()
        own_redis.kill()
        ask(store, num=4)
        await store.write()
        with pytest.raises(UsageUnavailable):
            await store.read(EVERYTHING)
        assert store.num_failed == 1
        own_redis.start()  # empty
        await store.write()
        assert store.num_emptied == 1
        assert await requests(store) == {"acme": 7}
        await store.write()
        assert await requests(open_store()) == {"acme": 7}, "the hour that was still held is whole again"


async def test_of_an_emptied_redis_earlier_hours_are_gone_and_it_is_said(
    routers: Open, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = routers()
    ask(store, at=NOON - 7200)
    ask(store)
    await store.write()
    async with redis.asyncio.Redis.from_url(redis_url, protocol=2) as client:
        await client.flushall()
    ask(store, "other")
    await store.write()
    await store.write()
    assert await requests(routers()) == {"acme": 1, "other": 1}
    assert "lost" in caplog.text


async def test_a_write_whose_answer_is_lost_counts_once(own_redis: RedisServer) -> None:
    async with opened(own_redis.url) as open_store:
        store = open_store()
        ask(store)
        await store.write()
        for _ in range(5):
            ask(store)
            with own_redis.silent(store_module):  # it will get to what it has been sent when it goes on
                await store.write()
            ask(store)
            await store.write()
        assert store.num_failed == 5
        assert await requests(store) == await requests(open_store()) == {"acme": 11}


async def test_an_old_write_that_comes_late_changes_nothing(redis_url: str) -> None:
    """Its connection has been given up, and Redis reads what it has sent after a newer write."""
    ledger, usage = Ledger(), RedisUsage(redis_url, "w", 3600)
    ledger.observe(served(PromptUsage(9, 0, 0), at=NOON))
    (old,) = ledger.take_unwritten(1)
    await usage.write([old])
    ledger.observe(served(PromptUsage(9, 0, 0), at=NOON))
    (new,) = ledger.take_unwritten(1)
    late = usage._redis.pipeline(transaction=True)
    await late.watch(PREFIX + "writer:w")
    late.multi()  # type: ignore[no-untyped-call]
    late.hset(amounts_key(HOUR, TenantTags(None).of("acme")), "w:1:0123456789ab:m", b"\x91\x01")
    await usage.write([new])
    with pytest.raises(redis.exceptions.WatchError):
        await late.execute()
    await late.reset()  # type: ignore[no-untyped-call]
    (stored,) = await usage.hashes([(HOUR, "acme")])
    (entry,) = usage.entries(stored)
    assert entry.amounts[Amount.REQUESTS] == 2
    await usage.close()


async def test_keys_of_others_do_no_harm(routers: Open, redis_url: str) -> None:
    store = routers()
    async with redis.asyncio.Redis.from_url(redis_url, protocol=2) as client:
        await client.set(amounts_key(HOUR, TenantTags(None).of("acme")), "no hash")
        ask(store)
        ask(store, "other")
        await store.write()
        assert store.ledger.num_unwritten == 1
        await client.delete(amounts_key(HOUR, TenantTags(None).of("acme")))
        await client.hset(amounts_key(HOUR, TenantTags(None).of("acme")), "x", "y")
    await store.write()
    assert await requests(store) == await requests(routers()) == {"acme": 1, "other": 1}


async def test_a_question_has_an_end(routers: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = routers()
    for tenant in range(6):
        ask(store, f"t{tenant}")
    await store.write()
    monkeypatch.setattr(store_module, "MAX_HASHES", 5)
    with pytest.raises(TooManyGroups):
        await store.read(EVERYTHING)


async def test_what_is_left_is_written_at_the_end_and_redis_forgets_it_by_itself(redis_url: str) -> None:
    async with opened(redis_url) as open_store:
        ask(open_store(), num=2)
    async with opened(redis_url) as open_store:
        assert await requests(open_store()) == {"acme": 2}
    async with redis.asyncio.Redis.from_url(redis_url, protocol=2) as client:
        keys = await client.keys("*")
        assert len(keys) == 3
        assert all([0 < await client.ttl(key) <= 745 * 3600 for key in keys])


async def test_sums_hold_while_requests_end_and_redis_comes_and_goes(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "WRITE_SECONDS", 0.005)
    async with opened(own_redis.url) as open_store:
        stores = [open_store(), open_store()]
        async with asyncio.TaskGroup() as tasks:
            writing = [tasks.create_task(store.run()) for store in stores]
            asked = 0
            with contextlib.ExitStack() as silence:
                for turn in range(200):
                    ask(stores[turn % 2], f"t{turn % 7}", at=NOON + 3600 * (turn % 3 - 1))
                    asked += 1
                    if turn % 40 == 20:
                        silence.enter_context(own_redis.silent(store_module, 0.1))
                    if turn % 40 == 30:
                        silence.close()
                    await asyncio.sleep(0.005)
            await asyncio.sleep(0.3)
            for task in writing:
                task.cancel()
        for store in stores:
            await store.write()
        assert sum((await requests(stores[0])).values()) == asked
        assert sum((await requests(open_store())).values()) == asked


def test_amounts_are_what_redis_has_them_by() -> None:
    """Renumbered, what lies in Redis would be read as something else."""
    names = "REQUESTS ERRORS ABORTED UNCACHED READ_DEVICE READ_HOST READ_DISK CROSS_USER WRITTEN WRITTEN_5M"
    names += " WRITTEN_30M WRITTEN_1H WRITTEN_12H WRITTEN_24H OUTPUT REASONING UNREPORTED"
    assert {amount.name: amount.value for amount in Amount} == {
        name: number for number, name in enumerate(names.split())
    }
