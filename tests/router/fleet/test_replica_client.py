"""The client of one replica over real gRPC, also of one that lies."""

import asyncio
import contextlib
import operator
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from replicas.protocol.frames import LoadSnapshot, RequestKey, TokenDelta
from replicas.protocol.keys import replica_key, replicas_key
from replicas.protocol.status import ReplicaId
from router.fleet.inflight import BYTES_OF_DELTA, Inflight, Mailbox, ReplicaLost
from router.fleet.replica_client import MAX_FRAME_BYTES, ReplicaClient
from tests.router.dispatched_fleet import GENERATION, DispatchedFleet, assert_complete, changed, generate
from tests.router.scripted_replica import CARD, ScriptedReplica, asking, eventually, token_at
from tests.router.watched_fleet import Registry, Start, World


@contextlib.asynccontextmanager
async def serving(client: ReplicaClient) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(client.serve())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()


@pytest.fixture
async def replica() -> AsyncIterator[ScriptedReplica]:
    replica = ScriptedReplica()
    await replica.start()
    yield replica
    await replica.kill()


@pytest.fixture
async def client(replica: ScriptedReplica) -> AsyncIterator[ReplicaClient]:
    client = ReplicaClient(replica.replica_id, replica.address, lambda *_: None)
    async with serving(client):
        yield client


async def collect(inflight: Inflight, num_choices: int = 1) -> list[TokenDelta]:
    deltas: list[TokenDelta] = []
    while sum(delta.finish_reason is not None for delta in deltas) < num_choices:
        deltas += await inflight.batch()
    return deltas


def tokens_of(deltas: list[TokenDelta], choice: int = 0) -> list[int]:
    return [token for delta in deltas if delta.key.choice == choice for token in delta.token_ids]


async def test_requests_of_one_turn_share_a_frame(client: ReplicaClient, replica: ScriptedReplica) -> None:
    inflights = [client.submit(asking([1], max_tokens=2, seed=n)) for n in range(20)]
    answers = [await collect(inflight) for inflight in inflights]
    assert [tokens_of(answer) for answer in answers] == [[token_at(n, 0), token_at(n, 1)] for n in range(20)]
    assert replica.num_client_frames == 1


