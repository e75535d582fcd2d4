"""complaint(): finds what would keep a model from loading on this machine, without loading it.

Owns which of the engine's checks can be made beforehand: settings, config, tokenizer and headers of weights.
Memory and devices are only tested by the replica's start.
"""

import importlib.util
import logging
from pathlib import Path

from replicas.checkpoints.model_config import (
    CheckpointError,
    read_eos_token_ids,
    read_json,
    read_model_config,
)
from replicas.checkpoints.text_sizes import read_text_sizes
from replicas.checkpoints.tokenizer import read_tokenizer
from replicas.checkpoints.weights import tokenizer_bundle, weight_files
from replicas.config import SERVERS, ReplicaConfig
from replicas.engines import check_simulation, check_vllm_is_here
from replicas.errors import StartupError
from replicas.toy_model import checkpoint_directory

logger = logging.getLogger(__name__)


def complaint(config: ReplicaConfig) -> str | None:
    """Return the sentence with which the replica would end, or None."""
    try:
        _check(config, checkpoint_directory(config.model))
    except Exception as error:  # as at a replica's start, where nothing that an engine raises is let through
        logger.info("the model of %s would not load", config.replica_id, exc_info=True)
        return str(error) or repr(error)
    return None


def files_complaint(config: ReplicaConfig) -> str | None:
    """Check a model's folder in milliseconds; returns one sentence about a defect, or None."""
    if config.model is None:
        return None
    try:
        _check_files(config, Path(config.model))
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def _check_files(config: ReplicaConfig, directory: Path) -> None:
    if not directory.is_dir():
        raise CheckpointError(f"there is no checkpoint directory {directory}")
    if config.engine == "vllm":
        read_json(directory / "config.json")
    elif config.engine in SERVERS:
        read_text_sizes(directory)
        return
    elif config.engine == "simulated":
        read_text_sizes(directory)
    else:
        read_model_config(directory)
    weight_files(directory)


def _check(config: ReplicaConfig, directory: Path) -> None:
    if config.engine == "openai" and config.model is None:  # each byte is a token
        return
    if config.engine == "vllm":
        _check_for_vllm(config, directory)
    elif config.engine in SERVERS:
        read_text_sizes(directory)
    elif config.engine == "simulated":
        check_simulation(config)
        read_text_sizes(directory)
        weight_files(directory)
    else:
        if importlib.util.find_spec("torch") is None:
            raise StartupError("torch is not installed here")
        from replicas.torch_engine.engine import check_model

        check_model(config, directory)
    read_eos_token_ids(directory)
    read_tokenizer(tokenizer_bundle(directory))


def _check_for_vllm(config: ReplicaConfig, directory: Path) -> None:
    """vLLM has its own word on much more, but only with the model in its hands."""
    check_vllm_is_here()
    from replicas.vllm_engine.adapters import read_adapters
    from replicas.vllm_engine.arguments import given_arguments

    given_arguments(config.engine_args or {}, trust_code=config.trust_code)
    model_name = config.model_name or directory.resolve().name
    read_adapters(config.adapters or {}, model_name, trust_code=config.trust_code)
    if not directory.is_dir():
        raise CheckpointError(f"there is no checkpoint directory {directory}")
    fields = read_json(directory / "config.json")
    weight_files(directory)
    names = [str(name) for name in fields.get("architectures") or []]
    if "auto_map" not in fields and not any(map(_has_vllm, names)):
        raise CheckpointError(
            f"vLLM does not serve the model in {directory}: it has no architecture {', '.join(names)}"
        )


def _has_vllm(architecture: str) -> bool:
    """Whether vLLM has code of its own for the architecture; otherwise it uses transformers'."""
    import transformers
    from vllm import ModelRegistry

    return architecture in ModelRegistry.get_supported_archs() or hasattr(transformers, architecture)
