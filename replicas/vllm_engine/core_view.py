"""CoreView: the only code that reads vLLM's engine core.

Owns what is attached there: a publisher that keeps each step's cache events, a note of the schedule, and the
root that is hashed after a prompt's published beginning. All else reads, except `reset_tiers` and `retain`.
Works only with an engine core in the same process.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from vllm.distributed.kv_events import AllBlocksCleared as VllmAllBlocksCleared
from vllm.distributed.kv_events import BlockRemoved as VllmBlockRemoved
from vllm.distributed.kv_events import BlockStored as VllmBlockStored
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import RequestStatus

from replicas.scheduling.step_promise import StepPromise, StepWork
from replicas.vllm_engine.cache_shape import CacheShape, read_cache_shape
from replicas.vllm_engine.salts import PublishedSalt

__all__ = ["CoreView", "Started", "VllmAllBlocksCleared", "VllmBlockRemoved", "VllmBlockStored"]


_ROOT_TAG = "kvasir_root"


def hash_second_roots() -> None:
    """Make vLLM hash a prompt's own root into the first block after its published beginning. Idempotent."""
    inner = kv_cache_utils._gen_prompt_embeds_extra_hash_keys
    if hasattr(inner, _ROOT_TAG):
        return

    # From 0.31 on, vLLM hashes each key with a tag, which its events leave out.
    has_tags = hasattr(kv_cache_utils, "to_event_extra_keys")

    def keys_of(request: Any, start: int, end: int) -> list[Any]:
        keys: list[Any] = inner(request, start, end)
        salt = request.cache_salt
        if isinstance(salt, PublishedSalt) and start == salt.num_blocks * (end - start):
            return [*keys, (_ROOT_TAG, salt.own_root) if has_tags else salt.own_root]
        return keys

    setattr(keys_of, _ROOT_TAG, True)
    kv_cache_utils._gen_prompt_embeds_extra_hash_keys = keys_of


