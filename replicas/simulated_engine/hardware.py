"""SimulatedHardware: the performance of a machine with a model, for engine and simulation alike.

Owns the figures of each hardware, and the cost of a step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from replicas.scheduling.step_promise import StepChunk


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step on some hardware.

    A whole prompt alone costs `a + b·u + c·u·(cached + u/2)`, with u uncached tokens; a step that only
    decodes costs `d0 + d1·(context tokens of the batch)`. A step may do both, and part of a prompt::

        max(d0, a · [a prompt ends in this step] + Σ chunks (b·u + c·u·(start + u/2))) + d1 · context

    The weights are read once for the whole batch (d0), hidden behind the arithmetic of a large enough
    prefill. The sum over a prompt's chunks equals that of the whole prompt, so cutting it costs only the
    other requests' tokens in between; `a` is paid when it ends. With `is_soft` it costs more: a step that
    does both takes `hypot` of weights and arithmetic instead of `max`, and each chunk reads the KV before it.
    A real engine's steps lie between the two.
    """

    a: float
    b: float
    c: float
    d0: float
    d1: float
    encode: float = 0.0
    """Per token of an image, besides computing it."""
    is_soft: bool = False
    """Weights and arithmetic slow each other down, and each chunk of a prompt reads its prefix."""

    def step_seconds(self, chunks: Sequence[StepChunk]) -> float:
        if not chunks:
            return 0.0
        num_context_tokens = sum(chunk.start + 1 for chunk in chunks if chunk.is_decode)
        seconds = self.with_weights(self.prefill_seconds(chunks), is_shared=num_context_tokens > 0)
        return seconds + self.d1 * num_context_tokens

    def with_weights(self, prefill_seconds: float, *, is_shared: bool) -> float:
        """Return the time of the prompts' arithmetic and of reading the weights, in a step that `is_shared`
        by prompts and decoding requests or has only one of them."""
        if self.is_soft and is_shared:
            return math.hypot(self.d0, prefill_seconds)
        return max(self.d0, prefill_seconds)

    def prompt_seconds(self, num_cached: int, num_tokens: int) -> float:
        """Return the arithmetic of a prompt computed in one step, from `num_cached` on."""
        return self.a + self._chunk_seconds(num_cached, num_tokens)

    def _chunk_seconds(self, start: int, num_tokens: int) -> float:
        seconds = num_tokens * (self.b + self.c * (start + num_tokens / 2))
        return seconds + self.d1 * start if self.is_soft else seconds

    def prefill_seconds(self, chunks: Sequence[StepChunk]) -> float:
        """Return the arithmetic of a step's prompts."""
        compute, ends_prompt = 0.0, False
        for chunk in chunks:
            if not chunk.is_decode:
                compute += self._chunk_seconds(chunk.start, chunk.num_tokens)
                ends_prompt = ends_prompt or chunk.samples
        return compute + (self.a if ends_prompt else 0.0)


FREE = CostModel(a=0.0, b=0.0, c=0.0, d0=0.0, d1=0.0)


@dataclass(frozen=True, slots=True)
class SimulatedHardware:
    """`cache_tokens` fit beside the weights, `max_batched_tokens` is the default per step, `bytes_per_token`
    the KV of a token."""

    cost: CostModel
    cache_tokens: int
    max_batched_tokens: int
    bytes_per_token: int


_ENCODE_SECONDS = 1.4e-5
"""Reckoned, not measured: the vision part of Qwen2-VL has 0.67 billion parameters, sees four patches for each
token of an image, and takes two operations for each parameter, at 400 teraflops."""

_MEASURED: Mapping[str, SimulatedHardware] = {
    # Llama-3.1-8B in bfloat16 on one H100: 128 KiB of KV a token.
    "h100-8b": SimulatedHardware(
        CostModel(a=0.018, b=3.08e-5, c=9.4e-10, d0=7.7e-3, d1=7.6e-8, encode=_ENCODE_SECONDS),
        430_000,
        8192,
        128 * 1024,
    ),
    # Llama-3.1-70B on four: 320 KiB a token.
    "h100x4-70b": SimulatedHardware(
        CostModel(a=0.022, b=6.76e-5, c=1.24e-9, d0=18e-3, d1=4.8e-8, encode=_ENCODE_SECONDS),
        418_000,
        8192,
        320 * 1024,
    ),
}

HARDWARE: Mapping[str, SimulatedHardware] = {
    **_MEASURED,
    **{
        f"{name}-soft": replace(each, cost=replace(each.cost, is_soft=True))
        for name, each in _MEASURED.items()
    },
    # No machine: for measuring everything else.
    "instant": SimulatedHardware(FREE, 131_072, 2048, 128 * 1024),
}
