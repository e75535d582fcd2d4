"""FleetOptions and its parts: everything that a simulated fleet is told.

Owns the defaults and the checks. Knows no command line.
"""

from dataclasses import dataclass, field

from loadtests.simulation.shape import ReplicaShape
from router.routing.cost import CostParameters


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds until something is known elsewhere.

    `event` is a change of a cache, until a router knows; `load` a replica's load. `snapshot_interval` is
    the time between two snapshots of a replica, 0 for one with every step. `network` is one way between
    router and replica, for requests and for answers.
    """

    event: float = 0.05
    load: float = 0.1
    snapshot_interval: float = 0.0
    network: float = 0.0

    def __post_init__(self) -> None:
        if min(self.event, self.load, self.snapshot_interval, self.network) < 0:
            raise ValueError("a delay cannot be below 0")


@dataclass(frozen=True, slots=True)
class Kill:
    """The replica dies at a time, and comes back, if at all, `back_after` seconds later: with its disk, or
    without it, on another machine.
    """

    replica: int
    at: float
    back_after: float | None = None
    keeps_disk: bool = True


@dataclass(frozen=True, slots=True)
class Outage:
    """Redis is away: no change of a cache reaches anybody. Afterwards every replica writes all it has."""

    start: float
    end: float

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"an outage ends after it starts, not from {self.start:g} to {self.end:g}")

    def covers(self, now: float) -> bool:
        return self.start <= now < self.end


@dataclass(frozen=True, slots=True)
class FleetOptions:
    shape: ReplicaShape
    num_replicas: int = 8
    num_routers: int = 1
    policy: str = "kvasir"
    parameters: CostParameters = field(default_factory=CostParameters)
    index_stride: int = 128
    delays: Delays = field(default_factory=Delays)
    announces: bool = True
    """Replicas tell which blocks a request will make when they take it, not only when they have them."""
    drop_share: float = 0.0
    """Each router misses this share of the changes of caches, and has to read that replica's set again."""
    kills: tuple[Kill, ...] = ()
    outages: tuple[Outage, ...] = ()

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or self.num_routers < 1:
            raise ValueError("a fleet has at least one replica and one router")
        if not 0 <= self.drop_share < 1:
            raise ValueError(f"a share of changes lies from 0 to below 1, not {self.drop_share:g}")
        for kill in self.kills:
            if not 0 <= kill.replica < self.num_replicas:
                raise ValueError(f"there is no replica {kill.replica} to kill; they count from 0")


def parse_kill(text: str) -> Kill:
    """REPLICA@SECONDS, with :BACK_AFTER, with :new if it is on another machine then. Raises ValueError."""
    try:
        replica, _, when = text.partition("@")
        at, *rest = when.split(":")
        if rest[1:] not in ([], ["new"]):
            raise ValueError
        return Kill(int(replica), float(at), float(rest[0]) if rest else None, keeps_disk=not rest[1:])
    except ValueError:
        raise ValueError(
            f"a kill reads REPLICA@SECONDS, REPLICA@SECONDS:BACK_AFTER or REPLICA@SECONDS:BACK_AFTER:new,"
            f" not {text}"
        ) from None


def parse_outage(text: str) -> Outage:
    """FROM-TO in seconds. Raises ValueError."""
    start, _, end = text.partition("-")
    try:
        times = float(start), float(end)
    except ValueError:
        raise ValueError(f"an outage reads FROM-TO in seconds, not {text}") from None
    return Outage(*times)
