"""Leases through a journal: noted, given back after a restart, and what jumping clocks do to them."""

from pathlib import Path

import pytest

from replicas.kvstore.chunk import NotedLease
from replicas.kvstore.directory import ChunkPlace
from replicas.kvstore.leasing.lease_service import LeaseService, restored_leases
from replicas.kvstore.leasing.leases import Charge, LeaseRecord, TenantTag
from replicas.kvstore.tenant_shares import Tenancy
from replicas.protocol.blocks import BlockHash
from replicas.protocol.prefix_leases import MAX_LEASE_SECONDS, LeaseAnswer, LeaseRefusal, PrefixLease
from replicas.protocol.status import Epoch
from replicas.protocol.tier_figures import WriteStop
from tests.replicas.kvstore.chunk_names import BLOCKS_PER_CHUNK, chain, key, name
from tests.replicas.kvstore.open_disk import opened
from tests.replicas.kvstore.test_directory import put, write_all
from tests.replicas.kvstore.test_directory_leases import leasing

DAY = MAX_LEASE_SECONDS


class NotedLeases:
    """A disk as leases see it."""

    def __init__(self) -> None:
        self.restored_leases: dict[BlockHash, NotedLease] = {}
        self.noted: list[tuple[BlockHash, float]] = []
        self.is_off = False
        self.write_stop: WriteStop | None = None

    def note_lease(self, key: BlockHash, until: float, seconds: int, tenant: bytes = b"") -> None:
        self.noted.append((key, until))
        self.restored_leases[key] = NotedLease(until, seconds, tenant)


class Desk:
    """A desk over a directory of 8 slots and 8 files, and the two clocks that it goes by."""

    def __init__(self) -> None:
        self.now = 0.0
        self.wall = 1e9
        self.directory = leasing(8, 8)
        self.disk = NotedLeases()
        self.desk = LeaseService(
            self.directory,
            self.disk,
            blocks_per_chunk=BLOCKS_PER_CHUNK,
            chunk_tokens=64,
            clock=lambda: self.now,
            wall_clock=lambda: self.wall,
        )

    def ask(self, path: str, *leases: tuple[int, int]) -> tuple[LeaseAnswer, ...]:
        names = [name(path[:length]) for length in range(1, len(path) + 1)]
        return self.desk.ask(names, [PrefixLease(*lease) for lease in leases], 0).answers


def test_a_lease_is_noted_with_its_end_once_its_file_is_there_and_again_when_it_is_used() -> None:
    desk = Desk()
    assert desk.ask("ab", (2 * BLOCKS_PER_CHUNK, DAY)) == (LeaseAnswer(DAY, 128),)
    put(desk.directory, "a", "ab")
    assert desk.desk.is_to_be_synced(key("a"))
    write_all(desk.directory)
    desk.desk.poll()
    assert [each.seconds for each in desk.disk.restored_leases.values()] == [DAY, DAY]
    assert sorted(desk.disk.noted) == [(key("a"), 1e9 + DAY), (key("ab"), 1e9 + DAY)]
    assert not desk.desk.is_to_be_synced(key("a"))
    desk.disk.noted.clear()
    desk.now, desk.wall = 100.0, 1e9 + 100
    desk.desk.poll()
    assert desk.disk.noted == []
    desk.directory.use(chain("a"))
    desk.desk.poll()
    assert desk.disk.noted == [(key("a"), 1e9 + 100 + DAY)]


@pytest.mark.parametrize("jump", [-3600.0, 3600.0, 1e8, -1e8])
def test_a_wall_clock_that_jumps_ends_no_lease_of_this_process(jump: float) -> None:
    desk = Desk()
    put(desk.directory, "a")
    desk.ask("a", (BLOCKS_PER_CHUNK, 600))
    desk.wall += jump
    desk.now = 599.0
    desk.desk.poll()
    assert desk.directory.leases.holds(key("a"))
    desk.now = 600.0
    desk.desk.poll()
    assert not desk.directory.leases.holds(key("a"))


@pytest.mark.parametrize(
    ("until", "left"), [(50.0, 50.0), (0.0, None), (-1.0, None), (1e12, float(DAY)), (float("inf"), DAY)]
)
def test_after_a_restart_what_is_left_holds_and_never_more_than_a_day(
    until: float, left: float | None
) -> None:
    disk = NotedLeases()
    disk.restored_leases = {key("a"): NotedLease(1e9 + until)}
    directory = leasing(4, 4)
    directory.restore([name("a")], restored_leases(disk, lambda: 1e9))
    lefts = [record.seconds_left for record in directory.leases.records([key("a")])]
    assert lefts == ([] if left is None else [left])


