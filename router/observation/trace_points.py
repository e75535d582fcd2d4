"""The moments of a request in a router, for tracing.

Owns the moments, and a trace's parent in the next process. A `Trace` only passes on what the client sent;
`tracing.py` makes spans of the same moments.
"""

from collections.abc import Iterator

from replicas.process.trace_parent import TraceParent
from router.routing.decision import Decision
from router.served import ServedRequest
from router.shared.instruments import Instrument, counter


class Trace:
    """A request of a client's, one of its generations, or one submission of that to a replica. Where nothing
    is traced they are one object.

    `request_id` is for the replicas' logs, `trace_parent` and `trace_state` are for the replica. Without a
    trace there is no `trace_id`.
    """

    __slots__ = ("request_id", "trace_id", "trace_parent", "trace_state")

    def __init__(self, request_id: str, parent: TraceParent | None) -> None:
        self.request_id = request_id
        self.trace_id = None if parent is None else parent.trace_id
        self.trace_parent = "" if parent is None else str(parent)
        self.trace_state = "" if parent is None else parent.state

    # Of a request.

    def generation(self) -> "Trace":
        """For one of its prompts."""
        return self

    def served(self, served: ServedRequest) -> None:
        """Called once, and last."""

    # Of a generation.

    def attempt(self, decision: Decision, *, is_resumed: bool) -> "Trace":
        """Trace an attempt at the decision's replica; `is_resumed` continues from earlier tokens."""
        return self

    def prefill(self, decision: Decision) -> "Trace":
        """Trace the first part of a split, at the decision's replica."""
        return self

    def waits(self, seconds: float) -> None:
        """No replica takes it just now."""

    # Of an attempt.

    def first_token(self) -> None:
        pass

    def failed(self, reason: str) -> None:
        """It has not ended as it should have."""

    def end(self) -> None:
        """A generation or an attempt is over: called once, and last."""


NO_TRACE = Trace("", None)


class Tracing:
    """Makes traces that do nothing."""

    def request(self, method: str, path: str, request_id: str, parent: TraceParent | None) -> Trace:
        """`parent` is the client's."""
        return Trace(request_id, parent)

    @property
    def num_dropped(self) -> int:
        """Spans that no collector has seen, since the start."""
        return 0

    def instruments(self) -> Iterator[Instrument]:
        yield counter(
            "router_dropped_spans_total",
            "Spans that were dropped because no collector accepted them",
            lambda: self.num_dropped,
        )

    def close(self, timeout_seconds: float) -> None:
        """Send the rest; blocks for at most `timeout_seconds`."""
