"""PrefixIndex: which replica holds how much of a prompt, by this router's knowledge.

Owns the mirror's data and the predictions. `router/fleet/index_mirror.py` reads Redis and supplies changes.

A replica is a bit. Two tables map a block hash to the bits of all replicas that have it, stored
(`holders.py`) or, in a small one, predicted, so that a lookup asks for all replicas at once. When all of a
replica's hashes become void (it is gone, its cache was cleared, its set was reread) it gets another bit, and
lookups skip the old one.

The index is *thinned*: replicas report every `blocks_per_stride`-th block of a chain and the last full block
of each prompt. `walk.py` finds from those how deep each replica has a chain.

A prediction names blocks that a replica is about to compute, and has one or two grounds:

- *own*: this router has just sent the request there; until `end_prediction`;
- *announced*: the replica has said so in the stream, to every router; until it ends the announcement.

Departures are remembered for a while (`departures.py`), so that a miss can be explained by where a block was
and how it went.

For a sparse model, points that hits may end at are kept beside the blocks (`resume_points.py`); overlaps are
then by points, and blocks only say how far full attention reaches.

The announcement comes back under the id of the router's prediction and merges with it. A replica's
announcements are dropped when messages were missed (a gap, a reread set, a lost stream), since the end may
have been among them. A removal cancels a predicted block, whichever router predicted it.
"""

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import Tier
from replicas.protocol.keys import Announcement, IndexChange, blocks_per_stride, indexed_positions
from replicas.protocol.status import Epoch, ReplicaId
from router.routing.departures import Departure, Departures
from router.routing.holders import Holders, StagedHashes
from router.routing.levels import Depth, Overlaps, Slots, View
from router.routing.resume_points import as_departed, as_points, point_levels
from router.routing.walk import Look, walk

MAX_PREDICTED_BLOCKS = 200_000
"""Own and announced predictions together."""


class ChangeOutcome(enum.Enum):
    APPLIED = "applied"
    STALE = "stale"
    """Contained in an earlier replacement or change; ignored."""
    GAP = "gap"
    """Changes before it are missing; ignored, and the replica's set must be read again."""
    UNKNOWN = "unknown"
    """Unknown replica or stale epoch; ignored."""


@dataclass(slots=True, eq=False)
class _PredictedBlocks:
    """Names at least one block, and has at least one ground."""

    replica: "_ReplicaShare"
    block_hashes: set[BlockHash]
    is_own: bool
    is_announced: bool


@dataclass(slots=True, eq=False)
class _ReplicaShare:
    bit: int
    num_stored: int = 0
    epoch: Epoch | None = None
    last_change: int = 0
    predictions: dict[int, _PredictedBlocks] = field(default_factory=dict)
    predicted_again: dict[BlockHash, int] = field(default_factory=dict)
    """The hashes that are in several of its predictions: in how many besides one."""


def _names(block_hashes: Collection[BlockHash], points: Collection[BlockHash]) -> Collection[BlockHash]:
    """Return the names of these blocks and resume points in the index."""
    return [*as_points(points), *block_hashes] if points else block_hashes


