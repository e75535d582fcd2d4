"""From ReplicaConfig to vLLM's engine arguments.

Owns which of them are Kvasir's own settings, which are fixed, and the sentences for those that do not
fit. Imports vLLM.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from vllm import EngineArgs
from vllm.config import KVEventsConfig
from vllm.platforms import current_platform

from replicas.config import ReplicaConfig
from replicas.protocol.settings import SettingsError

_OWN_SETTINGS: Mapping[str, str] = {
    "model": "model",
    "served_model_name": "model_name",
    "dtype": "dtype",
    "max_model_len": "context_length",
    "block_size": "block_size",
    "num_gpu_blocks_override": "num_blocks",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "max_num_batched_tokens": "max_batched_tokens",
    "max_num_seqs": "max_running",
}
"""Arguments that have a setting of their own."""

_FIXED = ("enable_prefix_caching", "kv_events_config", "skip_tokenizer_init", "max_logprobs")
"""Arguments without which the replica would not do what it promises."""

_CPU_CACHE_BYTES = 128 * 2**20
_CPU_BLOCK_MULTIPLE = 32


def engine_arguments(config: ReplicaConfig, directory: str) -> dict[str, Any]:
    """Raises SettingsError for what vLLM does not know, or what is not its to decide."""
    on_cpu = bool(current_platform.is_cpu())
    _check_device(config.device, on_cpu)
    _check_names(config.engine_args or {})
    block_size = config.tokens_per_block
    if on_cpu and block_size % _CPU_BLOCK_MULTIPLE:
        raise SettingsError(
            f"setting block_size is {block_size}, but on a CPU vLLM needs a multiple of {_CPU_BLOCK_MULTIPLE}"
        )
    cache_bytes = config.kv_cache_bytes
    if cache_bytes is None and on_cpu:
        cache_bytes = _CPU_CACHE_BYTES
    given = dict(config.engine_args or {})
    in_one_process = given.get("tensor_parallel_size", 1) == given.get("pipeline_parallel_size", 1) == 1
    arguments: dict[str, Any] = {
        "model": directory,
        "dtype": config.dtype,
        # -1: the longest that the model bears and the cache holds.
        "max_model_len": -1 if config.context_length is None else config.context_length,
        "block_size": block_size,
        "num_gpu_blocks_override": None if config.num_blocks is None else config.num_blocks + 1,
        "kv_cache_memory_bytes": cache_bytes,
        "max_num_batched_tokens": config.max_batched_tokens,
        "max_num_seqs": min(config.max_running, config.max_batched_tokens),
        "enable_prefix_caching": True,
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        "skip_tokenizer_init": True,
        "max_logprobs": -1,
        "generation_config": "vllm",
        "scheduling_policy": "priority",
        "distributed_executor_backend": "uni" if in_one_process else None,
        # A step ahead of its own results, vLLM would report blocks before their KV exists.
        "async_scheduling": False,
        "enforce_eager": on_cpu,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    return {**arguments, **given}


def _check_device(device: str, on_cpu: bool) -> None:
    if device not in ("auto", "cpu" if on_cpu else "cuda"):
        kind = "a CPU" if on_cpu else "CUDA"
        raise SettingsError(f"setting device is {device}, but the vLLM that is installed is for {kind}")


def _check_names(given: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in given:
        if name in _OWN_SETTINGS:
            raise SettingsError(f"engine_args cannot set {name}: use the setting {_OWN_SETTINGS[name]}")
        if name in _FIXED:
            raise SettingsError(f"engine_args cannot set {name}: a replica needs it as it is")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SettingsError(f"vLLM knows no engine argument {name}{hint}")
