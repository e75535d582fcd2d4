"""VllmEngine: vLLM's LLMEngine behind the Engine protocol, in the engine thread.

Owns the requests that live in vLLM, under our keys, and the translation of each step. Knows nothing of
threads, gRPC or text. What it reads inside vLLM goes through `core_view.py`.

One block size holds for vLLM, for block hashes and for routers alike; the index thins by its stride.
The namespace root of a request is its `cache_salt`, so namespaces are apart inside vLLM too, and comes
back with the event of the first block. Only the device's own tier is reported: blocks that a connector
keeps elsewhere are vLLM's business.
"""

import gc
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch._dynamo
import vllm.envs
from vllm import EngineArgs
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from replicas.config import ReplicaConfig
from replicas.engine import EngineRequest, RequestRefused
from replicas.errors import StartupError
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import CacheEvent
from replicas.protocol.frames import (
    FinishReason,
    LoadSnapshot,
    PromptUsage,
    Refusal,
    RefusalCode,
    RequestKey,
    StepFrame,
    TokenDelta,
)
from replicas.protocol.settings import SettingsError
from replicas.protocol.status import ModelCard, TokenizerBundle
from replicas.torch_engine.admission import AdmissionLimits, check_admission
from replicas.torch_engine.model_config import read_eos_token_ids
from replicas.torch_engine.weights import files_fingerprint, tokenizer_bundle
from replicas.toy_model import toy_model_path
from replicas.vllm_engine.arguments import engine_arguments
from replicas.vllm_engine.core_view import (
    CoreView,
    VllmAllBlocksCleared,
    VllmBlockRemoved,
    VllmBlockStored,
)
from replicas.vllm_engine.hash_map import HashMap, UnknownBlock
from replicas.vllm_engine.sampling import token_logprobs, vllm_sampling

logger = logging.getLogger(__name__)

_DEVICE_TIER = "GPU"
"""What vLLM calls the memory that its attention reads, on a CPU too."""

_SENSIBLE_CONTEXT = 256
"""A cache that cannot hold one sequence of so many tokens is a mistake in the settings."""

_REFUSALS = (
    VLLMValidationError,
    ValueError,
    TypeError,
    RuntimeError,  # NotImplementedError among them
    AssertionError,
    LookupError,
    AttributeError,
    ImportError,
    OSError,
    MemoryError,
)
"""How vLLM says at the start that it does not like a model or a setting."""

_TOO_SMALL = ("KV cache is needed", "Cannot auto-fit max_model_len")
"""What vLLM says when its cache cannot hold `context_length` tokens, or none at all."""

_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "repetition": FinishReason.STOP,
}


@dataclass(slots=True)
class _Live:
    """A request that vLLM has. `inner` is vLLM's own; `num_expected_tokens` it would have to compute."""

    request: EngineRequest
    inner: Any
    num_expected_tokens: int
    has_output: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids) - self.request.num_output_tokens


