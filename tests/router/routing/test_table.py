"""The routing table and the load book: decide, reserve, predict, and give all of it back."""

import contextlib
import random
from dataclasses import replace

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replicas.protocol.blocks import hash_blocks, pack_token_ids
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import IndexChange
from replicas.protocol.status import Adapter, Epoch, ModelCard, ReplicaId
from router.errors import NoReplicaAvailable, UnknownModel
from router.routing.bucket import bucket_of
from router.routing.cost import CostParameters
from router.routing.decision import DecisionReason, RoutingRequest
from router.routing.load import LEAST_MOVE_SECONDS, LOOKS_OF_SILENCE, LoadBook, ReplicaLoad, Reservation
from router.routing.policies import POLICIES
from router.routing.table import RoutedRequest, RoutingTable
from tests.examples import examples
from tests.router.routing.tables import BLOCK_SIZE, CARD, ROOT, STRIDE, Clock, prompt, route, store, table_of


def test_only_what_is_not_cached_is_reserved_as_prefill() -> None:
    table = table_of(4)
    store(table, ReplicaId("r2"), prompt(0, 1, 512))
    with route(table, prompt(0, 1, 520)) as routed:
        assert routed.decision.replica_id == "r2"
        assert routed.decision.overlap_tokens == 512
        assert table.load(ReplicaId("r2")).num_pending_tokens == 8


def test_the_first_token_ends_prefill_and_prediction_and_leaving_ends_the_rest() -> None:
    table = table_of(1)
    with route(table, prompt(0, 1, 500)) as routed:
        routed.sent(1)
        routed.first_token()
        assert table.num_predictions == 0
        table.update_load(ReplicaId("r0"), LoadSnapshot(num_running=1, num_context_tokens=500), 1)
        assert table.load(ReplicaId("r0")).num_requests == 1
        routed.first_token()
    assert table.loads.num_reserved == 0


def test_a_heartbeat_says_how_busy_a_silent_replica_is_and_one_of_a_stranger_nothing() -> None:
    table = table_of(2)
    busy = LoadSnapshot(num_running=7)
    table.update_load_from_registry(ReplicaId("r1"), busy)
    assert [table.load(ReplicaId(name)).num_requests for name in ("r0", "r1")] == [0, 7]
    table.update_load_from_registry(ReplicaId("stranger"), busy)
    assert table.loads.latest(ReplicaId("stranger")) is None


def test_with_a_clock_a_prediction_lingers_until_the_index_has_heard() -> None:
    clock = Clock()
    table = table_of(8, clock=clock)
    with route(table, prompt(0, 1, 2000)) as first:
        first.first_token()
    clock.seconds = 0.1
    with route(table, prompt(0, 1, 2000)) as second:
        assert second.decision.overlap_tokens == 1984
        assert second.decision.replica_id == first.decision.replica_id
    clock.seconds = 0.3
    with route(table, prompt(0, 1, 2000)) as third:
        assert third.decision.overlap_tokens == 0
    assert table.num_predictions == 0


def test_a_prediction_whose_time_is_over_can_be_dropped_without_another_decision() -> None:
    clock = Clock()
    table = table_of(8, clock=clock)
    with route(table, prompt(0, 1, 2000)) as routed:
        routed.first_token()
    table.end_lingering()
    assert table.num_predictions == 1
    clock.seconds = 0.3
    table.end_lingering()
    assert table.num_predictions == 0


@pytest.mark.parametrize("kind", ["refusing", "unread"])
def test_a_doubted_replica_is_believed_again_after_a_while_and_doubted_anew_after_one_more_fault(
    kind: str,
) -> None:
    clock = Clock()
    table = table_of(2, clock=clock)
    doubts = getattr(table, kind)
    held = ReplicaId("r1")
    store(table, held, prompt(2000, 1, 0))

    def is_chosen() -> bool:
        with route(table, prompt(2000, 1, 16)) as routed:
            has_overlap = routed.decision.overlap_tokens > 0
            assert has_overlap == (routed.decision.replica_id == held)
            return has_overlap

    while not doubts.wrong(held, clock.seconds):
        assert is_chosen()
    assert not is_chosen()
    table.set_draining(ReplicaId("r0"))
    with route(table, prompt(2000, 1, 16)) as routed:
        assert routed.decision.replica_id == held, "it is the last one"
    table.add_replica(ReplicaId("r0"), CARD, STRIDE)
    clock.seconds = 61.0
    assert is_chosen()
    assert doubts.wrong(held, clock.seconds)
    assert not is_chosen()
    assert doubts.right(held)
    assert is_chosen()
    table.remove_replica(held)
    assert not doubts.counts


