"""Two replicas with engines that compute, and a prompt whose KV the other has: over real gRPC."""

import asyncio
import contextlib
import random
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from replicas.host import ReplicaHost
from replicas.kvstore import plan
from replicas.kvstore.pulling import pull as pull_module
from replicas.protocol.call_tokens import METADATA_KEY, Audience, Caller, Role
from replicas.protocol.cluster_secret import Purpose, derive
from replicas.protocol.frames import PromptUsage
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.pulls import PullHint
from replicas.protocol.service import path
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState
from tests.certificates import REPLICA_NAME, Authority
from tests.replicas.mirror import connect, read_record
from tests.replicas.process_replica import REPOSITORY
from tests.replicas.router_client import RouterClient, submit
from tests.replicas.whole_replica import MODEL, config

CHUNK_BYTES = 4096 + 128 * 2560
"""Of the toy model, in float32."""

SECRET = "5e" * 32
KEY = derive(bytes.fromhex(SECRET), Purpose.CALLS)
NUM_CHUNKS = 9

TIERS = {
    "engine": "torch",
    "device": "cpu",
    "num_threads": 1,
    "num_blocks": 90,
    "context_length": 1300,
    "host_kv_bytes": 40 * CHUNK_BYTES,
}


def prompt(number: int) -> list[int]:
    """Nine chunks and a bit: long enough that to pull it is sooner than to compute it."""
    rng = random.Random(number)
    return [rng.randrange(3, 500) for _ in range(128 * NUM_CHUNKS + 40)]


PATIENCE = """
from replicas.kvstore import plan
from replicas.kvstore.pulling import pull

plan.MIN_PATIENCE_SECONDS = pull.MIN_SECONDS = 60.0
"""
"""What a process of an engine reads first, so that it computes nothing because the machine is busy."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of engines in this process, and in their own: these have the path of this one."""
    monkeypatch.setattr(plan, "MIN_PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(pull_module, "MIN_SECONDS", 60.0)
    (tmp_path / "sitecustomize.py").write_text(PATIENCE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


@dataclass
class Peer:
    host: ReplicaHost
    client: RouterClient
    num_asked: int = 0

    def hint(self, **other: Any) -> PullHint:
        record = self.host.record()
        hint = PullHint(record.replica_id, record.epoch, record.address, 128 * NUM_CHUNKS)
        return replace(hint, **other)

    async def ask(
        self, number: int, pull: PullHint | None = None, **other: Any
    ) -> tuple[list[int], PromptUsage]:
        self.num_asked += 1
        asked = submit(self.num_asked, prompt(number), max_tokens=6)
        greedy = replace(asked.sampling, temperature=0.0)
        await self.client.send(replace(asked, pull=pull, sampling=greedy, **other))
        ((_, deltas),) = (await self.client.finish((self.num_asked, 0))).items()
        (usage,) = [delta.usage for delta in deltas if delta.usage is not None]
        return [token for delta in deltas for token in delta.token_ids], usage

    async def has_copied(self, num_chunks: int) -> None:
        """What is computed is copied beside the steps, and found by peers once that has been done."""
        while await asyncio.to_thread(self.metric, "replica_tier_chunks", tier="host") < num_chunks:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    def metric(self, name: str, **labels: str) -> float:
        assert self.host._parts is not None
        return self.host._parts.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def peer(
    redis_url: str, number: int, credentials: grpc.ChannelCredentials | None = None, **settings: Any
) -> AsyncIterator[Peer]:
    with_defaults = {"replica_id": f"r{number}", "pull_bytes_per_second": 1e9, **TIERS, **settings}
    host = ReplicaHost(config(redis_url, **with_defaults))
    await host.start()
    try:
        channel = grpc.aio.insecure_channel(host.address)
        if credentials is not None:
            named = [("grpc.ssl_target_name_override", REPLICA_NAME)]
            channel = grpc.aio.secure_channel(host.address, credentials, options=named)
        async with channel:
            metadata = None
            if "secret" in with_defaults:
                caller = Caller(KEY, Role.ROUTER, Audience(ReplicaId(f"r{number}"), host.epoch))
                metadata = [(METADATA_KEY, caller.token(path("Serve"), random.randbytes(16)))]
            yield Peer(host, RouterClient(channel, metadata))
    finally:
        await host.stop()


@asynccontextmanager
async def two(redis_url: str, **settings: Any) -> AsyncIterator[tuple[Peer, Peer]]:
    async with AsyncExitStack() as stack:
        yield (
            await stack.enter_async_context(peer(redis_url, 0, **settings)),
            await stack.enter_async_context(peer(redis_url, 1, **settings)),
        )


@pytest.mark.parametrize(("secret", "has_process"), [(None, True), (SECRET, False)])
async def test_what_a_peer_computed_is_pulled_and_gives_the_same_tokens(
    redis_url: str, secret: str | None, has_process: bool
) -> None:
    settings = {"engine_process": has_process, **({} if secret is None else {"secret": secret})}
    async with two(redis_url, **settings) as (there, here):
        for number in range(3):
            expected, usage = await there.ask(number)
            assert usage.num_cached_tokens == 0
            await there.has_copied((number + 1) * NUM_CHUNKS)
            answer, usage = await here.ask(number, there.hint())
            assert answer == expected
            assert usage.num_pulled_tokens == usage.num_slower_tier_tokens == usage.num_cached_tokens
            assert usage.num_cached_tokens == 128 * NUM_CHUNKS
            assert usage.num_disk_tokens == 0
        assert there.metric("replica_sent_chunks_total") == 3 * NUM_CHUNKS
        assert here.metric("replica_tier_moves_total", way="pull") == 3 * NUM_CHUNKS
        answer, usage = await here.ask(0, there.hint())
        assert usage.num_cached_tokens > 0
        assert usage.num_pulled_tokens == 0, "it was pulled for another request"


async def test_a_replica_that_drains_is_pulled_from_until_its_last_request_has_ended(redis_url: str) -> None:
    async with two(redis_url, drain_seconds=60.0) as (there, here):
        expected, _ = await there.ask(0)
        await there.has_copied(NUM_CHUNKS)
        await there.client.send(submit(70, prompt(1)[:40], max_tokens=600))
        draining = asyncio.create_task(there.host.drain())
        answer, usage = await here.ask(0, there.hint())
        assert answer == expected and usage.num_pulled_tokens == 128 * NUM_CHUNKS
        assert not draining.done()
        await there.client.say_that_it_knows()
        await there.client.finish((70, 0))
        await draining
        answer, usage = await here.ask(0)
        assert answer == expected and usage.num_cached_tokens >= 128 * NUM_CHUNKS, "it stayed"


async def test_a_peer_that_has_only_the_beginning_sends_that(redis_url: str) -> None:
    async with two(redis_url) as (there, here):
        short = replace(submit(50, prompt(1)[:600], max_tokens=1))
        await there.client.send(short)
        await there.client.finish((50, 0))
        await there.has_copied(4)
        answer, usage = await here.ask(1, there.hint())
        assert usage.num_pulled_tokens == 128 * 4
        assert answer == (await there.ask(1))[0]
        assert here.metric("replica_tier_failed_moves_total", way="pull", reason="missing") == 1


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"epoch": Epoch("another")}, "refused"),
        ({"replica_id": ReplicaId("r7")}, "refused"),
        ({"address": "127.0.0.1:1"}, "unreachable"),
    ],
)
async def test_a_hint_that_is_wrong_costs_time_only(
    redis_url: str, wrong: dict[str, Any], reason: str
) -> None:
    async with two(redis_url, secret=SECRET) as (there, here):
        expected, _ = await there.ask(1)
        answer, usage = await here.ask(1, there.hint(**wrong))
        assert answer == expected
        assert (usage.num_cached_tokens, usage.num_pulled_tokens) == (0, 0)
        assert there.metric("replica_sent_chunks_total") == 0
        assert here.metric("replica_tier_failed_moves_total", way="pull", reason=reason) == 1


