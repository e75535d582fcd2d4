"""What stands for a tenant in Redis: no key has its name, and while a secret is changed nothing is lost."""

import time

import pytest
import redis

from replicas.protocol.cluster_secret import ClusterSecret
from replicas.protocol.frames import PromptUsage
from router.caller import Caller, Tenant
from router.errors import CachesFull
from router.features.history.redis_history import HistoryBounds, RedisHistory
from router.features.named_caches.bounds import CacheBounds
from router.features.named_caches.named_caches import NamedCaches
from router.features.responses.record import ResponseBounds
from router.features.responses.redis_responses import RedisResponses
from router.features.usage.amounts import Amount
from router.features.usage.store import UsageStore
from router.features.usage.sums import UsageQuery
from router.shared.tenant_tags import TenantTags
from tests.redis_server import RedisServer
from tests.router.features.history.test_redis_history import telling
from tests.router.features.named_caches.test_named_caches import CONTENT, record
from tests.router.features.responses.test_store import response
from tests.router.features.usage.test_ledger import served

OLD, NEW = ClusterSecret(b"of the whole cluster"), ClusterSecret(b"of the whole cluster, from now on")
CHANGED = ClusterSecret(NEW.current, (OLD.current,))
NAME = "umbrella-corporation"
USAGE = PromptUsage(9, 0, 0)


def test_a_tag_is_one_tenants_and_one_secrets() -> None:
    tags = {TenantTags(secret).of(name) for secret in (OLD, NEW, None) for name in (NAME, "us", "")}
    assert len(tags) == 9 and {len(tag) for tag in tags} == {32}
    assert TenantTags(CHANGED).all_of(NAME) == (TenantTags(NEW).of(NAME), TenantTags(OLD).of(NAME))


async def make_one_of_each(url: str, secret: ClusterSecret | None) -> None:
    """All that routers keep in Redis for the tenant, and that its name could stand beside."""
    usage = UsageStore(url, 744, secret=secret)
    usage.observe(
        served(USAGE, at=time.time(), caller=Caller(tenant=Tenant(name=NAME), key_id="0123456789ab"))
    )
    await usage.close()
    if secret is None:
        return
    caches = NamedCaches(url, secret)
    await caches.create(record(1, tenant=NAME, created=time.time(), expires=time.time() + 60), CONTENT)
    await caches.close()
    responses = RedisResponses(url, secret, ResponseBounds())
    await responses.add(response(1, tenant=NAME, at=time.time()), time.time())
    await responses.close()
    history = RedisHistory(url, secret, HistoryBounds())
    await history.write([telling(1, NAME)])
    await history.close()


@pytest.mark.parametrize("secret", [OLD, None])
async def test_no_name_of_a_tenant_stands_in_a_key(
    own_redis: RedisServer, secret: ClusterSecret | None
) -> None:
    await make_one_of_each(own_redis.url, secret)
    with redis.Redis.from_url(own_redis.url, protocol=2) as client:
        keys = [bytes(key) for key in client.keys("*")]
    assert len(keys) == (3 if secret is None else 13)
    assert [key for key in keys if NAME.encode() in key] == []


async def test_what_was_written_under_the_secret_before_is_read_while_that_is_accepted(
    own_redis: RedisServer,
) -> None:
    url, now = own_redis.url, time.time()
    await make_one_of_each(url, OLD)
    hour = int(now // 3600)
    for secret, is_found in ((CHANGED, True), (NEW, False)):
        usage = UsageStore(url, 744, secret=secret)
        sums = await usage.read(UsageQuery(hour - 1, hour + 1, NAME, bucket="day"))
        assert sum(int(amounts[Amount.REQUESTS]) for amounts in sums.values()) == is_found
        responses = RedisResponses(url, secret, ResponseBounds())
        assert (await responses.get(NAME, response(1).response_id) is not None) == is_found
        assert await responses.delete(NAME, response(1).response_id) == is_found
        await usage.close()
        await responses.close()


async def test_a_tenant_has_no_more_caches_while_the_secret_is_changed(own_redis: RedisServer) -> None:
    now = time.time()
    bounds = CacheBounds(num_caches=8)
    made = [record(number, created=now, expires=now + 60) for number in range(4)]
    before, caches = (NamedCaches(own_redis.url, secret, bounds) for secret in (OLD, CHANGED))
    await before.create(made[0], CONTENT, 0.25)
    await before.close()
    await caches.create(made[1], CONTENT, 0.25)
    await caches.extend(made[0].cache_id, "us", ttl=90)
    with pytest.raises(CachesFull):
        await caches.create(made[2], CONTENT, 0.25)
    await caches.delete(made[0].cache_id, "us")
    await caches.create(made[2], CONTENT, 0.25)
    with pytest.raises(CachesFull):
        await caches.create(made[3], CONTENT, 0.25)
    await caches.close()
