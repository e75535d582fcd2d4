"""VllmEngine: vLLM's LLMEngine behind the Engine protocol, in the engine thread.

Owns the requests in vLLM, under our keys, and the translation of each step. It reads vLLM's internals through
`core_view.py`.

Block sizes, adapters and tiers. vLLM, the block hashes and the model card share one block size. The index
keeps one hash per `index_stride` tokens of a chain (and the end of each prompt), so a stride of 128 keeps
every fourth of vLLM's blocks of 32, and a block size above the stride every block. A request's namespace root
is its `cache_salt`, so namespaces are separate inside vLLM too, and it returns with the event of the first
block. An adapter is part of the namespace: its blocks hash from another root, and vLLM separates them by
adapter as well. Events name the tier of a copy; a hash is in the index while any tier holds a copy, at the
stride of its chain position.

A model whose layers keep different caches has the size of a block that hits are multiples of, and none of
vLLM's own. It is told as resume points and reach (`sparse_translation.py`), and keeps nothing below the
device.
"""

import gc
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch._dynamo
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform

from replicas.checkpoints.image_rules import served_image_rule
from replicas.checkpoints.model_config import read_eos_token_ids
from replicas.checkpoints.sampling_defaults import read_sampling_defaults
from replicas.checkpoints.weights import files_fingerprint, tokenizer_bundle
from replicas.config import ReplicaConfig
from replicas.engine import EngineRequest, RequestRefused, SharedKv, with_layout
from replicas.errors import StartupError
from replicas.grammars.opening import open_holder
from replicas.kvcache.writers import Shares
from replicas.kvstore.leasing.lease_outcome import LeaseOutcome, without_tiers
from replicas.kvstore.tenant_shares import NOBODYS, Tenancy, tenancy_of
from replicas.media.holding import held_images, release_images
from replicas.media.image_cache import CachedImage
from replicas.media.probes import has_room_for_any
from replicas.media.store import ImageStore
from replicas.process.settings import SettingsError
from replicas.protocol.events import CacheEvent, Tier
from replicas.protocol.frames import (
    NO_USER,
    FinishReason,
    LoadSnapshot,
    Refusal,
    RefusalCode,
    RequestKey,
    StepFrame,
    TokenDelta,
    UserTag,
)
from replicas.protocol.hand_overs import StoreQuestion
from replicas.protocol.image_rules import ImageRule, written_rule
from replicas.protocol.media import ImageQuery, ImageQueryAnswer
from replicas.protocol.pulls import PullHint
from replicas.protocol.status import ModelCard, Role, TokenizerBundle
from replicas.protocol.ways import num_image_tokens_left
from replicas.scheduling.admission import AdmissionLimits, check_admission
from replicas.scheduling.constraining import last_delta
from replicas.scheduling.step_promise import open_promise
from replicas.toy_model import checkpoint_directory
from replicas.vllm_engine.adapters import LoraAdapter, read_adapters
from replicas.vllm_engine.arguments import RETENTION, engine_arguments
from replicas.vllm_engine.core_view import CoreView, Started
from replicas.vllm_engine.grammars import HeldGrammar, HeldRequests
from replicas.vllm_engine.images import ImageReader, ReadImage, prompt_with_images
from replicas.vllm_engine.live_request import LiveRequest
from replicas.vllm_engine.lower_tier import LowerTier, Requests
from replicas.vllm_engine.salts import salt_of
from replicas.vllm_engine.sampling import token_logprobs, vllm_sampling
from replicas.vllm_engine.sparse_translation import SparseTranslator
from replicas.vllm_engine.starting import check_environment, check_fit, load_adapters, sentence, start_vllm
from replicas.vllm_engine.translation import EventTranslator, Storer

logger = logging.getLogger(__name__)

_TRANSFER_PAUSE_SECONDS = 0.001
"""Pause of a step that computes nothing, for the threads that move blocks between tiers: they need the
interpreter. vLLM's own loop pauses as long."""

_IMAGE_PAUSE_SECONDS = 0.01
"""Seconds that an idle engine waits for an image being read."""

_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "repetition": FinishReason.STOP,
}


