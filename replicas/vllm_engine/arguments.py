"""From ReplicaConfig to vLLM's engine arguments.

Owns which of them are Kvasir's own settings, which are fixed, and the sentences for those that do not
fit. Imports vLLM.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from vllm import EngineArgs
from vllm.config import KVEventsConfig, SpeculativeConfig
from vllm.config.lora import MaxLoRARanks
from vllm.platforms import current_platform

from replicas.config import ReplicaConfig
from replicas.process.settings import SettingsError
from replicas.protocol.media import MAX_IMAGES
from replicas.vllm_engine.adapters import LoraAdapter
from replicas.vllm_engine.foreign_code import check_foreign_code
from replicas.vllm_engine.lower_tier import LowerTier

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
    "generation_config": "sampling_defaults",
    "override_generation_config": "sampling_override",
}
"""Arguments that have a setting of their own."""

_FIXED = (
    "async_scheduling",
    "data_parallel_size",
    "enable_prefix_caching",
    "kv_events_config",
    "language_model_only",
    "limit_mm_per_prompt",
    "max_logprobs",
    "mm_processor_cache_gb",
    "skip_tokenizer_init",
)
"""Arguments on which the replica's guarantees depend."""

_OF_THE_MODEL = ("mm_processor_kwargs",)
"""Arguments that change an image's KV: they would have to be in the model's fingerprint."""

_IMAGES: Mapping[str, Any] = {
    "mm_processor_cache_gb": 0,
    "limit_mm_per_prompt": {"image": MAX_IMAGES, "video": 0, "audio": 0},
}
"""vLLM keeps no processed images: it gets each with its request, from where they are kept by our hashes."""

_OF_A_DRAFT = ("speculative_config", "spec_method", "spec_model")

_NO_LOOKAHEAD = "disable_lookahead_block_hashes"
"""From 0.33 on: with a draft model a block's hash would cover tokens behind the block too."""

RETENTION = "prefix_cache_retention_interval"
"""The argument whose default depends on the model's cache."""

_CPU_RANKS: Mapping[str, Any] = {
    "distributed_executor_backend": "mp",
    "worker_cls": "replicas.vllm_engine.cpu_rank.CpuRank",
}

_CPU_CACHE_BYTES = 128 * 2**20
_CPU_BLOCK_MULTIPLE = 32


