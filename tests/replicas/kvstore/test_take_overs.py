"""What a store takes over of another's leased chunks, and what it says where it cannot."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.directory import ChunkPlace, Directory
from replicas.kvstore.leasing import lease_list
from replicas.kvstore.leasing.lease_service import LeaseService
from replicas.kvstore.leasing.leases import Leases, TenantTag
from replicas.kvstore.pulling import take_overs
from replicas.kvstore.pulling.take_overs import TakeOvers
from replicas.kvstore.tenant_shares import Tenancy
from replicas.protocol.hand_overs import HandOverOutcome, KeepChunks, LeasedChunk, ListLeases, TakeOver
from replicas.protocol.prefix_leases import LeaseBreak
from replicas.protocol.pulls import PullHint
from replicas.protocol.status import Epoch, ReplicaId
from tests.replicas.kvstore.chunk_names import key, name

SOURCE = PullHint(ReplicaId("there"), Epoch("e"), "127.0.0.1:1", 0)
TAKEN, NOT_SENT = HandOverOutcome.TAKEN, HandOverOutcome.NOT_SENT


class ScriptedPulls:
    """Takes slots as pulls do; the test says what comes."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self.num_transfers = 0

    def may_pull(self, peer: PullHint) -> bool:
        return peer == SOURCE

    def begin(self, peer: PullHint, wanted: Sequence[tuple[ChunkName, Tenancy]]) -> None:
        self.num_transfers += 1
        for each, tenancy in wanted:
            if self._directory.offer(each, tenancy) is None:
                break


class Store:
    def __init__(self, num_slots: int = 40, num_leased: int = 20) -> None:
        self.now = 0.0
        self.directory = Directory(host_chunks=num_slots, leases=Leases(host_chunks=num_leased))
        service = LeaseService(
            self.directory, None, blocks_per_chunk=8, chunk_tokens=128, clock=lambda: self.now
        )
        self.pulls = ScriptedPulls(self.directory)
        self.take_overs = TakeOvers(self.directory, service, self.pulls)  # type: ignore[arg-type]

    def keep(self, *chunks: LeasedChunk, are_lost: bool = False) -> None:
        self.take_overs.ask(KeepChunks(7, TakeOver(SOURCE, bytes(16), chunks, are_lost)))

    def answer(self) -> tuple[HandOverOutcome, ...]:
        self.take_overs.poll()
        (answer,) = self.take_overs.take_answers()
        assert answer.number == 7 and not self.take_overs.is_busy
        return answer.outcomes


def leased(path: str, seconds_left: float = 100.0, tenant: bytes = b"", share: float = 0.0) -> LeasedChunk:
    return LeasedChunk(*name(path), 600, seconds_left, tenant, share)


def test_what_comes_is_leased_for_the_time_that_was_left_and_then_anew_with_each_use() -> None:
    store = Store()
    store.keep(leased("a"), leased("ab"))
    assert not store.take_overs.has_answers
    for path in ("a", "ab"):
        store.directory.filled(key(path))
    assert store.answer() == (TAKEN, TAKEN)
    assert [record.seconds_left for record in store.directory.leases.all_records()] == [100.0, 100.0]
    store.directory.use([key("a")])
    assert [record.seconds_left for record in store.directory.leases.all_records()] == [600.0, 100.0]


def test_what_does_not_come_is_leased_no_more_and_breaks_no_promise_here() -> None:
    store = Store()
    store.keep(leased("a"), leased("ab"))
    store.directory.filled(key("a"))
    store.directory.given_up(key("ab"))
    assert store.answer() == (TAKEN, NOT_SENT)
    leases = store.directory.leases
    assert (leases.num_leased, leases.counts.leased, leases.counts.broken.total()) == (1, 1, 0)
    assert leases.charged.host == 1


def test_what_was_leased_here_before_stays_so_if_it_does_not_come() -> None:
    store = Store()
    assert store.directory.grant([key("a")], 600) is None
    store.keep(leased("a"))
    store.directory.given_up(key("a"))
    assert store.answer() == (NOT_SENT,)
    assert store.directory.leases.holds(key("a"))


def test_what_is_here_is_leased_and_not_pulled() -> None:
    store = Store()
    store.directory.offer(name("a"))
    store.directory.filled(key("a"))
    store.keep(leased("a"))
    assert store.answer() == (TAKEN,)
    assert store.directory.leases.holds(key("a")) and store.directory.num_in_host == 1


