"""The promises alone: what is granted and refused, the budget, time, tombstones."""

import pytest

from replicas.kvstore.leasing import leases as leases_module
from replicas.kvstore.leasing.leases import STORE_SECONDS, Charge, LeaseRecord, Leases, TenantTag, Wish
from replicas.protocol.prefix_leases import HOUR_SECONDS, MAX_LEASE_SECONDS, LeaseBreak, LeaseRefusal
from tests.replicas.kvstore.chunk_names import key

DAY = MAX_LEASE_SECONDS
ADA, BOB = TenantTag(b"ada"), TenantTag(b"bob")


def wishes(paths: str, *, has_file: bool = False) -> list[Wish]:
    return [Wish(key(path), has_file) for path in paths]


def test_a_lease_holds_until_its_seconds_after_the_last_use_are_over() -> None:
    leases = Leases(host_chunks=2)
    assert leases.grant(wishes("a"), 60) is None
    leases.stored(key("a"))
    assert leases.pass_time(50.0) == []
    leases.use(key("a"))
    assert leases.pass_time(109.0) == [] and leases.holds(key("a"))
    assert leases.pass_time(110.0) == [key("a")] and not leases.holds(key("a"))
    assert leases.counts.kept == 1 and leases.charged == Charge()
    assert leases.broken_by(key("a")) is None


def test_of_several_leases_the_longest_rules_and_who_asked_for_it_owes() -> None:
    leases = Leases(disk_chunks=4, host_chunks=4)
    leases.grant(wishes("a"), 60, ADA)
    leases.grant(wishes("a"), 600, BOB)
    leases.grant(wishes("a"), 60, ADA)
    assert leases.charged_to(ADA) == Charge() and leases.charged_to(BOB) == Charge(host=1)
    leases.stored(key("a"))
    leases.pass_time(599.0)
    assert leases.holds(key("a"))
    leases.grant(wishes("a"), DAY, ADA)
    assert leases.charged == leases.charged_to(ADA) == Charge(host=1, disk=1)
    assert leases.records([key("a"), key("b")]) == [LeaseRecord(key("a"), DAY, float(DAY), ADA)]


@pytest.mark.parametrize(
    ("seconds", "refusal"),
    [
        (0, LeaseRefusal.NO_TIME),
        (-5, LeaseRefusal.NO_TIME),
        (DAY + 1, LeaseRefusal.TOO_LONG),
        (365 * DAY, LeaseRefusal.TOO_LONG),
        (HOUR_SECONDS + 1, LeaseRefusal.NO_TIER),
        (HOUR_SECONDS, None),
    ],
)
def test_what_host_memory_alone_cannot_keep_is_refused(seconds: int, refusal: LeaseRefusal | None) -> None:
    leases = Leases(host_chunks=2)
    assert leases.grant(wishes("a"), seconds) is refusal
    assert leases.counts.refused.total() == (refusal is not None)
    assert leases.num_leased == leases.counts.granted == (refusal is None)


def test_the_budget_of_either_tier_bounds_what_is_leased_and_all_or_nothing_is() -> None:
    leases = Leases(host_chunks=2, disk_chunks=3)
    assert leases.grant(wishes("abc"), 60) is LeaseRefusal.BUDGET
    assert leases.num_leased == 0
    assert leases.grant(wishes("ab"), DAY) is None
    assert leases.grant(wishes("c"), DAY) is LeaseRefusal.BUDGET
    leases.has_file(key("a"))
    assert leases.charged == Charge(host=1, disk=2)
    assert leases.grant(wishes("c"), DAY) is None
    leases.has_file(key("b"))
    assert leases.grant(wishes("d", has_file=True), 60) is LeaseRefusal.BUDGET
    assert leases.grant(wishes("d"), 60) is None
    assert leases.charged == leases.budget


def test_what_is_leased_already_costs_nothing_again() -> None:
    leases = Leases(host_chunks=2)
    assert leases.grant(wishes("ab"), 60) is None
    assert leases.grant(wishes("ab"), 60) is None
    assert leases.grant(wishes("abc"), 60) is LeaseRefusal.BUDGET


