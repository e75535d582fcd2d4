"""TraceParent: the span that a request belongs to, as W3C's headers `traceparent` and `tracestate` name it.

Owns the reading and writing of the first, and how much of the second is passed on, unread.
"""

import re
from typing import NamedTuple

_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

MAX_STATE_CHARACTERS = 8192
"""OpenTelemetry's bound; the recommendation asks for 512. A longer `tracestate` is ignored."""

_NO_TRACE = "0" * 32
_NO_SPAN = "0" * 16


class TraceParent(NamedTuple):
    """Ids in lower-case hex digits. `state` is `tracestate` verbatim, or empty."""

    trace_id: str
    span_id: str
    is_sampled: bool
    state: str = ""

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"


def parse_trace_parent(text: str, state: str = "") -> TraceParent | None:
    """Parse a traceparent; None for what the specification says to ignore."""
    match = _HEADER.fullmatch(text)
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    if trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    if len(state) > MAX_STATE_CHARACTERS:
        state = ""
    return TraceParent(trace_id, span_id, bool(int(flags, 16) & 1), state)
