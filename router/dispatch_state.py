"""DispatchState: what all runs of a router share.

Owns the counts of what has become of them. Knows nothing of one generation: `run.py` does.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from replicas.protocol.status import ReplicaId
from router.replica_client import ReplicaClient
from router.routing.table import RoutingTable

MIN_RETRY_AFTER_SECONDS = 1.0
MAX_RETRY_AFTER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`max_attempts` bounds how many replicas one choice may see: it may be what kills them.

    When no replica is left, all may be tried again after a wait, which doubles each time.
    """

    max_attempts: int = 4
    max_waits: int = 5
    first_wait_seconds: float = 0.05


@dataclass(frozen=True, slots=True)
class DispatchStatistics:
    """Counts since the start, but for `num_running`. `num_lost` are attempts whose replica was lost."""

    num_running: int
    num_retries: int
    num_resumes: int
    num_lost: int


class DispatchState:
    """`clients` gives the open client of a replica, or None if there is none just now."""

    def __init__(
        self,
        table: RoutingTable,
        clients: Callable[[ReplicaId], ReplicaClient | None],
        *,
        rng: random.Random,
        retry: RetryPolicy,
    ) -> None:
        self.table = table
        self.clients = clients
        self.rng = rng
        self.retry = retry
        self.num_running = 0
        self.num_retries = 0
        self.num_resumes = 0
        self.num_lost = 0

    def retry_after_seconds(self, model: str) -> float:
        """When it is worth asking again: once the idlest replica has computed the prompts that it has."""
        seconds = self.table.backlog_seconds(model)
        return min(MAX_RETRY_AFTER_SECONDS, max(MIN_RETRY_AFTER_SECONDS, seconds))

    def statistics(self) -> DispatchStatistics:
        return DispatchStatistics(self.num_running, self.num_retries, self.num_resumes, self.num_lost)