def test_the_budget_and_the_tenants_share_bind_what_is_taken_over() -> None:
    store = Store(num_leased=4)
    store.keep(*(leased(path, tenant=b"t", share=0.5) for path in ("a", "ab", "abc")))
    for path in ("a", "ab"):
        store.directory.filled(key(path))
    assert store.answer() == (TAKEN, TAKEN, HandOverOutcome.TENANT_SHARE)
    store.keep(*map(leased, ("x", "xy", "xyz")))
    for path in ("x", "xy"):
        store.directory.filled(key(path))
    assert store.answer() == (TAKEN, TAKEN, HandOverOutcome.BUDGET)
    assert store.directory.place(key("xyz")) is None


def test_one_peer_fills_a_quarter_of_the_slots_at_most_over_all_its_calls() -> None:
    store = Store(num_slots=12, num_leased=12)
    no_room = HandOverOutcome.NO_ROOM
    for path, expected in (("ab", [TAKEN] * 2), ("xyz", [TAKEN, no_room, no_room])):
        names = [path[: end + 1] for end in range(len(path))]
        store.keep(*map(leased, names))
        for each in names:
            if store.directory.place(key(each)) is ChunkPlace.COMING:
                store.directory.filled(key(each))
        assert list(store.answer()) == expected


def test_what_is_lost_is_a_tombstone_until_its_lease_would_have_ended_or_it_comes() -> None:
    store = Store()
    store.keep(leased("a"), leased("ab"), are_lost=True)
    assert store.answer() == (HandOverOutcome.NOTED,) * 2
    assert store.directory.broken([key("a"), key("ab")]) == (2, LeaseBreak.LEFT)
    assert store.directory.leases.counts.broken == {LeaseBreak.LEFT: 2}
    store.directory.offer(name("a"))
    store.directory.filled(key("a"))
    assert store.directory.broken([key("a"), key("ab")]) == (1, LeaseBreak.LEFT)
    store.directory.pass_time(101.0)
    assert store.directory.broken([key("a"), key("ab")]) == (0, None)


def test_what_another_keeps_instead_is_given_back_unless_it_is_wanted_here() -> None:
    store = Store(num_leased=4)
    store.keep(*map(leased, ("a", "ab", "abc", "abcd")))
    for path in ("a", "ab", "abc"):
        store.directory.filled(key(path))
    assert store.directory.grant([key("a")], 600) is None
    other = replace(SOURCE, epoch=Epoch("f"))
    for source, num_left in ((other, 4), (SOURCE, 1)):
        chunks = tuple(map(leased, ("a", "ab", "abc", "abcd")))
        store.take_overs.ask(KeepChunks(8, TakeOver(source, bytes(16), chunks, are_elsewhere=True)))
        (answer,) = store.take_overs.take_answers()
        assert answer.outcomes == (HandOverOutcome.NOTED,) * 4
        assert store.directory.leases.num_leased == store.directory.leases.charged.host == num_left
    assert store.directory.place(key("abc")) is ChunkPlace.HOST, "what has come stays while there is room"
    assert key("abc") not in store.directory._owed, "it may go when there is none"
    store.directory.filled(key("abcd"))
    assert store.answer() == (TAKEN,) * 4
    assert store.directory.leases.counts.broken.total() == 0
    store.keep(leased("x"), leased("xy"), leased("xyz"))
    for path in ("x", "xy", "xyz"):
        store.directory.filled(key(path))
    assert store.answer() == (TAKEN,) * 3, "there is room for others' leases again"


def test_only_what_is_there_is_listed_with_its_time_and_whose_it_is() -> None:
    store = Store()
    tenancy = Tenancy(b"t", 0.5, 0.25)  # type: ignore[arg-type]
    store.directory.offer(name("a"), tenancy)
    store.directory.filled(key("a"))
    assert store.directory.grant([key("a"), key("ab")], 600, tenancy, b"bucket") is None
    store.now = 50.0
    store.take_overs.ask(ListLeases(3))
    (answer,) = store.take_overs.take_answers()
    assert answer.leased == (LeasedChunk(*name("a"), 600, 550.0, b"t", 0.5, 0.25, b"bucket"),)


def test_a_lease_that_a_request_wants_meanwhile_outlasts_a_take_over_that_fails() -> None:
    store = Store()
    store.keep(leased("a"), leased("ab"))
    assert store.directory.grant([key("a")], 60) is None
    store.directory.given_up(key("a"))
    store.directory.given_up(key("ab"))
    assert store.answer() == (NOT_SENT, NOT_SENT)
    leases = store.directory.leases
    assert leases.holds(key("a")) and not leases.holds(key("ab"))
    store.directory.offer(name("a"))
    store.directory.filled(key("a"))
    store.directory.pass_time(50.0)
    assert leases.holds(key("a")) and leases.counts.broken.total() == 0


