"""A replica's service to its routers: streams, and what it announces before anything is computed."""

import asyncio
import random
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from replicas.protocol.blocks import BlockHash, ImageTokens
from replicas.protocol.frames import (
    Abort,
    FinishReason,
    LoadSnapshot,
    RefusalCode,
    RequestKey,
    Submit,
    TokenDelta,
)
from replicas.protocol.status import Epoch, ReplicaId
from replicas.protocol.wire import (
    SERVICE_NAME,
    DescribeRequest,
    DescribeResponse,
    Nothing,
    decode_block_list,
    decode_description,
    encode,
)
from replicas.serving import router_stream
from replicas.serving.arrivals import Arrivals
from replicas.serving.intake import COUNTED_OUTPUT_TOKENS, Intake
from replicas.serving.router_stream import MAX_FRAME_BYTES, RouterStream
from replicas.serving.server import MAX_CHOICES
from tests.replicas.router_client import RouterClient, submit
from tests.replicas.scripted_engine import CARD
from tests.replicas.served_engine import Harness, channel, client, harness
from tests.replicas.waiting import until

__all__ = ["channel", "client", "harness"]

SUBMIT = {"submit_id": 1, "packed_tokens": b"abcd", "sampling": {"max_tokens": 1}, "root": bytes(16)}


async def test_a_stream_serves_many_requests_under_the_routers_own_ids(client: RouterClient) -> None:
    await client.send(submit(7, max_tokens=2), submit(2**63, [9, 8], max_tokens=4))
    found = await client.finish((7, 0), (2**63, 0))
    assert [delta.token_ids for delta in found[RequestKey(7, 0)]] == [(1,), (2,)]
    assert [delta.token_ids for delta in found[RequestKey(2**63, 0)]] == [(9,), (8,), (9,), (8,)]


async def test_two_routers_may_use_the_same_ids_and_see_only_their_own(channel: grpc.aio.Channel) -> None:
    first, second = RouterClient(channel), RouterClient(channel)
    await first.send(submit(1, [10], max_tokens=20))
    await second.send(submit(1, [20], max_tokens=20))
    for router, token in ((first, 10), (second, 20)):
        found = await router.finish((1, 0))
        assert {delta.token_ids for delta in found[RequestKey(1, 0)]} == {(token,)}


async def test_the_choices_of_a_request_are_aborted_one_by_one_or_all_together(
    client: RouterClient, harness: Harness
) -> None:
    await client.send(submit(1, num_choices=3, max_tokens=10**6), Abort(1, choice=1))
    await until(lambda: [key.choice for key in harness.engine.aborted] == [1])
    assert harness.server.num_requests == 1
    await client.send(Abort(1), Abort(1, choice=0), Abort(99))
    await harness.until_engine_is_empty()
    assert sorted(key.choice for key in harness.engine.aborted) == [0, 1, 2]


async def test_deltas_that_wait_together_go_out_as_one_message(
    client: RouterClient, harness: Harness
) -> None:
    harness.engine.gate.clear()
    await client.send(submit(1), submit(2), submit(3))
    await until(lambda: len(harness.engine.added) == 3)
    harness.engine.gate.set()
    frame = await client.read()
    while frame is not None and not frame.deltas:
        frame = await client.read()
    assert frame is not None
    assert {delta.key.number for delta in frame.deltas} == {1, 2, 3}


async def test_what_routers_send_and_get_is_counted(client: RouterClient, harness: Harness) -> None:
    harness.engine.gate.clear()
    await client.send(submit(1, num_choices=2, max_tokens=10**6), submit(2, max_tokens=10**6))
    await until(lambda: len(harness.engine.added) == 3)
    assert harness.sample("replica_arrived_requests") == 3
    await client.send(Abort(1, choice=0), Abort(99))
    await until(lambda: harness.sample("replica_aborts_total") == 1)
    harness.engine.gate.set()
    await until(lambda: harness.sample("replica_ttft_seconds_count") == 2)
    await client.send(Abort(1), Abort(2))
    await harness.until_engine_is_empty()
    await client.send(submit(3), submit(4, [1] * 10**4))  # the second is refused
    await client.finish((3, 0), (4, 0))
    assert harness.sample("replica_submits_total") == 4
    assert harness.sample("replica_aborts_total") == 3
    assert harness.sample("replica_arrived_requests") == 0
    assert harness.sample("replica_frames_total") >= 2
    assert harness.sample("replica_ttft_seconds_count") == 3
    assert harness.sample("replica_queue_seconds_count") == 3


