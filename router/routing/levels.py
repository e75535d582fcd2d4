"""Overlaps: each replica's share of one prompt, deepest first.

Owns the answer to one lookup. Knows no index: it is made of bit masks, and names the replicas behind the bits
only on demand, since a prefix may lie in every cache of a fleet of 1,000.
"""

import enum
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from replicas.protocol.status import ReplicaId

if TYPE_CHECKING:
    import random


class Slots:
    """The owner of each bit. Immutable: replicas that come and go make new slots."""

    __slots__ = ("_bits", "_replica_ids", "everyone")

    def __init__(self, bits: Mapping[ReplicaId, int]) -> None:
        self._bits = dict(bits)
        self._replica_ids = {bit.bit_length() - 1: replica_id for replica_id, bit in bits.items()}
        self.everyone = self.mask(bits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slots) and self._bits == other._bits

    __hash__ = None  # type: ignore[assignment]

    def bit(self, replica_id: ReplicaId) -> int:
        """0 if it has none."""
        return self._bits.get(replica_id, 0)

    def bits(self, replica_ids: Iterable[ReplicaId]) -> list[int]:
        """Return each replica's bit; 0 if it has none."""
        bits = self._bits
        return [bits.get(replica_id, 0) for replica_id in replica_ids]

    def mask(self, replica_ids: Iterable[ReplicaId]) -> int:
        """Return the bits of all of these."""
        return functools.reduce(operator.or_, self.bits(replica_ids), 0)

    def of(self, mask: int, positions: Sequence[int] | None = None) -> list[ReplicaId]:
        """Return the replicas of these bits, lowest first; with `positions`, only those of that ordinal (from
        0)."""
        if positions is None and mask and mask & (mask - 1) == 0:
            return [self._replica_ids[mask.bit_length() - 1]]
        packed = mask.to_bytes((mask.bit_length() + 7) // 8, "little")
        bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), bitorder="little")
        slots = np.flatnonzero(bits)
        if positions is not None:
            slots = slots[list(positions)]
        return [self._replica_ids[slot] for slot in slots.tolist()]


class Level:
    """The replicas that have just as many leading blocks."""

    __slots__ = ("_mask", "_slots", "depth")

    def __init__(self, depth: int, mask: int, slots: Slots) -> None:
        self.depth = depth
        self._mask = mask
        self._slots = slots

    def draw(self, count: int, rng: "random.Random") -> list[ReplicaId]:
        """Draw this many at random, or all if there are no more."""
        num_holders = self._mask.bit_count()
        if num_holders <= count:
            return self._slots.of(self._mask)
        return self._slots.of(self._mask, rng.sample(range(num_holders), count))


class Depths(NamedTuple):
    """How many leading blocks a replica has on its device, in host memory or faster, and anywhere."""

    device: int
    host: int
    anywhere: int


NOWHERE = Depths(0, 0, 0)

Depth: TypeAlias = tuple[int, int]
"""A number of leading blocks, and the bits of the replicas that have just that many."""


class Holdings(NamedTuple):
    """Each replica's share of a prompt at its decision, as plain data.

    `levels` are deepest first, each replica once, predictions included; `stored` are without them. `gone` are
    replicas that were dead although the index still had them.
    """

    slots: Slots
    levels: Sequence[Depth]
    stored: Sequence[Depth]
    gone: frozenset[ReplicaId] = frozenset()

    def depth(self, replica_id: ReplicaId) -> int:
        """Leading blocks that it had stored or was about to."""
        return _depth(self.levels, self.slots.bit(replica_id))

    def stored_depth(self, replica_id: ReplicaId) -> int:
        return _depth(self.stored, self.slots.bit(replica_id))

    def deepest(
        self, levels: Sequence[Depth], without: Iterable[ReplicaId] = (), prefer: Iterable[ReplicaId] = ()
    ) -> tuple[ReplicaId, int] | None:
        """One of those that are deepest there, and its leading blocks. Those in `prefer` come first."""
        among = ~self.slots.mask(without)
        for depth, mask in levels:
            left = mask & among
            if left:
                left = left & self.slots.mask(prefer) or left
                return self.slots.of(left & -left)[0], depth
        return None


class View(enum.IntEnum):
    """The part of an index that counts."""

    ON_DEVICE = 0
    IN_HOST = 1
    """Or on the device."""
    STORED = 2
    """In any tier, and not only predicted."""