def test_the_tombstone_of_a_broken_lease_stays_until_its_end_or_until_the_chunk_is_back() -> None:
    leases = Leases(host_chunks=2)
    leases.grant(wishes("ab"), 60)
    for path in "ab":
        leases.stored(key(path))
        leases.gone(key(path), LeaseBreak.HOST_FULL)
    assert leases.broken_by(key("a")) is LeaseBreak.HOST_FULL and not leases.holds(key("a"))
    assert leases.counts.broken == {LeaseBreak.HOST_FULL: 2} and leases.charged == Charge()
    leases.stored(key("a"))
    assert leases.broken_by(key("a")) is None and leases.broken_by(key("b")) is LeaseBreak.HOST_FULL
    leases.pass_time(59.0)
    assert leases.num_tombstones == 1
    leases.pass_time(60.0)
    assert leases.num_tombstones == 0 and leases.counts.kept == 0


def test_what_is_never_stored_is_given_up_after_a_while() -> None:
    leases = Leases(host_chunks=2, disk_chunks=2)
    leases.grant(wishes("a"), DAY)
    leases.gone(key("a"), LeaseBreak.HOST_FULL)
    assert leases.holds(key("a"))
    assert leases.pass_time(STORE_SECONDS - 1) == []
    assert leases.pass_time(STORE_SECONDS) == [key("a")]
    assert leases.broken_by(key("a")) is LeaseBreak.NOT_STORED and leases.charged == Charge()
    assert leases.pass_time(DAY - 1.0) == [] and leases.num_tombstones == 1
    assert leases.pass_time(float(DAY)) == [] and leases.num_tombstones == 0


def test_tombstones_are_bounded_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "MAX_TOMBSTONES", 2)
    leases = Leases(host_chunks=3)
    leases.grant(wishes("abc"), 60)
    leases.clear()
    assert [leases.broken_by(key(path)) for path in "abc"] == [None, *[LeaseBreak.CLEARED] * 2]


def test_a_clock_that_goes_back_ends_nothing_and_prolongs_nothing() -> None:
    leases = Leases(host_chunks=1)
    leases.pass_time(1000.0)
    leases.grant(wishes("a"), 60)
    leases.stored(key("a"))
    leases.pass_time(0.0)
    leases.use(key("a"))
    assert leases.pass_time(1059.0) == []
    assert leases.pass_time(1060.0) == [key("a")]


def test_leases_come_back_with_what_was_left_of_them_and_never_with_more() -> None:
    leases = Leases(disk_chunks=3)
    leases.pass_time(5000.0)
    leases.restore(
        [
            LeaseRecord(key("a"), 600, 100.0, ADA),
            LeaseRecord(key("b"), 600, 1e9),
            LeaseRecord(key("c"), 600, -1.0),
            LeaseRecord(key("d"), 600, float("nan")),
            LeaseRecord(key("e"), 365 * DAY, 1e9),
            LeaseRecord(key("f"), DAY, 5.0),
        ]
    )
    assert leases.charged_to(ADA) == Charge(disk=1)
    left = {record.key: record.seconds_left for record in leases.records(map(key, "abcdef"))}
    assert left == {key("a"): 100.0, key("b"): 600.0, key("e"): float(DAY)}
    assert leases.counts.granted == 0 and leases.counts.refused.total() == 0


def test_what_waits_for_its_end_stays_bounded_however_often_leases_break() -> None:
    leases = Leases(host_chunks=1)
    for _ in range(1000):
        leases.grant(wishes("a"), 60)
        leases.stored(key("a"))
        leases.gone(key("a"), LeaseBreak.LOST)
        leases.stored(key("a"))
    assert len(leases._due) < 100
    leases.grant(wishes("a"), 60)
    leases.stored(key("a"))
    assert leases.pass_time(60.0) == [key("a")]


@pytest.mark.parametrize("bad", [(-1, 0, 1.0), (0, -1, 1.0), (1, 1, 0.0), (1, 1, 1.1)])
def test_a_budget_that_is_none_is_refused(bad: tuple[int, int, float]) -> None:
    with pytest.raises(ValueError, match="budgets of 0 chunks or more"):
        Leases(host_chunks=bad[0], disk_chunks=bad[1], tenant_share=bad[2])
