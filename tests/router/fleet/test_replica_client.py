"""The client of one replica, over real gRPC."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from replicas.protocol.frames import FinishReason, LoadSnapshot, TokenDelta
from replicas.protocol.status import ReplicaId
from router.fleet.inflight import Inflight, Mailbox, ReplicaLost
from router.fleet.replica_client import MAX_FRAME_BYTES, ReplicaClient
from tests.router.scripted_replica import CARD, ScriptedReplica, asking, eventually, token_at


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


async def test_a_request_gets_its_tokens_in_order(client: ReplicaClient) -> None:
    deltas = await collect(client.submit(asking([1, 2, 3], max_tokens=5, seed=9)))
    assert tokens_of(deltas) == [token_at(9, n) for n in range(5)]
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert deltas[0].usage is not None and deltas[0].usage.num_prompt_tokens == 3
    assert client.num_inflight == 0


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


async def test_one_mailbox_serves_several_requests(client: ReplicaClient) -> None:
    mailbox = Mailbox()
    first = client.submit(asking([1], max_tokens=3), mailbox)
    second = client.submit(asking([1], max_tokens=3), mailbox)
    num_tokens = 0
    while num_tokens < 6:
        deltas = first.take() + second.take()
        num_tokens += sum(len(delta.token_ids) for delta in deltas)
        if not deltas:
            await mailbox.wait()


async def test_a_frame_wakes_its_consumer_once_with_all_its_deltas(
    client: ReplicaClient, replica: ScriptedReplica
) -> None:
    inflight = client.submit(asking([1], max_tokens=1, num_choices=4))
    assert len(await inflight.batch()) == 4


async def test_an_abort_reaches_the_replica_and_nothing_more_is_delivered(
    client: ReplicaClient, replica: ScriptedReplica
) -> None:
    replica.script.step_seconds = 0.005
    inflight = client.submit(asking([1], max_tokens=100_000))
    await inflight.batch()
    client.abort(inflight.submit_id)
    inflight.take()
    await eventually(lambda: replica.num_live == 0 and replica.num_aborts == 1)
    assert inflight.take() == []
    assert client.num_inflight == 0


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