class Overlaps(Mapping[ReplicaId, int]):
    """The leading blocks that each replica has in any tier, for replicas with any.

    `levels` are deepest first, each replica once. `look` answers the same for a part of the index; it is
    called on demand, so not after the index has changed. Without it, all is stored on the device.

    Of a sparse model, `levels` are the deepest resume points, and `reach` is how far full attention has the
    prompt: nothing that is computed less, but where a request leaves a point for later ones.
    """

    __slots__ = ("_has_foretold", "_levels", "_look", "_seen", "reach", "slots")

    def __init__(
        self,
        slots: Slots,
        levels: Sequence[Depth],
        look: Callable[[View], Sequence[Depth]] | None = None,
        *,
        has_foretold: bool = False,
        reach: Sequence[Depth] = (),
    ) -> None:
        self.slots = slots
        self.reach = reach
        self._has_foretold = has_foretold
        self._levels = levels
        self._look = look
        self._seen: dict[View, Sequence[Depth]] = {}

    def depth(self, replica_id: ReplicaId) -> int:
        """Return the replica's leading blocks; 0 if it has none."""
        return _depth(self._levels, self.slots.bit(replica_id))

    def holdings(self, gone: frozenset[ReplicaId]) -> Holdings | None:
        """Return the data to keep of it; None if no replica has anything."""
        if not self._levels:
            return None
        stored = self._view(View.STORED) if self._has_foretold else self._levels
        return Holdings(self.slots, self._levels, stored, gone)

    def without(self, replica_ids: Iterable[ReplicaId]) -> "Overlaps":
        """Return the same, as if these had nothing."""
        kept, look = ~self.slots.mask(replica_ids), self._look

        def masked(levels: Sequence[Depth]) -> list[Depth]:
            return [(depth, mask & kept) for depth, mask in levels if mask & kept]

        return Overlaps(
            self.slots,
            masked(self._levels),
            None if look is None else lambda view: masked(look(view)),
            has_foretold=self._has_foretold,
            reach=masked(self.reach),
        )

    def alike(self, among: int) -> list[tuple[int, Depths]]:
        """Group the replicas in the mask `among` that hold anything by equal depths."""
        if self._look is None or not self._levels:
            return [
                (mask & among, Depths(depth, depth, depth)) for depth, mask in self._levels if mask & among
            ]
        anywhere = [(depth, mask & among) for depth, mask in self._levels if mask & among]
        in_host, on_device = self._view(View.IN_HOST), self._view(View.ON_DEVICE)
        return [
            (mask, Depths(device, host, depth))
            for depth, with_depth in anywhere
            for host, with_host in _split(in_host, with_depth)
            for device, mask in _split(on_device, with_host)
        ]

    def levels(self, among: int) -> Iterator[Level]:
        """Deepest first, with those alone that are in the mask `among`."""
        return self._among(self._levels, among)

    def deepest_stored(self, among: int) -> Level | None:
        """Return the replicas in the mask `among` that have stored most; None if none has stored any."""
        return next(self._among(self._view(View.STORED), among), None)

    def reach_levels(self, among: int) -> Iterator[Level]:
        """Return the same by full attention's reach; nothing if the model is not sparse."""
        return self._among(self.reach, among)

    def reach_of(self, bit: int) -> int:
        return _depth(self.reach, bit)

    def _among(self, levels: Sequence[Depth], among: int) -> Iterator[Level]:
        for depth, mask in levels:
            if mask & among:
                yield Level(depth, mask & among, self.slots)

    def _view(self, view: View) -> Sequence[Depth]:
        if self._look is None:
            return self._levels
        if view not in self._seen:
            self._seen[view] = self._look(view)
        return self._seen[view]

    def __getitem__(self, replica_id: ReplicaId) -> int:
        depth = self.depth(replica_id)
        if not depth:
            raise KeyError(replica_id)
        return depth

    def __iter__(self) -> Iterator[ReplicaId]:
        for _, mask in self._levels:
            yield from self.slots.of(mask)

    def __len__(self) -> int:
        return sum(mask.bit_count() for _, mask in self._levels)

    def __repr__(self) -> str:
        return f"Overlaps({dict(self)})"


def _split(levels: Sequence[Depth], mask: int) -> list[Depth]:
    """Split the mask by depth in `levels`, 0 for replicas in none."""
    parts = []
    for depth, its in levels:
        part = its & mask
        if part:
            parts.append((depth, part))
            mask ^= part
            if not mask:
                return parts
    parts.append((0, mask))
    return parts


def _depth(levels: Sequence[Depth], bit: int) -> int:
    for depth, mask in levels:
        if mask & bit:
            return depth
    return 0