class VllmEngine:
    """Raises CheckpointError, SettingsError or StartupError. The process edge has set the environment."""

    def __init__(self, config: ReplicaConfig) -> None:
        _check_environment()
        directory = Path(config.model) if config.model is not None else toy_model_path()
        self._bundle = tokenizer_bundle(directory)
        digest = files_fingerprint(directory)
        eos_token_ids = read_eos_token_ids(directory)
        self._on_cpu = bool(current_platform.is_cpu())
        self._vllm = _start(engine_arguments(config, str(directory)), directory)
        self._core = CoreView(self._vllm)
        model: Any = self._vllm.vllm_config.model_config
        self._card = ModelCard(
            name=config.model_name or directory.resolve().name,
            fingerprint=digest,
            engine="vllm",
            block_size=int(self._vllm.vllm_config.cache_config.block_size),
            num_blocks=self._core.num_blocks,
            context_length=int(model.max_model_len),
            vocab_size=int(model.get_vocab_size()),
            eos_token_ids=eos_token_ids,
            max_batched_tokens=config.max_batched_tokens,
            max_running=min(config.max_running, config.max_batched_tokens),
        )
        try:
            _check_fit(self._card, config, self._core)
        except SettingsError:
            self.close()
            raise
        self._max_waiting = config.max_waiting
        self._limits = AdmissionLimits(
            self._card.context_length, self._card.num_blocks * self._card.block_size, self._card.vocab_size
        )
        self._hashes = HashMap(self._card.block_size)
        self._live: dict[str, _Live] = {}

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def core(self) -> CoreView:
        return self._core

    def bundle(self) -> TokenizerBundle:
        """The files that the model's text goes through."""
        return self._bundle

    def add(self, request: EngineRequest) -> None:
        if request.media:
            raise RequestRefused(RefusalCode.INVALID_REQUEST, f"{self._card.name} reads text only")
        check_admission(request, self._limits)
        name = _name(request.key)
        if name in self._live:
            raise RequestRefused(RefusalCode.INVALID_REQUEST, f"{request.key} is already here")
        num_waiting = len(self._live) - self._core.num_running
        if num_waiting >= self._max_waiting:
            raise RequestRefused(RefusalCode.OVERLOADED, f"{num_waiting} requests wait already")
        prompt = TokensPrompt(prompt_token_ids=list(request.token_ids), cache_salt=request.root.hex())
        try:
            internal_id = self._vllm.add_request(
                name,
                prompt,
                vllm_sampling(request, self._card.eos_token_ids),
                priority=request.priority,
                session_id=name,  # comes back with the events of its blocks
            )
        except (VLLMValidationError, ValueError) as error:
            raise RequestRefused(RefusalCode.INVALID_REQUEST, _sentence(error)) from error
        inner = self._core.request(internal_id)
        num_cached_tokens = self._core.num_leading_cached_blocks(inner) * self._card.block_size
        self._live[name] = _Live(request, inner, max(1, len(request.token_ids) - num_cached_tokens))

    def abort(self, key: RequestKey) -> None:
        name = _name(key)
        if self._live.pop(name, None) is not None:
            self._vllm.abort_request([name])

    def has_work(self) -> bool:
        return bool(self._live) or self._core.has_events

    def step(self) -> StepFrame:
        if self._on_cpu:
            # vLLM would compile a helper when logprobs are first asked for: seconds, for nothing. Torch
            # keeps this by thread, and the one that steps need not be the one that built the engine.
            torch._dynamo.config.disable = True
        outputs: Iterable[Any] = self._vllm.step() if self._live else ()
        events = self._translate(self._core.take_events())
        deltas = [self._delta(output) for output in outputs]
        num_prefill_tokens, num_decode_tokens = self._core.take_computed()
        return StepFrame(deltas, events, self._load(), num_prefill_tokens, num_decode_tokens)

    def reset_prefix_cache(self) -> bool:
        return bool(self._vllm.reset_prefix_cache())

    def close(self) -> None:
        self._vllm.engine_core.shutdown()
        del self._vllm
        del self._core
        cleanup_dist_env_and_memory()
        gc.collect()

    def _translate(self, events: Iterable[Any]) -> list[CacheEvent]:
        """Of the device's tier only. What cannot be named is left out: a block that no router finds."""
        translated: list[CacheEvent] = []
        for event in events:
            try:
                if isinstance(event, VllmAllBlocksCleared):
                    translated.append(self._hashes.cleared())
                elif event.medium != _DEVICE_TIER:
                    continue
                elif isinstance(event, VllmBlockStored):
                    translated.extend(self._stored(event))
                elif isinstance(event, VllmBlockRemoved):
                    translated.append(self._hashes.removed(event.block_hashes))
            except UnknownBlock as error:
                logger.error("vLLM reports a block that cannot be named: %s", error)
        return translated

    def _stored(self, event: Any) -> Iterable[CacheEvent]:
        live = self._live.get(event.session_id)
        return self._hashes.stored(
            event.block_hashes,
            parent=event.parent_block_hash,
            root=_root(event.extra_keys),
            token_ids=event.token_ids,
            num_prompt_tokens=None if live is None else live.num_prompt_tokens,
        )

    def _delta(self, output: Any) -> TokenDelta:
        name = output.request_id
        live = self._live[name]
        (completion,) = output.outputs
        token_ids = tuple(completion.token_ids)
        usage = None if live.has_output else self._usage(live, output)
        live.has_output = True
        finish_reason, refusal = _finish(completion.finish_reason)
        if output.finished:
            del self._live[name]
        logprobs = None
        num_logprobs = live.request.sampling.num_logprobs
        if num_logprobs is not None and completion.logprobs is not None:
            pairs = zip(token_ids, completion.logprobs, strict=True)
            logprobs = tuple(token_logprobs(token, entry, num_logprobs) for token, entry in pairs)
        return TokenDelta(live.request.key, token_ids, finish_reason, usage, logprobs, refusal)

    def _usage(self, live: _Live, output: Any) -> PromptUsage:
        """vLLM's own counters, less what they say of output that an earlier run produced."""
        num_prompt_tokens = live.num_prompt_tokens
        num_cached_tokens = int(output.num_cached_tokens or 0)
        num_full_tokens = num_prompt_tokens // self._card.block_size * self._card.block_size
        return PromptUsage(
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=min(num_cached_tokens, num_prompt_tokens),
            num_written_tokens=min(
                int(output.num_cache_creation_tokens or 0), max(0, num_full_tokens - num_cached_tokens)
            ),
        )

    def _load(self) -> LoadSnapshot:
        num_running = num_context_tokens = num_pending_tokens = 0
        for live in self._live.values():
            inner = live.inner
            if not self._core.is_running(inner):
                num_pending_tokens += live.num_expected_tokens
                continue
            num_running += 1
            num_computed_tokens = inner.num_computed_tokens
            num_context_tokens += num_computed_tokens
            num_left = inner.num_tokens - num_computed_tokens
            if num_left > 1:
                num_pending_tokens += num_left
        return LoadSnapshot(
            num_running=num_running,
            num_waiting=len(self._live) - num_running,
            num_pending_tokens=num_pending_tokens,
            num_context_tokens=num_context_tokens,
            num_used_blocks=self._card.num_blocks - self._core.num_free_blocks,
            num_cached_blocks=self._hashes.num_copies,
            num_total_blocks=self._card.num_blocks,
        )


