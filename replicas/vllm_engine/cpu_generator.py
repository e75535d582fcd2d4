"""CpuGenerator: a request's random generator that vLLM can rewind on a CPU.

While a prompt is computed in several steps, vLLM draws a token in each, discards all but the last, and
rewinds the request's generator (`_bookkeeping_sync` in vLLM's gpu_model_runner.py). It uses the generator's
offset, which torch has for CUDA only: on a CPU the engine would end with a RuntimeError, and every sampling
request with a prompt longer than a step would kill it.
"""

import torch


class CpuGenerator(torch.Generator):
    """Rewinding returns it to its start: nothing drawn before the prompt's end is kept.

    A request preempted after its first tokens draws the numbers of its first tokens again.
    """

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self.manual_seed(self.initial_seed())


def install() -> None:
    """For all generators that are made from now on in this process."""
    torch.Generator = CpuGenerator  # type: ignore[misc]