class VllmEngine:
    """Raises CheckpointError, SettingsError or StartupError. The process edge has set the environment."""

    def __init__(self, config: ReplicaConfig) -> None:
        check_environment()
        directory = checkpoint_directory(config.model)
        name = config.model_name or directory.resolve().name
        adapters = read_adapters(config.adapters or {}, name, trust_code=config.trust_code)
        self._bundle = tokenizer_bundle(directory)
        digest = files_fingerprint(directory)
        self._eos_token_ids = read_eos_token_ids(directory)
        self._on_cpu = bool(current_platform.is_cpu())
        self._tier = None if config.host_kv_bytes is None else LowerTier(config, secrets.token_hex(8), digest)
        rule = served_image_rule(directory) if config.image_bytes else None
        arguments = engine_arguments(
            config, str(directory), adapters, self._tier, takes_images=rule is not None
        )
        try:
            self._vllm = start_vllm(arguments, directory)
        except (SettingsError, StartupError):
            self._close_tier()
            raise
        self._core = CoreView(self._vllm)
        self._set_scheduler(config, name, arguments)
        self._shape = self._core.cache_shape
        self._card = self._model_card(config, name, digest, adapters, rule)
        if rule is not None and not has_room_for_any(self._card, rule):
            logger.warning(
                "a context of %d tokens leaves no room for an image: %s is served for text only",
                self._card.context_length,
                name,
            )
            rule, self._card = None, replace(self._card, image_rule="")
        self._images: ImageStore[ReadImage] | None = None
        if rule is not None:
            reader = ImageReader(self._vllm.renderer.get_mm_processor(), rule)
            self._images = ImageStore(reader.read, config.image_bytes)
        self._grammars = open_holder(self._bundle, self._card, config.grammar_seconds)
        try:
            check_fit(self._card, config, self._core)
            self._adapters = load_adapters(self._vllm, adapters)
        except (SettingsError, StartupError):
            self.close()
            raise
        self._card = with_layout(self._card, self.shared_kv)
        self._max_waiting = config.max_waiting
        self._limits = AdmissionLimits(
            self._card.context_length,
            self._card.num_cache_tokens,
            self._card.vocab_size,
            frozenset(self._adapters),
        )
        self._sparse = self._sparse_translator()
        self._cache = self._sparse or self._dense_translator()
        self._held = HeldRequests(self._grammars, self._core.structured_output_manager, self._card.vocab_size)
        self._adding: EngineRequest | None = None
        self._unsaid: list[CacheEvent] = []  # what came up between steps, and belongs to the next frame
        self._live: dict[str, LiveRequest] = {}
        if self._tier is not None:
            self._tier.requests = self._requests()

    def _set_scheduler(self, config: ReplicaConfig, name: str, arguments: Mapping[str, Any]) -> None:
        """Have vLLM's scheduler do what it has no argument for."""
        promise = open_promise(config.slo_tpot, self._core.cache_shape.alignment)
        if promise is not None:
            self._core.keep(promise)
        interval = self._core.cache_shape.default_retention
        if interval and RETENTION not in arguments:
            self._core.retain(interval)
            logger.info("%s keeps a resume point every %d tokens, since it has windows", name, interval)

    def _model_card(
        self,
        config: ReplicaConfig,
        name: str,
        fingerprint: str,
        adapters: Sequence[LoraAdapter],
        rule: ImageRule | None,
    ) -> ModelCard:
        model: Any = self._vllm.vllm_config.model_config
        shape = self._shape
        return ModelCard(
            name=name,
            fingerprint=fingerprint,
            engine="vllm",
            block_size=shape.alignment,
            num_blocks=self._core.num_blocks,
            context_length=int(model.max_model_len),
            vocab_size=int(model.get_vocab_size()),
            eos_token_ids=self._eos_token_ids,
            max_batched_tokens=config.tokens_per_step,
            max_running=min(config.max_running, config.tokens_per_step),
            adapters=tuple(adapter.card for adapter in adapters),
            image_rule=written_rule(rule),
            capacity_tokens=shape.capacity_tokens if shape.is_sparse else 0,
            is_sparse=shape.is_sparse,
            peek_tokens=shape.peek_tokens,
            retention_interval=shape.retention_interval if shape.is_sparse else 0,
            state_tokens=shape.state_tokens,
            sampling_defaults=read_sampling_defaults(config, checkpoint_directory(config.model)),
            role=Role(config.role),
        )

    def _sparse_translator(self) -> SparseTranslator | None:
        return SparseTranslator(self._shape, self._card.num_blocks) if self._card.is_sparse else None

    def _dense_translator(self) -> EventTranslator:
        return EventTranslator(
            self._card.block_size,
            self._card.num_blocks,
            has_more_tiers=self._core.has_more_tiers and self._tier is None,
            storer_of=self._storer,
            peek_tokens=self._card.peek_tokens,
        )

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def shared_kv(self) -> SharedKv | None:
        return None if self._tier is None else self._tier.store.shared

    @property
    def core(self) -> CoreView:
        return self._core

    def bundle(self) -> TokenizerBundle:
        """Return the files that the model's text goes through."""
        return self._bundle

    def begin(self, wake: Callable[[], None]) -> None:
        self._core.watch(wake)
        if self._tier is not None:
            self._tier.store.begin()

    def add(self, request: EngineRequest) -> None:
        check_admission(request, self._limits)
        name = _name(request.key)
        if name in self._live:
            raise RequestRefused(RefusalCode.INVALID_REQUEST, f"{request.key} is already here")
        num_waiting = len(self._live) - self._core.num_running
        if num_waiting >= self._max_waiting:
            raise RequestRefused(RefusalCode.OVERLOADED, f"{num_waiting} requests wait already")
        choice = self._held.begin(request)
        try:
            live = self._submit(name, request)
        except RequestRefused:
            if choice is not None:
                choice.end()
            raise
        if choice is not None:
            live.choice = choice
            self._held.await_grammar(name, choice, live.inner)
        self._live[name] = live

    def _submit(self, name: str, request: EngineRequest) -> LiveRequest:
        """Raises RequestRefused."""
        items = held_images(self._images, request, self._card.name)
        try:
            return self._submit_with(name, request, items)
        except RequestRefused:
            release_images(self._images, request)
            raise

    def _submit_with(
        self, name: str, request: EngineRequest, items: Sequence[CachedImage[ReadImage]]
    ) -> LiveRequest:
        """Raises RequestRefused."""
        adapter, media = request.submit.adapter, request.submit.media
        salt = salt_of(request.submit, self._card.block_size // self._shape.hash_block)
        token_ids = list(request.token_ids)
        prompt: Any = TokensPrompt(prompt_token_ids=token_ids, cache_salt=salt)
        if media:
            prompt = prompt_with_images(token_ids, media, items, salt)
        self._adding = request
        try:
            internal_id = self._vllm.add_request(
                name,
                prompt,
                vllm_sampling(request, self._card.eos_token_ids),
                lora_request=None if adapter is None else self._adapters[adapter],
                priority=request.submit.priority,
                session_id=name,  # comes back with the events of its blocks
            )
        except (VLLMValidationError, ValueError) as error:
            raise RequestRefused(RefusalCode.INVALID_REQUEST, sentence(error)) from error
        finally:
            self._adding = None
        inner = self._core.request(internal_id)
        if self._sparse is not None:
            self._sparse.follow(name, inner, request.submit)
        num_cached_tokens = self._num_leading_tokens(inner)
        live = LiveRequest(request, inner, max(1, len(request.token_ids) - num_cached_tokens))
        live.lease_outcome = self._lease(live)
        return live

    def take_media(self, question: ImageQuery) -> None:
        if self._images is not None:
            self._images.put(question)

    def abort(self, key: RequestKey) -> None:
        self._end(_name(key))

    def _end(self, name: str) -> None:
        """End a request in any state; nothing if there is no such request."""
        live = self._live.pop(name, None)
        if live is None:
            return
        self._vllm.abort_request([name])
        self._forget(name, live)

    def _forget(self, name: str, live: LiveRequest) -> None:
        release_images(self._images, live.request)
        if live.choice is not None:
            live.choice.end()
            self._held.forget(name)
        if self._sparse is not None:
            self._sparse.forget(name)

    def ask_store(self, question: StoreQuestion) -> None:
        if self._tier is not None:
            self._tier.store.take_overs.ask(question)

    def has_work(self) -> bool:
        has_news = self._tier is not None and self._tier.store.has_news
        if self._images is not None and self._images.has_news:
            return True
        return bool(self._live or self._unsaid) or has_news or self._core.has_transfers or self._core.has_died

    def step(self) -> StepFrame:
        if self._core.has_died:
            raise RuntimeError("a process of vLLM's has died")
        if self._on_cpu:
            # vLLM would compile a helper when logprobs are first asked for: seconds, for nothing. Torch
            # keeps this by thread, and the one that steps need not be the one that built the engine.
            torch._dynamo.config.disable = True
        started_at = time.perf_counter()
        if self._tier is not None:
            self._tier.store.poll()
        unheld = self._settle_grammars()
        must_step = self._live or self._core.has_transfers
        outputs: Iterable[Any] = self._vllm.step() if must_step else ()
        started = self._start(self._core.take_started())
        events = self._take_events()
        for live in started:  # after the events: what it found may have been computed in this very step
            live.shares = self._shares(live)
        deltas = unheld + [self._delta(output) for output in outputs]
        num_prefill_tokens, num_decode_tokens = self._core.take_computed()
        seconds = time.perf_counter() - started_at
        self._core.took(seconds)
        if must_step and not num_prefill_tokens + num_decode_tokens:
            self._pause()
        frame = StepFrame(
            deltas,
            events,
            self._load(),
            num_prefill_tokens,
            num_decode_tokens,
            started=[live.request.key for live in started],
            num_preemptions=self._core.take_num_preemptions(),
            media=self._take_images(may_wait=not (must_step or deltas or events)),
            num_encoded_tokens=self._core.take_num_encoded(),
        )
        return frame if self._tier is None else self._tier.fill(frame, seconds)

    def _take_images(self, *, may_wait: bool) -> list[ImageQueryAnswer]:
        """Take the images read since the last call; if the engine is idle, wait briefly for one."""
        if self._images is None or not self._images.has_news:
            return []
        if may_wait:
            self._images.wait(_IMAGE_PAUSE_SECONDS)
        return self._images.take_answers()

    def reset_prefix_cache(self) -> bool:
        """Clear the cache. A disk of vLLM's own keeps its content, since vLLM has no call to clear it."""
        self._unsaid += self._cache.translate(self._core.take_events())
        if not self._vllm.reset_prefix_cache():
            return False
        if self._images is not None:
            self._vllm.engine_core.reset_encoder_cache()
            self._images.clear()
        self._unsaid += self._cache.translate(self._core.take_events())
        if self._core.reset_tiers():
            if self._tier is not None:
                was_cleared = self._tier.clear()
                self._unsaid += self._tier.take_events()
                return was_cleared
            self._unsaid.append(self._cache.cleared(Tier.HOST))
        return True

    def close(self) -> None:
        self._grammars.close()
        if self._images is not None:
            self._images.close()
        self._vllm.engine_core.shutdown()
        self._close_tier()
        del self._vllm
        del self._core
        cleanup_dist_env_and_memory()
        gc.collect()

    def _pause(self) -> None:
        if self._tier is None:
            time.sleep(_TRANSFER_PAUSE_SECONDS)
        elif self._tier.store.look_again_seconds is not None:
            self._tier.store.wait(_TRANSFER_PAUSE_SECONDS)

    def _close_tier(self) -> None:
        if self._tier is not None:
            self._tier.close()

    def _start(self, started: Iterable[Started]) -> list[LiveRequest]:
        """Record what requests found when they were first scheduled."""
        lives: list[LiveRequest] = []
        for inner, num_found_tokens, num_external_tokens, num_shared_tokens in started:
            live = self._live.get(inner.session_id)
            if live is not None:
                live.num_found_tokens = num_found_tokens
                live.num_external_tokens = num_external_tokens
                live.num_shared_tokens = num_shared_tokens
                lives.append(live)
        return lives

    def _settle_grammars(self) -> list[TokenDelta]:
        """Give vLLM the grammars that are worked out; the last deltas of those that are none."""
        unheld: list[TokenDelta] = []
        for name, outcome in self._held.settle():
            if isinstance(outcome, HeldGrammar):
                self._live[name].grammar = outcome
            else:
                unheld.append(last_delta(self._live[name].request.key, outcome))
                self._end(name)
        return unheld

    def _take_events(self) -> list[CacheEvent]:
        events = self._unsaid + self._cache.translate(self._core.take_events())
        self._unsaid = []
        if self._tier is not None:
            events += self._tier.take_events()
        return events

    def _storer(self, name: str | None) -> Storer | None:
        live = None if name is None else self._live.get(name)
        if live is None:
            return None
        storer = Storer(live.request.submit.user, live.num_prompt_tokens, live.num_found_tokens)
        chain = None if self._tier is None else self._tier.chains.get(live.inner.request_id)
        return storer if chain is None else replace(storer, loaded_from=chain.loaded_from)

    def _requests(self) -> Requests:
        return Requests(
            self._core.find,
            self._user,
            self._cache.writer,
            self._num_device_tokens,
            lambda: self._load().num_pending_tokens,
            self._pull,
            self._tenancy,
        )

    def _pull(self, inner: Any) -> PullHint | None:
        adding = self._adding
        return adding.submit.pull if adding is not None and _name(adding.key) == inner.session_id else None

    def _tenancy(self, inner: Any) -> Tenancy:
        adding, live = self._adding, self._live.get(inner.session_id)
        if adding is not None and _name(adding.key) == inner.session_id:
            return tenancy_of(adding.submit)
        return NOBODYS if live is None else tenancy_of(live.request.submit)

    def _user(self, inner: Any) -> UserTag:
        live = self._live.get(inner.session_id)
        return NO_USER if live is None else live.request.submit.user

    def _num_leading_tokens(self, inner: Any) -> int:
        """Count the leading tokens of a new request that need not be computed."""
        num_tokens = self._num_device_tokens(inner)
        return (
            num_tokens if self._tier is None else self._tier.num_leading_tokens(inner.request_id, num_tokens)
        )

    def _num_device_tokens(self, inner: Any) -> int:
        """And with tiers of vLLM's own, those that lie there."""
        return self._cache.num_leading_tokens(inner)

    def _lease(self, live: LiveRequest) -> LeaseOutcome:
        """Request its leases, once, for its first choice."""
        submit, asks = live.request.submit, live.request.key.choice == 0
        if self._tier is None:
            return without_tiers(submit.leases if asks else ())
        num_device_tokens = self._num_device_tokens(live.inner)
        return self._tier.lease(live.inner.request_id, submit, num_device_tokens, asks=asks)

    def _shares(self, live: LiveRequest) -> Shares:
        return self._cache.token_shares(
            live.inner,
            live.request.submit.user,
            num_cached_tokens=live.num_found_tokens,
            num_prompt_tokens=live.num_prompt_tokens,
        )

    def _delta(self, output: Any) -> TokenDelta:
        name = output.request_id
        live = self._live[name]
        (completion,) = output.outputs
        token_ids = tuple(completion.token_ids)
        usage = None
        if not live.has_output:
            chain = None if self._tier is None else self._tier.chains.get(live.inner.request_id)
            usage = live.usage(output, self._card.block_size, chain)
        live.has_output = True
        finish_reason, refusal = _finish(completion.finish_reason)
        if live.grammar is not None and live.grammar.failure is not None:
            self._end(name)
            return last_delta(live.request.key, live.grammar.failure, usage)
        if live.grammar is not None and live.grammar.is_complete:
            finish_reason = FinishReason.STOP
            self._end(name)
        elif output.finished:
            del self._live[name]
            self._forget(name, live)
        logprobs = None
        num_logprobs = live.request.sampling.num_logprobs
        if num_logprobs is not None and completion.logprobs is not None:
            pairs = zip(token_ids, completion.logprobs, strict=True)
            logprobs = tuple(token_logprobs(token, entry, num_logprobs) for token, entry in pairs)
        return TokenDelta(live.request.key, token_ids, finish_reason, usage, logprobs, refusal)

    def _load(self) -> LoadSnapshot:
        num_running = num_context_tokens = num_pending_tokens = num_pending_image_tokens = 0
        num_wanted_tokens = 0
        for live in self._live.values():
            inner, media = live.inner, live.request.submit.media
            is_running = self._core.is_running(inner)
            if media:
                num_ready = inner.num_computed_tokens if is_running else live.num_tokens_found_on_arrival
                num_pending_image_tokens += num_image_tokens_left(media, num_ready)
            if not is_running:
                num_pending_tokens += live.num_expected_tokens
                num_wanted_tokens += inner.num_tokens
                continue
            num_running += 1
            num_computed_tokens = inner.num_computed_tokens
            num_context_tokens += num_computed_tokens
            num_left = inner.num_tokens - num_computed_tokens
            if num_left > 1:
                num_pending_tokens += num_left
                num_wanted_tokens += num_left
        return LoadSnapshot(
            num_running=num_running,
            num_waiting=len(self._live) - num_running,
            num_pending_tokens=num_pending_tokens,
            num_pending_image_tokens=num_pending_image_tokens,
            num_context_tokens=num_context_tokens,
            num_used_blocks=self._card.num_blocks - self._core.num_free_blocks,
            num_cached_blocks=self._cache.num_copies,
            num_total_blocks=self._card.num_blocks,
            num_room_tokens=self._core.num_free_blocks * self._card.block_size - num_wanted_tokens,
        )


def _name(key: RequestKey) -> str:
    return f"{key.number}-{key.choice}"


def _finish(reason: str | None) -> tuple[FinishReason | None, Refusal | None]:
    if reason is None:
        return None, None
    if reason in _FINISH_REASONS:
        return _FINISH_REASONS[reason], None
    return FinishReason.ERROR, Refusal(RefusalCode.INTERNAL, "vLLM failed on this request")
