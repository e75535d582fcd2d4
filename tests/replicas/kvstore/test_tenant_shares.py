"""Shares of tenants in host memory, on disk and of leases, against a slow model."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.directory import ChunkPlace, Directory
from replicas.kvstore.leasing.leases import Leases, TenantTag
from replicas.kvstore.tenant_shares import NOBODYS, SPARE_TENANTS, Tenancy, TenantShares
from replicas.protocol.blocks import BlockHash
from replicas.protocol.prefix_leases import LeaseRefusal
from tests.examples import examples

NUM_SLOTS = 12


def key(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def alone(number: int) -> ChunkName:
    return ChunkName(key(number), None, 7)


def tenancy(name: str, share: float, lease_share: float = 0.0) -> Tenancy:
    return Tenancy(TenantTag(name.encode()), lease_share, share)


TENANTS = [NOBODYS, tenancy("ada", 0.25), tenancy("bob", 0.5), tenancy("eve", 0.25), tenancy("none", 0.0)]


@dataclass
class SlowStore:
    """What is in host memory, oldest use first; each chunk of a chain of its own."""

    tenants: Sequence[Tenancy]
    chunks: list[tuple[int, int]] = field(default_factory=list)
    """Number and tenant."""
    over: list[int] = field(default_factory=list)

    def room_of(self, tenant: int) -> int | None:
        share = self.tenants[tenant].store_share
        return int(share * NUM_SLOTS) if share else None

    def num_held(self, tenant: int) -> int:
        return sum(1 for _, whose in self.chunks if whose == tenant)

    def use(self, number: int) -> None:
        for each in self.chunks:
            if each[0] == number:
                self.chunks.remove(each)
                self.chunks.append(each)
                return

    def may_lose(self, asking: int) -> set[int]:
        """The tenants of which a chunk may go for one of this tenant, by the rules in words; empty: none."""
        room = self.room_of(asking)
        held = {whose for _, whose in self.chunks}
        if room is not None and self.num_held(asking) >= room and asking in held:
            return {asking}
        over = {
            whose
            for whose in held
            if (most := self.room_of(whose)) is not None and self.num_held(whose) > most
        }
        if over:
            return over
        unbounded = {whose for whose in held if self.room_of(whose) is None}
        if unbounded:
            return unbounded
        return set() if room is not None and self.num_held(asking) >= room else held

    def offer(self, number: int, asking: int, gone: int | None) -> None:
        """`gone` is what the directory took the slot of."""
        if gone is not None:
            allowed = self.may_lose(asking)
            victim = next(each for each in self.chunks if each[0] == gone)
            assert victim[1] in allowed
            is_bounded = self.room_of(victim[1]) is not None
            is_beyond = self.num_held(victim[1]) > (self.room_of(victim[1]) or 0)
            alike = {victim[1]} if is_bounded and (is_beyond or victim[1] == asking) else allowed
            assert victim == next(each for each in self.chunks if each[1] in alike), "the oldest goes"
            self.chunks.remove(victim)
        self.chunks.append((number, asking))


steps = st.lists(st.tuples(st.sampled_from(["offer", "offer", "use"]), st.integers(0, 40), st.integers(0, 4)))


@settings(max_examples=examples(400), deadline=None)
@given(steps)
def test_what_goes_is_what_the_rules_say(steps: Sequence[tuple[str, int, int]]) -> None:
    directory, slow = Directory(host_chunks=NUM_SLOTS), SlowStore(TENANTS)
    numbers: set[int] = set()
    for what, number, whose in steps:
        before = {each for each in numbers if directory.place(key(each)) is ChunkPlace.HOST}
        if what == "use":
            owner = next((each[1] for each in slow.chunks if each[0] == number), None)
            if owner is not None:
                directory.use([key(number)], TENANTS[owner])
                slow.use(number)
            continue
        if number in before:
            continue
        numbers.add(number)
        slot = directory.offer(alone(number), TENANTS[whose])
        if slot is None:
            assert len(before) == NUM_SLOTS
            assert not slow.may_lose(whose)
            continue
        directory.filled(key(number))
        gone = [each for each in before if directory.place(key(each)) is None]
        assert len(gone) == (1 if len(before) == NUM_SLOTS else 0)
        slow.offer(number, whose, gone[0] if gone else None)


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 12), st.lists(st.integers(1, 4), min_size=1, max_size=12), st.booleans())
def test_a_flood_takes_nothing_of_who_is_within_a_share(
    num_floods: int, lengths: Sequence[int], has_share: bool
) -> None:
    """Chains, with a disk: what a tenant has within its share stays somewhere, whatever others do."""
    directory = Directory(host_chunks=16, disk_chunks=32)
    ada, flooder = tenancy("ada", 0.5), tenancy("eve", 0.25 if has_share else 0.0)
    mine: list[BlockHash] = []
    next_number = 1000

    def chain(length: int, whose: Tenancy) -> list[BlockHash]:
        nonlocal next_number
        parent, keys = None, []
        for place in range(length):
            next_number += 1
            name = ChunkName(key(next_number), parent, 8 * place + 7)
            if directory.offer(name, whose) is None:
                break
            directory.filled(name.key)
            keys.append(name.key)
            parent = name.key
        return keys

    for length in lengths:
        if len(mine) + length <= 8:
            mine += chain(length, ada)
    for _ in range(num_floods):
        chain(12, flooder)
        for write in directory.take_writes(0.0, 8):
            directory.written(write.name.key)
        directory.take_removals()
    assert all(directory.place(each) is ChunkPlace.HOST for each in mine)


def test_the_end_of_a_tenants_chain_goes_before_its_beginning() -> None:
    directory, ada = Directory(host_chunks=4), tenancy("ada", 0.5)
    parent = None
    for number in range(4):
        directory.offer(ChunkName(key(number), parent, 8 * number + 7), ada)
        directory.filled(key(number))
        parent = key(number)
    directory.offer(alone(9), tenancy("bob", 0.5))
    assert [directory.place(key(number)) is not None for number in range(4)] == [True, True, True, False]


def test_what_a_tenant_writes_takes_its_own_oldest_file() -> None:
    directory = Directory(host_chunks=16, disk_chunks=4)
    ada, bob = tenancy("ada", 0.5), tenancy("bob", 0.5)

    def write(number: int, whose: Tenancy) -> None:
        directory.offer(alone(number), whose)
        directory.filled(key(number))
        directory.write_all()
        for each in directory.take_writes(0.0, 8):
            directory.written(each.name.key)
        directory.take_removals()

    for number in (0, 1):
        write(number, ada)
    for number in range(10, 20):
        write(number, bob)
    files = {name.key for name in directory.on_disk()}
    assert files == {key(0), key(1), key(18), key(19)}


def test_what_an_earlier_life_has_left_is_charged_to_who_uses_it_first() -> None:
    directory, ada = Directory(host_chunks=4, disk_chunks=4), tenancy("ada", 0.5)
    directory.restore([alone(number) for number in range(4)])
    directory.use([key(2), key(3)], ada)
    bob = tenancy("bob", 0.5)
    for number in (10, 11, 12):
        directory.offer(alone(number), bob)
        directory.filled(key(number))
        directory.write_all()
        for write in directory.take_writes(0.0, 1):
            directory.written(write.name.key)
    files = {name.key for name in directory.on_disk()}
    assert {key(2), key(3)} < files
    assert not {key(0), key(1)} & files


@pytest.mark.parametrize("is_stored", [True, False])
def test_leases_of_one_tenant_leave_the_others_theirs(is_stored: bool) -> None:
    """Also those of requests that never came to store anything."""
    leases = Leases(host_chunks=8)
    directory = Directory(host_chunks=16, leases=leases)
    ada, bob = tenancy("ada", 0.0, 0.25), tenancy("bob", 0.0, 0.75)
    assert directory.grant([key(1), key(2)], 60, ada) is None
    if is_stored:
        directory.offer(alone(1), ada)
        directory.filled(key(1))
    assert directory.grant([key(3)], 60, ada) is LeaseRefusal.TENANT_SHARE
    assert directory.grant([key(number) for number in range(10, 16)], 60, bob) is None
    assert directory.grant([key(20)], 60, bob) is LeaseRefusal.TENANT_SHARE
    directory.pass_time(10_000.0)
    assert directory.grant([key(3)], 60, ada) is None
    assert leases.charged_to(ada.tag).host == 1


def test_tenants_by_the_thousand_that_hold_nothing_are_forgotten() -> None:
    shares = TenantShares()
    holder = shares.of(tenancy("ada", 0.5))
    assert holder is not None
    holder.num_held = 1
    for number in range(20 * SPARE_TENANTS):
        shares.of(tenancy(f"tenant-{number}", 0.5))
    assert len(shares._tenants) <= 2 * SPARE_TENANTS
    assert shares.of(tenancy("ada", 0.5)) is holder
    with contextlib.suppress(KeyError):
        assert shares.of(tenancy("ada", 0.0)) is None
