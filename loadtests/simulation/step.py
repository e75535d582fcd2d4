"""Step: what a simulated replica computes at a time, and what the prompts in it cost.

Owns the arithmetic of prompts. Knows no queue, no cache and no decoding: that is `lockstep.py`'s.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from loadtests.simulation.request import VirtualRequest
from replicas.simulated_engine.hardware import CostModel


@dataclass(slots=True)
class VirtualChunk:
    request: VirtualRequest
    start: int
    num_tokens: int
    samples: bool

    @property
    def is_decode(self) -> bool:
        """A single output token, of a request that was preempted and found all the rest cached."""
        return self.num_tokens == 1 and self.start >= self.request.num_prompt_tokens


@dataclass(slots=True)
class Step:
    """Work in progress: prefill chunks in one step, or `num_steps` of decoding only.

    `decode_seconds` is the decoding's own time, for all `num_steps` together. The chunks require encoding
    `num_encoded_tokens` of images.
    """

    started_at: float
    chunks: list[VirtualChunk] = field(default_factory=list)
    num_steps: int = 1
    ends_at: float = 0.0
    decode_seconds: float = 0.0
    num_encoded_tokens: int = 0


def prefill_seconds(cost: CostModel, chunks: Iterable[VirtualChunk]) -> float:
    """The arithmetic of a step's prompts, as the cost model has it."""
    prefills = [chunk for chunk in chunks if not chunk.is_decode]
    compute = sum(
        chunk.num_tokens * (cost.b + cost.c * (chunk.start + chunk.num_tokens / 2)) for chunk in prefills
    )
    if any(chunk.samples for chunk in prefills):
        compute += cost.a
    return compute