class PrefixIndex:
    def __init__(
        self,
        block_size: int,
        index_stride: int,
        *,
        is_sparse: bool = False,
        max_predicted_blocks: int = MAX_PREDICTED_BLOCKS,
    ) -> None:
        self._blocks_per_stride = blocks_per_stride(block_size, index_stride)
        self._is_sparse = is_sparse
        self._has_reach = False
        """Whether any replica ever had a block, not only points: the model has full attention."""
        self._max_predicted_blocks = max_predicted_blocks
        self.departures = Departures()
        self._holders = Holders(self._on_departed)
        self._predicted: dict[BlockHash, int] = {}
        """The bits of the replicas that have a prediction with this hash."""
        self._replicas: dict[ReplicaId, _ReplicaShare] = {}
        self._slots: Slots | None = None
        """Bits of these replicas; None after they changed."""
        self._predictions: dict[int, _PredictedBlocks] = {}
        self._num_predicted_blocks = 0

    def thin(self, block_size: int, index_stride: int, *, is_sparse: bool = False) -> None:
        """From now on the index is thinned like this: for a model whose replicas were all replaced."""
        self._blocks_per_stride = blocks_per_stride(block_size, index_stride)
        self._is_sparse, self._has_reach = is_sparse, False

    @property
    def blocks_per_stride(self) -> int:
        """The index has every block at this interval of a chain, and the last full ones of prompts."""
        return self._blocks_per_stride

    @property
    def is_sparse(self) -> bool:
        return self._is_sparse

    @property
    def has_reach(self) -> bool:
        """Whether any replica ever had a block, and not only resume points."""
        return self._has_reach

    @property
    def has_tiers(self) -> bool:
        """Whether any replica ever had anything below the device."""
        return self._holders.has_tiers

    @property
    def num_entries(self) -> int:
        """Pairs of replica and stored hash."""
        return sum(replica.num_stored for replica in self._replicas.values())

    @property
    def num_predictions(self) -> int:
        """Own and announced ones."""
        return len(self._predictions)

    def num_stored(self, replica_id: ReplicaId) -> int:
        replica = self._replicas.get(replica_id)
        return 0 if replica is None else replica.num_stored

    def epoch(self, replica_id: ReplicaId) -> Epoch | None:
        """Return the epoch last given to `replace`; None for an unknown replica."""
        replica = self._replicas.get(replica_id)
        return None if replica is None else replica.epoch

    def last_change(self, replica_id: ReplicaId) -> int:
        """Return the number of the newest change that is known to be contained; 0 if none is."""
        replica = self._replicas.get(replica_id)
        return 0 if replica is None else replica.last_change

    def stored(self, replica_id: ReplicaId) -> frozenset[BlockHash]:
        """Looks at every stored hash."""
        replica = self._replicas.get(replica_id)
        return frozenset() if replica is None else self._holders.of(replica.bit)

    def stored_in(self, replica_id: ReplicaId, tier: Tier) -> frozenset[BlockHash]:
        """Return the hashes whose fastest copy lies in this tier. Scans all stored hashes."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return frozenset()
        return frozenset(
            each for each in self.stored(replica_id) if self._holders.tier(replica.bit, each) is tier
        )

    def missing(self, replica_id: ReplicaId, block_hashes: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
        """Return the hashes that the index gains when the replica computes a prompt of these blocks."""
        replica = self._replicas.get(replica_id)
        bit = 0 if replica is None else replica.bit
        shards = self._holders.shards
        positions = indexed_positions(len(block_hashes), self._blocks_per_stride)
        kept = [block_hashes[position] for position in positions]
        return tuple([each for each in kept if not shards[each[0]].get(each, 0) & bit])

    def overlaps(self, block_hashes: Sequence[BlockHash]) -> Overlaps:
        """Leading blocks of this chain at each replica that has any, on its device and below."""
        if self._slots is None:
            self._slots = Slots({replica_id: each.bit for replica_id, each in self._replicas.items()})
        slots = self._slots
        shards, predicted, stride = self._holders.shards, self._predicted, self._blocks_per_stride
        levels, foretold = walk(shards, predicted, block_hashes, slots.everyone, stride)
        if self._is_sparse:
            return self._by_points(slots, block_hashes, levels)
        has_tiers = self._holders.has_tiers
        if not levels or not (foretold or has_tiers):
            return Overlaps(slots, levels)
        look = Look(shards, predicted, block_hashes, stride, levels, foretold, has_tiers=has_tiers)
        return Overlaps(slots, levels, look, has_foretold=foretold != 0)

    def _by_points(self, slots: Slots, block_hashes: Sequence[BlockHash], reach: list[Depth]) -> Overlaps:
        """Return the overlaps of a sparse model, where `reach` says how far full attention has the chain."""

        def points(predicted: Mapping[BlockHash, int]) -> tuple[list[Depth], int]:
            known = reach if self._has_reach else None
            stride = self._blocks_per_stride
            return point_levels(self._holders.shards, predicted, block_hashes, slots.everyone, known, stride)

        levels, foretold = points(self._predicted)
        if not foretold:
            return Overlaps(slots, levels, reach=reach)

        def look(view: View) -> Sequence[Depth]:
            return points({})[0] if view is View.STORED else levels

        return Overlaps(slots, levels, look, has_foretold=True, reach=reach)

    def reach(self, replica_id: ReplicaId, block_hashes: Sequence[BlockHash]) -> int:
        """Leading blocks that the replica has or is about to have, of full attention if it is sparse."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return 0
        shards, stride = self._holders.shards, self._blocks_per_stride
        levels, _ = walk(shards, self._predicted, block_hashes, replica.bit, stride)
        return levels[0][0] if levels else 0

    def departed(self, block_hashes: Sequence[BlockHash], first: int) -> list[tuple[int, Departure]]:
        """Return the latest known departures of this chain's blocks from `first` on, each with its position:
        on the stride, and up to a stride past the last of them, where a shorter prompt may have ended."""
        stride = self._blocks_per_stride
        at_first = range(first, min(first + stride, len(block_hashes)))
        on_stride = range(at_first.stop + (stride - 1 - at_first.stop) % stride, len(block_hashes), stride)
        found = self._departed_at(block_hashes, [*at_first, *on_stride])
        if not found or (found[-1][0] + 1) % stride:
            return found
        end = found[-1][0] + 1
        return found + self._departed_at(block_hashes, range(end, min(end + stride - 1, len(block_hashes))))

    def departed_points(
        self, replica_id: ReplicaId, block_hashes: Sequence[BlockHash], first: int
    ) -> list[tuple[int, Departure]]:
        """Return the latest known departures of this chain's resume points from a replica as it runs now,
        from `first` on, each with the position of its last block."""
        left, epoch = (
            self.departures.of(as_departed(block_hashes[first:], replica_id)),
            self.epoch(replica_id),
        )
        return [
            (position, one)
            for position, one in enumerate(left, start=first)
            if one is not None and one.epoch == epoch
        ]

    def _departed_at(
        self, block_hashes: Sequence[BlockHash], positions: Sequence[int]
    ) -> list[tuple[int, Departure]]:
        hashes = [block_hashes[position] for position in positions]
        left = self.departures.of(hashes)
        if self._holders.has_retired:
            left = [self._holders.retired_at(each) or one for each, one in zip(hashes, left, strict=True)]
        return [(position, one) for position, one in zip(positions, left, strict=True) if one is not None]

    def _on_departed(self, retired: Departure, block_hashes: Sequence[BlockHash]) -> None:
        """Record the hashes of a departed replica that the table has dropped."""
        self.departures.left(
            retired.replica_id, retired.epoch, block_hashes, is_replica_gone=True, at=retired.at
        )

    def stage(self) -> StagedHashes:
        """Stage a set for `replace` that is read piece by piece, without blocking others."""
        return self._holders.stage()

    def replace(
        self,
        replica_id: ReplicaId,
        epoch: Epoch,
        hashes: Iterable[BlockHash] | StagedHashes,
        *,
        last_change: int = 0,
    ) -> None:
        """Replace a replica's hashes. `hashes` contain every change up to `last_change`, maybe more.

        Own predictions stay, unless they were made for another incarnation.
        """
        if not isinstance(hashes, StagedHashes):
            staged = self.stage()
            staged.add(hashes)
            hashes = staged
        self._has_reach = self._has_reach or hashes.has_blocks
        replica = self._replica(replica_id)
        retired = None
        if replica.epoch not in (None, epoch):
            self._drop_all(replica)
            retired = self._retired(replica_id, replica)
        self._drop_announced(replica)
        replica.epoch = epoch
        replica.last_change = last_change
        self._become(replica, *hashes.take(), retired=retired)

    def apply(self, change: IndexChange) -> ChangeOutcome:
        replica = self._replicas.get(change.replica_id)
        if replica is None or replica.epoch != change.epoch:
            return ChangeOutcome.UNKNOWN
        if change.number <= replica.last_change:
            return ChangeOutcome.STALE
        if change.number > replica.last_change + 1:
            self._drop_announced(replica)
            return ChangeOutcome.GAP
        replica.last_change = change.number
        if change.cleared:
            self._drop_all(replica)
            if replica.num_stored:
                self._become(replica, self._holders.take(), 0)
        if change.points or change.points_removed:
            replica.num_stored += self._change_points(replica, change)
        self._has_reach = self._has_reach or bool(change.added)
        if replica.predictions:
            for block_hash in change.removed:
                self._cancel(replica, block_hash)
        for reason, block_hashes in change.removed_by_reason():
            self.departures.left(change.replica_id, change.epoch, block_hashes, reason=reason)
        replica.num_stored -= self._holders.remove(replica.bit, change.removed)
        replica.num_stored += self._holders.add(replica.bit, change.added)
        replica.num_stored += self._holders.add(replica.bit, change.in_host, Tier.HOST)
        replica.num_stored += self._holders.add(replica.bit, change.on_disk, Tier.DISK)
        for announcement in change.announced:
            self._announce(replica, announcement)
        for announcement_id in change.ended:
            if announcement_id in replica.predictions:
                self._drop(announcement_id)
        self._holders.sweep()
        return ChangeOutcome.APPLIED

    def _change_points(self, replica: _ReplicaShare, change: IndexChange) -> int:
        """Apply a change's resume points; returns how many more there are."""
        removed = as_points(change.points_removed)
        if replica.predictions:
            for point in removed:
                self._cancel(replica, point)
        for reason, points in change.points_removed_by_reason():
            gone = as_departed(points, change.replica_id)
            self.departures.left(change.replica_id, change.epoch, gone, reason=reason)
        num_removed = self._holders.remove(replica.bit, removed)
        return self._holders.add(replica.bit, as_points(change.points)) - num_removed

    def sweep(self) -> bool:
        """Clear some leftovers of replicas that are gone, or were cleared or reread; False if there are none.
        Each change clears as much."""
        return self._holders.sweep()

    def forget(self, replica_id: ReplicaId) -> None:
        """The replica is gone, with its predictions. Unknown ones are ignored."""
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return
        self._drop_all(replica)
        retired = self._retired(replica_id, replica)
        self._holders.give_back(replica.bit, is_clean=replica.num_stored == 0, retired=retired)
        self._slots = None

    def _retired(self, replica_id: ReplicaId, replica: _ReplicaShare) -> Departure | None:
        epoch = replica.epoch
        return None if epoch is None else Departure(replica_id, epoch, True, self.departures.now)

    def forget_announcements(self) -> None:
        """Drop all announcements, since no event will end them."""
        for replica in self._replicas.values():
            self._drop_announced(replica)

    def predict(
        self,
        announcement_id: int,
        replica_id: ReplicaId,
        block_hashes: Collection[BlockHash],
        points: Collection[BlockHash] = (),
    ) -> None:
        """Count these blocks and resume points at the replica, which is about to compute them, until the
        prediction ends.

        `block_hashes` come from `missing`. Predictions beyond the limit end the oldest.
        """
        self._drop(announcement_id)  # ids are made to be unique, but others make them too
        names = _names(block_hashes, points)
        self._add(announcement_id, self._replica(replica_id), names, is_own=True, is_announced=False)

    def end_prediction(self, announcement_id: int) -> None:
        """End this router's part of it. An announced one stays until its replica ends it.

        Unknown ones (ended by their replica, or by the limit) are ignored.
        """
        prediction = self._predictions.get(announcement_id)
        if prediction is not None:
            prediction.is_own = False
            if not prediction.is_announced:
                self._drop(announcement_id)

    def _announce(self, replica: _ReplicaShare, announcement: Announcement) -> None:
        announcement_id = announcement.announcement_id
        block_hashes = _names(announcement.block_hashes, announcement.points)
        own = replica.predictions.get(announcement_id)
        if own is not None and own.block_hashes == set(block_hashes):
            own.is_announced = True
            return
        self._drop(announcement_id)
        is_own = own is not None and own.is_own
        self._add(announcement_id, replica, block_hashes, is_own=is_own, is_announced=True)

    def _add(
        self,
        announcement_id: int,
        replica: _ReplicaShare,
        block_hashes: Collection[BlockHash],
        *,
        is_own: bool,
        is_announced: bool,
    ) -> None:
        hashes = set(islice(block_hashes, self._max_predicted_blocks))
        if not hashes:
            return
        while self._num_predicted_blocks + len(hashes) > self._max_predicted_blocks:
            self._drop(next(iter(self._predictions)))
        prediction = _PredictedBlocks(replica, hashes, is_own, is_announced)
        self._predictions[announcement_id] = replica.predictions[announcement_id] = prediction
        self._num_predicted_blocks += len(hashes)
        predicted, bit = self._predicted, replica.bit
        for block_hash in hashes:
            bits = predicted.get(block_hash, 0)
            if bits & bit:
                again = replica.predicted_again
                again[block_hash] = again.get(block_hash, 0) + 1
            else:
                predicted[block_hash] = bits | bit

    def _drop(self, announcement_id: int) -> None:
        prediction = self._predictions.pop(announcement_id, None)
        if prediction is None:
            return
        replica = prediction.replica
        del replica.predictions[announcement_id]
        self._num_predicted_blocks -= len(prediction.block_hashes)
        predicted, bit, again = self._predicted, replica.bit, replica.predicted_again
        for block_hash in prediction.block_hashes:
            if again and block_hash in again:
                self._unpredict_once(replica, block_hash)
                continue
            others = predicted[block_hash] ^ bit
            if others:
                predicted[block_hash] = others
            else:
                del predicted[block_hash]

    def _drop_all(self, replica: _ReplicaShare) -> None:
        for announcement_id in list(replica.predictions):
            self._drop(announcement_id)

    def _drop_announced(self, replica: _ReplicaShare) -> None:
        for announcement_id, prediction in list(replica.predictions.items()):
            prediction.is_announced = False
            if not prediction.is_own:
                self._drop(announcement_id)

    def _cancel(self, replica: _ReplicaShare, block_hash: BlockHash) -> None:
        """Cancel all predictions of a removed block."""
        others = self._predicted.get(block_hash, 0) ^ replica.bit
        if others & replica.bit:
            return
        replica.predicted_again.pop(block_hash, None)
        if others:
            self._predicted[block_hash] = others
        else:
            del self._predicted[block_hash]
        for announcement_id, prediction in list(replica.predictions.items()):
            if block_hash in prediction.block_hashes:
                prediction.block_hashes.remove(block_hash)
                self._num_predicted_blocks -= 1
                if not prediction.block_hashes:
                    self._drop(announcement_id)

    def _unpredict_once(self, replica: _ReplicaShare, block_hash: BlockHash) -> None:
        """One of several predictions with it is over."""
        replica.predicted_again[block_hash] -= 1
        if not replica.predicted_again[block_hash]:
            del replica.predicted_again[block_hash]

    def _become(
        self, replica: _ReplicaShare, bit: int, num_stored: int, *, retired: Departure | None = None
    ) -> None:
        """Switch the replica to this bit, with what is stored under it. Its old hashes depart as
        `retired`."""
        for block_hash in set().union(*(each.block_hashes for each in replica.predictions.values())):
            self._predicted[block_hash] ^= replica.bit | bit
        self._holders.give_back(replica.bit, is_clean=replica.num_stored == 0, retired=retired)
        replica.bit, replica.num_stored = bit, num_stored
        self._slots = None

    def _replica(self, replica_id: ReplicaId) -> _ReplicaShare:
        replica = self._replicas.get(replica_id)
        if replica is None:
            replica = self._replicas[replica_id] = _ReplicaShare(self._holders.take())
            self._slots = None
        return replica
