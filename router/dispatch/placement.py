"""Placement: finds a replica for each part of one generation, or waits for one.

Owns what was tried, and the generation's place in line.

    some replica is ready          it is asked, unless an earlier request still waits
    its prompt is suspected        only a replica without another suspect is asked
    its prompt is condemned        no replica is asked
    its replica cannot begin soon  it is held, in fair order (`router/queue/`), if this is its first attempt
    all that are ready refused it  once more after a wait
    none is ready                  in line, if replicas are coming
"""

import enum
import math
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from replicas.protocol.frames import Refusal, RefusalCode
from replicas.protocol.status import ReplicaId
from router.dispatch.attempt import ChoiceProgress
from router.dispatch.retries import Patience
from router.dispatch.suspects import PromptDigest, Standing
from router.dispatch.waiting_room import Lane, Ticket
from router.errors import (
    ErrorKind,
    GenerationFailed,
    NoReplicaAvailable,
    Overloaded,
    RouterError,
    ServerRefused,
    TooLate,
    UnknownModel,
)
from router.generation import Generation
from router.observation.trace_points import Trace
from router.programs.book import Turn
from router.queue.held import Asking, Held
from router.queue.work import BYTES_PER_TOKEN, Charge
from router.routing.decision import RoutingRequest
from router.routing.table import RoutedRequest

if TYPE_CHECKING:
    from router.dispatch.dispatcher import Dispatcher

LONGEST_PAUSE_SECONDS = 1.0
"""Interval at which a held request checks by itself."""

LEAST_PAUSE_SECONDS = 0.001

_KINDS = {
    RefusalCode.INVALID_REQUEST: ErrorKind.INVALID,
    RefusalCode.OVERLOADED: ErrorKind.OVERLOADED,
}
"""Meaning of a server's refusal; any other is a failure."""


class Obstacle(enum.Enum):
    """Why no replica could be asked."""

    NONE_READY = enum.auto()
    ALL_REFUSED = enum.auto()
    LINE = enum.auto()
    """Earlier requests wait, or there is no room for waiting ones."""
    TRIALS = enum.auto()
    """It is suspected, and every replica has a suspect on trial."""
    HELD = enum.auto()
    """Its replica has too much to do."""
    OWN_TRIAL = enum.auto()
    """The same prompt is on trial somewhere."""