async def test_prompts_beyond_the_frame_limit_are_split_over_frames(
    client: ReplicaClient, replica: ScriptedReplica
) -> None:
    long_prompt = [7] * (MAX_FRAME_BYTES // 4 * 2 // 3)
    inflights = [client.submit(asking(long_prompt, max_tokens=1)) for _ in range(3)]
    for inflight in inflights:
        await collect(inflight)
    assert replica.num_client_frames == 3


async def test_what_the_protocol_cannot_carry_fails_alone(client: ReplicaClient) -> None:
    running = client.submit(asking([1, 2, 3], max_tokens=5, seed=9))
    with pytest.raises(ValueError):
        client.submit(asking([1], max_tokens=5, top_k=2**40))
    with pytest.raises(OverflowError):
        client.submit(asking([-1], max_tokens=5))
    assert client.num_inflight == 1
    assert tokens_of(await collect(running)) == [token_at(9, n) for n in range(5)]
    assert client.num_inflight == 0
    following = client.submit(asking([1], max_tokens=1))
    assert (running.submit_id, following.submit_id) == (1, 2)  # ids count what was sent
    await collect(following)


async def test_a_frame_wakes_its_consumer_once_with_all_its_deltas(
    client: ReplicaClient, replica: ScriptedReplica
) -> None:
    inflight = client.submit(asking([1], max_tokens=1, num_choices=4))
    assert len(await inflight.batch()) == 4


async def test_aborting_one_choice_leaves_the_others_running(
    client: ReplicaClient, replica: ScriptedReplica
) -> None:
    replica.script.step_seconds = 0.002
    inflight = client.submit(asking([1], max_tokens=50, seed=3, num_choices=2))
    deltas = await inflight.batch()
    client.abort(inflight.submit_id, choice=0)
    deltas += inflight.take()
    num_tokens_of_aborted = len(tokens_of(deltas, choice=0))
    deltas += await collect(inflight)
    assert tokens_of(deltas, choice=1) == [token_at(4, n) for n in range(50)]
    assert len(tokens_of(deltas, choice=0)) == num_tokens_of_aborted
    assert client.num_inflight == 0


@pytest.mark.parametrize("choice", [0, None])
async def test_deltas_that_cross_an_abort_are_not_delivered(
    client: ReplicaClient, replica: ScriptedReplica, choice: int | None
) -> None:
    replica.script.ignores_aborts = True
    replica.script.step_seconds = 0.002
    inflight = client.submit(asking([1], max_tokens=30, num_choices=2))
    await inflight.batch()
    client.abort(inflight.submit_id, choice)
    inflight.take()
    await eventually(lambda: replica.num_live == 0)
    await collect(client.submit(asking([1], max_tokens=1)))
    assert tokens_of(inflight.take(), choice=0) == []
    assert client.num_inflight == 0


async def test_aborting_what_has_ended_sends_nothing(client: ReplicaClient, replica: ScriptedReplica) -> None:
    inflight = client.submit(asking([1], max_tokens=1))
    await collect(inflight)
    client.abort(inflight.submit_id)
    await collect(client.submit(asking([1], max_tokens=1)))
    assert replica.num_aborts == 0


async def test_every_frame_brings_the_load(replica: ScriptedReplica) -> None:
    loads: list[tuple[ReplicaId, LoadSnapshot, int]] = []
    client = ReplicaClient(replica.replica_id, replica.address, lambda *load: loads.append(load))
    async with serving(client):
        inflight = client.submit(asking([1], max_tokens=3))
        await collect(inflight)
        assert (replica.replica_id, LoadSnapshot(num_running=0), 0) in loads
        assert (replica.replica_id, LoadSnapshot(num_running=1), 1) in loads
        num_loads = len(loads)
        await eventually(lambda: len(loads) >= num_loads + 2)  # heartbeats, while idle


async def test_describe_brings_the_tokenizer_only_when_asked(
    client: ReplicaClient, replica: ScriptedReplica
) -> None:
    assert await client.describe(include_tokenizer=False) == (CARD, None, "r0", "e0")
    replica.files = {"tokenizer.json": b"x" * (40 << 20)}
    bundle = (await client.describe(include_tokenizer=True)).bundle
    assert bundle is not None and len(bundle.files["tokenizer.json"]) == 40 << 20


async def test_describing_where_nobody_listens_is_a_lost_replica(free_port: int) -> None:
    client = ReplicaClient(ReplicaId("r0"), f"127.0.0.1:{free_port}", lambda *load: None)
    with pytest.raises(ReplicaLost, match="UNAVAILABLE"):
        await client.describe(include_tokenizer=False)
    await client.close()


@pytest.mark.parametrize("death", ["stream", "server", "silence"])
async def test_a_broken_stream_fails_everything_in_flight(replica: ScriptedReplica, death: str) -> None:
    lost: list[ReplicaClient] = []
    client = ReplicaClient(
        replica.replica_id, replica.address, lambda *load: None, on_lost=lost.append, stall_seconds=0.3
    )
    async with serving(client) as task:
        replica.script.step_seconds = 0.002
        inflights = [client.submit(asking([1], max_tokens=100_000)) for _ in range(5)]
        for inflight in inflights:
            await inflight.batch()
        if death == "stream":
            replica.script.die_after_tokens = 0
        elif death == "server":
            await replica.kill()
        else:
            replica.script.silent = True
        for inflight in inflights:
            with pytest.raises(ReplicaLost):
                while True:
                    await inflight.batch()
        await task  # serve() returns by itself
        assert lost == [client]
        assert client.num_inflight == 0
        with pytest.raises(ReplicaLost):
            client.submit(asking([1], max_tokens=1))


async def test_an_idle_stream_with_heartbeats_is_no_stall(replica: ScriptedReplica) -> None:
    client = ReplicaClient(replica.replica_id, replica.address, lambda *load: None, stall_seconds=0.5)
    async with serving(client):
        await eventually(lambda: client.num_frames >= 20)
        assert client.lost is None


async def test_a_consumer_may_be_cancelled_while_it_waits_and_another_take_over(
    client: ReplicaClient, replica: ScriptedReplica
) -> None:
    replica.script.holding = True
    inflight = client.submit(asking([1], max_tokens=1))
    consumer = asyncio.create_task(inflight.batch())
    await eventually(lambda: replica.num_live == 1)
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    replica.script.holding = False
    assert len(await collect(inflight)) == 1


async def test_closing_the_client_fails_what_is_in_flight(
    replica: ScriptedReplica,
) -> None:
    client = ReplicaClient(replica.replica_id, replica.address, lambda *load: None)
    async with serving(client) as task:
        replica.script.holding = True
        inflight = client.submit(asking([1], max_tokens=1))
        await eventually(lambda: replica.num_live == 1)
        await client.close()
        with pytest.raises(ReplicaLost):
            await inflight.batch()
        await task
    await eventually(lambda: replica.num_streams == 0)


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


def test_a_long_body_waits_like_many_deltas() -> None:
    inflight, key = Inflight(1, 1, Mailbox()), RequestKey(1, 0)
    for body in (None, b"short", bytes(10 * BYTES_OF_DELTA)):
        inflight.deliver(TokenDelta(key, body=body))
    assert inflight.num_waiting == 1 + 1 + 11
    inflight.take()
    assert inflight.num_waiting == 0
