"""VirtualHost and Feed: what replicas tell the routers of themselves, and when they said it.

Owns a replica's identity, its incarnations and the numbering of its changes, and the log of all that
was said. Knows no router: each reads the log at its own pace.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from loadtests.simulation.replica import LoadReport, VirtualReplica
from loadtests.simulation.store import OnDisk
from replicas.index.announcements import Announcements
from replicas.index.residency import Residency
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import CacheEvent, Tier
from replicas.protocol.keys import Announcement, IndexChange
from replicas.protocol.status import Epoch, ReplicaId


@dataclass(frozen=True, slots=True)
class HostReport:
    replica_id: ReplicaId
    epoch: Epoch
    report: LoadReport


@dataclass(slots=True)
class Feed:
    """Both logs are in order of time."""

    change_times: list[float] = field(default_factory=list)
    changes: list[IndexChange] = field(default_factory=list)
    load_times: list[float] = field(default_factory=list)
    loads: list[HostReport] = field(default_factory=list)

    def add_change(self, now: float, change: IndexChange) -> None:
        self.change_times.append(now)
        self.changes.append(change)

    def add_load(self, now: float, report: HostReport) -> None:
        self.load_times.append(now)
        self.loads.append(report)


class VirtualHost:
    """One place in the fleet. `replica` is None while it is dead."""

    def __init__(self, number: int, index_stride: int) -> None:
        self.number = number
        self.replica_id = ReplicaId(f"replica-{number}")
        self.replica: VirtualReplica | None = None
        self.is_coming = False
        """It is dead, and will be back."""
        self.is_draining = False
        """It takes nothing new, and will be dead."""
        self.num_received = 0
        """Requests that came to this incarnation."""
        self.planned_end: float | None = None
        """The end of a step that is planned in the agenda."""
        self.planned_moves_end: float | None = None
        """The end of a move of KV that is waited for."""
        self.left_on_disk: list[OnDisk] = []
        """While it is dead: what its next life will find."""
        self.num_lives = 0
        self._index_stride = index_stride
        self._residency: Residency | None = None
        self._announcements = Announcements()
        self._last_change = 0

    @property
    def epoch(self) -> Epoch:
        return Epoch(f"life-{self.num_lives}")

    @property
    def last_change(self) -> int:
        return self._last_change

    @property
    def kept(self) -> frozenset[BlockHash]:
        """Return the hashes that the index should hold for it now."""
        return frozenset() if self._residency is None else frozenset(self._residency.kept)

    @property
    def points(self) -> frozenset[BlockHash]:
        """Its resume points, if its model is sparse."""
        return frozenset() if self._residency is None else frozenset(self._residency.points)

    @property
    def fastest(self) -> Mapping[BlockHash, Tier]:
        """The tier of the fastest copy of each of these."""
        return {} if self._residency is None else self._residency.fastest

    def start(self, replica: VirtualReplica) -> None:
        self.replica = replica
        self.num_lives += 1
        self.num_received = 0
        self.planned_end = self.planned_moves_end = None
        self._residency = Residency(replica.shape.block_size, self._index_stride)
        self._announcements = Announcements()
        self._last_change = 0

    def die(self) -> None:
        self.replica = self._residency = None
        self.is_draining = False

    def observe(self, events: Iterable[CacheEvent]) -> None:
        assert self._residency is not None
        num_unknown = self._residency.observe(events)
        assert not num_unknown, "the pool removed what it never stored"

    def announce(self, announcement: Announcement) -> None:
        """A request that will make these blocks has been taken."""
        begun = self._announcements.begin(
            announcement.announcement_id, announcement.block_hashes, announcement.points
        )
        assert begun, "announcements have different ids"

    def end_announcement(self, announcement_id: int) -> None:
        """It has made them, and `observe` was told."""
        self._announcements.end(announcement_id)

    def take_change(self) -> IndexChange | None:
        """Return the changes since the last call."""
        residency, announcements = self._residency, self._announcements
        if residency is None or not (residency.has_change or announcements.has_change):
            return None
        net = residency.take_change()
        announced, ended = announcements.take_change()
        return IndexChange(
            self.replica_id,
            self.epoch,
            self._next_number(),
            added=net.added,
            removed=net.removed,
            in_host=net.in_host,
            on_disk=net.on_disk,
            points=net.points,
            points_removed=net.points_removed,
            announced=announced,
            ended=ended,
        )

    def whole_set(self) -> IndexChange:
        """All that it holds and is about to make, in place of whatever was known."""
        assert self._residency is not None
        whole = self._residency.take_all()
        return IndexChange(
            self.replica_id,
            self.epoch,
            self._next_number(),
            added=whole.added,
            in_host=whole.in_host,
            on_disk=whole.on_disk,
            points=whole.points,
            cleared=True,
            announced=self._announcements.take_all(),
        )

    def _next_number(self) -> int:
        self._last_change += 1
        return self._last_change
