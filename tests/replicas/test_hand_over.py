"""A replica that drains, and what it had leased: real hosts, engines that compute, real gRPC and Redis."""

import asyncio
import contextlib
import signal
import time
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from replicas.leaving import hand_over
from replicas.protocol.affinity import AffinityRanking
from replicas.protocol.frames import PromptUsage
from replicas.protocol.prefix_leases import LeaseBreak, PrefixLease
from replicas.protocol.status import ReplicaId
from tests.certificates import Authority
from tests.replicas.router_client import submit
from tests.replicas.test_peer_pull import (
    CHUNK_BYTES,
    NUM_CHUNKS,
    SECRET,
    Peer,
    of_router,
    peer,
    process,
    prompt,
    two,
)

BLOCKS = 128 * NUM_CHUNKS // 16
TOKENS = 128 * NUM_CHUNKS


async def lease(there: Peer, number: int, seconds: int = 600) -> tuple[list[int], PromptUsage]:
    """A prompt that is to be kept there, all of it."""
    return await there.ask(number, leases=(PrefixLease(BLOCKS, seconds),), bucket=b"b" * 16)


async def drained(there: Peer) -> float:
    """The seconds that it took. Its router has heard of it."""
    began = time.monotonic()
    draining = asyncio.create_task(there.host.drain())
    await there.client.say_that_it_knows()
    await draining
    return time.monotonic() - began


def nothing_is_left(here: Peer) -> None:
    assert here.host._parts is not None
    assert here.host._parts.server.store.num_waiting == 0
    assert here.host._parts.server._take_over_service._num_calls == 0
    assert here.host._parts.server.is_idle


@pytest.mark.parametrize(("secret", "has_process"), [(None, True), (SECRET, False)])
async def test_what_was_leased_is_served_from_the_host_memory_of_another(
    redis_url: str, secret: str | None, has_process: bool
) -> None:
    settings = {"engine_process": has_process, **({} if secret is None else {"secret": secret})}
    async with two(redis_url, **settings) as (there, here):
        expected, usage = await lease(there, 1)
        assert usage.leases[0].num_tokens == TOKENS
        await there.ask(2)
        await drained(there)
        assert here.metric("replica_taken_over_chunks_total", outcome="taken") == NUM_CHUNKS
        assert there.metric("replica_handed_over_chunks_total", outcome="taken") == NUM_CHUNKS
        assert there.metric("replica_handed_over_bytes_total") == NUM_CHUNKS * CHUNK_BYTES
        assert here.metric("replica_prefix_leased_tokens") == TOKENS
        answer, usage = await here.ask(1)
        assert answer == expected
        assert usage.num_cached_tokens == usage.num_slower_tier_tokens == usage.num_host_tokens == TOKENS
        _, usage = await here.ask(2)
        assert usage.num_cached_tokens == 0, "nobody had leased it"
        nothing_is_left(here)


