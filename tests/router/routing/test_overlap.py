"""The prefix index and a naive twin, resume points of sparse models, and what has left."""

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replicas.index.residency import Residency
from replicas.protocol.affinity import AffinityOrder
from replicas.protocol.blocks import BlockHash, hash_blocks, pack_token_ids
from replicas.protocol.events import Removal, Tier
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import Announcement, IndexChange, is_indexed
from replicas.protocol.status import Epoch, ModelCard, ReplicaId
from router.explain.preview import because
from router.routing.bucket import bucket_of
from router.routing.cost import CostParameters
from router.routing.decision import DRAWN_PER_CHOSEN, Replicas, RoutingRequest, _deepest
from router.routing.departures import MAX_INCARNATIONS, Departure, Departures
from router.routing.levels import NOWHERE, Depths, Slots
from router.routing.load import ReplicaLoad
from router.routing.overlap import ChangeOutcome, PrefixIndex
from router.routing.table import RoutedRequest, RoutingTable
from tests.examples import examples
from tests.replicas.builders import ROOT as CACHE_ROOT
from tests.replicas.simulated_engine.test_grouped_cache import SHAPES, Served
from tests.router.routing.chains import chain
from tests.router.routing.fleets import fleet, overlapping, ready, request
from tests.router.routing.tables import ROOT, prompt

A, B = ReplicaId("a"), ReplicaId("b")
E1, E2 = Epoch("e1"), Epoch("e2")


def thinned(hashes: Sequence[BlockHash], stride: int) -> set[BlockHash]:
    """What a replica reports of a prompt: the stride, and the last full block."""
    return {h for i, h in enumerate(hashes) if is_indexed(i, 1, stride) or i == len(hashes) - 1}


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 8, 100])
def test_the_same_prompt_overlaps_with_all_its_full_blocks(stride: int) -> None:
    for length in range(1, 20):
        hashes = chain("abcdefghijklmnopqrstuvwxyz"[:length])
        index = PrefixIndex(1, stride)
        index.replace(A, E1, thinned(hashes, stride))
        assert index.overlaps(hashes) == {A: length}


def test_changes_of_another_epoch_or_replica_are_ignored() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E2, ())
    added = tuple(chain("a"))
    assert index.apply(IndexChange(A, E1, 1, added)) is ChangeOutcome.UNKNOWN
    assert index.apply(IndexChange(B, E1, 1, added)) is ChangeOutcome.UNKNOWN
    assert index.num_entries == 0


def test_a_number_that_is_missing_is_a_gap_and_an_old_one_is_stale() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, (), last_change=5)
    added = tuple(chain("a"))
    assert index.apply(IndexChange(A, E1, 5, added)) is ChangeOutcome.STALE
    assert index.apply(IndexChange(A, E1, 7, added)) is ChangeOutcome.GAP
    assert index.num_entries == 0
    assert index.apply(IndexChange(A, E1, 6, added)) is ChangeOutcome.APPLIED
    assert index.num_entries == 1
    assert index.last_change(A) == 6


def test_changes_that_a_set_already_contained_change_nothing_when_they_come_again() -> None:
    changes = [
        IndexChange(A, E1, 1, added=tuple(chain("abc"))),
        IndexChange(A, E1, 2, removed=tuple(chain("abc")[2:])),
        IndexChange(A, E1, 3, added=tuple(chain("xy")), cleared=True),
        IndexChange(A, E1, 4, added=tuple(chain("abc")[:1])),
    ]
    index = PrefixIndex(1, 1)
    index.replace(A, E1, {*chain("xy"), *chain("a")}, last_change=0)  # read after the last of them
    for change in changes:
        assert index.apply(change) is ChangeOutcome.APPLIED
    assert index.stored(A) == {*chain("xy"), *chain("a")}


def announced(number: int, announcement_id: int, text: str) -> IndexChange:
    return IndexChange(A, E1, number, announced=(Announcement(announcement_id, tuple(chain(text))),))


def test_announcements_and_predictions_share_one_limit() -> None:
    index = PrefixIndex(1, 1, max_predicted_blocks=10)
    index.replace(A, E1, ())
    index.apply(announced(1, 7, "aaaaaa"))
    index.predict(8, A, chain("bbbbbb"))
    assert index.overlaps(chain("aaaaaa")) == {}
    index.apply(announced(2, 9, "c" * 30))
    assert index.overlaps(chain("c" * 30)) == {A: 10}
    assert index.num_predictions == 1


def test_predictions_are_bounded_and_the_oldest_goes_first() -> None:
    index = PrefixIndex(1, 1, max_predicted_blocks=10)
    index.predict(1, A, chain("aaaaaa"))
    index.predict(2, A, chain("bbbb"))
    index.predict(3, A, chain("cc"))
    assert index.overlaps(chain("aaaaaa")) == {}
    assert index.overlaps(chain("bbbb")) == {A: 4}
    index.predict(4, B, chain("d" * 30))
    assert index.overlaps(chain("d" * 30)) == {B: 10}
    assert index.num_predictions == 1


def test_changes_alone_clear_away_what_was_left_behind() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, chain("a" * 2000))
    index.replace(B, E1, chain("a" * 1000))
    index.forget(A)
    for number in range(1, 2000):
        index.apply(IndexChange(B, E1, number))
    assert sum(map(len, index._holders.shards)) == 1000
    assert not index.sweep()
    assert index.overlaps(chain("a" * 2000)) == {B: 1000}


