"""The moments of a request in a router, for tracing.

Owns the moments, and a trace's parent in the next process. These classes only pass on what the client sent;
`tracing.py` makes spans of the same moments.
"""

from collections.abc import Iterator

from replicas.process.trace_parent import TraceParent
from router.routing.decision import Decision
from router.served import ServedRequest
from router.shared.instruments import Instrument, counter


class AttemptTrace:
    """One submission to one replica. `trace_parent` and `trace_state` are for the replica."""

    __slots__ = ("trace_parent", "trace_state")

    def __init__(self, parent: TraceParent | None) -> None:
        self.trace_parent = "" if parent is None else str(parent)
        self.trace_state = "" if parent is None else parent.state

    def first_token(self) -> None:
        pass

    def failed(self, reason: str) -> None:
        """It has not ended as it should have."""

    def end(self) -> None:
        """Called once, and last."""


class GenerationTrace:
    """One generation, wherever it runs. `request_id` is for the replicas' logs."""

    __slots__ = ("_parent", "request_id")

    def __init__(self, request_id: str, parent: TraceParent | None) -> None:
        self.request_id = request_id
        self._parent = parent

    def attempt(self, decision: Decision, *, is_resumed: bool) -> AttemptTrace:
        """Trace an attempt at the decision's replica; `is_resumed` continues from earlier tokens."""
        return AttemptTrace(self._parent)

    def waits(self, seconds: float) -> None:
        """No replica takes it just now."""

    def end(self) -> None:
        """Called once, and last."""


NO_TRACE = GenerationTrace("", None)


class RequestTrace:
    """One request of a client's. `trace_id` is None without a trace."""

    __slots__ = ("_parent", "request_id")

    def __init__(self, request_id: str, parent: TraceParent | None) -> None:
        self.request_id = request_id
        self._parent = parent

    @property
    def trace_id(self) -> str | None:
        return None if self._parent is None else self._parent.trace_id

    def generation(self) -> GenerationTrace:
        """For one of its prompts."""
        return GenerationTrace(self.request_id, self._parent)

    def end(self, served: ServedRequest) -> None:
        """Called once, and last."""


class Tracing:
    """Makes traces that do nothing."""

    def request(self, method: str, path: str, request_id: str, parent: TraceParent | None) -> RequestTrace:
        """`parent` is the client's."""
        return RequestTrace(request_id, parent)

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
