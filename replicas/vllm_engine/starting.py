"""Starts vLLM: its engine from arguments, and sentences for its failures.

Stateless. Imports vLLM.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import vllm.envs
from vllm import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from replicas.config import ReplicaConfig
from replicas.errors import StartupError
from replicas.process.settings import SettingsError
from replicas.protocol.status import ModelCard
from replicas.vllm_engine import cpu_generator
from replicas.vllm_engine.adapters import LoraAdapter
from replicas.vllm_engine.core_view import CoreView

_SENSIBLE_CONTEXT = 256
"""A cache that cannot hold one sequence of this many tokens is a mistake in the settings."""

_TOO_SMALL = ("KV cache is needed", "Cannot auto-fit max_model_len")
"""vLLM's messages when its cache cannot hold `context_length` tokens, or none at all."""


def check_environment() -> None:
    if vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING or vllm.envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES:
        raise StartupError(
            "the environment must say VLLM_ENABLE_V1_MULTIPROCESSING=0"
            " and VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0"
        )


def start_vllm(arguments: dict[str, Any], directory: Path) -> Any:
    if current_platform.is_cpu():
        cpu_generator.install()
    try:
        return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except (SettingsError, StartupError):
        raise
    except Exception as error:  # vLLM has no type for what it does not like: ValueError, AssertionError, …
        if any(words in str(error) for words in _TOO_SMALL):
            raise SettingsError(
                "the KV cache is too small for one sequence: raise num_blocks or kv_cache_bytes, "
                "or lower context_length"
            ) from error
        raise StartupError(f"vLLM cannot serve {directory} with these settings: {sentence(error)}") from error


def load_adapters(vllm: Any, adapters: Iterable[LoraAdapter]) -> Mapping[str, LoRARequest]:
    """All of them now, so that one that vLLM does not take is known before the first request for it."""
    loaded: dict[str, LoRARequest] = {}
    for number, adapter in enumerate(adapters, 1):
        loaded[adapter.name] = LoRARequest(adapter.name, number, str(adapter.directory))
        try:
            vllm.add_lora(loaded[adapter.name])
        except Exception as error:
            raise StartupError(f"vLLM refuses adapter {adapter.name}: {sentence(error)}") from error
    return loaded


def check_fit(card: ModelCard, config: ReplicaConfig, core: CoreView) -> None:
    if core.num_lookahead_tokens:
        raise SettingsError(
            f"with the draft model of {card.name}, vLLM's hashes cover tokens behind their block: set"
            " disable_lookahead_block_hashes=true in the speculative_config of engine_args"
        )
    shape = core.cache_shape
    if shape.problem is not None:
        raise SettingsError(
            f"{card.name} has {shape.problem}, of which Kvasir cannot foretell hits; a model with sliding"
            " windows or chunks beside full attention is served with disable_hybrid_kv_cache_manager=true in"
            " engine_args, which caches it as if all were full, and any model without speculative_config"
        )
    if shape.is_sparse and core.has_more_tiers:
        raise SettingsError(
            f"the layers of {card.name} keep different KV caches, which are not kept below the device: it is"
            " served without host_kv_bytes, and without kv_transfer_config in engine_args"
        )
    if config.context_length is None and card.context_length < _SENSIBLE_CONTEXT:
        raise SettingsError(
            f"the KV cache holds {card.num_blocks} blocks of {card.block_size}, too few for one sequence of "
            f"{_SENSIBLE_CONTEXT} tokens: raise num_blocks or kv_cache_bytes, or set context_length"
        )


def sentence(error: BaseException) -> str:
    """Return the first informative line. Pydantic puts a heading over its own, and maybe a field's name."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        field = "" if lines[1].startswith(" ") or len(lines) == 2 else f"{lines[1].strip()}: "
        message = lines[2 if field else 1].strip().removeprefix("Value error, ").split(" [type=")[0]
        return field + message
    return lines[0].strip() if lines else type(error).__name__
