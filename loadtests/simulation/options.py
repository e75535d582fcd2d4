"""FleetOptions and its parts: everything that a simulated fleet is told.

Owns the defaults and the checks. Knows no command line.
"""

import math
from dataclasses import dataclass, field, replace

from loadtests.simulation.shape import ReplicaShape
from replicas.protocol.status import Role
from router.queue.held import QueueRules
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


DRAIN_SECONDS = 30.0
"""A replica's own default."""


@dataclass(frozen=True, slots=True)
class Kill:
    """The replica dies at a time, and comes back, if at all, `back_after` seconds later: with its disk, or
    without it, on another machine.
    """

    replica: int
    at: float
    back_after: float | None = None
    keeps_disk: bool = True
    drain_seconds: float = 0.0
    """It is told so long before: it takes nothing new, and hands over what it has leased."""


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
class Autoscale:
    """The fleet begins with the fewest replicas, and wants one per `target_tokens` of prompts that wait. A
    new one is there after `start_seconds`."""

    min_replicas: int
    max_replicas: int
    target_tokens: float
    start_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError(
                f"replicas scale from 1 or more to no fewer, not {self.min_replicas} to {self.max_replicas}"
            )
        if not (0 < self.target_tokens < math.inf and 0 <= self.start_seconds < math.inf):
            raise ValueError("a target is above 0 tokens, and a start takes no less than 0 seconds")


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Some of the replicas: their role, and the most tokens of a step, if those are their own."""

    role: Role
    num_replicas: int
    max_batched_tokens: int | None = None


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
    routes_by_reach: bool = False
    """Routers take what full attention has of a prompt for a hit, though the model is sparse."""
    drop_share: float = 0.0
    """Each router misses this share of the changes of caches, and has to read that replica's set again."""
    queue: QueueRules | None = None
    """How routers hold back what no replica can begin soon; None sends everything at once."""
    has_programs: bool = True
    """Whether routers of policy `kvasir` know programs."""
    deadline_seconds: float | None = None
    """After its arrival a request's first token is worth nothing, and routers know it."""
    kills: tuple[Kill, ...] = ()
    outages: tuple[Outage, ...] = ()
    autoscale: Autoscale | None = None
    """`num_replicas` is the most of them then."""
    pools: tuple[PoolShape, ...] = ()
    """All replicas, in their order. Without, each does all."""

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or self.num_routers < 1:
            raise ValueError("a fleet has at least one replica and one router")
        if not 0 <= self.drop_share < 1:
            raise ValueError(f"a share of changes lies from 0 to below 1, not {self.drop_share:g}")
        if self.pools and sum(pool.num_replicas for pool in self.pools) != self.num_replicas:
            raise ValueError(f"pools have all replicas, which are {self.num_replicas}")
        for kill in self.kills:
            if not 0 <= kill.replica < self.num_replicas:
                raise ValueError(f"there is no replica {kill.replica} to kill; they count from 0")

    def pool_of(self, number: int) -> PoolShape:
        """Return the pool of the replica with this number."""
        for pool in self.pools:
            if number < pool.num_replicas:
                return pool
            number -= pool.num_replicas
        return PoolShape(Role.BOTH, self.num_replicas)

    def shape_of(self, number: int) -> ReplicaShape:
        max_batched_tokens = self.pool_of(number).max_batched_tokens
        if max_batched_tokens is None:
            return self.shape
        return replace(self.shape, max_batched_tokens=max(max_batched_tokens, self.shape.max_running + 1))


def parse_pools(text: str) -> tuple[PoolShape, ...]:
    """ROLE:REPLICAS or ROLE:REPLICAS:TOKENS, with commas between. Raises ValueError."""
    try:
        pools = []
        for each in text.split(","):
            role, num_replicas, *step = each.split(":")
            if len(step) > 1:
                raise ValueError
            numbers = [*map(int, [num_replicas, *step])]
            if min(numbers) < 1:
                raise ValueError
            pools.append(PoolShape(Role(role), *numbers))
    except ValueError:
        raise ValueError(
            f"pools read ROLE:REPLICAS or ROLE:REPLICAS:TOKENS, with commas between, not {text}; roles are "
            f"{', '.join(Role)}"
        ) from None
    return tuple(pools)


def parse_kill(text: str) -> Kill:
    """REPLICA@SECONDS, with :BACK_AFTER, with :new if it is on another machine then, or :drained if it drains
    before. Raises ValueError.
    """
    try:
        replica, _, when = text.partition("@")
        at, *rest = when.split(":")
        if rest[1:] not in ([], ["new"], ["drained"]):
            raise ValueError
        back_after = float(rest[0]) if rest else None
        seconds = DRAIN_SECONDS if rest[1:] == ["drained"] else 0.0
        return Kill(int(replica), float(at), back_after, keeps_disk=not rest[1:], drain_seconds=seconds)
    except ValueError:
        raise ValueError(
            "a kill reads REPLICA@SECONDS, REPLICA@SECONDS:BACK_AFTER, or that with :new or :drained, not"
            f" {text}"
        ) from None


def parse_autoscale(text: str) -> Autoscale:
    """MIN:MAX:TOKENS, or that with :SECONDS. Raises ValueError."""
    try:
        least, most, *rest = text.split(":")
        sizes, (target, *start) = (int(least), int(most)), map(float, rest)
        if len(start) > 1:
            raise ValueError
    except ValueError:
        raise ValueError(f"autoscaling reads MIN:MAX:TOKENS or MIN:MAX:TOKENS:SECONDS, not {text}") from None
    return Autoscale(*sizes, target, *start)


def parse_outage(text: str) -> Outage:
    """FROM-TO in seconds. Raises ValueError."""
    start, _, end = text.partition("-")
    try:
        times = float(start), float(end)
    except ValueError:
        raise ValueError(f"an outage reads FROM-TO in seconds, not {text}") from None
    return Outage(*times)