class Placement:
    """`call` wakes the run that this belongs to: it is worth another try."""

    def __init__(
        self, dispatcher: "Dispatcher", generation: Generation, trace: Trace, call: Callable[[], None]
    ) -> None:
        self.patience = Patience(dispatcher.retry)
        self.num_attempts = 0
        self.suspected: PromptDigest | None = None
        """Set where the prompt may have killed a replica; then an attempt is a trial."""
        self.routing_seconds = 0.0
        self._dispatcher = dispatcher
        self._generation = generation
        self._trace = trace
        self._call = call
        self._order = dispatcher.next_order()
        limit = generation.timeout_seconds
        promised = generation.caller.tenant.slo_seconds if generation.is_awaited else None
        if promised is not None and (limit is None or promised < limit):
            limit = promised
        self._deadline = None if limit is None else dispatcher.clock() + limit
        self._ticket: Ticket | None = None
        self._line_ends_at = 0.0
        self._owes_retry = False
        self._digest: PromptDigest | None = None
        self._held: Held | None = None
        self._asking: Asking | None = None
        """The terms under which it was held or released."""
        self.charge: Charge | None = None
        self._has_given_up = False
        self.turn: Turn | None = None
        """Set if it is one of a program."""
        self._has_ended = False

    def seconds_to_wait(self) -> float:
        """0 if a try is worth while now."""
        now = self._dispatcher.clock()
        if now < self.patience.not_before:
            return self.patience.not_before - now
        if self._ticket is not None and not self._ticket.is_called:
            return max(0.0, self._line_ends_at - now)
        return 0.0

    def seconds_left(self) -> float | None:
        """Until its first token is too late, None where it never is. Raises TooLate if it is."""
        if self._deadline is None:
            return None
        seconds = self._deadline - self._dispatcher.clock()
        if seconds <= 0:
            self._dispatcher.num_late += 1
            raise TooLate(
                "This request was not answered in time, so it was stopped. Try again later.",
                retry_after_seconds=self._dispatcher.retry_after_seconds(self._generation.model),
            )
        return seconds

    def may_try(self, choice: ChoiceProgress, *, is_visible: bool) -> bool:
        """Whether attempts are left for this choice, and retries for this router."""
        if not choice.tries.are_left(self._dispatcher.retry):
            return False
        if self._owes_retry:
            self._owes_retry = False
            # An answer that has begun is gone on with in any case.
            return self._dispatcher.budget.take(self._dispatcher.clock()) or is_visible
        return True

    def route(self, num_tokens: int, *, num_choices: int, may_split: bool = True) -> RoutedRequest | Obstacle:
        """Raises GenerationFailed for a prompt that is condemned."""
        generation, table = self._generation, self._dispatcher.table
        exclude: Collection[ReplicaId] = self.patience.excluded
        self.suspected = self._suspicion() if self._dispatcher.suspects.has_any else None
        if self.suspected is not None:
            self._withdraw()
            if self._dispatcher.suspects.is_on_trial(self.suspected):
                return Obstacle.OWN_TRIAL
            exclude = {*exclude, *self._dispatcher.suspects.places_taken()}
        elif self._held is None and self._is_behind(exclude):
            return Obstacle.LINE
        try:
            request = RoutingRequest(
                generation.bucket,
                num_tokens,
                table.block_size(generation.model),
                media=generation.submit.media,
                num_choices=num_choices,
                head_bucket=generation.head_bucket,
                by_load=bool(generation.submit.route),
                may_split=may_split and self.suspected is None,  # what a suspect kills is to be known
            )
            started = time.perf_counter()
            if self.suspected is None and not self.num_attempts:
                routed = self._ask(request, exclude)
            else:
                # Of a resumed choice, too, only the prompt's blocks: no other request continues its answer.
                routed = table.route(
                    generation.model,
                    request,
                    generation.block_hashes,
                    exclude=exclude,
                    adapter=generation.adapter,
                )
                if self.turn is not None:
                    self._dispatcher.holding.turn_moves(self.turn, routed, self._dispatcher.clock())
            self.routing_seconds = time.perf_counter() - started
            return routed
        except (NoReplicaAvailable, UnknownModel):
            # Unknown: a model can be asked for a moment before its first replica is routed to.
            return self._obstacle()

    def _ask(self, request: RoutingRequest, exclude: Collection[ReplicaId]) -> RoutedRequest | Obstacle:
        """Raises TooLate and Overloaded."""
        holding, now = self._dispatcher.holding, self._dispatcher.clock()
        if self._held is None:
            self._asking = self._as_asking(request)
            found = holding.ask(self._asking, now, self._call, exclude=exclude)
            if isinstance(found, RoutedRequest):
                return self._let_go(found, None)
            self._held = found
            self._leave_line()
            return Obstacle.HELD
        held = self._held
        holding.look_at(held, now)
        if not held.is_out:
            return Obstacle.HELD
        self._held = None
        if held.error is not None:
            raise held.error
        assert held.routed is not None
        return self._let_go(held.routed, held)

    def _let_go(self, routed: RoutedRequest, held: Held | None) -> RoutedRequest:
        assert self._asking is not None
        if self.charge is not None:  # of a replica that was chosen and never asked
            self.charge.close()
        self.charge = self._dispatcher.holding.charge(self._asking, routed, held)
        return routed

    def _withdraw(self) -> None:
        """Withdraw it from the queue."""
        if self._held is not None:
            held, self._held = self._held, None
            self._dispatcher.holding.withdraw(held)

    def _as_asking(self, request: RoutingRequest) -> Asking:
        generation, tenant = self._generation, self._generation.caller.tenant
        if generation.program is not None and self.turn is None:
            self.turn = self._dispatcher.holding.begin_turn(
                generation.model,
                tenant,
                generation.program,
                len(generation.token_ids),
                generation.block_hashes,
                self._dispatcher.clock(),
            )
        return Asking(
            generation.model,
            tenant.name,
            request,
            generation.block_hashes,
            generation.adapter,
            tenant.weight,
            generation.submit.priority,
            self._deadline,
            BYTES_PER_TOKEN * len(generation.token_ids),
            generation.grammar_seconds if self.charge is None else 0.0,
            generation.caller.key_id is not None,
            self.turn,
        )

    def wait(self, obstacle: Obstacle) -> float:
        """Seconds until the next try is due, unless it is called before; 0 when it has waited enough."""
        dispatcher, now = self._dispatcher, self._dispatcher.clock()
        if obstacle is Obstacle.HELD:
            assert self._held is not None and self._held.latest_start is not None
            seconds = min(LONGEST_PAUSE_SECONDS, max(LEAST_PAUSE_SECONDS, self._held.latest_start - now))
            self._trace.waits(seconds)
            return seconds
        is_trial = obstacle in (Obstacle.TRIALS, Obstacle.OWN_TRIAL)
        is_coming = obstacle is Obstacle.NONE_READY and self._is_coming()
        if not (is_trial or is_coming or obstacle is Obstacle.LINE):
            self._leave_line()
            if not self.patience.wait_for_all(now, dispatcher.rng.random()):
                return 0.0
            seconds = self.patience.not_before - now
            self._trace.waits(seconds)
            return seconds
        longest = dispatcher.retry.trial_seconds if is_trial else dispatcher.retry.wait_seconds
        seconds = self.patience.wait_in_line(now, longest)
        if not seconds or not self._enter_line(is_trial=is_trial, now=now):
            return 0.0
        self._line_ends_at = now + seconds
        assert self._ticket is not None
        if self._ticket.is_called:
            dispatcher.room.went_in_vain(self._ticket, call_next=obstacle is Obstacle.OWN_TRIAL)
        else:
            self._trace.waits(seconds)
        return seconds

    def submitted(self, *, is_visible: bool) -> None:
        if is_visible:
            self._dispatcher.num_resumes += 1
        elif self.num_attempts:
            self._dispatcher.num_retries += 1
        else:
            self._dispatcher.budget.add_request()
        self.num_attempts += 1
        if self.charge is not None:
            self.charge.goes(self._dispatcher.clock())

    def failed(
        self, replica_id: ReplicaId, code: RefusalCode, *, is_death: bool, refusal: Refusal | None = None
    ) -> None:
        now, chance = self._dispatcher.clock(), self._dispatcher.rng.random()
        self.patience.failed(replica_id, code, now, chance, refusal)
        # Where a living replica has refused it, trying again is more work for the others.
        is_no_load = is_death or code in (RefusalCode.DRAINING, RefusalCode.MEDIA_MISSING)
        self._owes_retry = self._owes_retry or not is_no_load

    def done(self) -> None:
        """All is placed."""
        if self._ticket is not None:
            self._leave_line()
        self.patience.placed()

    def close(self) -> None:
        if self._ticket is not None:
            self._leave_line()
        if self._held is not None:
            self._withdraw()
        if self.charge is not None:
            self.charge.close(None if self._has_given_up else self._dispatcher.clock())
        if self.turn is not None and not self._has_ended:
            self._has_ended = True
            self._dispatcher.holding.end_turn(self.turn, self._dispatcher.clock())

    def give_up(self, *, is_visible: bool) -> RouterError:
        """Return the client's error; the tenant is not charged for a prompt without output."""
        self._has_given_up = True
        generation, dispatcher, failure = self._generation, self._dispatcher, self.patience.failure
        model = generation.model if generation.adapter is None else generation.adapter.name
        refusal = self.patience.refusal
        if refusal is not None and (generation.submit.body or not is_visible):
            return self.refused(refusal)
        if is_visible:
            return GenerationFailed("The generation was interrupted and could not be resumed.")
        if failure is RefusalCode.OVERLOADED:
            return Overloaded(
                f"All replicas of model {model} are busy. Try again shortly.",
                retry_after_seconds=dispatcher.retry_after_seconds(generation.model),
            )
        has_failed = failure in (RefusalCode.INTERNAL, RefusalCode.ENGINE_FAILED)
        if has_failed and self.num_attempts >= dispatcher.retry.max_attempts:
            return GenerationFailed("The generation failed on several replicas.")
        return NoReplicaAvailable(
            f"No replica of model {model} is available. Try again shortly.",
            retry_after_seconds=dispatcher.retry_after_seconds(generation.model),
        )

    def refused(self, refusal: Refusal) -> RouterError:
        """Return a server's own error for the client. One that is busy says when to come back, or we do."""
        assert refusal.error is not None
        kind = _KINDS.get(refusal.code, ErrorKind.FAILED)
        seconds = refusal.error.retry_after_seconds
        if seconds is None and kind is ErrorKind.OVERLOADED:
            seconds = self._dispatcher.retry_after_seconds(self._generation.model)
        return ServerRefused(refusal.message, kind, refusal.error, retry_after_seconds=seconds)

    def _suspicion(self) -> PromptDigest | None:
        """Return the prompt's digest if it may have killed a replica. Raises for one that has killed two."""
        suspects, generation = self._dispatcher.suspects, self._generation
        if self._digest is None:
            self._digest = suspects.digest(
                generation.model, generation.token_ids_with_images(), generation.caller.owner
            )
        now = self._dispatcher.clock()
        standing = suspects.standing(self._digest, now)
        if standing is Standing.CONDEMNED:
            minutes = math.ceil(suspects.remaining_seconds(self._digest, now) / 60)
            raise GenerationFailed(
                "Replicas have died computing this prompt, so it is not tried again. It is refused for the"
                f" next {minutes} minutes."
            )
        return self._digest if standing is Standing.SUSPECT else None

    def _is_behind(self, exclude: Collection[ReplicaId]) -> bool:
        """Whether it must let others go first, or wait for room."""
        dispatcher, generation = self._dispatcher, self._generation
        if self._ticket is None:
            return bool(dispatcher.room.num_waiting) and dispatcher.room.is_before(
                self._lane(is_trial=False), self._order
            )
        if dispatcher.clock() >= self._line_ends_at:
            return False  # it may be refused where there is no room, but it is not kept from asking
        model, adapter, table = generation.model, generation.adapter, dispatcher.table
        return table.has_ready(model, adapter=adapter, exclude=exclude) and not table.has_room(
            model, adapter=adapter, exclude=exclude
        )

    def _obstacle(self) -> Obstacle:
        model, adapter, table = self._generation.model, self._generation.adapter, self._dispatcher.table
        if not table.has_ready(model, adapter=adapter):
            return Obstacle.NONE_READY
        if self.suspected is not None and table.has_ready(
            model, adapter=adapter, exclude=self.patience.excluded
        ):
            return Obstacle.TRIALS
        return Obstacle.ALL_REFUSED

    def _is_coming(self) -> bool:
        """A replica that gets nowhere will move again, or be replaced."""
        model = self._generation.model
        return self._dispatcher.outlook(model).is_coming or self._dispatcher.table.has_stalled(model)

    def _lane(self, *, is_trial: bool) -> Lane:
        return Lane(self._generation.model, self._generation.adapter, is_trial)

    def _enter_line(self, *, is_trial: bool, now: float) -> bool:
        """Join the line; False if it is full."""
        lane = self._lane(is_trial=is_trial)
        if self._ticket is not None and self._ticket.lane != lane:
            self._leave_line()
        if self._ticket is None:
            self._ticket = self._dispatcher.room.enter(
                lane,
                order=self._order,
                num_bytes=BYTES_PER_TOKEN * len(self._generation.token_ids),
                now=now,
                call=self._call,
                must=self.num_attempts > 0,
            )
        return self._ticket is not None

    def _leave_line(self) -> None:
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            self._dispatcher.room.leave(ticket)
