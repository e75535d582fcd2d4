"""ProgressMonitor: whether a live replica makes progress, and whether it has forgotten a request.

Owns the observations of one replica. Times are arguments.

    no token for any request, nothing computed,        it hangs: all that runs there is overdue
    for long
    no token for one request, for long, while nothing  it has forgotten that one: a request that runs gets
    waits and no prompt is left to compute             a token with every step
    a queue, or a prompt under way                     legitimate work, however long
"""

from collections.abc import Hashable
from dataclasses import dataclass

from replicas.protocol.frames import LoadSnapshot

STEPS_OF_PATIENCE = 20
"""A step that takes this many times as long as the measured speed lets expect is taken to hang."""

UNMEASURED_FACTOR = 10
"""Before the first step that was measured, a model may be compiled."""


@dataclass(slots=True)
class _Quiet:
    num_tokens: int
    since: float


class ProgressMonitor:
    """`seconds` is the shortest time in which something must have come. One that `relays` has as long as
    before its first measurement: nothing is seen of an answer that its server writes as a whole."""

    def __init__(self, seconds: float, *, relays: bool = False) -> None:
        self._seconds = seconds
        self._least = UNMEASURED_FACTOR * seconds if relays else seconds
        self.has_moved = False
        """Whether something had been computed since the look before the last."""
        self._sign: Hashable = None
        self._moved = 0.0
        self._idle_since: float | None = None
        self._quiet: dict[int, _Quiet] = {}

    def look(
        self, load: LoadSnapshot, num_deltas: int, num_tokens: dict[int, int], now: float
    ) -> tuple[bool, set[int]]:
        """Return whether it hangs, and the overdue requests. `num_tokens` counts each request's tokens so
        far."""
        sign = (
            num_deltas,
            load.num_used_blocks,
            load.num_context_tokens,
            load.prefill_seconds_per_token,
            load.decode_step_seconds,
        )
        self.has_moved = sign != self._sign
        if self.has_moved or not num_tokens:
            self._sign, self._moved = sign, now
        has_queue = bool(load.num_waiting or load.num_pending_tokens)
        if has_queue:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        self._note(num_tokens, now)
        patience = self.patience(load)
        silent = {number for number, quiet in self._quiet.items() if now - quiet.since >= patience}
        hangs = bool(silent) and now - self._moved >= patience
        if hangs or (self._idle_since is not None and now - self._idle_since >= patience):
            return hangs, silent
        return False, set()

    def patience(self, load: LoadSnapshot) -> float:
        if not load.prefill_seconds_per_token and not load.decode_step_seconds:
            return UNMEASURED_FACTOR * self._seconds
        prefill = load.num_pending_tokens * load.prefill_seconds_per_token
        encode = load.num_pending_image_tokens * load.encode_seconds_per_token
        step = max(load.decode_step_seconds, prefill + encode)
        return max(self._least, STEPS_OF_PATIENCE * step)

    def _note(self, num_tokens: dict[int, int], now: float) -> None:
        quiet = self._quiet
        self._quiet = {}
        for number, count in num_tokens.items():
            before = quiet.get(number)
            is_new = before is None or before.num_tokens != count
            self._quiet[number] = _Quiet(count, now) if before is None or is_new else before
