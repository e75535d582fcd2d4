"""SpeedMeter: how fast an engine prefills and decodes, from its own steps.

Owns the sums. Does not measure: it is told what each step took.
"""

from msgspec.structs import replace

from replicas.kvstore.rate import DECAY, Rate
from replicas.protocol.frames import LoadSnapshot, StepFrame


class SpeedMeter:
    """Seconds per prefilled token and per decode step, from the steps themselves.

    Only steps that are mostly prefill count for it, and only those with no prefill at all
    count for decode.
    """

    MIN_PREFILL_TOKENS = 16
    PREFILL_DOMINANCE = 4

    def __init__(self) -> None:
        self._prefill = Rate()
        self._decode_step_seconds = 0.0

    def observe(self, frame: StepFrame, seconds: float) -> None:
        prefill, decode = frame.num_prefill_tokens, frame.num_decode_tokens
        if prefill >= max(self.MIN_PREFILL_TOKENS, self.PREFILL_DOMINANCE * decode):
            self._prefill.observe(prefill, seconds)
        elif prefill == 0 and decode > 0:
            before = self._decode_step_seconds or seconds
            self._decode_step_seconds = DECAY * before + (1 - DECAY) * seconds

    def fill(self, load: LoadSnapshot) -> LoadSnapshot:
        return replace(
            load,
            prefill_seconds_per_token=self.prefill_seconds_per_token,
            decode_step_seconds=self._decode_step_seconds,
        )

    @property
    def prefill_seconds_per_token(self) -> float:
        """0.0 until a step has shown it."""
        return self._prefill.seconds_per_unit or 0.0
