"""Named caches in a real Redis, as several routers know them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import redis.asyncio

from replicas.protocol.cluster_secret import ClusterSecret
from replicas.protocol.prefix_leases import MAX_LEASE_SECONDS
from router.errors import CacheGone, CachesFull, CachesUnavailable
from router.features.named_caches import named_caches
from router.features.named_caches.bounds import GONE_SECONDS, MAX_TTL_SECONDS, CacheBounds
from router.features.named_caches.named_caches import RECHECK_SECONDS, REST_SECONDS, NamedCaches
from router.features.named_caches.record import CacheContent, CacheKind, CacheLease, CacheRecord
from router.features.named_caches.store import INDEX_KEY, PREFIX, content_key, record_key, tenant_index_key
from router.shared.tenant_tags import TenantTags
from tests.redis_server import RedisServer
from tests.router.features.conftest import NOON, Times

SECRET = ClusterSecret(b"of the whole cluster")
TAG = TenantTags(SECRET).of("us")
CONTENT = CacheContent('[{"role":"system","content":"Grüße ☂"}]'.encode(), b"[1]")


def record(number: int = 1, times: Times | None = None, **fields: object) -> CacheRecord:
    now = NOON if times is None else times.wall()
    made = CacheRecord(
        cache_id=f"cache_{number:032x}",
        tenant="us",
        model="tiny",
        kind=CacheKind.CHAT,
        created=now,
        expires=now + 60,
        ttl=60,
        num_bytes=CONTENT.num_bytes,
        num_tokens=17,
    )
    return msgspec.structs.replace(made, **fields)


def test_a_clock_that_is_behind_has_no_more_time_left_than_the_cache_was_given() -> None:
    """Or the lease that is asked for with the cache would be longer than any that is granted."""
    made = record(ttl=MAX_TTL_SECONDS, expires=NOON + MAX_TTL_SECONDS)
    for behind in (0.5, 86_400.0):
        assert made.seconds_left(NOON - behind) == MAX_TTL_SECONDS <= MAX_LEASE_SECONDS
    assert made.seconds_left(NOON + 1.5) == MAX_TTL_SECONDS - 1.5


Open = Callable[..., NamedCaches]


@pytest.fixture
async def routers(times: Times, redis_url: str) -> AsyncIterator[Open]:
    """Makes what one more router has."""
    opened: list[NamedCaches] = []

    def router(bounds: CacheBounds | None = None, *, secret: ClusterSecret = SECRET) -> NamedCaches:
        opened.append(NamedCaches(redis_url, secret, bounds, wall_clock=times.wall, clock=times.now))
        return opened[-1]

    yield router
    for each in opened:
        await each.close()


@asynccontextmanager
async def raw(url: str) -> AsyncIterator["redis.asyncio.Redis"]:
    client = redis.asyncio.Redis.from_url(url, protocol=2)
    try:
        yield client
    finally:
        await client.aclose()


async def test_what_one_router_creates_another_uses_whole(routers: Open) -> None:
    first, second = routers(), routers()
    made = record(name="Größe", salt="s", lease=CacheLease(60, 16, None), deleted=None)
    await first.create(made, CONTENT)
    assert await second.use(made.cache_id, "us") == (made, CONTENT)
    assert await second.look(made.cache_id, "us") == made
    noted = await second.note_lease(made.cache_id, "us", CacheLease(0, 0, "budget"))
    assert (await first.look(made.cache_id, "us")).lease == noted.lease == CacheLease(0, 0, "budget")
    assert second.num_uses == {"memory": 0, "redis": 1}
    await second.use(made.cache_id, "us")
    assert second.num_uses == {"memory": 1, "redis": 1}
    assert first.num_created == 1


async def test_a_cache_of_another_tenant_is_as_good_as_none(routers: Open) -> None:
    caches, other = routers(), routers()
    made = record()
    await caches.create(made, CONTENT)
    for router in (caches, other):
        for ask in (
            router.use(made.cache_id, "them"),
            router.look(made.cache_id, "them"),
            router.extend(made.cache_id, "them", ttl=5),
            router.delete(made.cache_id, "them"),
            router.page("them", 10, made.cache_id),
        ):
            with pytest.raises(CacheGone) as gone:
                await ask
            assert gone.value.code == "cache_not_found"
        assert await router.page("them", 10, None) == ([], False)
    assert (await caches.look(made.cache_id, "us")).expires == made.expires


async def test_one_that_expired_says_when_for_a_day(routers: Open, times: Times, redis_url: str) -> None:
    caches, other = routers(), routers()
    made = record()
    await caches.create(made, CONTENT)
    times.passed = 60.0
    for router in (caches, other):
        with pytest.raises(CacheGone, match=r"expired at 2027-01-15T08:01:00Z, 60 s after") as gone:
            await router.use(made.cache_id, "us")
        assert gone.value.code == "cache_expired"
        with pytest.raises(CacheGone, match="expired"):
            await router.extend(made.cache_id, "us", ttl=60)
    async with raw(redis_url) as client:
        assert GONE_SECONDS < await client.ttl(record_key(made.cache_id)) <= GONE_SECONDS + 60
        assert 0 < await client.ttl(content_key(made.cache_id)) <= 60


async def test_one_that_was_deleted_says_so_everywhere_within_seconds(
    routers: Open, times: Times, redis_url: str
) -> None:
    caches, other = routers(), routers()
    made = record()
    await caches.create(made, CONTENT)
    await other.use(made.cache_id, "us")
    times.passed = 1.0
    await caches.delete(made.cache_id, "us")
    times.passed += RECHECK_SECONDS
    for router in (caches, other):
        for ask in (
            router.use(made.cache_id, "us"),
            router.delete(made.cache_id, "us"),
            router.extend(made.cache_id, "us", ttl=9),
        ):
            with pytest.raises(CacheGone, match="deleted at 2027-01-15T08:00:01Z"):
                await ask
    async with raw(redis_url) as client:
        assert not await client.exists(content_key(made.cache_id)) and not await client.zcard(INDEX_KEY)
        assert 0 < await client.ttl(record_key(made.cache_id)) <= GONE_SECONDS


async def test_one_that_is_extended_lives_on_from_then(routers: Open, times: Times) -> None:
    caches, other = routers(), routers()
    made = record()
    await caches.create(made, CONTENT)
    times.passed = 50.0
    extended = await other.extend(made.cache_id, "us", ttl=3600, name="again")
    assert (extended.ttl, extended.expires, extended.name) == (3600, NOON + 3650, "again")
    times.passed = 3649.0
    assert await caches.use(made.cache_id, "us") == (extended, CONTENT)
    renamed = await other.extend(made.cache_id, "us", name="more")
    assert (renamed.name, renamed.expires) == ("more", extended.expires)


async def test_of_deletion_and_extension_at_once_deletion_stays(routers: Open) -> None:
    caches, other = routers(), routers()
    for number in range(20):
        made = record(number)
        await caches.create(made, CONTENT)
        work = [other.extend(made.cache_id, "us", ttl=100 + each) for each in range(5)]
        done = await asyncio.gather(caches.delete(made.cache_id, "us"), *work, return_exceptions=True)
        assert all(isinstance(each, CacheRecord | CacheGone) for each in done)
        with pytest.raises(CacheGone, match="deleted"):
            await caches.look(made.cache_id, "us")
    assert await caches.page("us", 10, None) == ([], False)


@pytest.mark.parametrize(
    "bounds", [CacheBounds(num_caches=3), CacheBounds(num_bytes=3 * CONTENT.num_bytes)], ids=str
)
async def test_there_are_never_more_than_may_be(routers: Open, times: Times, bounds: CacheBounds) -> None:
    some = [routers(bounds), routers(bounds)]
    work = [some[number % 2].create(record(number), CONTENT) for number in range(8)]
    done = await asyncio.gather(*work, return_exceptions=True)
    assert done.count(None) == 3
    assert all(each is None or isinstance(each, CachesFull) for each in done)
    assert sum(each.num_refused["full"] for each in some) == 5
    times.passed = 61.0
    await some[0].create(record(9, times), CONTENT)


@pytest.mark.parametrize(
    "bounds",
    [
        CacheBounds(num_caches=8),
        CacheBounds(num_bytes=8 * CONTENT.num_bytes, bytes_per_cache=CONTENT.num_bytes),
    ],
    ids=str,
)
async def test_one_tenant_cannot_take_all_places(routers: Open, times: Times, bounds: CacheBounds) -> None:
    some = [routers(bounds), routers(bounds)]
    work = [some[number % 2].create(record(number), CONTENT, 0.25) for number in range(6)]
    done = await asyncio.gather(*work, return_exceptions=True)
    assert done.count(None) == 2
    refused = [each for each in done if each is not None]
    assert all(isinstance(each, CachesFull) and "this tenant" in str(each) for each in refused)
    await some[0].create(record(7, tenant="them"), CONTENT, 0.25)
    kept = next(number for number, each in enumerate(done) if each is None)
    await some[1].delete(record(kept).cache_id, "us")
    await some[0].create(record(8), CONTENT, 0.25)
    times.passed = 61.0
    for number in (9, 10):
        await some[0].create(record(number, times), CONTENT, 0.25)


async def test_what_is_kept_of_a_tenants_caches_goes_by_itself(routers: Open, redis_url: str) -> None:
    await routers().create(record(), CONTENT)
    async with raw(redis_url) as redis:
        assert 0 < await redis.ttl(tenant_index_key(TAG)) <= MAX_TTL_SECONDS


async def test_a_page_follows_the_one_before_it_whatever_is_deleted_meanwhile(
    routers: Open, times: Times
) -> None:
    caches = routers()
    for number in range(7):
        times.passed = float(number)
        await caches.create(record(number, times), CONTENT)
    await caches.create(record(99, times, tenant="them"), CONTENT)
    page = await caches.page("us", 3, None)
    assert [each.cache_id[-1] for each in page.records] == ["6", "5", "4"] and page.has_more
    await caches.delete(page.records[-1].cache_id, "us")
    page = await caches.page("us", 3, page.records[-1].cache_id)
    assert [each.cache_id[-1] for each in page.records] == ["3", "2", "1"] and page.has_more
    page = await caches.page("us", 3, page.records[-1].cache_id)
    assert [each.cache_id[-1] for each in page.records] == ["0"] and not page.has_more


@pytest.mark.parametrize(
    "name", ["", "cache_", "cache_" + "g" * 32, "index", "☂" * 500, "../etc", "cache_\n"]
)
async def test_what_is_no_id_is_not_found(routers: Open, name: str) -> None:
    caches = routers()
    for ask in (caches.use(name, "us"), caches.look(name, "us"), caches.delete(name, "us")):
        with pytest.raises(CacheGone) as gone:
            await ask
        assert gone.value.code == "cache_not_found" and len(gone.value.message) < 100


@pytest.mark.parametrize("lie", ["flipped", "other_secret", "moved", "short", "empty"])
@pytest.mark.parametrize("where", ["record", "content"])
async def test_what_is_not_ours_is_not_believed_and_counted(
    routers: Open, times: Times, redis_url: str, lie: str, where: str
) -> None:
    caches, stranger = routers(), routers(secret=ClusterSecret(b"of another cluster"))
    made, other = record(1), record(2)
    await caches.create(other, CONTENT)
    await (stranger if lie == "other_secret" else caches).create(made, CONTENT)
    key_of = record_key if where == "record" else content_key
    async with raw(redis_url) as client:
        sealed = await client.get(key_of(made.cache_id))
        assert isinstance(sealed, bytes)
        if lie == "other_secret" and where == "content":
            await client.set(record_key(made.cache_id), b"")
        lies = {
            "flipped": sealed[:-1] + bytes([sealed[-1] ^ 1]),
            "other_secret": sealed,
            "moved": await client.get(key_of(other.cache_id)) or b"",
            "short": sealed[:9],
            "empty": b"",
        }
        await client.set(key_of(made.cache_id), lies[lie])
        await client.zadd(INDEX_KEY, {b"\xff:x:y": 9e15, b"1:cache_1:2": 9e15})
    reader = routers()
    with pytest.raises(CacheGone) as gone:
        await reader.use(made.cache_id, "us")
    is_lost = where == "content" and lie != "other_secret"
    assert gone.value.code == ("cache_lost" if is_lost else "cache_not_found")
    assert reader.num_not_ours == 1
    listed = [each.cache_id for each in (await reader.page("us", 10, None)).records]
    assert listed == ([other.cache_id] if not is_lost else [other.cache_id, made.cache_id])


async def test_nothing_that_a_client_sent_can_be_read_in_redis(routers: Open, redis_url: str) -> None:
    await routers().create(record(name="a name", salt="a salt"), CONTENT)
    async with raw(redis_url) as client:
        keys = await client.keys("*")
        assert keys and all(bytes(key).startswith(PREFIX.encode()) for key in keys)
        for key in keys:
            value = await client.dump(key)
            assert value is not None
            assert not any(word in value for word in (b"role", b"system", b"a name", b"a salt", b"tiny"))


@pytest.mark.parametrize("is_silent", [False, True])
async def test_without_redis_what_is_known_is_used_and_nothing_is_made(
    own_redis: RedisServer, times: Times, is_silent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    caches = NamedCaches(own_redis.url, SECRET, wall_clock=times.wall, clock=times.now)
    made = record()
    await caches.create(made, CONTENT)
    with own_redis.silent(named_caches) if is_silent else own_redis.away():
        times.passed = RECHECK_SECONDS
        for _ in range(20):
            assert await caches.use(made.cache_id, "us") == (made, CONTENT)
        with pytest.raises(CachesUnavailable):
            await caches.use(record(2).cache_id, "us")
        with pytest.raises(CachesUnavailable):
            await caches.create(record(2), CONTENT)
        times.passed = 60.0
        with pytest.raises(CacheGone, match="expired"):
            await caches.use(made.cache_id, "us")
    times.passed += REST_SECONDS
    await caches.create(record(3, times), CONTENT)
    said = [each.getMessage() for each in caplog.records if each.name == NamedCaches.__module__]
    assert len(said) == 2 and "cannot be reached" in said[0] and "again" in said[1]
    await caches.close()


async def test_many_first_uses_at_once_read_the_content_once(routers: Open, redis_url: str) -> None:
    made = record()
    await routers().create(made, CONTENT)
    other = routers()
    async with raw(redis_url) as client:
        await client.config_resetstat()
        await asyncio.gather(*(other.use(made.cache_id, "us") for _ in range(50)))
        assert (await client.info("commandstats"))["cmdstat_get"]["calls"] == 2


async def test_a_router_remembers_what_it_has_used_lately_within_its_bytes(routers: Open) -> None:
    size = 2048 + CONTENT.num_bytes
    caches = routers(CacheBounds(memory_bytes=2 * size))
    for number in range(5):
        await caches.create(record(number), CONTENT)
    assert (caches.num_remembered, caches.num_bytes) == (2, 2 * size)
    await caches.use(record(0).cache_id, "us")
    assert caches.num_uses == {"memory": 0, "redis": 1}
    await caches.use(record(4).cache_id, "us")
    assert caches.num_uses == {"memory": 1, "redis": 1}
