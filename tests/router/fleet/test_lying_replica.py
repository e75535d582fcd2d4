"""A replica that lies over its stream costs nobody anything but the requests on it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from replicas.protocol import replica_pb2 as pb
from replicas.protocol.keys import replica_key, replicas_key
from replicas.protocol.status import ReplicaId
from tests.router.dispatched_fleet import GENERATION, Fleet, assert_complete, fleet, generate
from tests.router.scripted_replica import CARD, ScriptedReplica, eventually
from tests.router.watched_fleet import Registry, Start, World, registry, start, world

__all__ = ["fleet", "registry", "start", "world"]

Lie = Callable[[pb.ServerFrame], object]


def every_delta(change: Callable[[pb.TokenDelta], None]) -> Lie:
    def lie(frame: pb.ServerFrame) -> None:
        for delta in frame.deltas:
            change(delta)

    return lie


def first_usage(**numbers: int) -> Lie:
    def lie(delta: pb.TokenDelta) -> None:
        if delta.HasField("usage"):
            delta.usage.CopyFrom(pb.PromptUsage(**numbers))

    return every_delta(lie)


def stray(request_id: int, choice: int = 0) -> Lie:
    return lambda frame: frame.deltas.add(request_id=request_id, choice=choice, token_ids=[1])


LOADS: dict[str, pb.Load] = {
    "not a number": pb.Load(decode_step_seconds=float("nan")),
    "endless": pb.Load(prefill_seconds_per_token=float("inf")),
    "negative": pb.Load(prefill_seconds_per_token=-1.0),
    "huge": pb.Load(num_running=2**32 - 1, num_pending_tokens=2**64 - 1, num_context_tokens=2**64 - 1),
}
DELTAS: dict[str, Lie] = {
    "a token outside the vocabulary": every_delta(lambda delta: delta.token_ids.append(CARD.vocab_size)),
    "a finish reason that there is not": every_delta(lambda delta: setattr(delta, "finish_reason", 77)),
    "more cached than there was": first_usage(num_prompt_tokens=10, num_cached_tokens=11),
    "a refusal without meaning": every_delta(lambda delta: setattr(delta.refusal, "code", "tired")),
    "torn log probabilities": every_delta(lambda delta: delta.logprobs.add(top_token_ids=[1])),
    "a log probability that is no number": every_delta(
        lambda delta: delta.logprobs.add(logprob=float("nan"))
    ),
}
STRAYS: dict[str, Lie] = {
    "a request from the future": stray(10**6),
    "no request": stray(0),
    "another choice": stray(1, choice=9),
}


async def liar_and_other(fleet: Fleet, lie: Lie) -> tuple[ScriptedReplica, ScriptedReplica]:
    liar, other = await fleet.add("liar"), await fleet.add("other")
    liar.script.alter = lie
    for client in fleet.clients.values():
        await client.describe(include_tokenizer=False)
    return liar, other


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
async def test_a_load_that_cannot_be_is_passed_over(fleet: Fleet, load: pb.Load) -> None:
    await liar_and_other(fleet, lambda frame: frame.load.CopyFrom(load))
    assert_complete(await generate(fleet, GENERATION), num_choices=1)
    client = fleet.clients[ReplicaId("liar")]
    await eventually(lambda: client.num_frames > 1)
    view = fleet.table.load(ReplicaId("liar"))
    assert view.num_requests == view.num_pending_tokens == 0 and view.decode_step_seconds is None
    assert client.lost is None


@pytest.mark.parametrize("lie", DELTAS.values(), ids=DELTAS)
async def test_an_answer_that_cannot_be_is_asked_for_again_elsewhere(
    fleet: Fleet, lie: Lie, caplog: pytest.LogCaptureFixture
) -> None:
    liar, _ = await liar_and_other(fleet, lie)
    generations = [replace(GENERATION, bucket=f"bucket {number}".encode()) for number in range(12)]
    answers = await asyncio.gather(*(generate(fleet, generation) for generation in generations))
    for answer in answers:
        assert_complete(answer, num_choices=1)
    assert liar.submits, "nobody was sent to the liar"
    await eventually(lambda: liar.num_live == 0)  # what it was asked for is aborted there
    assert fleet.clients[liar.replica_id].lost is None
    fleet.assert_nothing_reserved()
    assert len([entry for entry in caplog.records if "is passed over" in entry.message]) == 1


@pytest.mark.parametrize("lie", STRAYS.values(), ids=STRAYS)
async def test_answers_that_nobody_asked_for_harm_nobody(fleet: Fleet, lie: Lie) -> None:
    await liar_and_other(fleet, lie)
    for _ in range(4):
        assert_complete(await generate(fleet, GENERATION), num_choices=1)
    assert all(client.lost is None for client in fleet.clients.values())


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
    await eventually(lambda: world.membership.statistics().num_malformed > 0)
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
