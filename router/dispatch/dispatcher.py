"""Dispatcher: makes runs, and has what all runs of a router share.

Owns the requests in flight by replica, the suspects, the waiting requests, and the counts of outcomes.
`generation_run.py` knows single generations. Knows no HTTP, no text, no gRPC, and not how a replica is
chosen.
"""

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from replicas.protocol.frames import PromptUsage
from replicas.protocol.status import ReplicaId
from router.dispatch.attempt import Attempt, PromptOf
from router.dispatch.generation_run import GenerationRun
from router.dispatch.retries import RetryBudget, RetryPolicy
from router.dispatch.split import SplitCounts
from router.dispatch.suspects import Presence, Suspects, blamed
from router.dispatch.waiting_room import WaitingRoom
from router.fleet.fleet_health import NOTHING_COMING, FleetHealth
from router.fleet.replica_client import ReplicaClient
from router.generation import Generation
from router.limits.first_replica import FirstReplica
from router.observation.trace_points import NO_TRACE, Trace
from router.queue.held import QueueRules
from router.queue.holding import Holding
from router.queue.work import BYTES_PER_TOKEN
from router.routing.decision import RoutingRequest
from router.routing.table import REFUSING_SECONDS, UNREAD_SECONDS, Preview, RoutingTable
from router.shared.instruments import Instrument, counter, gauge

logger = logging.getLogger(__name__)

DEFAULT_RETRY = RetryPolicy()
MAX_WAITING = 2048
MAX_WAITING_BYTES = 256 << 20

LEAST_PROMISED_TOKENS = 1024
"""A shorter promise that is not kept is no sign: vendors cache no prompts that are shorter."""

MAX_LEFT = 64
LEFT_SECONDS = 5.0

MIN_RETRY_AFTER_SECONDS = 1.0
MAX_RETRY_AFTER_SECONDS = 60.0


@dataclass(slots=True)
class _OpenAttempts:
    """Requests over one stream, in order of submission."""

    max_step_tokens: int
    attempts: dict[Attempt, None] = field(default_factory=dict)
    left: deque[tuple[float, Presence, PromptOf]] = field(default_factory=lambda: deque(maxlen=MAX_LEFT))
    """Prompts whose client left before they made progress: their work may still end a replica."""
    is_dead: bool = False


class _WeighedPrompts:
    """A set of prompts, without a hash of all their tokens."""

    def __init__(self, prompts: Iterable[PromptOf]) -> None:
        self._prompts: dict[tuple[str, str | None, int, int], list[PromptOf]] = {}
        for prompt in prompts:
            self._prompts.setdefault(_key(prompt), []).append(prompt)

    def __contains__(self, prompt: PromptOf) -> bool:
        return prompt in self._prompts.get(_key(prompt), ())


def _key(prompt: PromptOf) -> tuple[str, str | None, int, int]:
    model, token_ids, owner = prompt
    return model, owner, len(token_ids), token_ids[-1]


