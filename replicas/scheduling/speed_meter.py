"""SpeedMeter: how fast an engine prefills and decodes, by its own steps.

Owns the sums. Its caller measures.
"""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from replicas.kvstore.rate import DECAY, Rate
from replicas.protocol.blocks import ImageTokens
from replicas.protocol.frames import LoadSnapshot, StepFrame
from replicas.protocol.ways import num_image_tokens_left


class SpeedMeter:
    """Seconds per prefilled token, per encoded token of an image and per decode step, and until requests that
    end give back room for a token of KV, of which `num_tokens` fit; 0 is not known.

    Only steps that are mostly prefill count for it, and only those without prefill for decode. A step's time
    beyond its other tokens counts as encoding, once a step without images has shown their time; until then
    images count as prefill.

    By Little's law a full cache gives back its tokens divided by the time that a request holds its own.
    """

    MIN_PREFILL_TOKENS = 16
    PREFILL_DOMINANCE = 4

    def __init__(self, num_tokens: int = 0) -> None:
        self._num_tokens = num_tokens
        self._held = Rate()
        self._held_seconds = 0.0
        """Time that all running requests have run since one ended."""
        self._prefill = Rate()
        self._encode = Rate()
        self._has_prefilled_text = False
        self._decode_step_seconds = 0.0

    def observe(self, frame: StepFrame, seconds: float) -> None:
        prefill, decode = frame.num_prefill_tokens, frame.num_decode_tokens
        if frame.num_encoded_tokens and self._has_prefilled_text:
            rest = prefill * self.prefill_seconds_per_token + (self._decode_step_seconds if decode else 0.0)
            self._encode.observe(frame.num_encoded_tokens, max(0.0, seconds - rest))
        elif prefill >= max(self.MIN_PREFILL_TOKENS, self.PREFILL_DOMINANCE * decode):
            if not frame.num_encoded_tokens and not self._has_prefilled_text:
                self._prefill, self._has_prefilled_text = Rate(), True
            self._prefill.observe(prefill, seconds)
        elif prefill == 0 and decode > 0:
            before = self._decode_step_seconds or seconds
            self._decode_step_seconds = DECAY * before + (1 - DECAY) * seconds

    def ran(self, num_requests: int, seconds: float, num_ended: int) -> None:
        """Record `num_requests` that ran for a time, at whose end some ended."""
        self._held_seconds += num_requests * seconds
        if num_ended:
            self._held.observe(num_ended, self._held_seconds)
            self._held_seconds = 0.0

    def fill(self, load: LoadSnapshot) -> LoadSnapshot:
        return replace(
            load,
            prefill_seconds_per_token=self.prefill_seconds_per_token,
            decode_step_seconds=self._decode_step_seconds,
            encode_seconds_per_token=self._encode.seconds_per_unit or 0.0,
            room_seconds_per_token=(self._held.seconds_per_unit or 0.0) / self._num_tokens
            if self._num_tokens
            else 0.0,
        )

    @property
    def prefill_seconds_per_token(self) -> float:
        """0.0 until a step has shown it."""
        return self._prefill.seconds_per_unit or 0.0

    def encode_seconds(self, media: Sequence[ImageTokens]) -> Callable[[int], float] | None:
        """Return the time to encode these images by ready leading tokens; None if unknown."""
        rate = self._encode.seconds_per_unit
        if not media or not rate:
            return None
        return lambda num_ready_tokens: rate * num_image_tokens_left(media, num_ready_tokens)