def test_overlaps_stay_what_they_were_when_replicas_come_and_go() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, chain("ab"))
    index.replace(B, E1, chain("abc"))
    before = index.overlaps(chain("abcd"))
    index.forget(A)
    while index.sweep():
        pass
    index.replace(ReplicaId("c"), E1, chain("abcd"))
    assert before == {A: 2, B: 3}
    assert index.overlaps(chain("abcd")) == {B: 3, "c": 4}


@dataclass
class NaivePrediction:
    owner: ReplicaId
    hashes: set[BlockHash]
    is_own: bool = False
    is_announced: bool = False


class NaiveIndex:
    """Sets and loops."""

    def __init__(self, stride: int) -> None:
        self.stride = stride
        self.stored: dict[ReplicaId, dict[BlockHash, Tier]] = {}
        self.predictions: dict[int, NaivePrediction] = {}

    def of(self, replica_id: ReplicaId) -> list[NaivePrediction]:
        return [prediction for prediction in self.predictions.values() if prediction.owner == replica_id]

    def holds(self, replica_id: ReplicaId, tiers: Collection[Tier], *, is_predicted: bool) -> set[BlockHash]:
        stored = {each for each, tier in self.stored.get(replica_id, {}).items() if tier in tiers}
        return stored.union(*(it.hashes for it in self.of(replica_id) if is_predicted))

    def overlaps(
        self,
        hashes: Sequence[BlockHash],
        tiers: Collection[Tier] = tuple(Tier),
        *,
        is_predicted: bool = True,
    ) -> dict[ReplicaId, int]:
        depths = {}
        owners = {prediction.owner for prediction in self.predictions.values()}
        for replica_id in {*self.stored, *owners}:
            held = self.holds(replica_id, tiers, is_predicted=is_predicted)
            depth = 0
            while depth + self.stride <= len(hashes) and hashes[depth + self.stride - 1] in held:
                depth += self.stride
            beyond = [i + 1 for i in range(depth, min(depth + self.stride, len(hashes))) if hashes[i] in held]
            depth = max([depth, *beyond])
            if depth:
                depths[replica_id] = depth
        return depths

    def in_tiers(self, hashes: Sequence[BlockHash], tiers: Collection[Tier]) -> dict[ReplicaId, int]:
        """Of what each has in any tier: up to the stride position before the first that is in none of these,
        and to the end if its last block is in one of them too.
        """
        depths = {}
        for replica_id, anywhere in self.overlaps(hashes).items():
            held = self.holds(replica_id, tiers, is_predicted=True)
            ends = [*range(self.stride, anywhere, self.stride), anywhere]
            while ends and hashes[ends[0] - 1] in held:
                depths[replica_id] = ends.pop(0)
        return depths

    def remove(self, replica_id: ReplicaId, block_hash: BlockHash) -> None:
        self.stored[replica_id].pop(block_hash, None)
        for prediction in self.of(replica_id):
            prediction.hashes.discard(block_hash)
        self.prune()

    def prune(self) -> None:
        self.predictions = {
            key: it for key, it in self.predictions.items() if it.hashes and (it.is_own or it.is_announced)
        }

    def announce(self, replica_id: ReplicaId, announcement: Announcement) -> None:
        known = self.predictions.get(announcement.announcement_id)
        is_own = known is not None and known.owner == replica_id and known.is_own
        self.predictions[announcement.announcement_id] = NaivePrediction(
            replica_id, set(announcement.block_hashes), is_own, True
        )
        self.prune()

    def forget_announcements(self, replica_id: ReplicaId) -> None:
        for prediction in self.of(replica_id):
            prediction.is_announced = False
        self.prune()

    def end_predictions(self, replica_id: ReplicaId) -> None:
        self.predictions = {k: v for k, v in self.predictions.items() if v.owner != replica_id}


REPLICAS = st.sampled_from([ReplicaId(name) for name in ("a", "b", "c")])
PROMPTS = st.text("xy", min_size=1, max_size=7)
HASHES = st.lists(PROMPTS.map(lambda text: chain(text)[-1]), max_size=5)
TIERS = st.sampled_from(Tier)
IDS = st.integers(1, 12)
"""Few, so that they meet: with predictions, with each other, and with other replicas'."""
ANNOUNCED = st.lists(st.builds(Announcement, IDS, HASHES.map(tuple)), max_size=3).map(tuple)


