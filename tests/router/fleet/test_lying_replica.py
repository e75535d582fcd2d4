"""A replica that lies over its stream costs nobody anything but the requests on it."""

import asyncio
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from replicas.protocol.keys import replica_key, replicas_key
from replicas.protocol.status import ReplicaId
from tests.router.dispatched_fleet import (
    GENERATION,
    DispatchedFleet,
    assert_complete,
    changed,
    fleet,
    generate,
)
from tests.router.scripted_replica import CARD, ScriptedReplica, eventually
from tests.router.watched_fleet import Registry, Start, World, registry, start, world

__all__ = ["fleet", "registry", "start", "world"]

Lie = Callable[[list[Any]], object]
"""Changes a frame: lists in the order of the fields, and names only where the struct has them."""

DELTAS_AT, LOAD_AT, COUNTED_AT = range(3)
KEY_AT, TOKENS_AT, FINISH_AT, USAGE_AT, LOGPROBS_AT, REFUSAL_AT = range(6)


def every_delta(change: Callable[[list[Any]], object]) -> Lie:
    def lie(frame: list[Any]) -> None:
        for delta in frame[DELTAS_AT]:
            change(delta)

    return lie


def says(place: int, value: object) -> Lie:
    """In every delta."""
    return every_delta(lambda delta: operator.setitem(delta, place, value))


def first_usage(**numbers: object) -> Lie:
    def lie(delta: list[Any]) -> None:
        if delta[USAGE_AT] is not None:
            delta[USAGE_AT] = USAGE | numbers

    return every_delta(lie)


def stray(submit_id: int, choice: int = 0) -> Lie:
    return lambda frame: frame[DELTAS_AT].append([[submit_id, choice], [1]])


USAGE = {"num_prompt_tokens": 10, "num_cached_tokens": 0, "num_written_tokens": 0}
LOADS: dict[str, object] = {
    "not a number": {"decode_step_seconds": float("nan")},
    "endless": {"prefill_seconds_per_token": float("inf")},
    "negative": {"prefill_seconds_per_token": -1.0},
    "less than none": {"num_running": -1},
    "huge": {"num_running": 2**32 - 1, "num_pending_tokens": 2**64 - 1, "num_context_tokens": 2**64 - 1},
    "of another type": {"num_running": "many"},
    "none": None,
}
DELTAS: dict[str, Lie] = {
    "a token outside the vocabulary": every_delta(lambda delta: delta[TOKENS_AT].append(CARD.vocab_size)),
    "a token that is none": every_delta(lambda delta: delta[TOKENS_AT].append(-1)),
    "a finish reason that there is not": says(FINISH_AT, "tired"),
    "more cached than there was": first_usage(num_cached_tokens=11),
    "less than nothing cached": first_usage(num_cached_tokens=-1),
    "parts that are more than the whole": first_usage(
        num_cached_tokens=1, num_own_tokens=1, num_cross_user_tokens=1
    ),
    "a usage without numbers": first_usage(num_written_tokens=None),
    "a refusal without meaning": says(REFUSAL_AT, {"code": "tired", "message": ""}),
    "torn log probabilities": says(LOGPROBS_AT, [[1, -0.5, [[1]]]]),
    "a log probability that is no number": says(LOGPROBS_AT, [[1, float("nan"), []]]),
    "log probabilities of no token": says(LOGPROBS_AT, [[1, -0.5, [[CARD.vocab_size, -0.5]]]]),
    "something else than tokens": says(TOKENS_AT, {"a": 1}),
}
STRAYS: dict[str, Lie] = {
    "a request from the future": stray(10**6),
    "no request": stray(0),
    "another choice": stray(1, choice=9),
}
NO_FRAMES: dict[str, Lie] = {
    "no deltas": lambda frame: frame.clear(),
    "a delta for nobody": lambda frame: frame[DELTAS_AT].append([["one", 0], [1]]),
    "more deltas than there may be": lambda frame: frame[DELTAS_AT].extend([[[1, 0], []]] * 5000),
    "a count that is none": lambda frame: operator.setitem(frame, COUNTED_AT, -1),
}