def engine_arguments(
    config: ReplicaConfig,
    directory: str,
    adapters: Sequence[LoraAdapter] = (),
    tier: LowerTier | None = None,
    *,
    takes_images: bool = False,
) -> dict[str, Any]:
    """Build vLLM's arguments, with our `tier` below the device, if there is one. A model that `takes_images`
    is loaded with its vision part, any other for text only.

    Raises SettingsError for arguments that vLLM does not have, or that Kvasir sets itself.
    """
    on_cpu = bool(current_platform.is_cpu())
    _check_device(config.device, on_cpu)
    given = given_arguments(config.engine_args or {}, trust_code=config.trust_code)
    block_size = config.tokens_per_block
    if on_cpu and block_size % _CPU_BLOCK_MULTIPLE:
        raise SettingsError(
            f"setting block_size is {block_size}, but on a CPU vLLM needs a multiple of {_CPU_BLOCK_MULTIPLE}"
        )
    cache_bytes = config.kv_cache_bytes
    if cache_bytes is None and on_cpu:
        cache_bytes = _CPU_CACHE_BYTES
    in_one_process = given.get("tensor_parallel_size", 1) == given.get("pipeline_parallel_size", 1) == 1
    arguments: dict[str, Any] = {
        "model": directory,
        "dtype": config.dtype,
        # -1: the longest that the model bears and the cache holds.
        "max_model_len": -1 if config.context_length is None else config.context_length,
        "block_size": block_size,
        "num_gpu_blocks_override": None if config.num_blocks is None else config.num_blocks + 1,
        "kv_cache_memory_bytes": cache_bytes,
        "max_num_batched_tokens": config.tokens_per_step,
        "max_num_seqs": min(config.max_running, config.tokens_per_step),
        "enable_prefix_caching": True,
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        # What reads images asks the tokenizer which tokens stand for them.
        "skip_tokenizer_init": not takes_images,
        **(_IMAGES if takes_images else {"language_model_only": True}),
        "max_logprobs": -1,
        "generation_config": "vllm",
        "scheduling_policy": "priority",
        **({"distributed_executor_backend": "uni"} if in_one_process else _CPU_RANKS if on_cpu else {}),
        # A step ahead of its own results, vLLM would report blocks before their KV exists.
        "async_scheduling": False,
        "enforce_eager": on_cpu,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    if tier is not None:
        _check_tier(given, in_one_process)
        arguments["kv_transfer_config"] = _connector(tier)
    return {**arguments, **_adapter_arguments(adapters, given, on_cpu), **given, **_draft_arguments(given)}


def _connector(tier: LowerTier) -> dict[str, Any]:
    """vLLM's, and where it finds this tier. The module is imported by vLLM, and only then: it needs more of
    vLLM than all else."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": tier.engine_id,
        "kv_connector_extra_config": {
            "spec_name": "TierSpec",
            "spec_module_path": "replicas.vllm_engine.offloading",
            "blocks_per_chunk": tier.blocks_per_chunk,
            # What was answered is part of the next prompt.
            "offload_prompt_only": False,
        },
    }


def _check_tier(given: Mapping[str, Any], in_one_process: bool) -> None:
    for name in ("kv_transfer_config", "kv_offloading_size"):
        if given.get(name) is not None:
            raise SettingsError(
                f"setting host_kv_bytes and {name} in engine_args both keep KV below the device: set one of"
                " them"
            )
    if not in_one_process:
        raise SettingsError(
            "setting host_kv_bytes needs vLLM in one process: engine_args must not raise"
            " tensor_parallel_size or pipeline_parallel_size"
        )


def _draft_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's hashes shall cover the tokens of their blocks and no others, as ours do."""
    if not hasattr(SpeculativeConfig, _NO_LOOKAHEAD) or not any(map(given.get, _OF_A_DRAFT)):
        return {}
    drafts = given.get("speculative_config") or {}
    if not isinstance(drafts, Mapping):
        return {}  # vLLM has a sentence for it
    drafts = {name.replace("-", "_"): value for name, value in drafts.items()}
    if drafts.setdefault(_NO_LOOKAHEAD, True) is not True:
        raise SettingsError(f"engine_args cannot turn {_NO_LOOKAHEAD} off: a replica needs it as it is")
    return {"speculative_config": drafts}


def _adapter_arguments(
    adapters: Sequence[LoraAdapter], given: Mapping[str, Any], on_cpu: bool
) -> dict[str, Any]:
    if not adapters:
        return {}
    if given.get("enable_lora", True) is not True:
        raise SettingsError("engine_args turns enable_lora off, but the setting adapters names adapters")
    # On a CPU, vLLM 0.32 gives requests without an adapter the weights of the last slot whenever others
    # of the batch have one. A slot that is never taken holds zeros.
    num_slots = len(adapters) + 1 if on_cpu else len(adapters)
    max_loras = given.get("max_loras", num_slots)
    if on_cpu and max_loras != num_slots:
        raise SettingsError(
            f"on a CPU, engine_args must set max_loras to {num_slots} or not at all: one more than adapters"
        )
    widest = max(adapters, key=lambda adapter: adapter.rank)
    ranks: Sequence[int] = get_args(MaxLoRARanks)
    if widest.rank > max(ranks):
        raise SettingsError(f"adapter {widest.name} has rank {widest.rank}; vLLM takes up to {max(ranks)}")
    max_rank = given.get("max_lora_rank", max(ranks))
    if isinstance(max_rank, int) and widest.rank > max_rank:
        raise SettingsError(
            f"engine_args sets max_lora_rank to {max_rank}, but adapter {widest.name} has rank {widest.rank}"
        )
    return {
        "enable_lora": True,
        "max_loras": num_slots,
        # None is ever read from disk again, where it may have changed.
        "max_cpu_loras": max(num_slots, max_loras) if isinstance(max_loras, int) else num_slots,
        "max_lora_rank": min(rank for rank in ranks if rank >= widest.rank),
    }


def _check_device(device: str, on_cpu: bool) -> None:
    if device not in ("auto", "cpu" if on_cpu else "cuda"):
        kind = "a CPU" if on_cpu else "CUDA"
        raise SettingsError(f"setting device is {device}, but the vLLM that is installed is for {kind}")


def given_arguments(engine_args: Mapping[str, Any], *, trust_code: bool = False) -> dict[str, Any]:
    """Return the user's arguments, checked by name, as vLLM's own flags or its field names spell them."""
    known = [field.name for field in dataclasses.fields(EngineArgs)]
    given: dict[str, Any] = {}
    for spelling, value in engine_args.items():
        name = spelling.replace("-", "_")
        if name in given:
            raise SettingsError(f"engine_args sets {name} twice")
        if name in _OWN_SETTINGS:
            raise SettingsError(f"engine_args cannot set {name}: use the setting {_OWN_SETTINGS[name]}")
        if name in _FIXED:
            raise SettingsError(f"engine_args cannot set {name}: a replica needs it as it is")
        if name in _OF_THE_MODEL:
            raise SettingsError(
                f"engine_args cannot set {name}: what becomes of images belongs to the model; set it in the"
                " image processor's file of the checkpoint, processor_config.json or preprocessor_config.json"
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SettingsError(f"vLLM does not have an engine argument {name}{hint}")
        given[name] = value
    check_foreign_code(given, trust_code=trust_code)
    return given
