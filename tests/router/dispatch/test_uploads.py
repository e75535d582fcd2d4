"""Generations with images: each is with its replica before the prompt that refers to it, whatever happens."""

import asyncio
import os
from dataclasses import replace
from typing import Any

import grpc
import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from replicas.protocol.blocks import ImageTokens
from replicas.protocol.frames import RefusalCode
from replicas.protocol.images import media_hash
from replicas.protocol.media import MEDIA_PART_BYTES
from replicas.protocol.status import ReplicaId
from router.errors import (
    GenerationFailed,
    InvalidRequest,
    NoReplicaAvailable,
    Overloaded,
    RouterError,
    TooLate,
)
from router.fleet.image_traffic import FAILURES
from router.fleet.image_uploads import MAX_UPLOADS
from router.generation import Generation
from router.observation.metrics import RouterMetrics
from router.prompt.images import Media
from router.queue.work import Charge
from tests.router.dispatched_fleet import (
    GENERATION,
    ROOT,
    DispatchedFleet,
    assert_complete,
    changed,
    fleet,
    generate,
)
from tests.router.scripted_replica import eventually

__all__ = ["fleet"]

PICTURE, LARGE = b"a picture", os.urandom(2 * MEDIA_PART_BYTES + 1)


def showing(*contents: bytes, **values: Any) -> Generation:
    """A generation whose prompt refers to these images."""
    media = [Media(media_hash(ROOT, content), content) for content in contents]
    spans = tuple(ImageTokens(each.content_hash, 10 * place, 5) for place, each in enumerate(media))
    generation = changed(GENERATION, **values)
    return replace(generation, media=media, submit=structs.replace(generation.submit, media=spans))


