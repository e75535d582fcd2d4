"""The prefix index and a naive twin with which it must always agree."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import Tier
from replicas.protocol.keys import Announcement, IndexChange
from replicas.protocol.status import Epoch, ReplicaId
from router.routing.levels import NOWHERE, Depths
from router.routing.overlap import ChangeOutcome, PrefixIndex
from tests.examples import examples
from tests.router.routing.chains import chain


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
        for prompt in ("xxxx", "xyxyx", "yyyyyyy"):
            assert self.index.overlaps(chain(prompt)) == self.twin.overlaps(chain(prompt))
            self.both_see_the_same_tiers(prompt)
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