class _EventKeeper:
    """Replaces vLLM's event publisher for the scheduler, and keeps what is published."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def publish(self, batch: Any) -> None:
        self.events.extend(batch.events)

    def get_publisher_config(self) -> None:
        return None

    def shutdown(self) -> None:
        pass


class Started(NamedTuple):
    """`num_found_tokens` were in the cache; of these a connector brought `num_external_tokens`. Some layers
    held `num_shared_tokens`, if that is more than was found; else it is 0."""

    request: Any
    num_found_tokens: int
    num_external_tokens: int
    num_shared_tokens: int


class CoreView:
    def __init__(self, llm_engine: Any) -> None:
        hash_second_roots()
        self._config: Any = llm_engine.vllm_config
        self._engine_core: Any = llm_engine.engine_core.engine_core
        self._scheduler: Any = self._engine_core.scheduler
        self._keeper = _EventKeeper()
        self._scheduler.kv_event_publisher = self._keeper
        self._schedule = self._scheduler.schedule
        self._scheduler.schedule = self._schedule_and_note
        self._num_prefill_tokens = 0
        self._num_decode_tokens = 0
        self._num_encoded_tokens = 0
        self._started: list[Started] = []
        self._num_preemptions = 0
        self._promise: StepPromise | None = None
        self._most_tokens = int(self._scheduler.max_num_scheduled_tokens)
        self._work = StepWork(0)

    def keep(self, promise: StepPromise) -> None:
        """Bound the prompt tokens of each step with decoding requests from now on. vLLM asks for its bound in
        every step, so it need not be the same in all."""
        self._promise = promise

    def took(self, seconds: float) -> None:
        """Say how long the last step took."""
        if self._promise is not None:
            work, self._work = self._work, StepWork(0)
            if work.num_prompt_tokens or work.num_context_tokens:
                self._promise.observe(work, seconds)

    @property
    def has_died(self) -> bool:
        """Whether a process of vLLM's has died; one that has no others never does."""
        return bool(getattr(self._engine_core.model_executor, "is_failed", False))

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` from another thread once it `has_died`."""
        self._engine_core.model_executor.register_failure_callback(wake)

    @property
    def structured_output_manager(self) -> Any:
        """vLLM's, which is asked for the masks of each step."""
        return self._scheduler.structured_output_manager

    @property
    def cache_shape(self) -> CacheShape:
        """How vLLM divides its KV cache."""
        return read_cache_shape(self._config, self._scheduler.kv_cache_manager)

    def retain(self, interval: int) -> None:
        """Keep a resume point every `interval` tokens, as vLLM's argument does. That one must be given before
        the groups are known, and is refused for models that have no use for it."""
        manager = self._scheduler.kv_cache_manager
        manager.kv_cache_config.prefix_cache_retention_interval = interval
        manager.coordinator.retention_interval = interval

    @property
    def num_lookahead_tokens(self) -> int:
        """Tokens behind a block that its hash covers too; vLLM can do so from 0.33 on."""
        return int(getattr(self._config, "num_hash_lookahead_tokens", 0))

    @property
    def num_blocks(self) -> int:
        """Without the null block."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        return int(self._pool.get_num_free_blocks())

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def has_more_tiers(self) -> bool:
        """Whether a connector keeps blocks, or fetches them, beyond the device's memory."""
        return self._scheduler.connector is not None

    @property
    def has_transfers(self) -> bool:
        """Whether a connector needs steps without requests, to finish its transfers."""
        return self.has_more_tiers and bool(self._scheduler.has_requests())

    def take_events(self) -> list[Any]:
        """In order: those of the last step, then those that came up since."""
        events = self._keeper.events
        self._keeper.events = []
        events.extend(self._scheduler.kv_cache_manager.take_events())
        if self.has_more_tiers:
            events.extend(self._scheduler.connector.take_events())
        return events

    def reset_tiers(self) -> bool:
        """Clear a connector's host memory. False if it has none, or cannot."""
        return self.has_more_tiers and self._scheduler.connector.reset_cache() is True

    def take_computed(self) -> tuple[int, int]:
        """Prefill and decode tokens of the steps since the last call."""
        computed = (self._num_prefill_tokens, self._num_decode_tokens)
        self._num_prefill_tokens = self._num_decode_tokens = 0
        return computed

    def take_num_encoded(self) -> int:
        """Tokens of the images that were encoded in the steps since the last call."""
        num_encoded, self._num_encoded_tokens = self._num_encoded_tokens, 0
        return num_encoded

    def take_started(self) -> list[Started]:
        """Requests first scheduled since the last call."""
        started = self._started
        self._started = []
        return started

    def take_num_preemptions(self) -> int:
        """Return the preemptions since the last call."""
        num_preemptions, self._num_preemptions = self._num_preemptions, 0
        return num_preemptions

    def request(self, internal_id: str) -> Any:
        """vLLM's own request, as the scheduler keeps it."""
        return self._scheduler.requests[internal_id]

    def find(self, internal_id: str) -> Any:
        """Return the request; None if the scheduler does not keep it, or no longer."""
        return self._scheduler.requests.get(internal_id)

    def is_running(self, request: Any) -> bool:
        return bool(request.status == RequestStatus.RUNNING)

    def cached_hashes(self) -> dict[bytes, int]:
        """vLLM's hash of every cached block, with its number of copies: the truth that events report."""
        copies: dict[bytes, int] = {}
        for block in self._pool.blocks:
            if block.block_hash is not None:
                digest = bytes(block.block_hash)[:-4]  # the rest is the number of the KV cache group
                copies[digest] = copies.get(digest, 0) + 1
        return copies

    @property
    def _pool(self) -> Any:
        return self._scheduler.kv_cache_manager.block_pool

    def _schedule_and_note(self, *arguments: Any, **named: Any) -> Any:
        if self._promise is not None:
            self._scheduler.max_num_scheduled_tokens = self._num_promised(self._promise)
        output = self._schedule(*arguments, **named)
        for new in output.scheduled_new_reqs:
            request = self._scheduler.requests[new.req_id]
            if request.num_preemptions == 0:
                stats = request.prefill_stats
                self._started.append(
                    Started(
                        request,
                        int(stats.num_cached_tokens),
                        int(stats.num_external_cached_tokens),
                        int(request.shared_prefix_boundary),
                    )
                )
        self._num_preemptions += len(output.preempted_req_ids or ())
        for internal_id, inputs in output.scheduled_encoder_inputs.items():
            features = self._scheduler.requests[internal_id].mm_features
            self._num_encoded_tokens += sum(features[each].mm_position.length for each in inputs)
        for internal_id, num_tokens in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[internal_id]
            num_drafted = len(output.scheduled_spec_decode_tokens.get(internal_id, ()))
            # The scheduler counts them as computed already.
            if num_tokens == 1 + num_drafted and request.num_computed_tokens > request.num_prompt_tokens:
                self._num_decode_tokens += num_tokens
            else:
                self._num_prefill_tokens += num_tokens
        if self._promise is not None:
            self._work = self._work_of(output)
        return output

    def _num_promised(self, promise: StepPromise) -> int:
        """Tokens of the next step, decoding requests first: vLLM's own bound where none decodes."""
        num_decode_tokens = num_context_tokens = num_pending_tokens = 0
        first_start = None
        for request in self._scheduler.running:
            start = int(request.num_computed_tokens)
            num_left = int(request.num_tokens_with_spec) - start
            if start >= request.num_prompt_tokens and num_left == 1 + len(request.spec_token_ids):
                num_decode_tokens += num_left
                num_context_tokens += start + 1
            else:
                first_start = start if first_start is None else first_start
                num_pending_tokens += num_left
        if not num_decode_tokens:
            return self._most_tokens
        num_pending_tokens += sum(int(request.num_tokens) for request in self._scheduler.waiting)
        num_prompt_tokens = promise.num_prompt_tokens(
            num_context_tokens, first_start or 0, num_pending_tokens
        )
        return min(self._most_tokens, num_decode_tokens + num_prompt_tokens)

    def _work_of(self, output: Any) -> StepWork:
        num_prompt_tokens = num_attended_tokens = num_context_tokens = 0
        ends_prompt = False
        for internal_id, num_tokens in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[internal_id]
            start = request.num_computed_tokens - num_tokens  # they are counted as computed already
            num_drafted = len(output.scheduled_spec_decode_tokens.get(internal_id, ()))
            if start >= request.num_prompt_tokens and num_tokens == 1 + num_drafted:
                num_context_tokens += start + 1
            else:
                num_prompt_tokens += num_tokens
                num_attended_tokens += num_tokens * start
                ends_prompt = ends_prompt or request.num_computed_tokens >= request.num_prompt_tokens
        return StepWork(num_prompt_tokens, num_attended_tokens, num_context_tokens, ends_prompt)
