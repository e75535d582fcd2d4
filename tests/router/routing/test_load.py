"""The load book: what is reserved, what the replica says, and nothing twice for long."""

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.status import ReplicaId
from router.routing.load import LEAST_MOVE_SECONDS, LOOKS_OF_SILENCE, LoadBook, ReplicaLoad, Reservation
from tests.examples import examples

A, B = ReplicaId("a"), ReplicaId("b")


def numbers(load: ReplicaLoad) -> tuple[int, int, int]:
    return load.num_requests, load.num_pending_tokens, load.num_context_tokens


def test_a_replica_that_nobody_spoke_of_is_idle() -> None:
    assert LoadBook().view(A) == ReplicaLoad()


def test_a_reservation_counts_at_once_and_is_given_back() -> None:
    book = LoadBook()
    with book.reserve(A, num_uncached_tokens=70, num_tokens=100):
        assert numbers(book.view(A)) == (1, 70, 100)
        assert numbers(book.view(B)) == (0, 0, 0)
        assert book.num_reserved == 1
    assert numbers(book.view(A)) == (0, 0, 0)
    assert book.num_reserved == 0


def test_it_is_given_back_whatever_happens() -> None:
    book = LoadBook()
    with pytest.raises(KeyError), book.reserve(A, num_uncached_tokens=70, num_tokens=100):
        raise KeyError
    assert book.num_reserved == 0
    assert numbers(book.view(A)) == (0, 0, 0)


def test_it_is_given_back_only_once() -> None:
    book = LoadBook()
    first = book.reserve(A, num_uncached_tokens=7, num_tokens=10)
    with book.reserve(A, num_uncached_tokens=7, num_tokens=10):
        first.release()
        first.release()
        assert numbers(book.view(A)) == (1, 7, 10)


def test_a_snapshot_counts_it_away_when_it_says_so_and_not_before() -> None:
    book = LoadBook()
    with (
        book.reserve(A, num_uncached_tokens=70, num_tokens=100) as first,
        book.reserve(A, num_uncached_tokens=5, num_tokens=1000) as second,
    ):
        first.sent(1)
        second.sent(2)
        for _ in range(9):
            book.update(A, LoadSnapshot(num_running=3, num_context_tokens=900), 0)
        assert numbers(book.view(A)) == (5, 75, 2000)
        book.update(A, LoadSnapshot(num_running=3, num_waiting=1, num_pending_tokens=70), 1)
        assert numbers(book.view(A)) == (5, 75, 1000)
        book.update(A, LoadSnapshot(num_running=5, num_pending_tokens=60), 2)
        assert numbers(book.view(A)) == (5, 60, 0)


def test_a_snapshot_says_nothing_of_what_has_not_been_sent() -> None:
    book = LoadBook()
    with book.reserve(A, num_uncached_tokens=70, num_tokens=100) as reservation:
        book.update(A, LoadSnapshot(), 5)
        assert numbers(book.view(A)) == (1, 70, 100)
        reservation.sent(6)
        book.update(A, LoadSnapshot(), 5)
        assert numbers(book.view(A)) == (1, 70, 100)
        book.update(A, LoadSnapshot(), 6)
        assert numbers(book.view(A)) == (0, 0, 0)
        assert book.num_reserved == 1
    assert book.num_reserved == 0


def test_what_was_given_back_is_not_counted_away_again() -> None:
    book = LoadBook()
    reservation = book.reserve(A, num_uncached_tokens=70, num_tokens=100)
    reservation.sent(1)
    reservation.release()
    book.update(A, LoadSnapshot(), 1)
    assert numbers(book.view(A)) == (0, 0, 0)


def test_a_burst_between_two_snapshots_adds_up() -> None:
    book = LoadBook()
    reservations = [book.reserve(A, num_uncached_tokens=10, num_tokens=20) for _ in range(1000)]
    assert numbers(book.view(A)) == (1000, 10_000, 20_000)
    for reservation in reservations:
        reservation.release()
    assert numbers(book.view(A)) == (0, 0, 0)


def test_rates_are_unknown_until_they_are_measured() -> None:
    book = LoadBook()
    book.update(A, LoadSnapshot(), 0)
    assert book.view(A).prefill_seconds_per_token is None
    assert book.view(A).decode_step_seconds is None
    book.update(A, LoadSnapshot(prefill_seconds_per_token=0.5, decode_step_seconds=0.25), 0)
    assert book.view(A).prefill_seconds_per_token == 0.5
    assert book.view(A).decode_step_seconds == 0.25


def test_no_replica_moves_kv_faster_than_hardware_does_whatever_it_claims() -> None:
    book = LoadBook()
    claims = {"host_seconds_per_token": 1e-30, "disk_seconds_per_token": 2e-5}
    book.update(A, msgspec.structs.replace(LoadSnapshot(), **claims), 0)
    load = book.view(A)
    assert load.speeds.host == LEAST_MOVE_SECONDS
    assert load.speeds.disk == 2e-5
    assert load.speeds.pull is None


def test_a_heartbeat_counts_before_the_first_frame_and_when_frames_have_long_stopped() -> None:
    book = LoadBook()
    book.update_from_registry(A, LoadSnapshot(num_running=9))
    assert book.view(A).num_requests == 9
    book.update(A, LoadSnapshot(num_running=2), 0)
    for _ in range(LOOKS_OF_SILENCE):
        book.update_from_registry(A, LoadSnapshot(num_running=9))
        assert book.view(A).num_requests == 2
    book.update_from_registry(A, LoadSnapshot(num_running=4))
    assert book.view(A).num_requests == 4


