from cluster.controller.leases import SILENT_SECONDS, LeaseBook, load_of
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState

A, B = ReplicaId("a-0"), ReplicaId("b-0")
READY = {A: Epoch("1"), B: Epoch("1")}


def record(
    replica_id: ReplicaId, state: ReplicaState = ReplicaState.READY, load: LoadSnapshot | None = None
) -> ReplicaRecord:
    return ReplicaRecord(replica_id, Epoch("1"), "x:1", state, "", 0, load or LoadSnapshot())


BOTH = {A: record(A), B: record(B)}
ONLY_B = {B: record(B)}


def looks(book: LeaseBook, *records: dict[ReplicaId, ReplicaRecord], every: float = 1.0) -> list[ReplicaId]:
    silent: list[ReplicaId] = []
    for number, seen in enumerate(records):
        silent = book.look(seen, READY, number * every)
    return silent


def test_a_replica_whose_lease_has_been_gone_for_long_is_silent() -> None:
    assert SILENT_SECONDS == 2.0
    assert looks(LeaseBook(), BOTH, ONLY_B) == []
    assert looks(LeaseBook(), BOTH, ONLY_B, ONLY_B) == [A]


def test_one_that_never_had_a_lease_is_not() -> None:
    assert looks(LeaseBook(), ONLY_B, ONLY_B, ONLY_B, ONLY_B) == []


def test_an_empty_registry_accuses_nobody() -> None:
    assert looks(LeaseBook(), BOTH, {}, {}, {}, {}) == []
    assert looks(LeaseBook(), BOTH, {}, {}, {}, ONLY_B) == [], "and the time without one does not count"


def test_time_in_which_nobody_looked_does_not_count() -> None:
    assert looks(LeaseBook(), BOTH, ONLY_B, every=60.0) == []


def test_another_epoch_under_the_name_is_no_sign_of_life_and_a_new_incarnation_starts_afresh() -> None:
    book = LeaseBook()
    looks(book, BOTH, ONLY_B)
    assert book.look(BOTH, {A: Epoch("2"), B: Epoch("1")}, 3.0) == []
    assert book.look(BOTH, {A: Epoch("2"), B: Epoch("1")}, 9.0) == []


def test_the_load_of_a_pool_is_that_of_its_ready_replicas() -> None:
    load = LoadSnapshot(num_running=3, num_waiting=2, num_pending_tokens=700)
    records = [
        record(ReplicaId("a-0"), load=load),
        record(ReplicaId("a-1"), load=load),
        record(ReplicaId("a-2"), ReplicaState.DRAINING, load),
        record(ReplicaId("a-b-0"), load=load),
    ]
    sample = load_of("a", records, 5.0)
    assert (sample.at, sample.num_in_flight, sample.num_pending_tokens) == (5.0, 10, 1400)
