"""What the index should hold, against a naive twin that keeps every copy and its tier in a list."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from replicas.index.residency import Residency
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    Removal,
    ResumePointsChanged,
    Tier,
)

BLOCK_SIZE, STRIDE = 4, 12  # every third block is on the stride

HASHES = [[BlockHash(bytes([chain, position]) * 8) for position in range(7)] for chain in range(3)]


@dataclass
class NaiveTwin:
    copies: list[tuple[Tier, BlockHash]] = field(default_factory=list)
    prompt_ends: set[BlockHash] = field(default_factory=set)
    story: list[BlockStored | BlockRemoved] = field(default_factory=list)
    points: set[BlockHash] = field(default_factory=set)
    cleared_points: set[BlockHash] = field(default_factory=set)

    def observe(self, event: CacheEvent) -> None:
        if isinstance(event, ResumePointsChanged):
            self.cleared_points -= set(event.added)
            self.points = (self.points | set(event.added)) - set(event.removed)
            return
        if isinstance(event, AllBlocksCleared) and event.tier is Tier.DEVICE:
            self.cleared_points |= self.points
            self.points = set()
        self.story += self._told_of_last_copies(event)
        if isinstance(event, BlockStored):
            self.copies.extend((event.tier, block_hash) for block_hash in event.block_hashes)
            if event.ends_prompt:
                self.prompt_ends.add(event.block_hashes[-1])
        elif isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                if (event.tier, block_hash) in self.copies:
                    self.copies.remove((event.tier, block_hash))
        else:
            self.copies = [copy for copy in self.copies if copy[0] is not event.tier]
        self.prompt_ends &= self.resident()

    def _told_of_last_copies(
        self, event: BlockStored | BlockRemoved | AllBlocksCleared
    ) -> list[BlockStored] | list[BlockRemoved]:
        """The same, one hash at a time, and of removals those that empty a tier of a hash that is kept."""
        if isinstance(event, BlockStored):
            return [BlockStored((each,), 0, tier=event.tier) for each in event.block_hashes]
        if isinstance(event, AllBlocksCleared):
            gone, reason = self.resident(event.tier), Removal.CLEARED
        else:
            counts = Counter(event.block_hashes)
            gone = {each for each in counts if 0 < self.copies.count((event.tier, each)) <= counts[each]}
            reason = event.reason
        return [BlockRemoved((each,), event.tier, reason) for each in sorted(gone & self.kept())]

    def reason(self, block_hash: BlockHash) -> Removal:
        """Of one that is gone: back to when it was last stored, what its last tier says; if that was evicted
        from the device, what was last said of it below."""
        for event in reversed(self.story):
            if block_hash not in event.block_hashes:
                continue
            if isinstance(event, BlockStored) or event.reason is not Removal.EVICTED:
                return Removal.EVICTED if isinstance(event, BlockStored) else event.reason
            if event.tier is not Tier.DEVICE:
                break
        return Removal.EVICTED

    def resident(self, *tiers: Tier) -> set[BlockHash]:
        """In these tiers, or in any."""
        return {block_hash for tier, block_hash in self.copies if tier in (tiers or Tier)}

    def fastest(self) -> dict[BlockHash, Tier]:
        """Of what is kept."""
        return {each: next(tier for tier in Tier if each in self.resident(tier)) for each in self.kept()}

    def kept(self) -> set[BlockHash]:
        on_stride = {chain[position] for chain in HASHES for position in (2, 5)}
        return self.resident() & (on_stride | self.prompt_ends)


TIERS = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK])


@st.composite
def stored(draw: st.DrawFn) -> BlockStored:
    chain = draw(st.sampled_from(HASHES))
    first = draw(st.integers(0, 6))
    last = draw(st.integers(first, 6))
    return BlockStored(tuple(chain[first : last + 1]), first, draw(st.booleans()), draw(TIERS))


ALL_HASHES = [block_hash for chain in HASHES for block_hash in chain]
EVENTS = st.one_of(
    stored(),
    stored(),
    st.builds(
        BlockRemoved,
        st.lists(st.sampled_from(ALL_HASHES), min_size=1, max_size=4).map(tuple),
        TIERS,
        st.sampled_from(Removal),
    ),
    st.builds(AllBlocksCleared, TIERS),
    st.sets(st.sampled_from(ALL_HASHES)).flatmap(
        lambda added: st.builds(
            ResumePointsChanged,
            st.just(tuple(added)),
            st.sets(st.sampled_from(ALL_HASHES)).map(lambda removed: tuple(removed - added)),
        )
    ),
)


@given(st.lists(st.lists(EVENTS, max_size=6), max_size=12))
def test_what_is_kept_and_the_sum_of_all_changes_equal_the_naive_twin(
    batches: list[list[CacheEvent]],
) -> None:
    residency, twin = Residency(BLOCK_SIZE, STRIDE), NaiveTwin()
    mirrored: dict[BlockHash, Tier] = {}
    points: set[BlockHash] = set()
    for batch in batches:
        residency.observe(batch)
        for event in batch:
            twin.observe(event)
        assert residency.kept == twin.kept()
        assert residency.fastest == twin.fastest()
        for tier in Tier:
            assert residency.num_resident(tier) == len(twin.resident(tier))
        change = residency.take_change()
        assert points.isdisjoint(change.points) and points.issuperset(change.points_removed)
        points = (points | set(change.points)) - set(change.points_removed)
        assert points == residency.points == twin.points
        point_reasons = change.point_reasons or bytes(len(change.points_removed))
        assert [*map(Removal, point_reasons)] == [
            Removal.CLEARED if each in twin.cleared_points else Removal.EVICTED
            for each in change.points_removed
        ]
        assert not change.point_reasons or any(change.point_reasons)
        before = {each: mirrored.pop(each) for each in change.removed}
        for tier, hashes in zip(Tier, (change.added, change.in_host, change.on_disk), strict=True):
            before |= {each: mirrored[each] for each in hashes if each in mirrored}
            assert all(mirrored.get(each) is not tier for each in hashes)
            mirrored |= dict.fromkeys(hashes, tier)
        assert change.before == before
        reasons = change.reasons or bytes(len(change.removed))
        assert [*map(Removal, reasons)] == [*map(twin.reason, change.removed)]
        assert not change.reasons or any(change.reasons)
        assert residency._reasons.keys() <= residency.kept
        assert mirrored == residency.fastest
        assert not residency.has_change
    whole = residency.take_all()
    assert (set(whole.added) | set(whole.in_host) | set(whole.on_disk)) == residency.kept
    assert set(whole.in_host) == {each for each, tier in mirrored.items() if tier is Tier.HOST}
    assert set(whole.on_disk) == {each for each, tier in mirrored.items() if tier is Tier.DISK}
    assert not whole.removed and not whole.before and not residency.has_change
    assert set(whole.points) == points and not whole.points_removed


def test_removals_of_what_was_never_stored_are_counted_and_harmless() -> None:
    residency = Residency(BLOCK_SIZE, STRIDE)
    assert residency.observe([BlockRemoved((HASHES[0][2], HASHES[0][3]))]) == 2
    assert residency.kept == set()
    assert not residency.has_change


def test_a_stride_shorter_than_a_block_keeps_every_block() -> None:
    residency = Residency(block_size=256, index_stride=128)
    residency.observe([BlockStored(tuple(HASHES[0]), 0)])
    assert residency.kept == set(HASHES[0])


def test_a_set_that_is_taken_whole_forgets_why_others_went() -> None:
    residency = Residency(BLOCK_SIZE, STRIDE)
    block_hash = HASHES[0][2]
    residency.observe([BlockStored((block_hash,), 2, tier=Tier.HOST)])
    residency.take_change()
    residency.observe([BlockRemoved((block_hash,), Tier.HOST, Removal.BROKEN)])
    residency.take_all()
    residency.observe([BlockStored((block_hash,), 2)])
    residency.take_change()
    residency.observe([BlockRemoved((block_hash,))])
    assert residency.take_change().reasons == b"" and not residency._reasons