def test_after_a_restart_a_use_renews_all_that_was_asked_for() -> None:
    disk = NotedLeases()
    disk.restored_leases = {key("a"): NotedLease(1e9 + 50, 600), key("b"): NotedLease(1e9 + 5000, 600)}
    directory = leasing(4, 4)
    directory.restore(map(name, "ab"), restored_leases(disk, lambda: 1e9))
    lefts = [record.seconds_left for record in directory.leases.records([key("a"), key("b")])]
    assert lefts == [50.0, 600.0], "and a clock that went back prolongs nothing"
    directory.use([key("a")])
    assert [record.seconds_left for record in directory.leases.records([key("a")])] == [600.0]


def test_a_real_disk_remembers_ends_and_seconds_also_when_its_journal_is_written_anew(tmp_path: Path) -> None:
    with opened(tmp_path) as at:
        assert at.write("a").ok and at.write("b").ok
        at.disk.note_lease(key("a"), 2e9, 600)
        at.disk.note_lease(key("b"), 2e9, 600)
        at.disk.note_lease(key("b"), 3e9, 7200)
    for _ in range(2):
        with opened(tmp_path) as at:
            assert at.disk.restored_leases == {key("a"): (2e9, 600, b""), key("b"): (3e9, 7200, b"")}
            at.disk._journal._rewrite()
    with opened(tmp_path) as at:
        at.disk.note_lease(key("a"), 0)
    with opened(tmp_path) as at:
        assert at.disk.restored_leases == {key("b"): (3e9, 7200, b"")}


def test_after_a_restart_a_lease_is_charged_to_the_tenant_whose_it_was(tmp_path: Path) -> None:
    desk, ours = Desk(), Tenancy(TenantTag(b"us"), lease_share=0.5)
    names = [name("a"), name("ab")]
    assert desk.desk.ask(names, [PrefixLease(2 * BLOCKS_PER_CHUNK, DAY)], 0, ours).answers[0].num_tokens
    put(desk.directory, "a", "ab")
    write_all(desk.directory)
    desk.desk.poll()
    with opened(tmp_path) as at:
        assert at.write("a").ok and at.write("ab").ok
        for noted, lease in desk.disk.restored_leases.items():
            at.disk.note_lease(noted, *lease)
    for _ in range(2):
        with opened(tmp_path) as at:
            restored = leasing(8, 8)
            restored.restore(at.disk.restored, restored_leases(at.disk, lambda: 1e9))
            assert restored.leases.charged_to(ours.tag) == restored.leases.charged == Charge(0, 2)
            refusal = restored.grant([key("x")], DAY, ours)
            assert refusal is LeaseRefusal.TENANT_SHARE, "its share holds what it has leased before"
            at.disk._journal._rewrite()


def test_nobody_is_promised_what_only_a_disk_could_keep_that_is_off() -> None:
    desk = Desk()
    desk.disk.is_off = True
    put(desk.directory, "a")
    assert desk.ask("a", (4, DAY), (4, 60)) == (
        LeaseAnswer(refusal=LeaseRefusal.NO_TIER),
        LeaseAnswer(60, 64),
    )


def test_what_the_process_has_leased_is_written_when_it_ends() -> None:
    directory = leasing(4, 4)
    put(directory, "a", "b")
    directory.grant([key("a")], 60)
    directory.write_all()
    assert sorted(write_all(directory)) == ["a", "b"]
    assert directory.take_lease_changes() == [LeaseRecord(key("a"), 60, 60.0)]


def test_a_file_that_is_found_late_keeps_what_is_leased() -> None:
    directory = leasing(4, 4)
    put(directory, "a")
    directory.grant([key("a")], 60)
    directory.adopt(name("a"))
    put(directory, *"uvwxyz")
    assert directory.place(key("a")) is ChunkPlace.DISK and directory.leases.holds(key("a"))
    assert directory.leases.charged.host == 1


def test_a_lease_that_another_replica_keeps_instead_ends_in_the_journal_too() -> None:
    desk, source = Desk(), Epoch("e")
    records = [LeaseRecord(each, DAY, 100.0) for each in chain("ab")]
    assert desk.directory.take_leases(records, source) == [None, None]
    put(desk.directory, "a", "ab")
    write_all(desk.directory)
    desk.desk.poll()
    desk.disk.noted.clear()
    desk.directory.withdraw(chain("ab"), source)
    assert desk.ask("a", (BLOCKS_PER_CHUNK, DAY)) == (LeaseAnswer(DAY, 64),)
    desk.desk.poll()
    assert sorted(desk.disk.noted) == [(key("a"), 1e9 + DAY), (key("ab"), 0.0)]
