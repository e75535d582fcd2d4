"""Environment variables that vLLM reads at import.

Owns the values. Sets nothing: the process edges do, before anything imports vLLM. Imports nothing.
"""

from collections.abc import Mapping

VLLM_ENVIRONMENT: Mapping[str, str] = {
    # The engine core runs in the engine thread, where its events and its scheduler can be reached.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Whole digests as block hashes; half of one could be searched for a collision.
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
"""Set unconditionally: with other values for the first two, the engine refuses to start."""


def vllm_environment(num_threads: int | None) -> dict[str, str]:
    """All of it, and the threads of its kernels: they obey no other setting once loaded."""
    threads = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}
    return {**VLLM_ENVIRONMENT, **threads}