async def liar_and_other(fleet: DispatchedFleet, lie: Lie) -> tuple[ScriptedReplica, ScriptedReplica]:
    liar, other = await fleet.add("liar"), await fleet.add("other")
    liar.script.alter = lie
    for client in fleet.clients.values():
        await client.describe(include_tokenizer=False)
    return liar, other


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
async def test_a_load_that_cannot_be_is_passed_over(fleet: DispatchedFleet, load: object) -> None:
    await liar_and_other(fleet, lambda frame: operator.setitem(frame, LOAD_AT, load))
    assert_complete(await generate(fleet, GENERATION), num_choices=1)
    client = fleet.clients[ReplicaId("liar")]
    await eventually(lambda: client.num_frames > 1)
    view = fleet.table.load(ReplicaId("liar"))
    assert view.num_requests == view.num_pending_tokens == 0 and view.decode_step_seconds is None
    assert client.lost is None


@pytest.mark.parametrize("lie", DELTAS.values(), ids=DELTAS)
async def test_an_answer_that_cannot_be_is_asked_for_again_elsewhere(
    fleet: DispatchedFleet, lie: Lie, caplog: pytest.LogCaptureFixture
) -> None:
    liar, _ = await liar_and_other(fleet, lie)
    generations = [changed(GENERATION, bucket=f"bucket {number}".encode()) for number in range(12)]
    answers = await asyncio.gather(*(generate(fleet, generation) for generation in generations))
    for answer in answers:
        assert_complete(answer, num_choices=1)
    assert liar.submits, "nobody was sent to the liar"
    await eventually(lambda: liar.num_live == 0)  # what it was asked for is aborted there
    assert fleet.clients[liar.replica_id].lost is None
    fleet.assert_nothing_reserved()
    assert len([entry for entry in caplog.records if "is ignored" in entry.message]) == 1


@pytest.mark.parametrize("lie", STRAYS.values(), ids=STRAYS)
async def test_answers_that_nobody_asked_for_harm_nobody(fleet: DispatchedFleet, lie: Lie) -> None:
    await liar_and_other(fleet, lie)
    for _ in range(4):
        assert_complete(await generate(fleet, GENERATION), num_choices=1)
    assert all(client.lost is None for client in fleet.clients.values())


@pytest.mark.parametrize("lie", NO_FRAMES.values(), ids=NO_FRAMES)
async def test_what_is_no_frame_ends_the_stream_and_all_on_it_goes_on_elsewhere(
    fleet: DispatchedFleet, lie: Lie
) -> None:
    liar, _ = await liar_and_other(fleet, lie)
    await eventually(lambda: fleet.clients[liar.replica_id].lost is not None)
    assert "breaks the contract" in str(fleet.clients[liar.replica_id].lost)
    for number in range(6):
        generation = changed(GENERATION, bucket=f"bucket {number}".encode())
        assert_complete(await generate(fleet, generation), num_choices=1)
    fleet.assert_nothing_reserved()


@pytest.mark.parametrize("change", [{"block_size": 0}, {"vocab_size": 0}, {"name": ""}, {"engine": "a\nb"}])
async def test_a_replica_with_an_impossible_card_is_never_routed_to(
    world: World, registry: Registry, start: Start, change: dict[str, object]
) -> None:
    liar = await start("liar", card=replace(CARD, **change))  # type: ignore[arg-type]
    honest = liar.card
    liar.card = CARD
    await registry.put(liar)
    liar.card = honest
    await registry.put(await start("right"))
    await world.wait_routed("right")
    await eventually(lambda: world.membership.num_malformed > 0)
    await eventually(
        lambda: any("breaks the contract" in (each.complaint or "") for each in world.membership.members())
    )
    assert world.routed() == {"right"}


async def test_a_lease_with_an_address_that_is_none_harms_nobody(
    world: World, registry: Registry, start: Start
) -> None:
    liar = await start("liar")
    await registry.put(liar)
    await world.wait_routed("liar")
    key = replica_key("toy", liar.replica_id)
    for address in ("", "unix:/tmp/x", "300.300.300.300:1", "a..b:1", "[::1:1", "-:1"):
        await registry.redis.hset(key, "address", address)
        await asyncio.sleep(0.1)
    await registry.redis.srem(replicas_key("toy"), "liar")
    await registry.put(await start("right"))
    await eventually(lambda: "right" in world.routed())