def test_never_are_more_than_half_of_the_replicas_passed_over() -> None:
    table = table_of(5, clock=Clock())
    for number, used in ((1, 4), (2, 3), (3, 5)):
        while not table.refusing.wrong(ReplicaId(f"r{number}"), 0.0):
            pass
        found = set()
        for seed in range(200):
            with route(table, prompt(seed, 1, 16)) as routed:
                found.add(routed.decision.replica_id)
        assert len(found) == used


def test_an_announced_prediction_ends_when_the_replica_says_so_and_not_before() -> None:
    clock = Clock()
    table = table_of(1, clock=clock)
    index = table.index("m")
    index.replace(ReplicaId("r0"), Epoch("e"), ())
    with route(table, prompt(0, 1, 2000)) as first:
        assert len(first.announcement.block_hashes) == 2000 // STRIDE + 1
        index.apply(IndexChange(ReplicaId("r0"), Epoch("e"), 1, announced=(first.announcement,)))
        first.first_token()
    clock.seconds = 100
    with route(table, prompt(0, 1, 2000)) as second:
        assert second.decision.overlap_tokens == 1984
        # Not stored yet, so the second would compute them too, should the first be given up.
        assert second.announcement.block_hashes == first.announcement.block_hashes
    ended = (first.announcement.announcement_id,)
    added = first.announcement.block_hashes
    index.apply(IndexChange(ReplicaId("r0"), Epoch("e"), 2, added=added, ended=ended))
    assert table.num_predictions == 0
    with route(table, prompt(0, 1, 2000)) as third:
        assert third.announcement.block_hashes == ()
        assert third.decision.overlap_tokens == 1984
        assert table.num_predictions == 0


def test_no_two_requests_of_any_router_have_the_same_announcement() -> None:
    tables = [RoutingTable("kvasir", CostParameters(), random.Random(seed)) for seed in range(5)]
    ids = []
    for table in tables:
        table.add_replica(ReplicaId("r0"), CARD, STRIDE)
        for number in range(100):
            with route(table, prompt(0, number, 100)) as routed:
                ids.append(routed.announcement.announcement_id)
    assert len(set(ids)) == 500
    assert min(ids) > 0
    assert max(ids) < 2**64


def test_a_request_that_failed_before_its_first_token_leaves_no_prediction() -> None:
    table = table_of(8, clock=Clock())
    with contextlib.suppress(KeyError), route(table, prompt(0, 1, 2000)):
        raise KeyError
    assert table.num_predictions == 0
    assert table.loads.num_reserved == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_after_a_storm_every_number_is_zero(policy: str) -> None:
    table = table_of(5, policy)
    rng = random.Random(7)
    running: list[RoutedRequest] = []
    for step in range(600):
        if rng.random() < 0.6:
            running.append(
                route(table, prompt(rng.choice([0, 128, 300]), rng.randrange(9), rng.randrange(1, 400)))
            )
        if running and rng.random() < 0.4:
            rng.choice(running).first_token()
        if running and rng.random() < 0.5:
            running.pop(rng.randrange(len(running))).close()
        if rng.random() < 0.1:
            table.update_load(ReplicaId(f"r{rng.randrange(6)}"), LoadSnapshot(num_running=rng.randrange(9)))
        if rng.random() < 0.02:
            gone = ReplicaId(f"r{rng.randrange(5)}")
            table.remove_replica(gone)
            if step % 2 or not table.replica_ids("m"):
                table.add_replica(gone, CARD, STRIDE)
        if not table.replica_ids("m"):
            table.add_replica(ReplicaId("r0"), CARD, STRIDE)
    for routed in running:
        routed.close()
        routed.close()
    assert table.loads.num_reserved == 0
    assert table.num_predictions == 0
    for replica_id in table.replica_ids("m"):
        table.update_load(replica_id, LoadSnapshot())
        load = table.load(replica_id)
        assert (load.num_requests, load.num_pending_tokens, load.num_context_tokens) == (0, 0, 0)