async def test_an_idle_stream_hears_the_load_at_once_and_with_every_heartbeat(client: RouterClient) -> None:
    for _ in range(3):
        frame = await client.read()
        assert frame is not None
        assert frame.deltas == ()
        assert frame.load.num_total_blocks == CARD.num_blocks


async def test_an_idle_stream_hears_of_load_that_another_stream_causes(
    channel: grpc.aio.Channel, harness: Harness
) -> None:
    idle, busy = RouterClient(channel), RouterClient(channel)
    await idle.read()
    await busy.send(submit(1, max_tokens=100_000))
    while True:
        frame = await idle.read()
        assert frame is not None
        if frame.load.num_running == 1:
            return


async def test_a_router_that_hangs_up_frees_all_that_it_had_open(harness: Harness) -> None:
    async with grpc.aio.insecure_channel(harness.address) as channel:
        client = RouterClient(channel)
        await client.send(submit(1, max_tokens=10**6, num_choices=2), submit(2, max_tokens=10**6))
        await until(lambda: harness.server.num_requests == 2)
    await harness.until_engine_is_empty()
    assert harness.server.num_streams == 0


async def test_a_router_that_ends_its_half_of_the_stream_frees_it_too(
    client: RouterClient, harness: Harness
) -> None:
    await client.send(submit(1, max_tokens=10**6))
    await client.read()
    await client.call.done_writing()
    while await client.read() is not None:
        pass
    assert await client.call.code() is grpc.StatusCode.OK
    await harness.until_engine_is_empty()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ([[SUBMIT | {"packed_tokens": b"abc"}]], "3 bytes are not tokens"),
        ([[SUBMIT | {"root": b"short"}]], "length >= 16"),
        ([[SUBMIT | {"num_choices": 0}]], "`int` >= 1"),
        ([[SUBMIT], [[-1]]], "`int` >= 0"),
        ({"submits": [SUBMIT]}, "Expected `array`"),
    ],
)
async def test_a_message_that_breaks_the_contract_ends_the_stream_with_a_reason(
    client: RouterClient, harness: Harness, message: object, reason: str
) -> None:
    await client.send(submit(5, max_tokens=10**6))
    await client.call.write(encode(message))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await client.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason in str(caught.value.details())
    await harness.until_engine_is_empty()
    assert harness.server.num_streams == 0


async def test_a_reused_id_ends_both_requests_with_a_refusal(client: RouterClient, harness: Harness) -> None:
    await client.send(submit(1, max_tokens=10**6))
    await until(lambda: harness.server.num_requests > 0)
    await client.send(submit(1))
    found = await client.finish((1, 0))
    refusal = found[RequestKey(1, 0)][-1].refusal
    assert refusal is not None
    assert refusal.code is RefusalCode.INVALID_REQUEST
    await harness.until_engine_is_empty()
    await client.send(submit(1))
    await client.finish((1, 0))


async def test_a_draining_replica_refuses_and_finishes_what_it_has(
    client: RouterClient, harness: Harness
) -> None:
    harness.engine.gate.clear()
    await client.send(submit(1))
    await until(lambda: harness.server.num_requests > 0)
    harness.server.drain()
    await client.send(submit(2, num_choices=2))
    refused = await client.finish((2, 0), (2, 1))
    assert {deltas[-1].refusal.code for deltas in refused.values() if deltas[-1].refusal} == {
        RefusalCode.DRAINING
    }
    harness.engine.gate.set()
    await client.finish((1, 0))
    await harness.server.wait_idle()


async def test_more_choices_than_allowed_are_refused_before_they_cost_anything(
    client: RouterClient, harness: Harness
) -> None:
    await client.send(submit(1, num_choices=2**32 - 1))
    found = await client.finish(*((1, choice) for choice in range(MAX_CHOICES)))
    assert all(deltas[-1].finish_reason is FinishReason.ERROR for deltas in found.values())
    assert harness.engine.added == []


