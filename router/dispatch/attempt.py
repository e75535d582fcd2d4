"""Attempt and ChoiceProgress: the parts of one generation at replicas, and their output.

Plain records that `generation_run.py` owns and changes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from replicas.protocol.status import ReplicaId
from router.dispatch.retries import Tries
from router.dispatch.suspects import SURVIVED_TOKENS, Presence, Trial
from router.fleet.inflight import Inflight
from router.fleet.replica_client import ReplicaClient
from router.observation.trace_points import Trace
from router.routing.table import RoutedRequest

if TYPE_CHECKING:
    from router.dispatch.split import FirstPart


class PromptOf(NamedTuple):
    """Identifies a prompt within one tenant, ignoring salt, so that tenants cannot probe each other."""

    model: str
    token_ids: Sequence[int]
    owner: str | None


class Attempt:
    """One submission to one replica. `choices` maps the submission's choices to the generation's."""

    __slots__ = (
        "choices",
        "client",
        "first",
        "inflight",
        "num_open",
        "prompt",
        "replica_id",
        "routed",
        "started",
        "trace",
        "trial",
    )

    def __init__(
        self,
        routed: RoutedRequest,
        client: ReplicaClient,
        inflight: Inflight,
        choices: Sequence[int],
        trace: Trace,
        *,
        model: str,
        token_ids: Sequence[int],
        owner: str | None = None,
        trial: Trial | None = None,
        first: "FirstPart | None" = None,
    ) -> None:
        self.replica_id: ReplicaId = routed.decision.replica_id
        self.routed = routed
        self.client = client
        self.inflight = inflight
        self.choices = choices
        self.num_open = len(choices)
        self.started = False
        self.trace = trace
        self.prompt = PromptOf(model, token_ids, owner)
        """The prompt without resumed output."""
        self.first = first
        """The first part of the split whose second part this is."""
        self.trial = trial
        """Set while its prompt is suspected and has not survived here."""

    @property
    def has_survived(self) -> bool:
        """Its prompt has been computed there and some tokens after it, and the replica lives."""
        return self.inflight.num_tokens >= SURVIVED_TOKENS * len(self.choices)

    def presence(self) -> Presence:
        """For the day of the replica's death."""
        return Presence(
            num_uncached_tokens=self.routed.num_uncached_tokens,
            num_tokens_out=self.inflight.num_tokens // len(self.choices),
            is_heard=self.inflight.submit_id <= self.client.num_heard_submits,
            is_on_trial=self.trial is not None,
        )

    def first_token(self) -> None:
        self.started = True
        self.routed.first_token()
        self.trace.first_token()

    def release(self) -> None:
        """Stop what still runs there, and return reservation and prediction. Called once."""
        if self.trial is not None:
            self.trial.close()
        self.client.abort(self.inflight.submit_id)
        self.routed.close()
        self.trace.end()


class ChoiceProgress:
    """One continuation. `attempt` serves it now: None before it is placed, and once it is closed."""

    __slots__ = ("attempt", "closed", "has_usage", "token_ids", "tries")

    def __init__(self) -> None:
        self.attempt: Attempt | None = None
        self.closed = False
        self.has_usage = False
        self.tries = Tries()
        self.token_ids: list[int] = []

    @property
    def is_unplaced(self) -> bool:
        return self.attempt is None and not self.closed