def test_excluded_and_draining_replicas_serve_nothing() -> None:
    table = table_of(3)
    store(table, ReplicaId("r0"), prompt(0, 1, 1000))
    store(table, ReplicaId("r1"), prompt(0, 1, 500))
    table.set_draining(ReplicaId("r0"))
    with route(table, prompt(0, 1, 1000)) as routed:
        assert routed.decision.replica_id == "r1"
    with route(table, prompt(0, 1, 1000), exclude=["r1"]) as routed:
        assert routed.decision.replica_id == "r2"
        assert routed.decision.reason is DecisionReason.ONLY_REPLICA
    with pytest.raises(NoReplicaAvailable):
        route(table, prompt(0, 1, 1000), exclude={"r1", "r2"})
    assert table.replica_ids("m") == ["r0", "r1", "r2"]
    assert table.loads.num_reserved == 0


@pytest.mark.parametrize(
    ("leaves", "source"),
    [("set_draining", "r0"), ("set_dead", None), ("set_stalled", None), ("remove_replica", None)],
)
def test_what_a_draining_replica_holds_is_pulled_from_it_until_it_leaves(
    leaves: str, source: str | None
) -> None:
    table = table_of(0)
    for number in range(3):
        table.add_replica(ReplicaId(f"r{number}"), replace(CARD, kv_layout="one"), STRIDE)
        speeds = {"host_seconds_per_token": 1e-6, "pull_seconds_per_token": 1e-6}
        table.update_load(ReplicaId(f"r{number}"), msgspec.structs.replace(LoadSnapshot(), **speeds))
    store(table, ReplicaId("r0"), prompt(0, 1, 8000))
    getattr(table, leaves)(ReplicaId("r0"), **({"is_stalled": True} if leaves == "set_stalled" else {}))
    with route(table, prompt(0, 1, 8000)) as routed:
        assert routed.decision.replica_id in ("r1", "r2")
        assert routed.decision.pull_from == source
        assert routed.decision.overlap_tokens == (7984 if source else 0)
    with route(table, prompt(0, 1, 8000), exclude=["r0"]) as routed:
        assert routed.decision.pull_from is None, "a try there has failed"
    table.add_replica(ReplicaId("r0"), replace(CARD, kv_layout="one"), STRIDE)
    with route(table, prompt(0, 1, 8000)) as routed:
        assert routed.decision.pull_from is None
        assert routed.decision.overlap_tokens == (0 if leaves == "remove_replica" else 7984), "it is back"


def test_an_adapter_is_served_only_by_replicas_with_just_that_one() -> None:
    old, new, other = Adapter("sql", "1"), Adapter("sql", "2"), Adapter("poetry", "1")
    table = table_of(4)
    for name, adapters in {"r0": (), "r1": (old, other), "r2": (new,), "r3": (other, new)}.items():
        table.add_replica(ReplicaId(name), replace(CARD, adapters=adapters), STRIDE)
    store(table, ReplicaId("r0"), prompt(0, 1, 1000))

    def serving(adapter: Adapter) -> set[str]:
        found: set[str] = set()
        with contextlib.suppress(NoReplicaAvailable):
            while True:
                with route(table, prompt(0, 1, 1000), adapter=adapter, exclude=found) as routed:
                    found.add(routed.decision.replica_id)
        return found

    assert serving(new) == {"r2", "r3"}
    assert serving(old) == {"r1"}
    assert serving(other) == {"r1", "r3"}
    assert serving(Adapter("prose", "1")) == set()
    with route(table, prompt(0, 1, 1000)) as routed:
        assert routed.decision.replica_id == "r0"
    table.set_draining(ReplicaId("r2"))
    table.add_replica(ReplicaId("r3"), CARD, STRIDE)
    assert serving(new) == set()
    assert table.loads.num_reserved == 0


def test_a_replica_that_comes_back_is_not_draining_and_holds_nothing() -> None:
    table = table_of(1)
    store(table, ReplicaId("r0"), prompt(0, 1, 1000))
    table.set_draining(ReplicaId("r0"))
    table.remove_replica(ReplicaId("r0"))
    with pytest.raises(NoReplicaAvailable):
        route(table, prompt(0, 1, 1000))
    table.add_replica(ReplicaId("r0"), CARD, STRIDE)
    with route(table, prompt(0, 1, 1000)) as routed:
        assert routed.decision.overlap_tokens == 0