async def test_replicas_of_another_layout_or_without_the_setting_refuse(redis_url: str) -> None:
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(peer(redis_url, 0))
        half = await stack.enter_async_context(peer(redis_url, 1, dtype="bfloat16", role="prefill"))
        off = await stack.enter_async_context(peer(redis_url, 2, pull_bytes_per_second=None))
        for number, there in enumerate((half, off)):
            await there.ask(number)
            _, usage = await here.ask(number, there.hint())
            assert usage.num_cached_tokens == 0
        assert here.metric("replica_tier_failed_moves_total", way="pull", reason="refused") == 2
        cards = [each.host._parts.card for each in (here, half, off) if each.host._parts]
        layouts = [card.kv_layout for card in cards]
        assert layouts[0] and layouts[1] and layouts[0] != layouts[1] and layouts[2] == ""
        assert [card.splits_by for card in cards] == ["pull", "pull", ""]
        assert [card.role for card in cards] == ["both", "prefill", "both"]


async def test_without_the_setting_nobody_connects(redis_url: str) -> None:
    async with two(redis_url, pull_bytes_per_second=None) as (there, here):
        expected, _ = await there.ask(1)
        answer, usage = await here.ask(1, there.hint())
        assert answer == expected
        assert usage.num_cached_tokens == 0
        assert here.metric("replica_tier_failed_moves_total", way="pull", reason="refused") == 0
        assert here.host._parts is not None
        assert here.host._parts.server.load.pull_seconds_per_token == 0


@pytest.mark.parametrize("role", [Role.ROUTER, Role.CONTROLLER])
async def test_who_is_no_replica_may_not_pull_and_a_replica_nothing_else(redis_url: str, role: Role) -> None:
    async with peer(redis_url, 0, secret=SECRET) as there:
        audience = Audience(ReplicaId("r0"), there.host.epoch)
        async with grpc.aio.insecure_channel(there.host.address) as channel:

            async def code(called_by: Role, method: str, call: Any) -> grpc.StatusCode:
                token = Caller(KEY, called_by, audience).token(path(method), random.randbytes(16))
                answer = call(path(method))(b"", metadata=[(METADATA_KEY, token)], timeout=20)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await (answer.read() if hasattr(answer, "read") else answer)
                return await answer.code()  # type: ignore[no-any-return]

            denied, stream, unary = (
                grpc.StatusCode.PERMISSION_DENIED,
                channel.unary_stream,
                channel.unary_unary,
            )
            assert await code(role, "Pull", stream) is denied
            assert await code(Role.REPLICA, "Pull", stream) is grpc.StatusCode.INVALID_ARGUMENT
            for method, call in (("Describe", unary), ("Drain", unary), ("ListBlocks", stream)):
                assert await code(Role.REPLICA, method, call) is denied


