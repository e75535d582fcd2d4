"""What a prompt takes at a replica, with its images; what begins an overload of a model."""

import dataclasses

import pytest
from msgspec.structs import replace

from replicas.protocol.blocks import ImageTokens
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.status import Adapter, ReplicaId
from router.errors import NoReplicaAvailable
from router.queue.held import Asking, Held, QueueRules
from router.queue.holding import Holding
from router.queue.room import DEFAULT_TOKEN_SECONDS, Room
from router.routing.decision import RoutingRequest
from router.routing.table import RoutedRequest
from tests.router.routing.tables import BLOCK_SIZE, CARD, table_of

A = ReplicaId("r0")
IMAGES = (ImageTokens(b"", 100, 64), ImageTokens(b"", 300, 32))


@pytest.fixture
def room() -> Room:
    return Room(table_of(1), target_seconds=1.0)


def asked(*media: ImageTokens) -> RoutingRequest:
    return RoutingRequest(b"bucket", 500, BLOCK_SIZE, media=media)


def test_images_take_nothing_while_nobody_has_measured_them(room: Room) -> None:
    room.table.update_load(A, LoadSnapshot(num_running=1, num_pending_image_tokens=1000))
    assert room.wait_seconds(A, 500) == 0.0
    assert room.prompt_seconds(A, asked(*IMAGES), 500) == pytest.approx(500 * DEFAULT_TOKEN_SECONDS)


def test_images_take_their_time_where_any_of_them_is_computed(room: Room) -> None:
    measured = LoadSnapshot(
        num_running=1,
        num_pending_tokens=10,
        num_pending_image_tokens=90,
        prefill_seconds_per_token=1e-3,
        encode_seconds_per_token=1e-2,
    )
    room.table.update_load(A, measured)
    assert room.wait_seconds(A, 500) == pytest.approx(0.01 + 0.9)
    assert not room.is_full(A)
    for num_uncached, num_image_tokens in ((500, 96), (336, 32), (337, 96), (168, 0), (169, 32)):
        taken = room.prompt_seconds(A, asked(*IMAGES), num_uncached)
        assert taken == pytest.approx(num_uncached * 1e-3 + num_image_tokens * 1e-2), num_uncached
    room.table.update_load(A, replace(measured, num_pending_image_tokens=200))
    assert room.is_full(A)


@pytest.mark.parametrize(("num_others", "is_full"), [(0, False), (2, False), (8, True)])
def test_what_other_routers_may_be_sending_counts_by_their_part_of_the_requests(
    room: Room, num_others: int, is_full: bool
) -> None:
    """One request of this router's is there, and another on its way with 0.3 s of prompt."""
    room.table.loads.reserve(A, num_uncached_tokens=100, num_tokens=100).sent(1)
    room.table.update_load(A, LoadSnapshot(num_running=1 + num_others, prefill_seconds_per_token=1e-3), 1)
    assert not room.is_full(A), "nothing is on its way"
    room.table.loads.reserve(A, num_uncached_tokens=300, num_tokens=300).sent(2)
    assert room.is_full(A) == is_full
    assert room.wait_seconds(A, 500) == pytest.approx(0.3), "what is known alone tells an overload"


def test_a_prompt_waits_until_requests_that_end_leave_room_for_it(room: Room) -> None:
    """300 tokens are free, of which 100 are promised to another that is on its way."""
    load = LoadSnapshot(
        num_running=1,
        num_total_blocks=100,
        num_room_tokens=300,
        room_seconds_per_token=1e-2,
        prefill_seconds_per_token=1e-6,
    )
    room.table.update_load(A, load)
    room.table.loads.reserve(A, num_uncached_tokens=100, num_tokens=100)
    assert room.wait_seconds(A, 200) == pytest.approx(1e-4)
    assert room.wait_seconds(A, 250) == pytest.approx(0.5 + 1e-4)
    assert room.is_there(A, 300) and not room.is_there(A, 301), "what is soon given back is room"
    assert not room.is_there(A, 300, spared=0.1)
    assert not room.is_full(A)
    room.table.update_load(A, replace(load, num_room_tokens=-100))
    assert room.is_full(A), "two others wait for room"
    room.table.update_load(A, replace(load, num_room_tokens=-100, num_running=0))
    assert room.wait_seconds(A, 200) > 1.0
    room.table.update_load(A, replace(load, num_room_tokens=None))
    assert room.is_there(A, 10**6) and room.wait_seconds(A, 10**6) == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("max_running", "spared", "most"),
    [(256, 0.0, 258), (256, 0.2, 205), (4, 0.2, 3), (4, 1 / 16, 6), (1, 0.2, 3)],
)
def test_places_left_for_others_are_rounded_and_a_full_batch_has_a_few_beyond(
    room: Room, max_running: int, spared: float, most: int
) -> None:
    room.table.update_card(A, dataclasses.replace(CARD, max_running=max_running))
    for num_running in (most - 1, most):
        room.table.update_load(A, LoadSnapshot(num_running=num_running))
        assert room.has_full_batch(A, spared) == (num_running == most)


def test_a_replica_that_runs_nothing_has_room(room: Room) -> None:
    room.table.update_load(A, LoadSnapshot(num_room_tokens=-100, room_seconds_per_token=1.0))
    assert room.is_there(A, 500) and room.wait_seconds(A, 500) == 0.0


BUSY = LoadSnapshot(num_running=1, num_pending_tokens=1000, prefill_seconds_per_token=1e-3)


def asking(adapter: Adapter | None = None) -> Asking:
    return Asking(CARD.name, "red", RoutingRequest(b"bucket", 100, BLOCK_SIZE), (), adapter)


@pytest.fixture
def holding() -> Holding:
    """A replica that is busy, and no overload."""
    table = table_of(1)
    table.update_load(A, BUSY)
    return Holding(table, QueueRules())


def ask_in_vain(holding: Holding, adapter: Adapter | None = None) -> None:
    with pytest.raises(NoReplicaAvailable):
        holding.ask(asking(adapter), 0.0, lambda: None)


def test_an_adapter_that_no_replica_has_ready_holds_no_other_request_back(holding: Holding) -> None:
    ask_in_vain(holding, Adapter("sql", "f1"))
    assert isinstance(holding.ask(asking(), 1.0, lambda: None), RoutedRequest)


def test_after_all_replicas_were_away_requests_are_held(holding: Holding) -> None:
    holding._table.set_stalled(A, is_stalled=True)
    ask_in_vain(holding)
    holding._table.set_stalled(A, is_stalled=False)
    assert isinstance(holding.ask(asking(), 1.0, lambda: None), Held)