def test_an_unknown_model_is_another_error_than_one_without_replicas() -> None:
    table = RoutingTable("kvasir", CostParameters(), random.Random(1))
    with pytest.raises(UnknownModel):
        route(table, [1, 2, 3])
    with pytest.raises(UnknownModel):
        table.index("m")


def test_models_share_nothing() -> None:
    table = table_of(2)
    other = ModelCard("other", "f2", "simulated", 32, 1000, 100_000, 1000)
    table.add_replica(ReplicaId("x"), other, STRIDE)
    assert table.replica_ids("other") == ["x"]
    assert (table.block_size("m"), table.block_size("other")) == (16, 32)
    assert table.index("m") is not table.index("other")
    with route(table, prompt(0, 1, 100)) as routed:
        assert routed.decision.replica_id in ("r0", "r1")


def test_replicas_of_one_model_must_index_alike() -> None:
    table = table_of(2)
    with pytest.raises(ValueError, match="64"):
        table.add_replica(ReplicaId("r9"), ModelCard("m", "f", "torch", 64, 10, 10, 10), STRIDE)
    assert table.replica_ids("m") == ["r0", "r1"]
    index = table.index("m")
    table.remove_replica(ReplicaId("r0"))
    table.remove_replica(ReplicaId("r1"))
    table.add_replica(ReplicaId("r9"), ModelCard("m", "f", "torch", 64, 10, 10, 10), STRIDE)
    assert table.block_size("m") == 64
    assert table.index("m") is index


def test_an_unknown_policy_is_refused_with_the_names_of_the_known_ones() -> None:
    with pytest.raises(ValueError, match="kvasir, minimum_ttft"):
        RoutingTable("fastest", CostParameters(), random.Random(1))


def test_a_replica_that_left_may_still_be_spoken_of() -> None:
    table = table_of(2)
    with route(table, prompt(0, 1, 100)) as routed:
        table.remove_replica(routed.decision.replica_id)
        table.update_load(routed.decision.replica_id, LoadSnapshot(num_running=1))
        table.update_load_from_registry(routed.decision.replica_id, LoadSnapshot(num_running=1))
        table.set_draining(routed.decision.replica_id)
        table.remove_replica(routed.decision.replica_id)
        routed.first_token()
    assert table.loads.num_reserved == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [1, 3, 40])
def test_a_preview_is_what_is_decided_next_and_leaves_no_trace(policy: str, size: int) -> None:
    """40 replicas are more than are compared, so chance has a part in who is."""
    rng = random.Random(size)
    previewed, plain = table_of(size, policy), table_of(size, policy)
    open_requests: list[tuple[RoutedRequest, RoutedRequest]] = []
    for _ in range(200):
        tokens = prompt(512 * rng.randrange(3), rng.randrange(5), 300)
        bucket = bucket_of(ROOT, None, pack_token_ids(tokens), None, BLOCK_SIZE)
        request = RoutingRequest(bucket, len(tokens), BLOCK_SIZE)
        reserved, predicted = previewed.loads.num_reserved, previewed.num_predictions
        preview = previewed.preview("m", request, hash_blocks(ROOT, tokens, BLOCK_SIZE))
        assert (previewed.loads.num_reserved, previewed.num_predictions) == (reserved, predicted)
        routed, twin = route(previewed, tokens), route(plain, tokens)
        assert preview.decision == routed.decision == twin.decision
        assert sorted(preview.affinity_order) == sorted(previewed.replica_ids("m"))
        assert preview.affinity_order[routed.decision.rank] == routed.decision.replica_id
        open_requests.append((routed, twin))
        if rng.random() < 0.7:
            for request_to_close in open_requests.pop(rng.randrange(len(open_requests))):
                request_to_close.close()


A, B = ReplicaId("a"), ReplicaId("b")


def numbers(load: ReplicaLoad) -> tuple[int, int, int]:
    return load.num_requests, load.num_pending_tokens, load.num_context_tokens


def test_a_replica_that_nobody_spoke_of_is_idle() -> None:
    assert LoadBook().view(A) == ReplicaLoad()


def test_it_is_given_back_only_once() -> None:
    book = LoadBook()
    first = book.reserve(A, num_uncached_tokens=7, num_tokens=10)
    with book.reserve(A, num_uncached_tokens=7, num_tokens=10):
        first.release()
        first.release()
        assert numbers(book.view(A)) == (1, 7, 10)


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