def test_a_heartbeat_acknowledges_nothing() -> None:
    book = LoadBook()
    with book.reserve(A, num_uncached_tokens=70, num_tokens=100):
        for _ in range(20):
            book.update_from_registry(A, LoadSnapshot(num_running=5))
        assert book.view(A).num_requests == 6


def test_a_reservation_on_a_replica_that_went_does_not_haunt_its_successor() -> None:
    book = LoadBook()
    reservation = book.reserve(A, num_uncached_tokens=70, num_tokens=100)
    book.forget(A)
    assert book.num_reserved == 0
    with book.reserve(A, num_uncached_tokens=1, num_tokens=2):
        reservation.release()
        assert numbers(book.view(A)) == (1, 1, 2)


def test_images_to_encode_count_beside_the_tokens_and_are_given_back() -> None:
    book = LoadBook()
    book.update(A, LoadSnapshot(num_pending_image_tokens=7, encode_seconds_per_token=0.5), 0)
    with book.reserve(A, num_uncached_tokens=70, num_tokens=100, num_image_tokens=64) as reservation:
        assert numbers(book.view(A)) == (1, 70, 100)
        assert book.view(A).num_pending_image_tokens == 71
        reservation.sent(1)
        book.update(A, LoadSnapshot(num_running=1, num_pending_image_tokens=64), 1)
        assert book.view(A).num_pending_image_tokens == 64
        assert book.view(A).encode_seconds_per_token is None
    assert book.view(A).num_pending_image_tokens == 64


class Storm(RuleBasedStateMachine):
    """A replica that counts what it has admitted, and a router that hears of it late and gives up at will."""

    def __init__(self) -> None:
        super().__init__()
        self.book = LoadBook()
        self.open: list[Reservation] = []
        self.sent: list[Reservation] = []
        """By ordinal, from 1."""
        self.num_counted = 0
        self.snapshot = LoadSnapshot()

    @rule(uncached=st.integers(0, 100), cached=st.integers(1, 100))
    def reserve(self, uncached: int, cached: int) -> None:
        self.open.append(
            self.book.reserve(
                A,
                num_uncached_tokens=uncached,
                num_tokens=uncached + cached,
                num_image_tokens=uncached // 2,
                num_choices=cached,
            )
        )

    @precondition(lambda self: any(reservation not in self.sent for reservation in self.open))
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        unsent = [reservation for reservation in self.open if reservation not in self.sent]
        reservation = data.draw(st.sampled_from(unsent))
        self.sent.append(reservation)
        reservation.sent(len(self.sent))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        reservation = data.draw(st.sampled_from(self.open))
        reservation.release()
        self.open.remove(reservation)

    @rule(data=st.data(), requests=st.integers(0, 5), tokens=st.integers(0, 100))
    def hear(self, data: st.DataObject, requests: int, tokens: int) -> None:
        self.num_counted = data.draw(st.integers(self.num_counted, len(self.sent)))
        self.snapshot = LoadSnapshot(num_running=requests, num_pending_tokens=tokens)
        self.book.update(A, self.snapshot, self.num_counted)

    @rule(requests=st.integers(0, 5))
    def heartbeat(self, requests: int) -> None:
        if self.book._book(A).num_silent_looks >= LOOKS_OF_SILENCE:
            self.snapshot = LoadSnapshot(num_waiting=requests)
        self.book.update_from_registry(A, LoadSnapshot(num_waiting=requests))

    @invariant()
    def everything_open_counts_once(self) -> None:
        counted = self.sent[: self.num_counted]
        on_the_way = [reservation for reservation in self.open if reservation not in counted]
        snapshot = self.snapshot
        assert self.book.num_reserved == len(self.open)
        assert self.book.num_places_at(A) == sum(each.num_choices for each in self.open)
        assert numbers(self.book.view(A)) == (
            snapshot.num_running + snapshot.num_waiting + sum(each.num_choices for each in on_the_way),
            snapshot.num_pending_tokens + sum(reserved.num_uncached_tokens for reserved in on_the_way),
            sum(reserved.num_tokens for reserved in on_the_way),
        )
        assert self.book.view(A).num_pending_image_tokens == sum(
            reserved.num_image_tokens for reserved in on_the_way
        )

    def teardown(self) -> None:
        for reservation in self.open:
            reservation.release()
        self.book.update(A, LoadSnapshot(), self.num_counted)
        assert self.book.view(A) == ReplicaLoad()
        assert self.book.num_reserved == 0
        assert not self.book._book(A).sent_reservations


TestStorm = Storm.TestCase
TestStorm.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)


def test_a_cache_is_as_full_as_its_blocks_in_use_or_those_that_can_be_found_whichever_are_more() -> None:
    book = LoadBook()
    assert book.view(A).cache_fill == 0.0
    book.update(A, LoadSnapshot(num_used_blocks=30, num_cached_blocks=10, num_total_blocks=40), 0)
    assert book.view(A).cache_fill == 0.75
    book.update(A, LoadSnapshot(num_used_blocks=1, num_cached_blocks=50, num_total_blocks=40), 0)
    assert book.view(A).cache_fill == 1.0
