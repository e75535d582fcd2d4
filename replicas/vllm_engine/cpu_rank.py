"""CpuRank: vLLM's worker for one rank of a model that several processes of one machine share, on a CPU.

Each rank gets what `start_vllm` gives an engine in one process. Only a rank's own process imports this; it
imports vLLM's worker for CPUs.
"""

from typing import Any

import torch._dynamo
from vllm.v1.worker.cpu_worker import CPUWorker

from replicas.vllm_engine import cpu_generator


class CpuRank(CPUWorker):  # type: ignore[misc]
    def __init__(self, *arguments: Any, **named: Any) -> None:
        cpu_generator.install()
        torch._dynamo.config.disable = True  # as in VllmEngine.step
        super().__init__(*arguments, **named)
