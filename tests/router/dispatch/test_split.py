"""Prompts computed at one replica and decoded at another, through dispatch over real gRPC: `a` and `b`."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from replicas.protocol.blocks import ImageTokens, PublishedBeginning
from replicas.protocol.frames import PromptUsage, RefusalCode, Submit, UserTag
from replicas.protocol.images import media_hash
from replicas.protocol.prefix_leases import PrefixLease
from replicas.protocol.split_handover import SplitHandover, read_handover
from replicas.protocol.status import Adapter, SplitWay
from router.dispatch.attempt import Attempt
from router.dispatch.split import ONE_TOKEN, FirstPart
from router.prompt.images import Media
from router.routing.cost import CostParameters
from router.routing.decision import LEAST_SPLIT_SECONDS, Decision, Pair, Replicas, RoutingRequest, decide
from router.routing.levels import Overlaps
from router.routing.table import RoutingTable
from tests.router.dispatched_fleet import (
    GENERATION,
    PROMPT,
    ROOT,
    DispatchedFleet,
    assert_complete,
    changed,
    generate,
)
from tests.router.scripted_replica import ScriptedReplica, eventually

NUM_READY = 96


def splitting(table: RoutingTable) -> None:
    """Every prompt is computed at `a` and decoded at `b`, while both are there; else it goes to who is."""

    def policy(
        request: RoutingRequest,
        replicas: Replicas,
        overlaps: Overlaps,
        parameters: CostParameters,
        rng: random.Random,
    ) -> Decision:
        decision = decide(request, replicas, overlaps, parameters, rng)
        by_name = {each.replica_id: each for each in decision.candidates}
        if not {"a", "b"} <= set(by_name):
            return decision
        a, b = by_name["a"], by_name["b"]
        pair = Pair(a, b, None, NUM_READY, 0.05, seconds=0.1, alone_seconds=0.2)
        return structs.replace(
            decision, replica_id=b.replica_id, overlap_tokens=NUM_READY, pull_from=a.replica_id, pair=pair
        )

    table._policy = policy


async def pair_of(
    fleet: DispatchedFleet, way: SplitWay = SplitWay.PULL, *others: str, adapter: Adapter | None = None
) -> tuple[ScriptedReplica, ScriptedReplica]:
    splitting(fleet.table)
    a, b, *_ = [await fleet.add(name, *filter(None, [adapter])) for name in ("a", "b", *others)]
    for replica in (a, b):  # without roles, which would have the table choose
        fleet.table.update_card(replica.replica_id, replace(replica.card, splits_by=way))
    return a, b


async def test_both_parts_are_sent_at_once_and_the_second_one_answers(fleet: DispatchedFleet) -> None:
    a, b = await pair_of(fleet)
    leases = (PrefixLease(64, 300),)
    deltas = await generate(fleet, changed(GENERATION, leases=leases, priority=3, num_choices=2))
    assert_complete(deltas, num_choices=2)
    (first,), (second,) = a.submits, b.submits
    assert (first.sampling, first.num_choices, first.leases) == (ONE_TOKEN, 1, ())
    assert (first.packed_tokens, first.priority) == (second.packed_tokens, second.priority)
    assert (second.num_choices, second.leases, second.sampling) == (2, leases, GENERATION.sampling)
    assert second.split_id == 0 and second.handover == b""
    assert second.num_expected_tokens == len(PROMPT) - NUM_READY
    hint = second.pull
    assert hint is not None
    assert (hint.replica_id, hint.epoch, hint.address, hint.num_tokens) == ("a", "e0", a.address, NUM_READY)
    assert hint.split_id == first.split_id != 0
    assert hint.wait_seconds >= LEAST_SPLIT_SECONDS
    assert fleet.dispatcher.splits.outcomes == {"whole": 1, "part": 0, "failed": 0}


OWN_TO_A_PART = {
    *(
        "submit_id",
        "sampling",
        "num_choices",
        "leases",
        "pull",
        "split_id",
        "handover",
        "num_expected_tokens",
    ),
    *("announced_hashes", "announced_points", "announcement_id", "trace_parent", "trace_state"),
}


async def test_both_parts_are_of_one_prompt_whatever_it_has(fleet: DispatchedFleet) -> None:
    """Its images go to both replicas before it."""
    adapter = Adapter("lora", "f" * 64)
    a, b = await pair_of(fleet, SplitWay.PULL, "c", adapter=adapter)
    content = b"a picture"
    values = {
        "media": (ImageTokens(media_hash(ROOT, content), 10, 5),),
        "priority": 3,
        "adapter": "lora",
        "user": UserTag(b"user"),
        "bucket": b"bucket",
        "tenant": b"tenant",
        "lease_share": 0.5,
        "store_share": 0.25,
        "published": PublishedBeginning(ROOT, 16),
    }
    asked = structs.replace(GENERATION.submit, **values)
    media = [Media(asked.media[0].content_hash, content)]
    await generate(fleet, replace(GENERATION, submit=asked, media=media, adapter=adapter))
    (first,), (second,) = a.submits, b.submits
    for name in set(Submit.__struct_fields__) - OWN_TO_A_PART:
        assert getattr(first, name) == getattr(second, name), name
    assert all(getattr(first, name) == value for name, value in values.items())
    assert a.media == b.media == {asked.media[0].content_hash: content}


async def test_what_the_first_part_reads_from_cache_is_what_the_client_gets(fleet: DispatchedFleet) -> None:
    a, b = await pair_of(fleet)
    a.script.num_cached, b.script.num_cached = 32, NUM_READY
    b.script.step_seconds = 0.05
    b.script.alter = _pulled(64)
    deltas = await generate(fleet, GENERATION)
    usage = next(delta.usage for delta in deltas if delta.usage is not None)
    assert (usage.num_cached_tokens, usage.num_split_tokens, usage.num_pulled_tokens) == (32, 64, 0)


def _pulled(num_tokens: int) -> Callable[[list[Any]], object]:
    def alter(frame: list[Any]) -> None:
        for delta in frame[0]:
            if delta[3] is not None:
                delta[3]["num_pulled_tokens"] = delta[3]["num_slower_tier_tokens"] = num_tokens

    return alter


@pytest.mark.parametrize("code", [RefusalCode.OVERLOADED, RefusalCode.INVALID_REQUEST, RefusalCode.DRAINING])
async def test_a_refused_first_part_is_placed_anew(fleet: DispatchedFleet, code: RefusalCode) -> None:
    a, b = await pair_of(fleet)
    a.script.refusal, b.script.holding = code, True
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(generate(fleet, GENERATION))
        await eventually(lambda: len(b.submits) == 2)
        b.script.holding = False
        assert_complete(await task, 1)
    assert [submit.pull is None for submit in b.submits] == [False, True]
    assert fleet.dispatcher.splits.outcomes["failed"] == 1


async def test_a_prefiller_that_dies_is_replaced(fleet: DispatchedFleet) -> None:
    a, b = await pair_of(fleet, SplitWay.PULL, "c")
    a.script.holding = b.script.holding = True
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(generate(fleet, GENERATION))
        await eventually(lambda: bool(a.submits and b.submits))
        await a.kill()
        b.script.holding = False
        assert_complete(await task, 1)
    assert fleet.dispatcher.num_lost == 1


async def test_a_decoder_that_dies_leaves_the_first_part_running(fleet: DispatchedFleet) -> None:
    a, b = await pair_of(fleet, SplitWay.PULL, "c")
    a.script.holding = b.script.holding = True
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(generate(fleet, GENERATION))
        await eventually(lambda: bool(a.submits and b.submits))
        await b.kill()
        await eventually(lambda: fleet.dispatcher.num_retries == 1)
        assert a.num_live >= 1 and fleet.table.loads.num_reserved == 2
        a.script.holding = False
        assert_complete(await task, 1)


@pytest.mark.parametrize("way", [SplitWay.PULL, SplitWay.NIXL])
@pytest.mark.parametrize("held", ["a", "b"])
async def test_a_client_that_leaves_ends_both_parts(fleet: DispatchedFleet, way: SplitWay, held: str) -> None:
    a, b = await pair_of(fleet, way)
    a.script.holding, b.script.holding = held == "a", True
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(generate(fleet, GENERATION))
        await eventually(lambda: bool(a.submits if held == "a" else b.submits))
        await asyncio.sleep(0.05)
        task.cancel()
    await eventually(lambda: a.num_live == b.num_live == 0)


@pytest.mark.parametrize(("lease_seconds", "is_said"), [(60.0, True), (0.08, False)])
async def test_a_servers_words_go_from_the_first_part_to_the_second_in_time(
    fleet: DispatchedFleet, lease_seconds: float, is_said: bool
) -> None:
    a, b = await pair_of(fleet, SplitWay.NIXL)
    a.script.holding = True
    a.script.alter = _says(_handover(lease_seconds))
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(generate(fleet, GENERATION))
        await eventually(lambda: bool(a.submits))
        await asyncio.sleep(0.05)
        assert not b.submits
        a.script.holding = False
        deltas = await task
    assert_complete(deltas, 1)
    (submit,) = b.submits
    said = read_handover(submit.handover)
    assert (None if said is None else said.params) == (b"block ids" if is_said else None)
    assert submit.pull is None
    assert all(delta.usage is None or not delta.usage.handover for delta in deltas)


def _handover(lease_seconds: float) -> bytes:
    return SplitHandover(b"block ids", bytes(16), lease_seconds, 0.0, time.time()).packed()


def _says(handover: bytes) -> Callable[[list[Any]], object]:
    def alter(frame: list[Any]) -> None:
        for delta in frame[0]:
            if delta[3] is not None:
                delta[3]["handover"] = handover

    return alter


async def test_words_are_not_said_again_on_a_retry(fleet: DispatchedFleet) -> None:
    a, b = await pair_of(fleet, SplitWay.NIXL, "c")
    a.script.alter, b.script.holding = _says(_handover(60.0)), True
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(generate(fleet, GENERATION))
        await eventually(lambda: bool(b.submits))
        await b.kill()
        assert_complete(await task, 1)
    assert not [each for each in (*a.submits, *fleet.replicas["c"].submits) if each.handover]


async def test_a_first_part_that_fails_before_the_second_is_sent(fleet: DispatchedFleet) -> None:
    a, b = await pair_of(fleet, SplitWay.NIXL)
    a.script.refusal = RefusalCode.INTERNAL
    assert_complete(await generate(fleet, GENERATION), 1)
    assert [submit.handover for submit in b.submits] == [b""]


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        # cached, slower tiers, pulled: of the first part, of the second, and of both
        ((0, 0, 0), (896, 896, 896), (0, 0, 0, 896)),
        ((512, 128, 0), (896, 384, 384), (512, 128, 0, 384)),
        ((512, 0, 0), (256, 256, 256), (256, 256, 256, 256)),
        (None, (896, 640, 512), (384, 128, 0, 512)),
    ],
)
def test_usage_of_both_parts(
    first: tuple[int, int, int] | None, second: tuple[int, int, int], found: tuple[int, int, int, int]
) -> None:
    part = FirstPart(Attempt.__new__(Attempt), 0.0, goes_first=False)
    if first is not None:
        part.usage = _usage(*first)
    usage = part.joined(_usage(*second))
    tiers = (usage.num_cached_tokens, usage.num_slower_tier_tokens, usage.num_pulled_tokens)
    assert (*tiers, usage.num_split_tokens) == found
    assert usage.num_device_tokens >= 0 and usage.num_host_tokens >= 0


def _usage(num_cached: int, num_slower: int, num_pulled: int) -> PromptUsage:
    return PromptUsage(1000, num_cached, 0, num_slower_tier_tokens=num_slower, num_pulled_tokens=num_pulled)
