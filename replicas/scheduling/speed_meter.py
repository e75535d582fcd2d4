"""SpeedMeter: how fast an engine prefills and decodes, from its own steps.

Owns the sums. Does not measure: it is told what each step took.
"""

from msgspec.structs import replace

from replicas.protocol.frames import LoadSnapshot, StepFrame


class SpeedMeter:
    """Seconds per prefilled token and per decode step, from the steps themselves.

    Prefill is a ratio of two decaying sums, so a long step counts by its tokens and the fixed cost of
    many tiny ones does not pass for slowness. Only steps that are mostly prefill count for it, and
    only those with no prefill at all count for decode.
    """

    DECAY = 0.9
    MIN_PREFILL_TOKENS = 16
    PREFILL_DOMINANCE = 4

    def __init__(self) -> None:
        self._prefill_seconds = 0.0
        self._prefill_tokens = 0.0
        self._decode_step_seconds = 0.0

    def observe(self, frame: StepFrame, seconds: float) -> None:
        prefill, decode = frame.num_prefill_tokens, frame.num_decode_tokens
        if prefill >= max(self.MIN_PREFILL_TOKENS, self.PREFILL_DOMINANCE * decode):
            self._prefill_seconds = self.DECAY * self._prefill_seconds + seconds
            self._prefill_tokens = self.DECAY * self._prefill_tokens + prefill
        elif prefill == 0 and decode > 0:
            before = self._decode_step_seconds or seconds
            self._decode_step_seconds = self.DECAY * before + (1 - self.DECAY) * seconds

    def fill(self, load: LoadSnapshot) -> LoadSnapshot:
        return replace(
            load,
            prefill_seconds_per_token=self.prefill_seconds_per_token,
            decode_step_seconds=self._decode_step_seconds,
        )

    @property
    def prefill_seconds_per_token(self) -> float:
        """0.0 until a step has shown it."""
        return self._prefill_seconds / self._prefill_tokens if self._prefill_tokens else 0.0
