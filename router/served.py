"""ServedRequest: what became of one request to a route that generates, told once, at its end.

Plain data for those who watch: metrics, logs, the live page. Whatever the end was, there is one. Knows
nothing of who watches.
"""

from collections.abc import Callable
from dataclasses import dataclass

from replicas.protocol.frames import PromptUsage
from router.generation import Generation
from router.routing.decision import Decision

CLIENT_GONE = 499
"""Not a status that anyone receives: it stands for a client that did not wait."""


@dataclass(frozen=True, slots=True)
class ServedPrompt:
    """`decision` is that of the replica that answered first, or of the last attempt where none did; None:
    there was none. `usage` is None where no token came."""

    generation: Generation
    decision: Decision | None
    usage: PromptUsage | None
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """Durations are in seconds and count from the request's arrival; None: it did not come to that.

    `model` is the name of the model or adapter, None where none was recognised. `status` is the one that the
    client got, or CLIENT_GONE; a stream that broke off has that of its error. `error` is the name of the
    error's class.
    """

    request_id: str
    route: str
    model: str | None
    status: int
    error: str | None
    arrived_at: float
    """Seconds since 1970."""
    prepared_seconds: float | None
    """The prompt is tokenised and hashed."""
    first_token_seconds: float | None
    ended_seconds: float
    is_stream: bool
    prompts: tuple[ServedPrompt, ...]


Observer = Callable[[ServedRequest], None]
"""Quick, and never raises: it runs on the event loop, in the request's own task."""