async def test_requests_beyond_what_the_replica_takes_are_refused_as_overload(
    client: RouterClient, harness: Harness
) -> None:
    harness.engine.gate.clear()
    await client.send(*(submit(submit_id) for submit_id in range(301)))
    found = await client.finish((300, 0))
    refusal = found[RequestKey(300, 0)][-1].refusal
    assert refusal is not None
    assert refusal.code is RefusalCode.OVERLOADED


@pytest.mark.parametrize(
    ("num_choices", "max_tokens", "num_tokens", "num_taken"),
    [(16, 3, 5, 300 // 16), (1, 10**6, 100, 200_000 // 1_124)],
    ids=["sequences", "tokens"],
)
async def test_requests_weigh_as_much_as_their_sequences_and_tokens(
    client: RouterClient,
    harness: Harness,
    num_choices: int,
    max_tokens: int,
    num_tokens: int,
    num_taken: int,
) -> None:
    harness.engine.gate.clear()
    many = range(1, num_taken + 6)
    await client.send(
        *(
            submit(number, range(num_tokens), max_tokens=max_tokens, num_choices=num_choices)
            for number in many
        )
    )
    found = await client.finish(*((number, 0) for number in many[num_taken:]))
    refusals = [deltas[-1].refusal for deltas in found.values()]
    assert [refusal and refusal.code for refusal in refusals] == [RefusalCode.OVERLOADED] * 5
    assert harness.server.num_requests == num_taken
    assert harness.sample("replica_open_sequences") == num_taken * num_choices
    assert harness.sample("replica_open_tokens") == num_taken * (
        num_tokens + num_choices * min(max_tokens, 1024)
    )
    await client.send(*(Abort(number) for number in many))
    await until(lambda: harness.server.num_requests == 0)
    assert harness.sample("replica_open_sequences") == harness.sample("replica_open_tokens") == 0
    harness.engine.gate.set()


async def test_a_router_that_does_not_read_is_cut_off_and_its_requests_are_freed(
    client: RouterClient, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_stream, "MAX_OUTBOX_WEIGHT", 5_000)
    await client.send(*(submit(submit_id, max_tokens=10**6) for submit_id in range(100)))
    await harness.until_engine_is_empty()  # only reached if they were aborted: a million tokens each
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await client.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await until(lambda: harness.server.num_streams == 0)


async def test_stop_sends_what_is_queued_before_it_ends_the_streams(
    client: RouterClient, harness: Harness
) -> None:
    await client.send(submit(1, max_tokens=10**6))
    await until(lambda: harness.server.num_requests > 0)
    stopping = asyncio.create_task(harness.server.stop(5.0))
    while await client.read() is not None:
        pass
    assert await client.call.code() is grpc.StatusCode.OK
    await stopping


async def test_describe_hands_over_the_card_and_on_request_large_tokenizer_files(
    client: RouterClient,
) -> None:
    bare = decode_description(await client.stub.describe(DescribeRequest()))
    assert bare == DescribeResponse(CARD, ReplicaId("r0"), Epoch("e1"))
    full = decode_description(await client.stub.describe(DescribeRequest(include_tokenizer=True)))
    assert len(full.tokenizer_files["tokenizer.json"]) == 8_000_000


async def test_list_blocks_streams_what_the_index_should_hold(client: RouterClient, harness: Harness) -> None:
    lists = [decode_block_list(each).hashes async for each in client.stub.list_blocks(Nothing())]
    assert b"".join(lists) == b"".join(harness.blocks)


async def test_drain_is_passed_on_and_answered_at_once(client: RouterClient, harness: Harness) -> None:
    await client.stub.drain(Nothing())
    assert harness.drains == 1


async def test_health_follows_what_the_host_says(channel: grpc.aio.Channel, harness: Harness) -> None:
    health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
    for is_serving, status in ((True, 1), (False, 2)):
        await harness.server.set_serving(is_serving)
        for service in ("", SERVICE_NAME):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == status


async def test_reflection_names_the_service(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[no-untyped-call]
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    assert SERVICE_NAME in {service.name for service in answer.list_services_response.service}
    call.cancel()


async def test_a_taken_port_is_an_error_not_a_shared_port(harness: Harness) -> None:
    port = int(harness.address.rpartition(":")[2])
    second = Harness()
    with pytest.raises(OSError, match="cannot listen"):
        await second.server.start("127.0.0.1", port)


def test_a_stream_forgets_no_delta_however_they_are_cut_into_messages() -> None:
    stream = router_stream.RouterStream(LoadSnapshot(), clock=lambda: 0.0)
    deltas = [TokenDelta(RequestKey(n, 0), (n,)) for n in range(10_000)]
    for delta in deltas:
        stream.put(delta)
    taken: list[TokenDelta] = []
    while stream.wanted.is_set():
        taken.extend(stream.take().deltas)
    assert taken == deltas


def test_an_engine_s_load_with_its_arrivals_counts_the_room_of_those() -> None:
    arrivals = Arrivals(LoadSnapshot(num_running=1, num_room_tokens=300))
    arrivals.add(1, num_requests=1, num_tokens=50, num_room_tokens=200)
    assert arrivals.load.num_room_tokens == 100
    arrivals.take(LoadSnapshot(), 1)
    assert arrivals.load.num_room_tokens is None


WORK = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(1, 3000), st.integers(0, 9)), max_size=40
)


@given(WORK)
def test_what_is_held_is_the_sum_of_what_has_not_ended(work: list[tuple[int, int, int, int]]) -> None:
    intake = Intake(max_sequences=64, max_tokens=20_000)
    sequences: dict[tuple[int, int], int] = {}
    prompts: dict[int, int] = {}
    for number, (num_prompt, num_choices, max_tokens, num_ends) in enumerate(work):
        one = submit(number, range(num_prompt), max_tokens=max_tokens, num_choices=num_choices)
        output = min(max_tokens, COUNTED_OUTPUT_TOKENS)
        fits = (
            len(sequences) + num_choices <= 64
            and sum(sequences.values()) + sum(prompts.values()) + num_prompt + num_choices * output <= 20_000
        )
        assert intake.has_room(one) == (fits or not sequences)
        if intake.has_room(one):
            intake.take(number, one)
            prompts[number] = num_prompt
            sequences |= {(number, choice): output for choice in range(num_choices)}
        for key in list(sequences)[:num_ends]:
            intake.end_sequence(key[0])
            del sequences[key]
            if not any(serial == key[0] for serial, _ in sequences):
                del prompts[key[0]]
        assert intake.num_sequences == len(sequences)
        assert intake.num_tokens == sum(sequences.values()) + sum(prompts.values())


def test_bodies_that_wait_go_in_messages_of_a_bounded_size() -> None:
    stream = RouterStream(LoadSnapshot(), time.monotonic)
    piece = bytes(MAX_FRAME_BYTES // 4 + 1)
    for number in range(10):
        stream.put(TokenDelta(RequestKey(number, 0), body=piece))
        stream.put(TokenDelta(RequestKey(number, 0), (1,)))
    frames = []
    while stream.wanted.is_set():
        frames.append(stream.take().deltas)
    assert [len(deltas) for deltas in frames] == [6, 6, 6, 2]
    assert [delta.key.number for deltas in frames for delta in deltas] == sorted([*range(10), *range(10)])
    stream.put(TokenDelta(RequestKey(1, 0), (1,)))
    assert len(stream.take().deltas) == 1


HASHES = tuple(BlockHash(bytes([n]) * 16) for n in range(3))


def announcing(submit_id: int, announcement_id: int, **fields: Any) -> Submit:
    bare = submit(submit_id, range(fields.pop("num_tokens", 5)), **fields)
    return replace(bare, announcement_id=announcement_id, announced_hashes=HASHES)


async def test_a_request_is_announced_while_nothing_of_it_is_computed(
    client: RouterClient, harness: Harness
) -> None:
    harness.engine.gate.clear()
    await client.send(announcing(1, 71, max_tokens=10**6, num_choices=3), announcing(2, 72))
    await until(lambda: len(harness.announcer.live) == 2)
    assert harness.announcer.live[71] == HASHES
    harness.engine.gate.set()
    await client.finish((2, 0))
    assert harness.announcer.live == {}
    assert harness.server.num_requests == 1


@pytest.mark.parametrize("how", ["aborted", "cut off", "one choice after the other"])
async def test_an_announcement_ends_with_its_request(
    client: RouterClient, harness: Harness, how: str
) -> None:
    harness.engine.gate.clear()
    await client.send(announcing(1, 71, num_choices=2))
    await until(lambda: bool(harness.announcer.live))
    if how == "aborted":
        await client.send(Abort(1))
    elif how == "cut off":
        client.call.cancel()
    else:
        await client.send(Abort(1, choice=0))
        await until(lambda: harness.server._open[1].choices == {1})
        assert harness.announcer.live
        await client.send(Abort(1, choice=1))
    await until(lambda: not harness.announcer.live)
    assert harness.announcer.num_begun == 1


async def test_what_the_server_refuses_is_never_announced_and_what_the_engine_refuses_is_over(
    client: RouterClient, harness: Harness
) -> None:
    await client.send(announcing(1, 71, num_tokens=300))
    await client.finish((1, 0))
    assert (harness.announcer.live, harness.announcer.num_begun) == ({}, 1)
    harness.server.drain()
    await client.send(announcing(2, 72))
    await client.finish((2, 0))
    assert harness.announcer.num_begun == 1


async def test_a_request_without_hashes_or_without_an_id_is_not_announced(
    client: RouterClient, harness: Harness
) -> None:
    await client.send(announcing(1, 0), replace(announcing(2, 72), announced_hashes=()))
    await client.finish((1, 0), (2, 0))
    assert harness.announcer.num_begun == 0


async def test_a_request_that_will_only_add_a_resume_point_is_announced(
    client: RouterClient, harness: Harness
) -> None:
    harness.engine.gate.clear()
    await client.send(replace(announcing(1, 71), announced_hashes=(), announced_points=HASHES[:1]))
    await until(lambda: harness.announcer.live == {71: HASHES[:1]})
    harness.engine.gate.set()
    await client.finish((1, 0))
    assert harness.announcer.live == {}


async def test_two_requests_with_one_announcement_end_it_once(client: RouterClient, harness: Harness) -> None:
    harness.engine.gate.clear()
    await client.send(announcing(1, 71), announcing(2, 71))
    await until(lambda: harness.server.num_requests == 2)
    await client.send(Abort(2))
    await until(lambda: harness.server.num_requests == 1)
    assert set(harness.announcer.live) == {71}
    harness.engine.gate.set()
    await client.finish((1, 0))
    assert harness.announcer.live == {}


@pytest.mark.timeout(60)
async def test_in_a_storm_no_announcement_outlives_its_request(
    harness: Harness, channel: grpc.aio.Channel
) -> None:
    rng = random.Random(4)
    clients = [RouterClient(channel) for _ in range(3)]
    for step in range(400):
        which = rng.randrange(3)
        if rng.random() < 0.04:
            clients[which].call.cancel()
            clients[which] = RouterClient(channel)
        submit_id = step + 1
        fields: dict[str, Any] = {"max_tokens": rng.randrange(1, 50), "num_choices": rng.randrange(1, 4)}
        if rng.random() < 0.1:
            fields["num_tokens"] = 300
        await clients[which].send(announcing(submit_id, submit_id, **fields))
        if rng.random() < 0.5:
            await clients[which].send(Abort(rng.randrange(1, submit_id + 1)))
        if rng.random() < 0.1:
            harness.engine.gate.clear()
        if rng.random() < 0.3:
            harness.engine.gate.set()
        assert len(harness.announcer.live) <= harness.server.num_requests
    harness.engine.gate.set()
    await harness.until_engine_is_empty()
    assert harness.announcer.live == {}
    assert harness.announcer.num_begun > 100


async def test_each_frame_counts_exactly_the_submits_that_it_says(
    client: RouterClient, harness: Harness
) -> None:
    rng = random.Random(8)
    ordinals: dict[int, int] = {}
    finished: set[int] = set()
    num_refused = 0
    frame = await client.read()
    while len(finished) < 300:
        assert frame is not None
        ends = [delta for delta in frame.deltas if delta.finish_reason is not None]
        finished |= {ordinals[delta.key.number] for delta in ends}
        num_refused += sum(delta.refusal is not None for delta in ends)
        assert frame.num_counted_submits <= len(ordinals)
        num_gone = sum(ordinal <= frame.num_counted_submits for ordinal in finished)
        num_there = frame.load.num_running + frame.load.num_waiting
        assert num_there == frame.num_counted_submits - num_gone
        if len(ordinals) < 300:
            for _ in range(rng.randrange(4)):
                submit_id = len(ordinals) + 1
                ordinals[submit_id] = submit_id
                kind = rng.random()
                num_choices = MAX_CHOICES + 1 if kind < 0.05 else 1  # refused by the server
                prompt = range(300 if kind > 0.95 else 5)  # refused by the engine
                max_tokens = rng.randrange(1, 6)
                await client.send(submit(submit_id, prompt, max_tokens=max_tokens, num_choices=num_choices))
        frame = await client.read()
    while frame is not None and frame.num_counted_submits < len(ordinals):
        frame = await client.read()
    assert num_refused > 5


async def test_a_request_is_part_of_the_load_while_the_engine_is_busy_with_a_step(
    client: RouterClient, channel: grpc.aio.Channel, harness: Harness
) -> None:
    """Of what is known to every router, not only to the one that sent it."""
    other = RouterClient(channel)
    harness.engine.gate.clear()
    await client.send(submit(1, range(5), max_tokens=1))
    await client.send(submit(2, range(200), max_tokens=1, num_choices=3))
    await client.send(replace(submit(3, range(200), max_tokens=1), num_expected_tokens=7))
    for router, num_submits in ((client, 3), (other, 0)):
        frame = await router.read()
        while frame is not None and frame.load.num_running + frame.load.num_waiting < 5:
            frame = await router.read()
        assert frame is not None
        assert frame.num_counted_submits == num_submits
        assert frame.load.num_pending_tokens == 5 + 200 + 7
    assert harness.server.load.num_running + harness.server.load.num_waiting == 5
    await client.send(Abort(2))
    await until(lambda: harness.sample("replica_aborts_total") == 1)
    harness.engine.gate.set()
    while frame is not None and frame.load.num_running + frame.load.num_waiting > 2:
        frame = await other.read()
    assert frame is not None and frame.load.num_pending_tokens <= 5 + 7
    await harness.until_engine_is_empty()
    assert (harness.server.load.num_running, harness.server.load.num_waiting) == (0, 0)
    assert harness.server.load.num_pending_tokens == 0


async def test_images_are_part_of_the_load_before_the_engine_has_counted_them(
    client: RouterClient, harness: Harness
) -> None:
    harness.engine.gate.clear()
    images = ImageTokens(b"\1" * 32, 10, 20), ImageTokens(b"\2" * 32, 100, 40)
    await client.send(submit(1, range(5)))
    await client.send(replace(submit(2, range(200), num_choices=2), media=images, num_expected_tokens=150))
    frame = await client.read()
    while frame is not None and frame.load.num_pending_tokens < 150:
        frame = await client.read()
    assert frame is not None and frame.load.num_pending_image_tokens == 40
    assert harness.server.load.num_pending_image_tokens == 40
    await client.send(Abort(2))
    await until(lambda: harness.server.load.num_pending_image_tokens == 0)
    harness.engine.gate.set()
    await harness.until_engine_is_empty()


async def test_every_submit_is_counted_with_the_load_that_is_offered_next() -> None:
    stream = router_stream.RouterStream(LoadSnapshot(), clock=lambda: 0.0)
    assert stream.take().num_counted_submits == 0
    stream.submitted()
    assert stream.take().num_counted_submits == 0
    stream.submitted()
    stream.offer_load(LoadSnapshot())
    assert stream.take().num_counted_submits == 2


async def test_a_load_that_counts_another_submit_is_news_though_its_numbers_are_the_same() -> None:
    stream = router_stream.RouterStream(LoadSnapshot(), clock=lambda: 0.0)
    stream.take()
    stream.offer_load(LoadSnapshot())
    assert stream._timer is None
    stream.submitted()
    stream.offer_load(LoadSnapshot())
    assert stream._timer is not None
    stream.cut()