def _check_environment() -> None:
    if vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING or vllm.envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES:
        raise StartupError(
            "the environment must say VLLM_ENABLE_V1_MULTIPROCESSING=0"
            " and VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0"
        )


def _start(arguments: dict[str, Any], directory: Path) -> Any:
    try:
        return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except _REFUSALS as error:
        if any(words in str(error) for words in _TOO_SMALL):
            raise SettingsError(
                "the KV cache is too small for one sequence: raise num_blocks or kv_cache_bytes, "
                "or lower context_length"
            ) from error
        raise StartupError(f"vLLM does not serve {directory} so: {_sentence(error)}") from error


def _check_fit(card: ModelCard, config: ReplicaConfig, core: CoreView) -> None:
    if core.num_attention_kinds != 1:
        raise SettingsError(
            f"{card.name} mixes {core.num_attention_kinds} kinds of attention cache, and Kvasir indexes one"
        )
    if config.context_length is None and card.context_length < _SENSIBLE_CONTEXT:
        raise SettingsError(
            f"the KV cache holds {card.num_blocks} blocks of {card.block_size}, too few for one sequence of "
            f"{_SENSIBLE_CONTEXT} tokens: raise num_blocks or kv_cache_bytes, or set context_length"
        )


def _name(key: RequestKey) -> str:
    return f"{key.request_id}-{key.choice}"


def _root(extra_keys: Any) -> BlockHash | None:
    """The salt of a run's first block, which is all that a prompt's first block has besides its tokens."""
    if not extra_keys or not extra_keys[0]:
        return None
    return BlockHash(bytes.fromhex(extra_keys[0][-1]))


def _finish(reason: str | None) -> tuple[FinishReason | None, Refusal | None]:
    if reason is None:
        return None, None
    if reason in _FINISH_REASONS:
        return _FINISH_REASONS[reason], None
    return FinishReason.ERROR, Refusal(RefusalCode.INTERNAL, "vLLM failed on this request")


def _sentence(error: BaseException) -> str:
    """The first line that says something; pydantic puts a heading over its own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        lines = [line.removeprefix("Value error, ").split(" [type=")[0] for line in lines[1:]]
    return lines[0] if lines else type(error).__name__
