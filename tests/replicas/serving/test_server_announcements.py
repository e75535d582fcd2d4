"""What the server tells before anything is computed: which blocks are coming, and how much there is to do."""

import random
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from replicas.protocol.blocks import BlockHash, ImageTokens
from replicas.protocol.frames import Abort, LoadSnapshot, Submit
from replicas.serving import router_stream
from replicas.serving.server import MAX_CHOICES
from tests.replicas.router_client import RouterClient, submit
from tests.replicas.served_engine import Harness, channel, client, harness
from tests.replicas.waiting import until

__all__ = ["channel", "client", "harness"]

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