class IndexAndTwin(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stride = 2
        self.index = PrefixIndex(1, self.stride)
        self.twin = NaiveIndex(self.stride)
        self.epochs: dict[ReplicaId, int] = {}
        self.staged = self.index.stage()
        self.staged_twin: dict[BlockHash, Tier] = {}

    @rule(hashes=HASHES, tier=TIERS)
    def stage(self, hashes: list[BlockHash], tier: Tier) -> None:
        self.staged.add(hashes, tier)
        self.staged_twin |= dict.fromkeys(hashes, tier)

    @rule()
    def stage_in_vain(self) -> None:
        with self.staged:
            pass
        self.staged, self.staged_twin = self.index.stage(), {}

    @rule(replica_id=REPLICAS, hashes=HASHES, is_restarted=st.booleans(), is_staged=st.booleans())
    def replace(
        self, replica_id: ReplicaId, hashes: list[BlockHash], is_restarted: bool, is_staged: bool
    ) -> None:
        known = replica_id in self.epochs
        epoch = self.epochs.get(replica_id, 0) + is_restarted
        if is_staged:
            self.index.replace(replica_id, Epoch(str(epoch)), self.staged, last_change=0)
            stored = self.staged_twin
            self.staged, self.staged_twin = self.index.stage(), {}
        else:
            self.index.replace(replica_id, Epoch(str(epoch)), hashes, last_change=0)
            stored = dict.fromkeys(hashes, Tier.DEVICE)
        if is_restarted and known:
            self.twin.end_predictions(replica_id)
        self.twin.forget_announcements(replica_id)
        self.epochs[replica_id] = epoch
        self.twin.stored[replica_id] = stored

    @precondition(lambda self: self.epochs)
    @rule(
        data=st.data(),
        added=HASHES,
        removed=HASHES,
        in_host=HASHES,
        on_disk=HASHES,
        cleared=st.booleans(),
        announced=ANNOUNCED,
        ended=st.lists(IDS, max_size=3),
        is_gap=st.booleans(),
    )
    def change(
        self,
        data: st.DataObject,
        added: list[BlockHash],
        removed: list[BlockHash],
        in_host: list[BlockHash],
        on_disk: list[BlockHash],
        cleared: bool,
        announced: tuple[Announcement, ...],
        ended: list[int],
        is_gap: bool,
    ) -> None:
        replica_id = data.draw(st.sampled_from(sorted(self.epochs)))
        number = self.index.last_change(replica_id) + 1 + is_gap
        epoch = Epoch(str(self.epochs[replica_id]))
        outcome = self.index.apply(
            IndexChange(
                replica_id,
                epoch,
                number,
                tuple(added),
                tuple(removed),
                cleared,
                announced,
                tuple(ended),
                tuple(in_host),
                tuple(on_disk),
            )
        )
        assert outcome is (ChangeOutcome.GAP if is_gap else ChangeOutcome.APPLIED)
        if is_gap:
            self.twin.forget_announcements(replica_id)
            return
        if cleared:
            self.twin.stored[replica_id].clear()
            self.twin.end_predictions(replica_id)
        for block_hash in removed:
            self.twin.remove(replica_id, block_hash)
        for tier, hashes in zip(Tier, (added, in_host, on_disk), strict=True):
            self.twin.stored[replica_id] |= dict.fromkeys(hashes, tier)
        for announcement in announced:
            self.twin.announce(replica_id, announcement)
        for announcement_id in ended:
            known = self.twin.predictions.get(announcement_id)
            if known is not None and known.owner == replica_id:
                del self.twin.predictions[announcement_id]

    @rule(replica_id=REPLICAS)
    def forget(self, replica_id: ReplicaId) -> None:
        self.index.forget(replica_id)
        self.twin.stored.pop(replica_id, None)
        self.twin.end_predictions(replica_id)
        self.epochs.pop(replica_id, None)

    @rule(num_slices=st.integers(1, 5))
    def sweep(self, num_slices: int) -> None:
        for _ in range(num_slices):
            self.index.sweep()

    @rule()
    def lose_the_stream(self) -> None:
        self.index.forget_announcements()
        for replica_id in ("a", "b", "c"):
            self.twin.forget_announcements(ReplicaId(replica_id))

    @rule(announcement_id=IDS, replica_id=REPLICAS, hashes=HASHES)
    def predict(self, announcement_id: int, replica_id: ReplicaId, hashes: list[BlockHash]) -> None:
        self.index.predict(announcement_id, replica_id, hashes)
        self.twin.predictions[announcement_id] = NaivePrediction(replica_id, set(hashes), is_own=True)
        self.twin.prune()

    @rule(announcement_id=IDS)
    def end_prediction(self, announcement_id: int) -> None:
        self.index.end_prediction(announcement_id)
        if announcement_id in self.twin.predictions:
            self.twin.predictions[announcement_id].is_own = False
            self.twin.prune()

    @rule(prompt=PROMPTS)
    def look_up(self, prompt: str) -> None:
        overlaps = self.index.overlaps(chain(prompt))
        assert overlaps == self.twin.overlaps(chain(prompt))
        assert list(overlaps.values()) == sorted(overlaps.values(), reverse=True)
        self.both_see_the_same_tiers(prompt)

    def both_see_the_same_tiers(self, prompt: str) -> None:
        hashes = chain(prompt)
        overlaps = self.index.overlaps(hashes)
        on_device = self.twin.in_tiers(hashes, [Tier.DEVICE])
        in_host = self.twin.in_tiers(hashes, [Tier.DEVICE, Tier.HOST])
        slots = overlaps.slots
        alike = {each: depths for mask, depths in overlaps.alike(slots.everyone) for each in slots.of(mask)}
        for replica_id in map(ReplicaId, "abc"):
            assert alike.get(replica_id, NOWHERE) == Depths(
                on_device.get(replica_id, 0), in_host.get(replica_id, 0), overlaps.get(replica_id, 0)
            )
        stored = self.twin.overlaps(chain(prompt), is_predicted=False)
        deepest = overlaps.deepest_stored(overlaps.slots.everyone)
        assert (0 if deepest is None else deepest.depth) == max(stored.values(), default=0)

    @invariant()
    def both_hold_the_same(self) -> None:
        assert self.index.num_entries == sum(map(len, self.twin.stored.values()))
        assert self.index.num_predictions == len(self.twin.predictions)
        for text in ("xxxx", "xyxyx", "yyyyyyy"):
            assert self.index.overlaps(chain(text)) == self.twin.overlaps(chain(text))
            self.both_see_the_same_tiers(text)
        for replica_id in self.epochs:
            assert self.index.stored(replica_id) == self.twin.stored[replica_id].keys()
            for tier in Tier:
                stored = {each for each, it in self.twin.stored[replica_id].items() if it is tier}
                assert self.index.stored_in(replica_id, tier) == stored
            assert self.index.num_stored(replica_id) == len(self.twin.stored[replica_id])
            wanted = set(chain("xyxyx")[1::2] + chain("xyxyx")[4:]) - self.twin.stored[replica_id].keys()
            assert set(self.index.missing(replica_id, chain("xyxyx"))) == wanted

    def teardown(self) -> None:
        self.stage_in_vain()
        for replica_id in ("a", "b", "c"):
            self.index.forget(ReplicaId(replica_id))
        while self.index.sweep():
            pass
        assert not any(self.index._holders.shards), "something was left behind"
        assert not self.index._predicted
        assert self.index._num_predicted_blocks == 0
        assert self.index.num_predictions == 0


PLACES = st.lists(st.sampled_from([*Tier, *Tier, *Tier, None]), min_size=12, max_size=12)


@settings(max_examples=examples(400), deadline=None)
@given(
    places=st.tuples(PLACES, PLACES, PLACES),
    predicted=st.lists(st.integers(0, 11)),
    length=st.integers(1, 12),
)
def test_depths_by_tier_are_those_of_the_twin(
    places: Sequence[Sequence[Tier | None]], predicted: list[int], length: int
) -> None:
    """Every block of one chain somewhere, at three replicas."""
    both = IndexAndTwin()
    prompt = "xyxyxyxyxyxy"
    for replica_id, where in zip(map(ReplicaId, "abc"), places, strict=True):
        held = {block: tier for block, tier in zip(chain(prompt), where, strict=True) if tier is not None}
        for block, tier in held.items():
            both.stage([block], tier)
        both.replace(replica_id, [], is_restarted=False, is_staged=True)
    both.predict(1, ReplicaId("b"), [chain(prompt)[position] for position in predicted])
    both.both_see_the_same_tiers(prompt[:length])
    both.teardown()


TestIndexAndTwin = IndexAndTwin.TestCase
TestIndexAndTwin.settings = settings(max_examples=examples(120), stateful_step_count=50, deadline=None)


BLOCK = 32
CARD = ModelCard("m", "fingerprint", "simulated", BLOCK, 1000, 100_000, 1000, is_sparse=True)


def index_of(*replica_ids: ReplicaId, stride: int = 1) -> PrefixIndex:
    index = PrefixIndex(16, 16 * stride, is_sparse=True)
    for replica_id in replica_ids:
        index.replace(replica_id, Epoch("e"), ())
    return index


def change(index: PrefixIndex, replica_id: ReplicaId, **parts: object) -> None:
    number = index.last_change(replica_id) + 1
    index.apply(IndexChange(replica_id, Epoch("e"), number, **parts))  # type: ignore[arg-type]


def test_the_deepest_point_counts_whatever_lies_before_it_and_full_attention_does_not() -> None:
    index, hashes = index_of(A, B), chain("abcdef")
    change(index, A, added=tuple(hashes), points=(hashes[1], hashes[3]))
    change(index, B, added=tuple(hashes[:5]))
    overlaps = index.overlaps(hashes)
    assert dict(overlaps) == {A: 4}
    assert [overlaps.reach_of(overlaps.slots.bit(each)) for each in (A, B)] == [6, 5]
    change(index, A, points_removed=(hashes[3],))
    assert dict(index.overlaps(hashes)) == {A: 2}
    change(index, A, points_removed=(hashes[1],))
    assert dict(index.overlaps(hashes)) == {}


def test_a_block_and_a_point_of_one_hash_come_and_go_apart() -> None:
    index, hashes = index_of(A, stride=2), chain("abcd")
    change(index, A, added=(hashes[1], hashes[2], hashes[3]), points=(hashes[2],))
    assert index.num_stored(A) == 4
    change(index, A, removed=(hashes[2],))
    assert dict(index.overlaps(hashes)) == {A: 3}
    change(index, A, added=(hashes[2],), points_removed=(hashes[2],))
    assert index.num_stored(A) == 3
    assert dict(index.overlaps(hashes)) == {}


def test_points_that_went_are_remembered_apart_from_blocks_and_from_those_of_others() -> None:
    index, hashes = index_of(A, B), chain("abcd")
    index.departures.now = 7.0
    change(index, A, added=tuple(hashes), points=(hashes[1], hashes[3]))
    change(index, A, points_removed=(hashes[1],))
    index.departures.now = 8.0
    change(index, B, added=tuple(hashes), points=(hashes[1], hashes[2]))
    change(index, B, points_removed=(hashes[1], hashes[2]))

    def gone(replica_id: ReplicaId, first: int = 0) -> list[tuple[int, ReplicaId, float]]:
        return [
            (at, left.replica_id, left.at) for at, left in index.departed_points(replica_id, hashes, first)
        ]

    assert gone(A) == [(1, A, 7.0)]
    assert gone(B) == [(1, B, 8.0), (2, B, 8.0)]
    assert gone(A, 2) == []
    assert index.departed(hashes, 0) == []
    change(index, A, removed=(hashes[3],))
    assert [at for at, _ in index.departed(hashes, 0)] == [3]
    assert [at for at, *_ in gone(A)] == [1]


def test_without_full_attention_points_are_found_anywhere() -> None:
    index, hashes = index_of(A, B, stride=4), chain("abcdefghijkl")
    change(index, A, points=(hashes[2], hashes[9]))
    assert dict(index.overlaps(hashes)) == {A: 10}
    assert dict(index.overlaps(hashes[:9])) == {A: 3}


def test_predicted_points_count_until_they_end_and_are_not_stored() -> None:
    index, hashes = index_of(A), chain("abcd")
    change(index, A, added=(hashes[0],), points=(hashes[0],))
    index.predict(7, A, index.missing(A, hashes), [hashes[2]])
    overlaps = index.overlaps(hashes)
    assert dict(overlaps) == {A: 3}
    held = overlaps.holdings(frozenset())
    assert held is not None and (held.depth(A), held.stored_depth(A)) == (3, 1)
    announced = Announcement(7, index.missing(A, hashes), (hashes[2],))
    change(index, A, announced=(announced,))
    index.end_prediction(7)
    assert dict(index.overlaps(hashes)) == {A: 3}
    change(index, A, ended=(7,))
    assert dict(index.overlaps(hashes)) == {A: 1}
    assert index.num_predictions == 0


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("has_full", [True, False])
def test_levels_are_those_of_a_naive_twin(stride: int, has_full: bool) -> None:
    rng = random.Random(stride)
    replica_ids = [ReplicaId(f"r{number}") for number in range(5)]
    index = index_of(*replica_ids, stride=stride)
    points: dict[ReplicaId, set[BlockHash]] = {each: set() for each in replica_ids}
    foretold: dict[ReplicaId, set[BlockHash]] = {each: set() for each in replica_ids}
    chains = [chain("ab" * 3 + text * 4) for text in "cdef"]
    for number in range(400):
        replica_id, hashes = rng.choice(replica_ids), rng.choice(chains)
        end = rng.randint(1, len(hashes))
        if has_full and number % 3 == 0:
            change(index, replica_id, added=tuple(hashes[stride - 1 : end : stride]))
        reach = index.reach(replica_id, hashes) if has_full else len(hashes)
        point = hashes[rng.randint(1, min(len(hashes), reach + stride - 1) or 1) - 1]
        if rng.random() < 0.2 and reach:
            index.predict(number, replica_id, [], [point])
            foretold[replica_id].add(point)
        elif rng.random() < 0.6 and reach:
            change(index, replica_id, points=(point,))
            points[replica_id].add(point)
        else:
            gone = tuple(each for each in points[replica_id] | foretold[replica_id] if rng.random() < 0.5)
            change(index, replica_id, points_removed=gone)
            points[replica_id] -= set(gone)
            foretold[replica_id] -= set(gone)
        asked = rng.choice(chains)[: rng.randint(1, 18)]

        def deepest(known: set[BlockHash], asked: Sequence[BlockHash] = asked) -> int:
            return max((end for end, each in enumerate(asked, start=1) if each in known), default=0)

        overlaps = index.overlaps(asked)
        assert {each: overlaps.depth(each) for each in replica_ids} == {
            each: deepest(points[each] | foretold[each]) for each in replica_ids
        }
        held = overlaps.holdings(frozenset())
        if held is not None:
            assert {each: held.stored_depth(each) for each in replica_ids} == {
                each: deepest(points[each]) for each in replica_ids
            }
        depths = [level.depth for level in overlaps.levels(overlaps.slots.everyone)]
        assert depths == sorted(set(depths), reverse=True)


@pytest.mark.parametrize("retention_blocks", [0, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_router_expects_of_one_prompt_at_a_time_is_what_the_cache_has(
    shape: str, retention_blocks: int
) -> None:
    """Events, thinning, index and lookup, with evictions."""
    served = Served(shape, num_blocks=260, budget=256)
    alignment = served.cache.alignment
    served = Served(shape, retention_blocks * alignment, num_blocks=260, budget=256)
    residency = Residency(alignment, 128)
    index = PrefixIndex(alignment, 128, is_sparse=True)
    index.replace(A, Epoch("e"), ())
    rng, known = random.Random(3), [served.fresh(300)]
    take, num_hits = served.cache.take_events, 0

    def observed() -> object:
        events = take()
        residency.observe(events)
        net = residency.take_change()
        change(
            index,
            A,
            added=net.added,
            removed=net.removed,
            points=net.points,
            points_removed=net.points_removed,
        )
        return events

    served.cache.take_events = observed  # type: ignore[method-assign,assignment]
    for _ in range(100):
        base = rng.choice(known[-12:])
        tokens = (base[: rng.randint(1, len(base))] + served.fresh(rng.randint(0, 200)))[:900]
        hashes = hash_blocks(CACHE_ROOT, tokens, alignment)[: (len(tokens) - 1) // alignment]
        expected = index.overlaps(hashes).depth(A) * alignment
        hit, whole = served.serve(tokens, rng.choice([1, 2, 40]))
        assert hit.num_tokens == expected
        num_hits += expected > 0
        known.append(whole)
        assert index.num_stored(A) == len(residency.kept) + len(residency.points)
    assert num_hits > 10


def sparse_table(size: int = 2, card: ModelCard = CARD) -> RoutingTable:
    table = RoutingTable("kvasir", CostParameters(), random.Random(1))
    for number in range(size):
        table.add_replica(ReplicaId(f"r{number}"), card, 128)
        table.index("m").replace(ReplicaId(f"r{number}"), Epoch("e"), ())
    return table


def route(table: RoutingTable, tokens: Sequence[int], num_output_tokens: int = 0) -> RoutedRequest:
    """An answer that is resumed has output tokens, whose blocks the router does not name."""
    bucket = bucket_of(ROOT, None, pack_token_ids(tokens), None, BLOCK)
    request = RoutingRequest(bucket, len(tokens) + num_output_tokens, BLOCK)
    return table.route("m", request, hash_blocks(ROOT, tokens, BLOCK))


def computed(table: RoutingTable, routed: RoutedRequest) -> None:
    """Its replica has what it announced."""
    announced = routed.announcement
    change(
        table.index("m"),
        routed.decision.replica_id,
        added=announced.block_hashes,
        points=announced.points,
    )
    routed.close()


@pytest.mark.parametrize("home", ["r0", "r1"])
def test_the_second_request_goes_where_its_junction_can_form_and_the_third_is_resumed_there(
    home: str,
) -> None:
    table = sparse_table()
    first = prompt(0, 7, 1300)
    hashes = hash_blocks(ROOT, first, BLOCK)
    change(table.index("m"), ReplicaId(home), added=tuple(hashes[3::4]), points=(hashes[39],))
    second, third = ([*first[:1200], *prompt(0, number, 100)] for number in (8, 9))
    routed = route(table, second)
    assert (routed.decision.replica_id, routed.decision.overlap_tokens) == (home, 0)
    if routed.decision.rank:
        other = "r1" if home == "r0" else "r0"
        assert because(routed.decision).startswith(f"not to {other}, its home: it has less of the prompt")
    ends = [hash_blocks(ROOT, second, BLOCK).index(each) + 1 for each in routed.announcement.points]
    assert ends == [36, 40]  # what the thinned index knows of 37 common blocks, and the prompt's end
    with route(table, third) as expected:
        assert expected.decision.overlap_tokens == 36 * BLOCK
    computed(table, routed)
    with route(table, third) as expected:
        assert expected.decision.overlap_tokens == 36 * BLOCK


def test_a_prompts_last_token_is_computed_and_so_is_the_block_that_it_ends() -> None:
    table = sparse_table(1)
    tokens = prompt(0, 1, 4 * BLOCK)
    routed = route(table, tokens)
    assert routed.announcement.points == tuple(hash_blocks(ROOT, tokens, BLOCK)[2:3])
    computed(table, routed)
    assert route(table, tokens).decision.overlap_tokens == 3 * BLOCK
    whole = tuple(hash_blocks(ROOT, tokens, BLOCK)[3:])
    change(table.index("m"), ReplicaId("r0"), points=whole)
    assert route(table, tokens).decision.overlap_tokens == 3 * BLOCK
    assert route(table, [*tokens, 1]).decision.overlap_tokens == 4 * BLOCK


@pytest.mark.parametrize("peek_tokens", [0, BLOCK])
@pytest.mark.parametrize("num_output_tokens", [1, BLOCK - 1, BLOCK, 5 * BLOCK])
def test_a_resumed_answer_announces_no_points_behind_its_prompt(
    num_output_tokens: int, peek_tokens: int
) -> None:
    table = sparse_table(1, replace(CARD, peek_tokens=peek_tokens))
    tokens = prompt(0, 1, 4 * BLOCK + 1)
    hashes = hash_blocks(ROOT, tokens, BLOCK)
    announced = route(table, tokens, num_output_tokens).announcement
    assert set(announced.points) <= {hashes[3]}


def test_a_draft_model_reads_the_last_block_of_what_is_found() -> None:
    table = sparse_table(1, replace(CARD, peek_tokens=BLOCK))
    tokens = prompt(0, 1, 4 * BLOCK)
    routed = route(table, tokens)
    assert routed.announcement.points == tuple(hash_blocks(ROOT, tokens, BLOCK)[2:4])
    computed(table, routed)
    assert route(table, tokens).decision.overlap_tokens == 3 * BLOCK
    dense = sparse_table(1, replace(CARD, peek_tokens=BLOCK, is_sparse=False))
    computed(dense, route(dense, tokens))
    assert route(dense, tokens).decision.overlap_tokens == 2 * BLOCK
    assert route(dense, [*tokens, 1]).decision.overlap_tokens == 3 * BLOCK


def test_replicas_that_find_hits_in_different_ways_are_not_mixed() -> None:
    table = sparse_table(1)
    with pytest.raises(ValueError, match="in another way"):
        table.add_replica(B, replace(CARD, is_sparse=False), 128)
    with pytest.raises(ValueError, match="in another way"):
        table.add_replica(B, replace(CARD, peek_tokens=BLOCK), 128)
    table.add_replica(ReplicaId("r0"), replace(CARD, is_sparse=False), 128)
    assert dict(table.index("m").overlaps(chain("a"))) == {}


def test_in_a_large_fleet_those_that_full_attention_reaches_are_compared() -> None:
    table = sparse_table(60)
    first = prompt(0, 7, 1300)
    there = ReplicaId("r47")
    change(table.index("m"), there, added=tuple(hash_blocks(ROOT, first, BLOCK)[3::4]))
    routed = route(table, [*first[:1200], *prompt(0, 8, 100)])
    assert routed.decision.replica_id == there


def test_what_full_attention_has_is_computed_again_but_is_no_second_copy() -> None:
    table = sparse_table(2)
    first = prompt(0, 7, 1280)
    change(table.index("m"), ReplicaId("r1"), added=tuple(hash_blocks(ROOT, first, BLOCK)[3::4]))
    decision = route(table, [*first, *prompt(0, 8, 640)]).decision
    there, elsewhere = (
        next(each for each in decision.candidates if each.replica_id == name) for name in ("r1", "r0")
    )
    assert there.overlap_tokens == elsewhere.overlap_tokens == 0
    assert there.cost.prefill_seconds == elsewhere.cost.prefill_seconds
    junction_seconds = 0.5 * 1280 * CostParameters().default_prefill_seconds_per_token
    assert there.cost.room_seconds == pytest.approx((elsewhere.cost.room_seconds - junction_seconds) / 3)
    assert decision.replica_id == "r1"


def test_a_request_waits_where_it_leaves_a_junction_unless_a_point_as_deep_is_elsewhere() -> None:
    table = sparse_table(3)
    first = prompt(0, 7, 6400)
    hashes = hash_blocks(ROOT, first, BLOCK)
    index = table.index("m")
    change(index, ReplicaId("r1"), added=tuple(hashes[3::4]))
    table.update_load(ReplicaId("r1"), LoadSnapshot(num_pending_tokens=6000))
    with route(table, [*first, *prompt(0, 8, 640)]) as routed:
        assert routed.decision.replica_id == "r1"
    change(index, ReplicaId("r2"), added=tuple(hashes[3::4]), points=(hashes[-1],))
    table.update_load(ReplicaId("r2"), LoadSnapshot(num_pending_tokens=20_000))
    assert route(table, [*first, *prompt(0, 9, 640)]).decision.replica_id == "r0"


def hashes(count: int, seed: int = 0) -> list[BlockHash]:
    rng = random.Random(seed)
    return [BlockHash(rng.randbytes(16)) for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_of_each_hash_the_latest_departure_is_known(seed: int) -> None:
    rng = random.Random(seed)
    departures, truth = Departures(1 << 16), dict[BlockHash, Departure]()
    known = [BlockHash(place.to_bytes(8, "little") + rng.randbytes(8)) for place in range(300)]
    for step in range(400):
        departures.now = float(step)
        some = rng.sample(known, rng.randrange(40))
        is_gone = rng.random() < 0.2
        reason = Removal.EVICTED if is_gone else rng.choice([*Removal])
        left = Departure(rng.choice((A, B)), rng.choice((E1, E2)), is_gone, float(step), reason)
        departures.left(left.replica_id, left.epoch, some, reason=reason, is_replica_gone=is_gone)
        truth |= dict.fromkeys(some, left)
        if rng.random() < 0.1:
            assert departures.of(known) == [truth.get(each) for each in known]
    unknown = hashes(100, seed + 1000)
    assert departures.of([*known, *unknown]) == [truth.get(each) for each in known] + [None] * 100


def test_memory_is_bounded_and_what_is_forgotten_is_not_told_wrongly() -> None:
    departures = Departures(1 << 8)
    every = hashes(5000)
    for step, each in enumerate(every):
        departures.now = float(step)
        departures.left(A, E1, [each])
    assert departures.num_hashes <= 1 << 8 and departures.num_bytes == 20 << 8
    found = departures.of(every)
    assert all(left is None or left.at == step for step, left in enumerate(found))
    assert found[-1] is not None and sum(left is not None for left in found) == departures.num_hashes
    for number in range(MAX_INCARNATIONS):
        departures.left(A, Epoch(f"later-{number}"), ())
    assert departures.of(every) == [None] * 5000


def index_with(a: list[BlockHash], b: list[BlockHash]) -> PrefixIndex:
    """Every second block is indexed."""
    index = PrefixIndex(16, 32)
    index.replace(A, E1, a)
    index.replace(B, E1, b)
    return index


def test_what_was_removed_is_evicted_and_what_went_with_its_replica_is_not() -> None:
    chain = hashes(12)
    index = index_with(chain[1::2], chain[5:8:2])
    index.departures.now = 7.0
    index.apply(IndexChange(A, E1, 1, removed=tuple(chain[7::2])))
    assert index.departed(chain, 0) == [(each, Departure(A, E1, False, 7.0)) for each in (7, 9, 11)]
    assert index.departed(chain, 9) == [(each, Departure(A, E1, False, 7.0)) for each in (9, 11)]
    index.departures.now = 8.0
    index.forget(B)
    gone = {each: Departure(B, E1, True, 8.0) for each in (5, 7)}
    assert (
        dict(index.departed(chain, 0))
        == {9: Departure(A, E1, False, 7.0), 11: Departure(A, E1, False, 7.0)} | gone
    )
    while index.sweep():
        pass
    assert (
        dict(index.departed(chain, 0))
        == {9: Departure(A, E1, False, 7.0), 11: Departure(A, E1, False, 7.0)} | gone
    )
    assert not any(block_hash in index.stored(A) for block_hash in chain[7::2])


def test_each_block_that_was_removed_has_its_own_reason() -> None:
    chain = hashes(12)
    index = index_with(chain[1::2], [])
    reasons = bytes([Removal.CLEARED, Removal.EVICTED, 99, Removal.LOST, Removal.BROKEN, Removal.EXPIRED])
    index.apply(IndexChange(A, E1, 1, removed=tuple(chain[1::2]), reasons=reasons))
    found = [left.reason.name for _, left in index.departed(chain, 0)]
    assert found == ["CLEARED", "EVICTED", "EVICTED", "LOST", "BROKEN", "EXPIRED"]
    assert not index.stored(A)


def test_a_prompt_that_ended_off_the_stride_is_found_behind_the_last_that_left() -> None:
    chain = hashes(12)
    index = index_with([chain[1], chain[3], chain[4]], [])
    index.apply(IndexChange(A, E1, 1, removed=(chain[3], chain[4])))
    assert [block for block, _ in index.departed(chain, 2)] == [3, 4]
    assert [block for block, _ in index.departed(chain, 4)] == [4]


def test_another_incarnation_and_a_set_that_is_read_anew_differ() -> None:
    chain = hashes(4)
    index = index_with(chain[1::2], [])
    index.replace(A, E1, chain[1:2])
    while index.sweep():
        pass
    assert index.departed(chain, 0) == []
    index.replace(A, E2, [])
    while index.sweep():
        pass
    assert index.departed(chain, 0) == [(1, Departure(A, E1, True, 0.0))]
    assert index.num_entries == 0


def test_a_slot_that_is_used_again_is_retired_nobody() -> None:
    chain = hashes(4)
    index = index_with(chain[1::2], [])
    index.forget(A)
    while index.sweep():
        pass
    fresh = hashes(4, 9)
    index.replace(A, E2, fresh)
    assert index.departed(fresh, 0) == []


depths_by_number = st.dictionaries(st.integers(0, 60), st.integers(1, 4), max_size=60)


def named(depths: Mapping[int, int]) -> dict[ReplicaId, int]:
    return {ReplicaId(f"r{number}"): depth for number, depth in depths.items()}


@given(depths_by_number)
def test_overlaps_are_a_mapping_with_the_deepest_first(depths: dict[int, int]) -> None:
    by_name = named(depths)
    overlaps = overlapping(by_name)
    assert dict(overlaps) == by_name
    assert len(overlaps) == len(by_name) and bool(overlaps) == bool(by_name)
    assert list(overlaps.values()) == sorted(by_name.values(), reverse=True)
    assert all(overlaps.depth(name) == depth == overlaps[name] for name, depth in by_name.items())
    assert overlaps.depth(ReplicaId("stranger")) == 0
    assert "stranger" not in overlaps


@given(st.sets(st.integers(0, 300)))
def test_slots_name_the_bits_that_they_were_given(numbers: set[int]) -> None:
    bits = {ReplicaId(f"r{number}"): 1 << number for number in range(0, 301)}
    slots = Slots(bits)
    mask = slots.mask(ReplicaId(f"r{number}") for number in numbers)
    assert mask == sum(1 << number for number in numbers)
    assert slots.of(mask) == [f"r{number}" for number in sorted(numbers)]
    assert slots.of(mask, range(len(numbers))[::-2]) == slots.of(mask)[::-2]
    assert slots.of(mask, []) == []
    assert slots.everyone == 2**301 - 1
    assert slots.mask([ReplicaId("stranger")]) == 0


def test_a_draw_from_a_level_gives_everybody_the_same_chance() -> None:
    (level,) = overlapping(dict.fromkeys(fleet(20), 7)).levels(2**20 - 1)
    rng = random.Random(1)
    drawn = Counter(replica_id for _ in range(4000) for replica_id in level.draw(5, rng))
    assert len(drawn) == 20
    assert max(drawn.values()) < 1.25 * min(drawn.values())


def test_replicas_that_do_not_serve_are_no_holders() -> None:
    overlaps = overlapping({ReplicaId(f"r{number}"): 5 + number % 2 for number in range(40)})
    few = ready(fleet(3))
    levels = list(overlaps.levels(few.mask(overlaps.slots)))
    drawn = [(level.depth, level.draw(9, random.Random(1))) for level in levels]
    assert drawn == [(6, ["r1"]), (5, ["r0", "r2"])]


def test_replicas_know_their_bits_when_the_slots_change() -> None:
    replicas = ready(fleet(2))
    assert replicas.mask(Slots({ReplicaId("r0"): 1, ReplicaId("r1"): 2})) == 3
    assert replicas.mask(Slots({ReplicaId("r0"): 8, ReplicaId("gone"): 1})) == 8


def deepest_by_sorting(
    replicas: Replicas,
    order: AffinityOrder,
    overlaps: Mapping[ReplicaId, int],
    chosen: Collection[ReplicaId],
    count: int,
    rng: random.Random,
) -> list[ReplicaId]:
    """The rule as it reads: all holders in one list."""
    holders = sorted((each for each in overlaps if each in replicas), key=lambda each: -overlaps[each])
    num_drawn = DRAWN_PER_CHOSEN * count + len(chosen)
    if len(holders) > num_drawn:
        least = overlaps[holders[num_drawn - 1]]
        deeper = [each for each in holders if overlaps[each] > least]
        equals = [each for each in holders if overlaps[each] == least]
        holders = deeper + rng.sample(equals, num_drawn - len(deeper))
    holders = [each for each in holders if each not in chosen]
    ranks = order.ranks(holders)
    loads = [replicas[each] for each in holders]
    by_preference = sorted(
        (-overlaps[each], load.num_pending_tokens, load.num_requests, rank, each)
        for each, load, rank in zip(holders, loads, ranks, strict=True)
    )
    return [each for *_, each in by_preference[:count]]


@given(
    depths=st.lists(st.sampled_from([0, *[1] * 30, 2, 3]), min_size=60, max_size=60),
    busy=st.lists(st.integers(0, 99), min_size=50, max_size=50),
    num_chosen=st.integers(0, 4),
    count=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_the_deepest_holders_are_those_that_sorting_everybody_would_find(
    depths: list[int], busy: list[int], num_chosen: int, count: int, seed: int
) -> None:
    replicas = ready({ReplicaId(f"r{n}"): ReplicaLoad(num_requests=load) for n, load in enumerate(busy)})
    order = replicas.ranking.of(request(seed).bucket)
    by_name = named({number: depth for number, depth in enumerate(depths) if depth})
    overlaps = overlapping(by_name)
    chosen = order.first(num_chosen)
    found = _deepest(replicas, order, overlaps, chosen, count, random.Random(seed))
    expected = deepest_by_sorting(replicas, order, by_name, chosen, count, random.Random(seed))
    assert found == expected