class Dispatcher:
    """`clients` returns the open client of a replica, or None."""

    def __init__(
        self,
        table: RoutingTable,
        clients: Callable[[ReplicaId], ReplicaClient | None],
        *,
        rng: random.Random,
        retry: RetryPolicy = DEFAULT_RETRY,
        room: WaitingRoom | None = None,
        outlook: Callable[[str], FleetHealth] = lambda _: NOTHING_COMING,
        clock: Callable[[], float] = time.monotonic,
        holding: Holding | None = None,
        first_replica: FirstReplica | None = None,
    ) -> None:
        self.table = table
        self.clients = clients
        self.rng = rng
        self.clock = clock
        self.retry = retry
        self.room = room or WaitingRoom(max_waiting=MAX_WAITING, max_bytes=MAX_WAITING_BYTES)
        self.outlook = outlook
        self.holding = holding or Holding(table, QueueRules())
        self._waiting_places: list[WaitingRoom | Holding | FirstReplica] = [self.room, self.holding]
        if first_replica is not None:
            self._waiting_places.append(first_replica)
        self.budget = RetryBudget()
        self.suspects = Suspects(rng.randbytes(32))
        self.num_running = 0
        self.num_retries = 0
        self.num_resumes = 0
        self.num_lost = 0
        self.num_overdue = 0
        self.num_late = 0
        self.splits = SplitCounts()
        self._num_runs = 0
        self._open: WeakKeyDictionary[ReplicaClient, _OpenAttempts] = WeakKeyDictionary()
        table.on_change = self._changed
        table.on_absence = self.holding.absent

    def run(self, generation: Generation, trace: Trace = NO_TRACE) -> GenerationRun:
        """Return an async context manager; leaving it stops what still runs and returns everything."""
        return GenerationRun(self, generation, trace)

    def preview(self, generation: Generation) -> Preview:
        """Return where it would go now, without sending it. Raises UnknownModel or NoReplicaAvailable."""
        request = RoutingRequest(
            generation.bucket,
            len(generation.token_ids),
            self.table.block_size(generation.model),
            media=generation.submit.media,
            head_bucket=generation.head_bucket,
        )
        return self.table.preview(
            generation.model, request, generation.block_hashes, adapter=generation.adapter
        )

    def _changed(self, model: str, replica_id: ReplicaId) -> None:
        if self.room.num_waiting:
            self.room.call(model)
        if self.holding.num_waiting_for(model):
            self.holding.changed(model, replica_id, self.clock())

    def next_order(self) -> int:
        """Runs are numbered as they come."""
        self._num_runs += 1
        return self._num_runs

    # Who is in flight where.

    def begin(self, attempt: Attempt) -> None:
        there = self._open.get(attempt.client)
        if there is None:
            card = self.table.card(attempt.replica_id)
            there = _OpenAttempts(0 if card is None else card.max_batched_tokens)
            self._open[attempt.client] = there
        there.attempts[attempt] = None

    def end(self, attempt: Attempt) -> None:
        """Return an attempt's resources. Once per attempt."""
        there = self._open[attempt.client]
        there.attempts.pop(attempt, None)
        had_trial = attempt.trial is not None
        if attempt.num_open and not attempt.has_survived:
            there.left.append((self.clock(), attempt.presence(), attempt.prompt))
        attempt.release()
        model = attempt.prompt[0]
        if self.holding.num_waiting_for(model):
            self.holding.changed(model, attempt.replica_id, self.clock())
        if had_trial:
            self.room.call(attempt.prompt.model)

    def replica_died(self, client: ReplicaClient) -> None:
        """Judge the requests in flight at a dead replica, once even if called repeatedly."""
        there = self._open.get(client)
        if there is None or there.is_dead:
            return
        there.is_dead = True
        if self.clients(client.replica_id) is client:
            self.table.set_dead(client.replica_id)  # and its stream will end
        if not client.is_draining:  # else it was told to leave, and has not waited for its last requests
            self._blame(there)

    def blame_those_at(self, client: ReplicaClient) -> None:
        """Blame the requests at a replica that lives but no longer works."""
        self._blame(self._open[client])

    def streams(self) -> list[ReplicaClient]:
        """Over which something was ever sent."""
        return list(self._open)

    def attempts_at(self, client: ReplicaClient) -> list[Attempt]:
        return list(self._open[client].attempts)

    def _blame(self, there: _OpenAttempts) -> None:
        now = self.clock()
        present = [(presence, prompt) for left, presence, prompt in there.left if now - left < LEFT_SECONDS]
        present += [(attempt.presence(), attempt.prompt) for attempt in there.attempts]
        found = blamed([presence for presence, _ in present], there.max_step_tokens)
        innocent = self._surviving_prompts()
        self.suspects.blame(
            [
                (self.suspects.digest(*prompt), presence.is_heard)
                for presence, prompt in (present[position] for position in found)
                if prompt not in innocent
            ],
            now,
        )

    def _surviving_prompts(self) -> "_WeighedPrompts":
        """Return the prompts that a living replica has just computed: no replica dies of them."""
        living = (there for there in self._open.values() if not there.is_dead)
        return _WeighedPrompts(
            attempt.prompt for there in living for attempt in there.attempts if attempt.has_survived
        )

    # What answers show of replicas.

    def taken(self, attempt: Attempt, refused_by: ReplicaId | None) -> None:
        """An attempt has its first token, after the server of `refused_by` had refused the request."""
        refusing, replica_id = self.table.refusing, attempt.replica_id
        if refusing.counts and refusing.right(replica_id):
            logger.info("replica %s takes requests again", replica_id)
        if refused_by in (None, replica_id) or self.table.card(refused_by) is None:
            return
        if refusing.wrong(refused_by, self.clock()):
            self._tell_doubt(refused_by, REFUSING_SECONDS)

    def measured(self, attempt: Attempt, usage: PromptUsage) -> None:
        """Compare a prompt's cached tokens with what the index had promised of it, predictions apart."""
        unread, replica_id = self.table.unread, attempt.replica_id
        if usage.num_cached_tokens:
            if unread.counts and unread.right(replica_id):
                logger.info("what the index has of replica %s counts again", replica_id)
            return
        decision = attempt.routed.decision
        if usage.num_cached_tokens is None or usage.num_unresumable_tokens or decision.holdings is None:
            return
        if decision.pull_from is not None or self.table.card(replica_id) is None:
            return
        block_size = self.table.block_size(attempt.prompt.model)
        num_stored = decision.holdings.stored_depth(replica_id) * block_size
        if min(num_stored, decision.overlap_tokens) < LEAST_PROMISED_TOKENS:
            return
        if unread.wrong(replica_id, self.clock()):
            self._tell_doubt(replica_id, UNREAD_SECONDS)

    def _tell_doubt(self, replica_id: ReplicaId, seconds: float) -> None:
        logger.warning("replica %s, for %g s: %s", replica_id, seconds, self.table.doubt(replica_id))

    # Suspects.

    def survived(self, attempt: Attempt) -> None:
        """A suspect that has got this far is none."""
        assert attempt.trial is not None
        self.suspects.survived(attempt.trial.digest)
        attempt.trial.close()
        attempt.trial = None
        self.room.call(attempt.prompt.model)

    # What is told.

    def retry_after_seconds(self, model: str) -> float:
        """Return the seconds until a retry makes sense: until the idlest replica has computed its prompts.

        Without replicas, as long again as there have been none.
        """
        return min(
            MAX_RETRY_AFTER_SECONDS,
            max(
                MIN_RETRY_AFTER_SECONDS,
                self.table.backlog_seconds(model),
                self.outlook(model).away_seconds,
            ),
        )

    def _unplaced(self) -> Mapping[str, tuple[int, int]]:
        """Count waiting generations, and the memory of their prompts, by model."""
        found = dict.fromkeys(self.table.models, (0, 0))
        for place in self._waiting_places:
            for model, (number, num_bytes) in place.waiting_by_model.items():
                before = found.get(model, (0, 0))
                found[model] = before[0] + number, before[1] + num_bytes
        return found

    def instruments(self) -> Iterator[Instrument]:
        yield counter(
            "router_retries_total",
            "Attempts that were repeated on another replica before the first token",
            lambda: self.num_retries,
        )
        yield counter(
            "router_resumes_total",
            "Answers that were continued on another replica",
            lambda: self.num_resumes,
        )
        yield counter(
            "router_lost_attempts_total",
            "Attempts that ended because the replica or its stream was lost",
            lambda: self.num_lost,
        )
        yield counter(
            "router_overdue_attempts_total",
            "Attempts that moved to another replica because theirs made no progress",
            lambda: self.num_overdue,
        )
        yield counter(
            "router_late_requests_total",
            "Generations that were stopped because their deadline passed before the first token",
            lambda: self.num_late,
        )
        yield gauge("router_runs", "Generations that are being dispatched", lambda: self.num_running)
        yield gauge(
            "router_unplaced_requests",
            "Generations that wait in this router: for a replica, or until one has room",
            lambda: {model: number for model, (number, _) in self._unplaced().items()},
            "model",
        )
        yield gauge(
            "router_unplaced_tokens",
            "Prompt tokens of the generations that wait in this router",
            lambda: {model: size // BYTES_PER_TOKEN for model, (_, size) in self._unplaced().items()},
            "model",
        )
        yield gauge(
            "router_retry_budget",
            "Retries that the retry budget allows now",
            lambda: self.budget.left(self.clock()),
        )
        yield counter(
            "router_retries_refused_total",
            "Retries that were not made because the retry budget was used up",
            lambda: self.budget.num_refused,
        )
        yield from self.splits.instruments()
        yield from self.suspects.instruments()
        yield from self.room.instruments(self.clock)
        yield from self.holding.instruments(self.clock)
