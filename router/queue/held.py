"""Held: a request that a router holds back, and the counts of all of them.

Plain records that `holding.py` owns and changes.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from replicas.protocol.blocks import BlockHash
from replicas.protocol.status import Adapter, ReplicaId
from router.errors import RouterError
from router.programs.book import Turn
from router.queue.line import Waiter
from router.routing.decision import RoutingRequest
from router.routing.table import RoutedRequest


@dataclass(frozen=True, slots=True)
class QueueRules:
    """In an overload a replica gets more while it has less than `target_seconds` of prompts.

    A request without a deadline waits for `longest_seconds` at most, or for as long as its own prompt takes.
    `margin` is the share of the time to a deadline that an estimate may fill: a small error would otherwise
    make everything late.
    """

    target_seconds: float = 0.25
    longest_seconds: float = 1.0
    margin: float = 0.8


class Asking(msgspec.Struct, frozen=True):
    """A request on its way to a replica. After `deadline` its first token is too late. `other_seconds` of
    work besides its prompt are charged when it goes. `has_others`: other tenants may come. `turn` is set for
    one of a program."""

    model: str
    tenant: str
    request: RoutingRequest
    block_hashes: Sequence[BlockHash]
    adapter: Adapter | None = None
    weight: float = 1.0
    priority: int = 0
    deadline: float | None = None
    num_bytes: int = 0
    other_seconds: float = 0.0
    has_others: bool = False
    turn: Turn | None = None


class Held(Waiter):
    """A request that waits for room. `call` tells its holder that it was routed, or refused."""

    __slots__ = (
        "asked_at",
        "asking",
        "call",
        "error",
        "exclude",
        "is_at_gate",
        "is_out",
        "num_passed",
        "routed",
    )

    def __init__(
        self,
        line: ReplicaId,
        asking: Asking,
        call: Callable[[], None],
        *,
        work: float,
        order: int,
        now: float,
    ) -> None:
        super().__init__(
            line,
            asking.tenant,
            work=work,
            order=order,
            since=now,
            weight=asking.weight,
            priority=asking.priority,
            num_bytes=asking.num_bytes,
        )
        self.asking = asking
        self.call = call
        self.exclude: Collection[ReplicaId] = ()
        self.asked_at = now
        self.is_out = False
        self.is_at_gate = False
        """Its program may not run yet."""
        self.num_passed = 0
        self.routed: RoutedRequest | None = None
        self.error: RouterError | None = None


@dataclass(slots=True)
class HoldingCounts:
    """Since the start. `held_seconds` were spent in line by those that have gone."""

    num_passed: int = 0
    num_held: int = 0
    num_released: int = 0
    num_refused_at_once: int = 0
    """Their wait would have been too long."""
    num_refused_late: int = 0
    """Their wait was too long."""
    num_refused_full: int = 0
    held_seconds: float = 0.0
