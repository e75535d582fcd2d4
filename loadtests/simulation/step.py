"""Step: what a simulated replica computes at a time.

Knows no queue, no cache and no decoding: that is `lockstep.py`'s.
"""

from dataclasses import dataclass, field

from loadtests.simulation.request import VirtualRequest


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