async def test_images_go_before_the_prompt_whole_and_once(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    assert_complete(await generate(fleet, showing(LARGE, PICTURE)), 1)
    assert_complete(await generate(fleet, showing(PICTURE)), 1)
    assert sorted(replica.media.values()) == sorted([LARGE, PICTURE])
    assert replica.num_uploads == 2
    first, second = replica.submits
    assert [span.content_hash for span in first.media] == [
        media_hash(ROOT, each) for each in (LARGE, PICTURE)
    ]
    assert len(second.media) == 1
    assert (fleet.traffic.images.num_sent, fleet.traffic.images.num_known) == (2, 1)
    assert fleet.traffic.images.num_bytes == len(LARGE) + len(PICTURE)
    uploads = fleet.traffic.images.uploads.of()
    assert sum(uploads.counts) == 2 and uploads.total > 0
    fleet.assert_nothing_reserved()


async def test_images_are_counted_for_as_long_as_the_router_lives(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    await generate(fleet, showing(PICTURE))
    await generate(fleet, showing(PICTURE, LARGE))
    assert (fleet.traffic.images.num_sent, fleet.traffic.images.num_known) == (2, 1)
    await fleet.clients[ReplicaId("r0")].close()
    fleet.connect(replica)
    assert_complete(await generate(fleet, showing(PICTURE)), 1)
    assert (fleet.traffic.images.num_sent, fleet.traffic.images.num_again) == (3, 0)
    metrics = RouterMetrics(CollectorRegistry())
    metrics.add(fleet.traffic.images.instruments())
    lines = [line for family in metrics.families() for line in family.text().splitlines()]
    assert 'router_images_total{way="sent"} 3.0' in lines and 'router_images_total{way="known"} 1.0' in lines
    assert "router_image_upload_seconds_count 3.0" in lines
    assert 'router_image_failures_total{reason="overloaded"} 0.0' in lines  # there before the first
    assert f"router_image_bytes_total {float(2 * len(PICTURE) + len(LARGE))}" in lines


async def test_prompts_that_wait_for_one_image_wait_for_one_upload(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.holds_uploads = True
    runs = [asyncio.create_task(generate(fleet, showing(PICTURE))) for _ in range(5)]
    await eventually(lambda: replica.num_uploads == 1)
    assert not replica.submits
    replica.script.holds_uploads = False
    for run in runs:
        assert_complete(await run, 1)
    assert (replica.num_uploads, len(replica.submits)) == (1, 5)
    assert (fleet.traffic.images.num_sent, fleet.traffic.images.num_shared) == (1, 4)


async def test_what_a_replica_has_forgotten_is_sent_again_to_the_same_one(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    await generate(fleet, showing(PICTURE, LARGE))
    replica.media.clear()
    assert_complete(await generate(fleet, showing(PICTURE, LARGE)), 1)
    assert replica.num_uploads == 4
    assert (fleet.traffic.images.num_sent, fleet.traffic.images.num_again) == (4, 2)
    assert [len(submit.media) for submit in replica.submits] == [2, 2, 2]
    fleet.assert_nothing_reserved()


async def test_a_replica_that_never_has_it_is_not_asked_for_ever(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.refusal = RefusalCode.MEDIA_MISSING
    with pytest.raises(Overloaded, match="fewer or smaller"):
        await generate(fleet, showing(PICTURE))
    assert replica.num_uploads == len(replica.submits) == 3
    fleet.assert_nothing_reserved()


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest, "no such picture"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded, "busy"),
        (grpc.StatusCode.INTERNAL, NoReplicaAvailable, "Try again"),
    ],
)
async def test_an_image_that_is_not_taken_ends_its_request_alone(
    fleet: DispatchedFleet, code: grpc.StatusCode, error: type[RouterError], message: str
) -> None:
    replica = await fleet.add("r0")
    replica.script.upload_error = code
    with pytest.raises(error, match=message):
        await generate(fleet, showing(PICTURE))
    assert not replica.submits
    failures = fleet.traffic.images.num_failed
    assert failures.total() == replica.num_uploads
    assert set(failures) == set(FAILURES) and sum(map(bool, failures.values())) == 1
    assert fleet.traffic.images.num_sent == 0
    assert_complete(await generate(fleet), 1)
    fleet.assert_nothing_reserved()


async def test_where_one_replica_takes_no_image_another_does(fleet: DispatchedFleet) -> None:
    for name in ("r0", "r1"):
        (await fleet.add(name)).script.upload_error = grpc.StatusCode.RESOURCE_EXHAUSTED
    fleet.replicas[ReplicaId("r1")].script.upload_error = None
    for place in range(8):
        picture = b"picture %d" % place
        generation = showing(picture, bucket=b"bucket %d" % place)
        assert_complete(await generate(fleet, generation), 1)
    refusing = fleet.replicas[ReplicaId("r0")]
    assert refusing.num_uploads and not refusing.submits
    fleet.assert_nothing_reserved()


async def test_a_client_that_goes_while_its_image_is_sent_leaves_nothing(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.holds_uploads = True
    run = asyncio.create_task(generate(fleet, showing(PICTURE)))
    await eventually(lambda: replica.num_uploads == 1)
    assert fleet.table.loads.num_reserved == 1
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    fleet.assert_nothing_reserved()
    replica.script.holds_uploads = False
    assert_complete(await generate(fleet, showing(PICTURE)), 1)
    assert replica.num_uploads == 1, "what had begun went on"


async def test_an_image_that_takes_too_long_is_too_late(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.holds_uploads = True
    with pytest.raises(TooLate):
        await generate(fleet, showing(PICTURE, timeout_seconds=0.2))
    assert not replica.submits
    fleet.assert_nothing_reserved()
    replica.script.holds_uploads = False


async def test_a_replica_that_dies_with_an_image_on_its_way_costs_only_time(fleet: DispatchedFleet) -> None:
    dying = await fleet.add("r0")
    dying.script.holds_uploads = True
    run = asyncio.create_task(generate(fleet, showing(PICTURE)))
    await eventually(lambda: dying.num_uploads == 1)
    other = await fleet.add("r1")
    dying.script.holds_uploads = False
    dying.script.upload_error = grpc.StatusCode.INTERNAL
    await dying.kill()
    assert_complete(await run, 1)
    assert len(other.submits) == other.num_uploads == 1
    fleet.assert_nothing_reserved()


async def test_an_answer_that_goes_on_elsewhere_takes_its_images_along(fleet: DispatchedFleet) -> None:
    dying = await fleet.add("r0")
    dying.script.step_seconds = 0.01
    dying.script.die_after_tokens = 7
    run = asyncio.create_task(generate(fleet, showing(PICTURE, LARGE)))
    await eventually(lambda: dying.num_tokens_sent > 0)
    other = await fleet.add("r1")
    assert_complete(await run, 1)
    assert sorted(other.media.values()) == sorted([LARGE, PICTURE])
    (submit,) = other.submits
    assert submit.num_output_tokens == 7 and len(submit.media) == 2
    fleet.assert_nothing_reserved()


async def test_a_tenant_is_charged_once_however_often_an_image_is_not_taken(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.upload_error = grpc.StatusCode.RESOURCE_EXHAUSTED
    charges: list[Charge] = []
    holding = fleet.dispatcher.holding
    charge = holding.charge

    def noted(*arguments: Any) -> Charge:
        charges.append(charge(*arguments))
        return charges[-1]

    holding.charge = noted  # type: ignore[method-assign, assignment]
    closed: list[Charge] = []
    with pytest.MonkeyPatch.context() as patch:
        close = Charge.close

        def counted(self: Charge, now: float | None = None) -> None:
            closed.append(self)
            close(self, now)

        patch.setattr(Charge, "close", counted)
        with pytest.raises(Overloaded):
            await generate(fleet, showing(PICTURE))
    assert len(charges) > 1 and {id(each) for each in charges} == {id(each) for each in closed}


async def test_a_burst_of_images_waits_its_turn_at_the_router(fleet: DispatchedFleet) -> None:
    """A replica takes so many calls at once, of all routers, and refuses more."""
    replica = await fleet.add("r0")
    replica.script.holds_uploads = True
    runs = [
        asyncio.create_task(generate(fleet, showing(f"picture {number}".encode(), bucket=b"b%d" % number)))
        for number in range(5 * MAX_UPLOADS)
    ]
    await eventually(lambda: replica.num_uploads == MAX_UPLOADS)
    await asyncio.sleep(0.05)
    assert replica.num_uploads == MAX_UPLOADS
    replica.script.holds_uploads = False
    for run in runs:
        assert_complete(await run, 1)
    assert replica.num_uploads == len(replica.media) == len(runs)
    fleet.assert_nothing_reserved()


async def test_what_waits_its_turn_goes_with_the_last_who_wants_it(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.holds_uploads = True
    first = [
        asyncio.create_task(generate(fleet, showing(b"first %d" % number))) for number in range(MAX_UPLOADS)
    ]
    await eventually(lambda: replica.num_uploads == MAX_UPLOADS)
    wanted = [asyncio.create_task(generate(fleet, showing(b"wanted"))) for _ in range(2)]
    unwanted = [asyncio.create_task(generate(fleet, showing(b"unwanted"))) for _ in range(2)]
    uploads = fleet.clients[ReplicaId("r0")].media
    await eventually(lambda: len(uploads._sending) == MAX_UPLOADS + 2)
    for run in (*unwanted, wanted[0]):
        run.cancel()
    await asyncio.gather(*unwanted, wanted[0], return_exceptions=True)
    await eventually(lambda: len(uploads._sending) == MAX_UPLOADS + 1)
    again = asyncio.create_task(generate(fleet, showing(b"unwanted")))
    await eventually(lambda: len(uploads._sending) == MAX_UPLOADS + 2)
    replica.script.holds_uploads = False
    for run in (*first, wanted[1], again):
        assert_complete(await run, 1)
    assert replica.num_uploads == MAX_UPLOADS + 2 and not uploads._sending
    fleet.assert_nothing_reserved()


async def test_a_picture_that_kills_replicas_condemns_no_other_of_its_size(fleet: DispatchedFleet) -> None:
    for name in ("r0", "r1"):
        replica = await fleet.add(name)
        replica.script.step_seconds, replica.script.die_after_tokens = 0.01, 1
    with pytest.raises(GenerationFailed):
        await generate(fleet, showing(b"poison"))
    healthy = await fleet.add("r2")
    assert_complete(await generate(fleet, showing(b"harmless")), 1)
    with pytest.raises(GenerationFailed, match="died computing this prompt"):
        await generate(fleet, showing(b"poison"))
    assert len(healthy.submits) == 1


async def test_a_suspect_is_tried_alone_though_its_image_is_on_its_way(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0", holding=True)
    suspect, state = showing(b"suspect"), fleet.dispatcher
    digest = state.suspects.digest(suspect.model, suspect.token_ids_with_images(), suspect.caller.owner)
    state.suspects.blame([(digest, True)], state.clock())
    replica.script.holds_uploads = True
    runs = [asyncio.create_task(generate(fleet, suspect)) for _ in range(3)]
    await eventually(lambda: replica.num_uploads == 1)
    await asyncio.sleep(0.05)
    replica.script.holds_uploads = False
    await eventually(lambda: len(replica.submits) == 1)
    await asyncio.sleep(0.1)
    assert len(replica.submits) == state.suspects.num_on_trial == 1
    replica.script.holding = False
    for run in runs:
        assert_complete(await run, 1)
    fleet.assert_nothing_reserved()


async def test_an_answer_that_has_begun_goes_on_where_its_image_is_taken(fleet: DispatchedFleet) -> None:
    dying = await fleet.add("r0")
    dying.script.step_seconds, dying.script.die_after_tokens = 0.01, 7
    run = asyncio.create_task(generate(fleet, showing(PICTURE)))
    await eventually(lambda: dying.num_tokens_sent > 0)
    refusing = await fleet.add("r1")
    refusing.script.upload_error = grpc.StatusCode.INVALID_ARGUMENT
    await eventually(lambda: refusing.num_uploads > 0)
    await fleet.add("r2")
    assert_complete(await run, 1)
    fleet.assert_nothing_reserved()
