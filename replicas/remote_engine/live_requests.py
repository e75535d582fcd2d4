"""LiveRequests: the requests that are at a server, and how fast it answers, seen from beside it.

Owns who waits and who runs, and the speeds. What a request has said so far is its engine's.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Generic, TypeVar

from replicas.engine import EngineRequest, RequestRefused
from replicas.kvstore.rate import DECAY, Rate
from replicas.protocol.frames import LoadSnapshot, RefusalCode, RequestKey


@dataclass(slots=True)
class LiveRequest:
    """Times are of the monotonic clock, and 0 before the first token."""

    request: EngineRequest
    submitted_at: float = field(default_factory=monotonic, kw_only=True)
    added_at: float = field(default_factory=monotonic, kw_only=True)
    first_at: float = field(default=0.0, kw_only=True)
    last_at: float = field(default=0.0, kw_only=True)
    num_output_tokens: int = field(default=0, kw_only=True)

    @property
    def num_expected_tokens(self) -> int:
        return self.request.submit.num_expected_tokens or len(self.request.token_ids)


Live = TypeVar("Live", bound=LiveRequest)


class LiveRequests(Generic[Live]):
    """By the names under which they are at the server."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._live: dict[str, Live] = {}
        self._started: list[RequestKey] = []
        self._prefill = Rate()
        self._held = Rate()
        self._decode_seconds = 0.0
        self._last_first_at = 0.0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, name: str) -> bool:
        return name in self._live

    def values(self) -> Collection[Live]:
        return self._live.values()

    def get(self, name: str) -> Live | None:
        return self._live.get(name)

    def check_room(self, name: str, key: RequestKey) -> None:
        """Raises RequestRefused where too many wait, or the name is taken."""
        num_waiting = sum(not live.first_at for live in self._live.values())
        if num_waiting >= self._max_waiting:
            raise RequestRefused(RefusalCode.OVERLOADED, f"{num_waiting} requests wait already")
        if name in self._live:
            raise RequestRefused(RefusalCode.INVALID_REQUEST, f"{key} is already here")

    def add(self, name: str, live: Live) -> None:
        self._live[name] = live

    def pop(self, name: str) -> Live | None:
        live = self._live.pop(name, None)
        if live is not None and live.first_at:
            self._held.observe(1, live.last_at - live.submitted_at)
        return live

    def came(self, live: Live, num_tokens: int, now: float) -> bool:
        """Measure: a prompt from when the server could begin it to its first token; then each token. Returns
        whether these are the first."""
        if not live.first_at:
            live.submitted_at = max(live.submitted_at, self._last_first_at)
            live.first_at = live.last_at = self._last_first_at = now
            self._started.append(live.request.key)
            return True
        seconds = (now - live.last_at) / num_tokens
        live.last_at = now
        self._decode_seconds = DECAY * (self._decode_seconds or seconds) + (1 - DECAY) * seconds
        return False

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Measure: so much of a prompt took so long."""
        self._prefill.observe(max(1, num_tokens), max(0.0, seconds))

    def take_started(self) -> list[RequestKey]:
        started, self._started = self._started, []
        return started

    def load(
        self,
        *,
        num_other_running: int = 0,
        num_other_waiting: int = 0,
        num_free_tokens: int | None = None,
        num_cache_tokens: int = 0,
        **more: Any,
    ) -> LoadSnapshot:
        """Ours are counted exactly; the others are those of the server's other clients. `num_free_tokens` are
        those of the cache that no request holds."""
        waiting = [live for live in self._live.values() if not live.first_at]
        running = [live for live in self._live.values() if live.first_at]
        return LoadSnapshot(
            num_running=len(running) + num_other_running,
            num_waiting=len(waiting) + num_other_waiting,
            num_pending_tokens=sum(live.num_expected_tokens for live in waiting),
            num_context_tokens=sum(len(live.request.token_ids) + live.num_output_tokens for live in running),
            prefill_seconds_per_token=self._prefill.seconds_per_unit or 0.0,
            decode_step_seconds=self._decode_seconds,
            num_room_tokens=None
            if num_free_tokens is None
            else num_free_tokens - sum(len(live.request.token_ids) for live in waiting),
            room_seconds_per_token=(self._held.seconds_per_unit or 0.0) / num_cache_tokens
            if num_cache_tokens
            else 0.0,
            **more,
        )
