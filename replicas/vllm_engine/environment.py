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


_BINDING = "VLLM_CPU_OMP_THREADS_BIND"


def vllm_environment(
    num_threads: int | None,
    engine_args: Mapping[str, object] | None = None,
    given: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """All of it, and the threads of its kernels: they obey no other setting once loaded.

    Ranks on a CPU share the threads. vLLM would bind each to a NUMA node of its own, and refuse more ranks
    than nodes: they are not bound, unless the `given` environment binds them.
    """
    threads = {}
    if num_threads is not None:
        threads = {"OMP_NUM_THREADS": str(max(1, num_threads // _num_ranks(engine_args or {})))}
    return {**VLLM_ENVIRONMENT, _BINDING: (given or {}).get(_BINDING, "nobind"), **threads}


def _num_ranks(engine_args: Mapping[str, object]) -> int:
    num_ranks = 1
    for spelling, value in engine_args.items():
        if spelling.replace("-", "_") in ("tensor_parallel_size", "pipeline_parallel_size"):
            num_ranks *= value if isinstance(value, int) else 1
    return num_ranks