def of_router(ca: Authority) -> grpc.ChannelCredentials:
    router = ca.router()
    files = (ca.certificate, router.key, router.certificate)
    return grpc.ssl_channel_credentials(*(Path(each).read_bytes() for each in files))


@pytest.mark.parametrize("may_call", [True, False])
async def test_with_tls_replicas_show_each_other_their_certificates(
    redis_url: str, ca: Authority, may_call: bool
) -> None:
    own = ca.pulling_replica() if may_call else ca.replica()
    credentials = of_router(ca)
    settings = {"tls_certificate": own.certificate, "tls_key": own.key, "tls_client_ca": ca.certificate}
    async with two(redis_url, credentials=credentials, secret=SECRET, **settings) as (there, here):
        expected, _ = await there.ask(1)
        await there.has_copied(NUM_CHUNKS)
        answer, usage = await here.ask(1, there.hint())
        assert answer == expected
        assert usage.num_pulled_tokens == (128 * NUM_CHUNKS if may_call else 0)


NUM_PROMPTS = 4


@dataclass
class Running:
    process: Process
    record: ReplicaRecord
    client: RouterClient

    @property
    def hint(self) -> PullHint:
        record = self.record
        return PullHint(record.replica_id, record.epoch, record.address, 128 * NUM_CHUNKS)

    async def ask(
        self, *numbers: int, pull: PullHint | None = None
    ) -> list[tuple[list[int], PromptUsage | None]]:
        """All at once."""
        for number in numbers:
            asked = submit(number + 1, prompt(number), max_tokens=4)
            greedy = replace(asked.sampling, temperature=0.0)
            await self.client.send(replace(asked, pull=pull, sampling=greedy))
        found = await self.client.finish(*((number + 1, 0) for number in numbers))
        return [
            (
                [token for delta in deltas for token in delta.token_ids],
                next((delta.usage for delta in deltas if delta.usage is not None), None),
            )
            for _, deltas in sorted(found.items())
        ]


@asynccontextmanager
async def process(redis_url: str, number: int, **settings: Any) -> AsyncIterator[Running]:
    replica_id = ReplicaId(f"r{number}")
    flags = {
        **TIERS,
        "replica_id": replica_id,
        "redis_url": redis_url,
        "pull_bytes_per_second": 1e9,
        "lease_seconds": 2,
        "heartbeat_seconds": 0.2,
        **settings,
    }
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "replicas"),
        *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items()),
        cwd=REPOSITORY,
    )
    redis = connect(redis_url)
    try:
        while not (
            (record := await read_record(redis, MODEL, replica_id)) and record.state is ReplicaState.READY
        ):
            assert started.returncode is None
            await asyncio.sleep(0.02)
        async with grpc.aio.insecure_channel(record.address) as channel:
            yield Running(started, record, RouterClient(channel))
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()
        await redis.delete(f"kvasir:v1:{{{MODEL}}}:replica:{replica_id}")
        await redis.aclose()


@pytest.mark.parametrize(
    "delay", [0.03, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.0, 0.1))]
)
async def test_a_peer_that_is_killed_while_it_sends_costs_time_only(redis_url: str, delay: float) -> None:
    numbers = range(NUM_PROMPTS)
    async with process(redis_url, 0) as there, process(redis_url, 1) as here:
        expected = [answer for number in numbers for answer, _ in await there.ask(number)]
        asking = asyncio.create_task(here.ask(*numbers, pull=there.hint))
        await asyncio.sleep(delay)
        there.process.kill()
        assert [answer for answer, _ in await asking] == expected
        assert here.process.returncode is None


@pytest.mark.slow
async def test_a_replica_that_is_killed_while_it_pulls_harms_nobody(redis_url: str) -> None:
    async with process(redis_url, 0) as there:
        expected = [answer for number in range(NUM_PROMPTS) for answer, _ in await there.ask(number)]
        for delay in (0.02, 0.08):
            async with process(redis_url, 1) as here:
                asking = asyncio.create_task(here.ask(*range(NUM_PROMPTS), pull=there.hint))
                await asyncio.sleep(delay)
                here.process.kill()
                await here.process.wait()
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        async with process(redis_url, 1) as here:
            answers = await here.ask(*range(NUM_PROMPTS), pull=there.hint)
            assert [answer for answer, _ in answers] == expected
            pulled = [usage.num_pulled_tokens for _, usage in answers if usage is not None]
            assert max(pulled) == 128 * NUM_CHUNKS