def test_what_two_replicas_hand_over_is_leased_until_neither_has_sent_it() -> None:
    store = Store()
    store.keep(leased("a"))
    other = replace(SOURCE, replica_id=ReplicaId("other"), epoch=Epoch("f"))
    store.take_overs.ask(KeepChunks(8, TakeOver(other, bytes(16), (leased("a"),))))
    assert not store.directory.leases.withdraw(key("a"), SOURCE.epoch)
    assert store.directory.leases.holds(key("a"))
    store.directory.given_up(key("a"))
    store.take_overs.poll()
    assert [answer.outcomes for answer in store.take_overs.take_answers()] == [(NOT_SENT,)] * 2
    assert not store.directory.leases.holds(key("a"))


@pytest.mark.parametrize("record_share", [0.0, 0.75])
def test_the_share_of_the_store_that_a_tenant_has_here_outlasts_what_a_record_says(
    record_share: float,
) -> None:
    store = Store(num_slots=12, num_leased=12)
    tenancy = Tenancy(TenantTag(b"t"), 0.0, 0.25)
    store.directory.offer(name("x"), tenancy)
    store.directory.filled(key("x"))
    assert store.directory.grant([key("x")], 600, tenancy) is None
    store.keep(replace(leased("a", tenant=b"t"), store_share=record_share))
    store.directory.filled(key("a"))
    assert store.answer() == (TAKEN,)
    for each in ("a", "x"):
        found = store.directory.leased(key(each))
        assert found is not None and found[2] == 0.25


def test_what_comes_before_a_chunk_may_have_come_in_another_call_or_not() -> None:
    store = Store()
    store.keep(leased("a"), leased("x"))
    store.directory.filled(key("a"))
    store.directory.given_up(key("x"))
    assert store.answer() == (TAKEN, NOT_SENT)
    store.keep(leased("ab"), leased("xy"), leased("xyz"))
    store.directory.filled(key("ab"))
    incomplete = HandOverOutcome.INCOMPLETE
    assert store.answer() == (TAKEN, incomplete, incomplete)
    assert store.directory.leases.num_leased == 2 and store.directory.num_in_host == 2


def test_what_comes_after_a_chunk_that_may_not_be_leased_is_not_leased_either() -> None:
    store = Store(num_leased=4)
    share = 0.25
    store.keep(*(leased(path, tenant=b"t", share=share) for path in ("a", "ab")), leased("abc"))
    store.directory.filled(key("a"))
    assert store.answer() == (TAKEN, HandOverOutcome.TENANT_SHARE, HandOverOutcome.INCOMPLETE)
    assert store.directory.leases.num_leased == 1


def test_questions_that_wait_for_chunks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(take_overs, "MAX_ASKED", 2)
    store = Store()
    for path in "ax":
        store.keep(leased(path))
    store.keep(leased("y"), leased("yz"))
    (answer,) = store.take_overs.take_answers()
    assert answer.outcomes == (HandOverOutcome.BUSY,) * 2
    assert not store.directory.leases.holds(key("y"))
    for path in "ax":
        store.directory.given_up(key(path))
    store.take_overs.poll()
    assert len(store.take_overs.take_answers()) == 2
    store.keep(leased("y"))
    assert store.take_overs.is_busy


def test_leases_are_listed_a_few_at_a_time_the_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_list, "SEEN_PER_STEP", 3)
    monkeypatch.setattr(lease_list, "TOLD_PER_STEP", 2)
    monkeypatch.setattr(lease_list, "MAX_LISTED_CHUNKS", 5)
    store = Store()
    for number, path in enumerate("abcdefg"):
        for each in (path, path + "x"):
            store.directory.offer(name(each))
            store.directory.filled(key(each))
        assert store.directory.grant([key(path), key(path + "x")], 100 + number) is None
    store.take_overs.ask(ListLeases(3))
    num_steps = 1
    while store.take_overs.is_listing:
        assert not store.take_overs.has_answers
        store.take_overs.poll()
        num_steps += 1
    assert num_steps == 7, "14 leases to look at and 5 to tell, of which 2 in the step that sees the last"
    (answer,) = store.take_overs.take_answers()
    assert [each.key for each in answer.leased] == [key(each) for each in ("g", "gx", "f", "fx", "e")]


def test_what_did_not_come_takes_no_room_from_what_is_asked_for_again() -> None:
    """Of 40 slots a source may have ten, and it asks for six, three times."""
    store = Store()
    paths = ["a", "ab", "abc", "abcd", "abcde", "abcdef"]
    for _ in range(2):
        store.keep(*map(leased, paths))
        for path in paths:
            store.directory.given_up(key(path))
        assert store.answer() == (NOT_SENT,) * 6
    store.keep(*map(leased, paths))
    for path in paths:
        store.directory.filled(key(path))
    assert store.answer() == (TAKEN,) * 6
