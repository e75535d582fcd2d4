"""ServedRequest: what became of one request to a route that generates, told once, at its end.

Plain data for those who watch: metrics, logs, the live page. Whatever the end was, there is one. Does
not know who watches.
"""

from bisect import bisect_left

import msgspec

from replicas.protocol.frames import PromptUsage
from router.caller import OPEN_CALLER, Caller
from router.errors import ErrorKind
from router.generation import Generation
from router.misses import Misses
from router.routing.decision import Decision

CLIENT_GONE = 499
"""Not a status that anyone receives: it stands for a client that did not wait."""

GAP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds in seconds by which the time between tokens is counted."""


class TokenGaps:
    """The time between arrivals of tokens, counted by GAP_BOUNDS: a long answer takes no more memory.

    Several tokens may arrive together; `num_first_tokens` came with the first arrival.
    """

    __slots__ = ("_latest", "counts", "num_first_tokens", "total_seconds")

    def __init__(self, now: float, num_first_tokens: int) -> None:
        self._latest = now
        self.counts = [0] * (len(GAP_BOUNDS) + 1)
        self.num_first_tokens = num_first_tokens
        self.total_seconds = 0.0

    def arrived(self, now: float) -> None:
        """More tokens have come."""
        seconds = now - self._latest
        self._latest = now
        self.counts[bisect_left(GAP_BOUNDS, seconds)] += 1
        self.total_seconds += seconds


class ServedPrompt(msgspec.Struct, frozen=True):
    """`decision` is that of the replica that answered first, or of the last attempt where none did; None:
    there was none. It took the router `decision_seconds`. `usage` is None where no token came. Of the
    output, `num_silent_tokens` are in no answer, since only the prompt was asked for. The last
    `num_own_leases` of the submit's are the router's own wish. `misses` say why the rest of the prompt was
    not read from cache, where there is a usage; `difference` where it left an earlier prompt at an image.
    """

    generation: Generation
    decision: Decision | None
    usage: PromptUsage | None
    num_output_tokens: int
    decision_seconds: float | None = None
    num_silent_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_own_leases: int = 0
    misses: Misses | None = None
    difference: str | None = None


class ServedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Durations are in seconds and count from the request's arrival; None: it did not come to that.

    `model` is the name of the model or adapter, None where none was recognised; `prompts` are missing where
    what was asked of it was refused. `status` is the one that the client got, or CLIENT_GONE; a stream that
    broke off has that of its error. `error` is the name of the error's class, `error_kind` what it comes down
    to. `token_gaps` are known of answers with one continuation of one prompt.
    """

    request_id: str
    route: str
    model: str | None
    status: int
    error: str | None
    arrived_at: float
    """Seconds since 1970."""
    read_seconds: float | None = None
    """The whole body is there."""
    prepared_seconds: float | None
    """The prompt is tokenised and hashed."""
    first_token_seconds: float | None
    ended_seconds: float
    is_stream: bool
    prompts: tuple[ServedPrompt, ...]
    error_kind: ErrorKind | None = None
    token_gaps: TokenGaps | None = None
    trace_id: str | None = None
    caller: Caller = OPEN_CALLER
    answer_id: str | None = None
    """The id in the answer's body."""
