"""Attempt and Choice: where the parts of one generation run, and what each has produced.

Plain records that `dispatch.py` owns and changes; nothing here acts by itself.
"""

from collections.abc import Sequence

from replicas.protocol.status import ReplicaId
from router.replica_client import Inflight, ReplicaClient
from router.routing.table import RoutedRequest
from router.trace_points import AttemptTrace


class Attempt:
    """One submission to one replica. `choices` maps the submission's choices to the generation's."""

    __slots__ = ("choices", "client", "inflight", "num_open", "replica_id", "routed", "started", "trace")

    def __init__(
        self,
        routed: RoutedRequest,
        client: ReplicaClient,
        inflight: Inflight,
        choices: Sequence[int],
        trace: AttemptTrace,
    ) -> None:
        self.replica_id: ReplicaId = routed.decision.replica_id
        self.routed = routed
        self.client = client
        self.inflight = inflight
        self.choices = choices
        self.num_open = len(choices)
        self.started = False
        self.trace = trace

    def first_token(self) -> None:
        self.started = True
        self.routed.first_token()
        self.trace.first_token()

    def release(self) -> None:
        """Stop what still runs there, and give reservation and prediction back. Called once."""
        self.client.abort(self.inflight.request_id)
        self.routed.__exit__(None, None, None)
        self.trace.end()


class Choice:
    """One continuation. `attempt` serves it now: None before it is placed, and once it is closed."""

    __slots__ = ("attempt", "closed", "has_usage", "num_attempts", "token_ids")

    def __init__(self) -> None:
        self.attempt: Attempt | None = None
        self.closed = False
        self.has_usage = False
        self.num_attempts = 0
        self.token_ids: list[int] = []

    @property
    def is_unplaced(self) -> bool:
        return self.attempt is None and not self.closed
