"""CpuGenerator: a request's random generator that vLLM can turn back, on a CPU.

Owns that one thing. While a prompt is computed in several steps, vLLM draws a token in each, throws all but
the last away and turns the request's generator back (`_bookkeeping_sync` in vLLM's gpu_model_runner.py). It
does so by the generator's offset, which torch has for CUDA only: on a CPU the engine would end with a
RuntimeError, and every request that samples and whose prompt is longer than a step would be what kills it.
"""

import torch


class CpuGenerator(torch.Generator):
    """Turned back, it is at its start again: nothing that was drawn before the prompt's end has been kept.

    A request that was preempted after its first tokens draws the numbers of its first tokens again.
    """

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self.manual_seed(self.initial_seed())


def install() -> None:
    """For all generators that are made from now on in this process."""
    torch.Generator = CpuGenerator  # type: ignore[misc]