async def test_prompts_that_begin_alike_go_together_and_their_beginning_once(redis_url: str) -> None:
    async with two(redis_url) as (there, here):
        for end in (300, 700):
            there.num_asked += 1
            asked = submit(there.num_asked, prompt(1)[:end], max_tokens=1)
            await there.client.send(replace(asked, leases=(PrefixLease(end // 16, 600),)))
            await there.client.finish((there.num_asked, 0))
        await drained(there)
        assert here.metric("replica_tier_moves_total", way="pull") == 700 // 128
        _, usage = await here.ask(1)
        assert usage.num_cached_tokens == 700 // 128 * 128


async def test_a_request_that_runs_meanwhile_has_its_lease_handed_over_as_well(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.host.HAND_OVER_PAUSE_SECONDS", 0.2)
    async with two(redis_url, drain_seconds=60.0) as (there, here):
        asked = submit(70, prompt(3)[:200], max_tokens=400)
        await lease(there, 1)
        await there.client.send(replace(asked, leases=(PrefixLease(200 // 16, 600),)))
        draining = asyncio.create_task(there.host.drain())
        await there.client.say_that_it_knows()
        await there.client.finish((70, 0))
        await draining
        assert here.metric("replica_prefix_leased_tokens") == TOKENS + 128


@pytest.mark.parametrize(
    ("settings", "seconds", "reason"),
    [({"lease_share": 0.0}, 600, "no_tier"), ({"lease_share": 0.1}, 600, "budget"), ({}, 86_400, "no_tier")],
)
async def test_what_nobody_can_take_is_said_to_be_broken_to_who_asks_for_it(
    redis_url: str, settings: dict[str, Any], seconds: int, reason: str, tmp_path: Any
) -> None:
    disk = {"disk_kv_bytes": 40 * CHUNK_BYTES, "kv_folder": str(tmp_path)} if seconds > 3600 else {}
    async with contextlib.AsyncExitStack() as stack:
        there = await stack.enter_async_context(peer(redis_url, 0, **disk))
        here = await stack.enter_async_context(peer(redis_url, 1, **settings))
        expected, _ = await lease(there, 1, seconds)
        await drained(there)
        num_taken = here.metric("replica_prefix_leased_tokens") // 128
        assert num_taken == (4 if reason == "budget" else 0)
        num_lost = NUM_CHUNKS - num_taken
        assert here.metric("replica_taken_over_chunks_total", outcome=reason) == num_lost
        assert here.metric("replica_taken_over_chunks_total", outcome="noted") == num_lost
        if not disk:
            assert here.metric("replica_prefix_lease_broken_tokens_total", cause="left") == 128 * num_lost
        answer, usage = await here.ask(1)
        assert answer == expected
        assert usage.num_cached_tokens == 128 * num_taken
        assert (usage.num_evicted_early_tokens, usage.broken_by) == (128 * num_lost, LeaseBreak.LEFT)


async def test_of_several_the_first_in_the_affinity_order_takes_it_and_else_the_next(redis_url: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        there = await stack.enter_async_context(peer(redis_url, 0))
        other = await stack.enter_async_context(peer(redis_url, 1, dtype="bfloat16"))
        here = await stack.enter_async_context(peer(redis_url, 2))
        await lease(there, 1)
        await drained(there)
        assert other.metric("replica_prefix_leased_tokens") == 0, "it has another layout"
        assert here.metric("replica_prefix_leased_tokens") == TOKENS


async def test_what_one_takes_in_part_and_the_next_whole_takes_no_room_at_the_first(redis_url: str) -> None:
    ids = [ReplicaId("r1"), ReplicaId("r2")]
    (home,) = AffinityRanking(ids).of(b"b" * 16).first(1)
    async with contextlib.AsyncExitStack() as stack:
        there = await stack.enter_async_context(peer(redis_url, 0))
        by_id = {
            each: await stack.enter_async_context(
                peer(redis_url, number, **({"lease_share": 0.1} if each == home else {}))
            )
            for number, each in enumerate(ids, 1)
        }
        await lease(there, 1)
        await drained(there)
        first, second = by_id.pop(home), *by_id.values()
        assert first.metric("replica_taken_over_chunks_total", outcome="taken") == 4
        assert second.metric("replica_prefix_leased_tokens") == TOKENS
        await first.ask(2)
        assert first.metric("replica_prefix_leased_tokens") == 0
        assert first.metric("replica_prefix_lease_broken_tokens_total", cause="left") == 0
        _, usage = await second.ask(1)
        assert usage.num_host_tokens == TOKENS


async def test_no_more_than_the_setting_allows_goes_and_none_without_a_peer(redis_url: str) -> None:
    async with two(redis_url, hand_over_bytes=4 * CHUNK_BYTES) as (there, here):
        await lease(there, 1)
        await drained(there)
        assert there.metric("replica_handed_over_chunks_total", outcome="too_much") == NUM_CHUNKS
        assert here.metric("replica_prefix_leased_tokens") == 0
        await lease(here, 2)
        assert await drained(here) < 4
        assert here.metric("replica_handed_over_chunks_total", outcome="no_peer") == NUM_CHUNKS


async def test_a_peer_that_stalls_or_vanishes_holds_the_drain_for_a_bounded_time(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with process(redis_url, 1) as stalled:
        for seconds_for_call, drain_seconds in ((0.5, 30.0), (30.0, 2.5)):
            monkeypatch.setattr(hand_over, "CALL_SECONDS", seconds_for_call)
            async with peer(redis_url, 0, drain_seconds=drain_seconds) as there:
                await lease(there, 1)
                stalled.process.send_signal(signal.SIGSTOP)
                assert await drained(there) < 5
                assert there.metric("replica_handed_over_chunks_total", outcome="late") == NUM_CHUNKS
                stalled.process.send_signal(signal.SIGCONT)
        async with peer(redis_url, 0) as there:
            await lease(there, 2)
            draining = asyncio.create_task(drained(there))
            await asyncio.sleep(hand_over.SETTLE_SECONDS)
            stalled.process.kill()
            assert await draining < 5


async def test_a_fault_of_our_own_ends_the_hand_over_and_not_the_drain(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with peer(redis_url, 0) as there:
        await lease(there, 1)
        monkeypatch.setattr("replicas.leaving.live_peers.LivePeers.read", None)
        await drained(there)
        await there.host.wait_dead()
    assert "by a fault of our own" in caplog.text


async def test_a_process_that_is_told_to_end_hands_over(redis_url: str) -> None:
    async with process(redis_url, 0) as there, peer(redis_url, 1) as here:
        asked = submit(1, prompt(1), max_tokens=4)
        await there.client.send(replace(asked, leases=(PrefixLease(BLOCKS, 600),)))
        await there.client.finish((1, 0))
        there.process.terminate()
        await there.client.say_that_it_knows()
        assert await there.process.wait() == 0
        _, usage = await here.ask(1)
        assert usage.num_host_tokens == TOKENS


async def test_with_tls_it_goes_as_well(redis_url: str, ca: Authority) -> None:
    own = ca.pulling_replica()
    settings = {"tls_certificate": own.certificate, "tls_key": own.key, "tls_client_ca": ca.certificate}
    async with two(redis_url, credentials=of_router(ca), secret=SECRET, **settings) as (there, here):
        await lease(there, 1)
        await drained(there)
        _, usage = await here.ask(1)
        assert usage.num_host_tokens == TOKENS


async def test_a_call_that_breaks_the_contract_is_refused(redis_url: str) -> None:
    async with peer(redis_url, 0) as there, grpc.aio.insecure_channel(there.host.address) as channel:
        call = channel.unary_unary("/kvasir.v2.Replica/TakeOver")(b"", timeout=5)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        nothing_is_left(there)
