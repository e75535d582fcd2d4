"""Stored responses in a real Redis, as several routers know them, and in one router's memory."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import redis.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.protocol.cluster_secret import ClusterSecret
from router.errors import ResponseGone, ResponsesUnavailable
from router.features.responses import store as response_store
from router.features.responses.memory import ENTRY_BYTES, ResponseMemory
from router.features.responses.record import ResponseBounds, StoredResponse
from router.features.responses.redis_responses import PREFIX, RedisResponses, index_key, record_key
from router.features.responses.store import ResponseStore
from router.shared.tenant_tags import TenantTags
from tests.examples import examples
from tests.redis_server import RedisServer
from tests.router.features.conftest import NOON, Times

SECRET = ClusterSecret(b"of the whole cluster")
TAG = TenantTags(SECRET).of("us")
OTHER_SECRET = ClusterSecret(b"of another cluster..")


def response(number: int, *, tenant: str = "us", size: int = 100, at: float = NOON) -> StoredResponse:
    items = b'["' + b"x" * size + b'"]'
    return StoredResponse(f"resp_{number:024x}", tenant, at, items, '{"output":["Größe"]}'.encode())


Open = Callable[..., ResponseStore]


@pytest.fixture
async def routers(times: Times, redis_url: str) -> AsyncIterator[Open]:
    opened: list[ResponseStore] = []

    def router(
        bounds: ResponseBounds | None = None, *, url: str | None = redis_url, secret: ClusterSecret = SECRET
    ) -> ResponseStore:
        bounds = bounds or ResponseBounds()
        kept = None if url is None else RedisResponses(url, secret, bounds)
        opened.append(ResponseStore(kept, bounds, wall_clock=times.wall, clock=times.now))
        return opened[-1]

    yield router
    for each in opened:
        await each.close()


async def written(store: ResponseStore) -> None:
    async with asyncio.timeout(20):
        while store.num_remembered:  # noqa: ASYNC110 (nobody else can tell)
            await asyncio.sleep(0.005)


async def test_what_one_router_stores_another_finds_and_deletes(routers: Open) -> None:
    first, second = routers(), routers()
    made = response(1)
    first.keep(made)
    assert await first.find(made.response_id, "us") == made
    await written(first)
    assert await second.find(made.response_id, "us") == made
    assert await first.find(made.response_id, "us") == made
    assert first.num_found == {"memory": 1, "redis": 1}
    await second.delete(made.response_id, "us")
    for store in (first, second):
        with pytest.raises(ResponseGone):
            await store.find(made.response_id, "us")
        with pytest.raises(ResponseGone):
            await store.delete(made.response_id, "us")


@pytest.mark.parametrize("in_redis", [False, True])
async def test_a_response_of_another_tenant_is_as_good_as_none(routers: Open, in_redis: bool) -> None:
    store = routers() if in_redis else routers(url=None)
    made = response(1)
    store.keep(made)
    if in_redis:
        await written(store)
    for act in (store.find, store.delete):
        with pytest.raises(ResponseGone):
            await act(made.response_id, "them")
    assert await store.find(made.response_id, "us") == made


async def test_nothing_of_it_can_be_read_or_made_without_the_secret(routers: Open, redis_url: str) -> None:
    store, stranger = routers(), routers(secret=OTHER_SECRET)
    made, other = response(1), response(2)
    store.keep(made)
    store.keep(other)
    await written(store)
    with pytest.raises(ResponseGone):
        await stranger.find(made.response_id, "us")
    async with redis.asyncio.Redis.from_url(redis_url, protocol=2) as client:
        sealed = await client.get(record_key(TAG, made.response_id))
        assert made.items not in sealed
        await client.set(record_key(TAG, other.response_id), sealed)
    with pytest.raises(ResponseGone):
        await store.find(other.response_id, "us")
    assert store.num_not_ours > 0


async def test_the_oldest_go_when_there_are_too_many_or_too_large_ones(
    routers: Open, times: Times, redis_url: str
) -> None:
    bounds = ResponseBounds(num_responses=8, num_bytes=16_000)
    store = routers(bounds)
    for number in range(20):
        times.passed += 1
        store.keep(response(number, at=times.wall()))
    await written(store)
    async with redis.asyncio.Redis.from_url(redis_url, protocol=2) as client:
        assert await client.zcard(index_key(TAG)) == 8
        assert len([key async for key in client.scan_iter(PREFIX + "*:record:*")]) == 8
        for number in range(20, 24):
            times.passed += 1
            store.keep(response(number, size=5000, at=times.wall()))
        await written(store)
        assert await client.zcard(index_key(TAG)) == 3
    assert await store.find(response(23).response_id, "us")
    with pytest.raises(ResponseGone):
        await store.find(response(20).response_id, "us")


@pytest.mark.parametrize("in_redis", [False, True])
async def test_what_is_too_old_is_gone(routers: Open, times: Times, redis_url: str, in_redis: bool) -> None:
    store = routers(ResponseBounds(seconds=60.0), url=redis_url if in_redis else None)
    made = response(1)
    store.keep(made)
    if in_redis:
        await written(store)
        async with redis.asyncio.Redis.from_url(redis_url, protocol=2) as client:
            assert 0 < await client.pttl(record_key(TAG, made.response_id)) <= 60_000
            await client.pexpire(record_key(TAG, made.response_id), 1)
        await asyncio.sleep(0.01)
    else:
        assert await store.find(made.response_id, "us")
        times.passed = 60.0
    with pytest.raises(ResponseGone):
        await store.find(made.response_id, "us")


@pytest.mark.parametrize("is_silent", [False, True])
async def test_while_redis_is_away_its_own_are_found_and_others_are_unavailable(
    own_redis: RedisServer, times: Times, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    monkeypatch.setattr(response_store, "REST_SECONDS", 0.1)
    bounds = ResponseBounds()
    redis_side = RedisResponses(own_redis.url, SECRET, bounds)
    store = ResponseStore(redis_side, bounds, wall_clock=times.wall)
    store.keep(response(1))
    await written(store)
    with own_redis.silent(response_store) if is_silent else own_redis.away():
        store.keep(response(2))
        assert await store.find(response(2).response_id, "us") == response(2)
        with pytest.raises(ResponsesUnavailable):
            await store.find(response(1).response_id, "us")
        while not store.num_failed:  # noqa: ASYNC110 (nobody else can tell)
            await asyncio.sleep(0.01)
    await written(store)
    assert await store.find(response(2).response_id, "us") == response(2)
    assert store.num_found["redis"] == 1
    await store.close()


async def test_what_redis_does_not_take_stays_in_memory_and_harms_nobody(
    own_redis: RedisServer, times: Times
) -> None:
    bounds = ResponseBounds()
    store = ResponseStore(RedisResponses(own_redis.url, SECRET, bounds), bounds, wall_clock=times.wall)
    store.keep(response(1))
    await written(store)
    async with redis.asyncio.Redis.from_url(own_redis.url, protocol=2) as client:
        await client.config_set("maxmemory", 1)
    for number in (2, 3):
        store.keep(response(number))
    async with asyncio.timeout(5):
        while store.num_failed < 2:  # noqa: ASYNC110 (nobody else can tell)
            await asyncio.sleep(0.01)
    for number in (1, 2, 3):
        assert await store.find(response(number).response_id, "us") == response(number)
    await store.close()


async def test_what_has_just_been_kept_is_written_before_the_end(routers: Open) -> None:
    first, second = routers(), routers()
    for number in range(20):
        first.keep(response(number))
    await first.close()
    for number in range(20):
        assert await second.find(response(number).response_id, "us") == response(number)


async def test_another_router_waits_a_moment_for_what_is_being_written(routers: Open) -> None:
    first, second = routers(), routers()
    made = response(1)

    async def soon() -> None:
        await asyncio.sleep(0.02)
        first.keep(made)

    _, found = await asyncio.gather(soon(), second.find(made.response_id, "us"))
    assert found == made


async def test_ids_that_are_none_are_not_looked_for(routers: Open) -> None:
    store = routers(url="redis://127.0.0.1:1/0")
    for text in ("", "resp_", "resp_1", "x" * 10_000, "resp_" + "g" * 24, "resp_" + "0" * 24 + "\n"):
        with pytest.raises(ResponseGone):
            await store.find(text, "us")


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("khd"), st.integers(0, 9), st.integers(0, 3000)), max_size=40))
def test_memory_is_within_its_bounds_and_gives_all_back(acts: list[tuple[str, int, int]]) -> None:
    bounds = ResponseBounds(num_responses=5, memory_bytes=4 * ENTRY_BYTES)
    memory = ResponseMemory(bounds)
    held = []
    for number, (act, which, size) in enumerate(acts):
        if act == "k":
            memory.put(response(number, size=size))
        elif act == "d":
            memory.drop(("us", response(which).response_id))
        else:
            room = memory.hold(size)
            room.__enter__()
            held.append(room)
        assert memory.num_bytes <= bounds.memory_bytes
        assert len(memory) <= bounds.num_responses
    for room in held:
        room.__exit__(None, None, None)
    for number in range(len(acts)):
        memory.drop(("us", response(number).response_id))
    assert (memory.num_bytes, len(memory)) == (0, 0)
