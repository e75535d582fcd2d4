"""Scheduler: which requests an engine computes in the next step, and the results of the last one.

Owns every Request from `add` to its last delta, the queue, the order of service, preemption and the stop
rules. The engine owns models, sampling, threads and time: the torch engine and the simulated one drive the
same scheduler, one `schedule()` and one `finish_step()` per step.

Requests are served by *rank*: priority first, then arrival. Running and waiting ones are kept in that order,
so the request to preempt is always the last that runs, and comes after everything scheduled in the step: no
block is shared that this step will not compute.

With KV below the device, a request may hold blocks without running, while KV is copied into them, and one
that waits for KV to come to host memory lets later ones pass. So does one whose grammar is still being
compiled.
"""

from bisect import insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter

from replicas.engine import EngineRequest, RequestRefused
from replicas.grammars.constraint import ConstraintExhausted, ConstraintFailed, Constraints
from replicas.protocol.frames import (
    FinishReason,
    LoadSnapshot,
    RefusalCode,
    RequestKey,
    StepFrame,
    TokenDelta,
)
from replicas.scheduling.admission import AdmissionLimits, check_admission
from replicas.scheduling.constraining import constrain, last_delta, take_unheld
from replicas.scheduling.kvcache_manager import KVCacheManager
from replicas.scheduling.lower_tiers import LowerTiers
from replicas.scheduling.request import Chunk, Request, SampledToken
from replicas.scheduling.step_promise import StepPromise
from replicas.scheduling.usage import prompt_usage

_rank = attrgetter("rank")


class Scheduler:
    """Continuous batching with chunked prefill over a prefix cache.

    A request may produce up to `context_length` tokens, or fewer if the whole KV cache holds less: then its
    last delta has FinishReason.LENGTH, as at the context's end.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_batched_tokens: int,
        max_running: int,
        max_waiting: int,
        context_length: int,
        vocab_size: int,
        eos_token_ids: Collection[int],
        lower_tiers: LowerTiers | None = None,
        constraints: Constraints | None = None,
        promise: StepPromise | None = None,
    ) -> None:
        assert min(max_batched_tokens, max_running, max_waiting) >= 1
        self._manager = manager
        self._max_batched_tokens = max_batched_tokens
        self._promise = promise
        self._num_pending_tokens = 0
        """Prompt tokens still to be computed, at the last look."""
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._eos_token_ids = frozenset(eos_token_ids)
        self._limits = AdmissionLimits(context_length, manager.capacity_tokens, vocab_size)
        self._max_total_tokens = self._limits.max_total_tokens
        self._requests: dict[RequestKey, Request] = {}
        self._running: list[Request] = []
        self._waiting: list[Request] = []
        self._lower_tiers = lower_tiers
        self._loading: list[Request] = []
        """Requests with all their blocks, into some of which KV is being copied."""
        self._loaded: list[Request] = []
        """Requests with all their blocks that may run once a step has a token for them."""
        self._constraints = constraints
        self._refused: list[TokenDelta] = []
        """Refusals for the next frame: requests whose grammar cannot be followed."""
        self._num_added = 0
        self._started: list[RequestKey] = []  # of the step that is being made, like the next
        self._num_preemptions = 0

    def add(self, engine_request: EngineRequest) -> None:
        """Queue a request. Raises RequestRefused, and keeps nothing of it, if it cannot run."""
        check_admission(engine_request, self._limits)
        if engine_request.key in self._requests:
            raise RequestRefused(RefusalCode.INVALID_REQUEST, f"{engine_request.key} is already here")
        if len(self._waiting) >= self._max_waiting:
            raise RequestRefused(RefusalCode.OVERLOADED, f"{len(self._waiting)} requests wait already")
        constraint = constrain(engine_request, self._constraints)
        self._num_added += 1
        request = Request(engine_request, self._num_added, constraint)
        self._requests[request.key] = request
        self._enqueue(request)

    def abort(self, key: RequestKey) -> None:
        """Forget a request and free its blocks now; no delta of it follows. Unknown keys are ignored."""
        request = self._requests.pop(key, None)
        if request is None:
            return
        if request in self._loading:
            self._loading.remove(request)  # its blocks are free when nothing is copied into them any more
        else:
            self._queue_of(request).remove(request)
            self._manager.free(request)
        self._forget(request)

    def has_work(self) -> bool:
        """Whether a step has anything to do: a waiting or running request, or an event to report."""
        has_tier_work = self._lower_tiers is not None and self._lower_tiers.has_work
        return bool(self._requests) or has_tier_work or self._manager.has_events

    def reset_prefix_cache(self) -> bool:
        """Forget all KV. Returns False and does nothing while any request holds blocks or any chunk moves."""
        if self._manager.pool.num_used:
            return False
        if self._lower_tiers is not None and not self._lower_tiers.reset():
            return False
        return self._manager.reset()

    def schedule(self) -> list[Chunk]:
        """Return the next step's work, decoding requests first; every chunk is computed in one batch.

        Blocks are allocated here, and those that the step will fill are shared already. So the engine must
        write the KV of all chunks of the step before any of them reads (layer by layer is enough). At least
        one chunk, unless no request can be computed: all wait for KV on its way, or for their grammar.
        """
        for request, delta in take_unheld(self._waiting):
            self._waiting.remove(request)
            self._end(request)
            self._refused.append(delta)
        decodes: list[Chunk] = []
        prefills: list[Chunk] = []
        num_decoding = self._num_decoding()
        budget = self._max_batched_tokens - num_decoding
        # A request is admitted only where all that run have had a token and one is left for it.
        assert budget >= 0, "more requests decode than a step has tokens"
        if self._promise is not None and num_decoding:
            budget = min(budget, self._num_promised(self._promise))
        num_running = len(self._running)
        budget = self._schedule_running(decodes, prefills, budget)
        if len(self._running) == num_running:
            self._admit(prefills, budget)
        assert decodes or prefills or not self._requests or self._awaits, (
            "requests are left, and none can be computed"
        )
        return decodes + prefills

    def finish_step(self, chunks: Iterable[Chunk], sampled: Mapping[RequestKey, SampledToken]) -> StepFrame:
        """Record the results of `schedule()`'s chunks, one token for each that samples.

        A stopping token (EOS or a stop token) is part of its delta. Requests aborted since they were
        scheduled are skipped.
        """
        deltas, self._refused = self._refused, []
        num_prefill_tokens = num_decode_tokens = 0
        any_finished = False
        for chunk in chunks:
            request, start, num_tokens, samples = chunk
            if num_tokens == 1 and start >= request.num_prompt_tokens:
                num_decode_tokens += 1
            else:
                num_prefill_tokens += num_tokens
            if self._requests.get(request.key) is not request:
                continue
            request.num_computed_tokens = start + num_tokens
            if self._lower_tiers is not None:
                self._lower_tiers.computed(request)
            if samples:
                delta = self._append(request, sampled[request.key])
                deltas.append(delta)
                if delta.finish_reason is not None:
                    any_finished = True
                    self._end(request)
        if any_finished:
            self._running = [request for request in self._running if request.block_ids]
        started, self._started = self._started, []
        num_preemptions, self._num_preemptions = self._num_preemptions, 0
        frame = StepFrame(
            deltas,
            self._manager.take_events(),
            self.load(),
            num_prefill_tokens,
            num_decode_tokens,
            started=started,
            num_preemptions=num_preemptions,
        )
        return frame if self._lower_tiers is None else self._lower_tiers.fill(frame)

    def wait(self, seconds: float) -> None:
        """Wait for what the last `schedule()` lacked, at most `seconds`."""
        if self._lower_tiers is not None:
            self._lower_tiers.wait(seconds)
        elif self._constraints is not None:
            self._constraints.wait(seconds)

    def load(self) -> LoadSnapshot:
        """How busy the engine is; its speed is for others to measure."""
        num_context_tokens = 0
        to_start = [*self._waiting, *self._loading, *self._loaded]
        num_pending_tokens = sum(request.num_expected_tokens for request in to_start)
        num_wanted_tokens = sum(request.num_tokens for request in self._waiting)
        for request in self._running:
            num_computed_tokens = request.num_computed_tokens
            num_context_tokens += num_computed_tokens
            num_left = len(request.token_ids) - num_computed_tokens
            if num_left > 1:
                num_pending_tokens += num_left
                num_wanted_tokens += num_left
        pool = self._manager.pool
        self._num_pending_tokens = num_pending_tokens
        return LoadSnapshot(
            num_running=len(self._running),
            num_waiting=len(to_start),
            num_pending_tokens=num_pending_tokens,
            num_context_tokens=num_context_tokens,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_total_blocks=pool.num_usable,
            num_room_tokens=pool.num_free * self._manager.block_size - num_wanted_tokens,
        )

    def _num_promised(self, promise: StepPromise) -> int:
        """Prompt tokens that the requests that decode leave time for."""
        num_context_tokens, first_start = 0, None
        for request in self._running:
            start = request.num_computed_tokens
            if len(request.token_ids) - start == 1:
                num_context_tokens += start + 1
            elif first_start is None:
                first_start = start
        return promise.num_prompt_tokens(num_context_tokens, first_start or 0, self._num_pending_tokens)

    def _num_decoding(self) -> int:
        """Running requests that need one token only: theirs is set aside before prompts share the rest."""
        return sum(
            1 for request in self._running if len(request.token_ids) - request.num_computed_tokens == 1
        )

    def _schedule_running(self, decodes: list[Chunk], prefills: list[Chunk], budget: int) -> int:
        """Chunks of the requests that run already, in order of rank; the prefill budget that is left.

        Where blocks run out the last in rank is preempted, which may be the very one that needs them.
        """
        running = self._running
        position = 0
        while position < len(running):
            request = running[position]
            position += 1
            start = request.num_computed_tokens
            num_left = len(request.token_ids) - start
            num_tokens = 1 if num_left == 1 else min(num_left, budget)
            if num_tokens == 0:
                continue
            if num_left > 1:
                num_tokens = self._manager.chunk_tokens(request, num_tokens)
            while not self._manager.allocate(request, num_tokens):
                if self._preempt_last() is request:
                    return budget
            chunk = Chunk(request, start, num_tokens, num_tokens == num_left)
            if num_left == 1:
                decodes.append(chunk)
            else:
                prefills.append(chunk)
                budget -= num_tokens
        return budget

    def _admit(self, prefills: list[Chunk], budget: int) -> None:
        """Start waiting requests, in order of rank, until budget, slots or blocks run out.

        One starts only if its whole prompt fits into what is free, even if the first chunk is smaller: half a
        prompt that is preempted for the other half of another was computed in vain.
        """
        budget = self._start_loaded(prefills, budget)
        waiting, self._waiting = self._waiting, []
        for position, request in enumerate(waiting):
            if budget <= 0 or self._num_holding >= self._max_running:
                self._waiting += waiting[position:]
                break
            if request.awaits_grammar or (
                self._lower_tiers is not None and self._lower_tiers.still_waits(request)
            ):
                self._waiting.append(request)
                continue
            cached_block_ids = self._manager.find_cached(request)
            num_ready, is_more_coming = self._num_ready(request, len(cached_block_ids))
            if is_more_coming:
                self._waiting.append(request)
                continue
            if not self._manager.fits(request, cached_block_ids):
                self._waiting += waiting[position:]
                break
            if num_ready > len(cached_block_ids):
                self._load(request, cached_block_ids, num_ready)
                budget = self._start_loaded(prefills, budget)
            else:
                self._count_cached(request, len(cached_block_ids))
                budget = self._start(request, prefills, budget, cached_block_ids)

    def _start(
        self, request: Request, prefills: list[Chunk], budget: int, cached_block_ids: Sequence[int] = ()
    ) -> int:
        """Its first chunk, from where its KV ends; the budget that is left."""
        start = request.num_computed_tokens
        num_left = len(request.token_ids) - start
        num_tokens = self._manager.chunk_tokens(request, min(num_left, budget))
        allocated = self._manager.allocate(request, num_tokens, cached_block_ids)
        assert allocated, "the whole prompt fits, but not its first chunk"
        insort(self._running, request, key=_rank)
        prefills.append(Chunk(request, start, num_tokens, num_tokens == num_left))
        return budget - num_tokens

    def _count_cached(self, request: Request, num_blocks: int) -> None:
        """Record that its first `num_blocks` blocks are cached. Its usage counts those of its first start."""
        request.num_computed_tokens = num_blocks * self._manager.block_size
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            shares = self._manager.token_shares(request, num_blocks)
            request.num_own_tokens, request.num_cross_user_tokens = shares
            self._started.append(request.key)

    # Where KV lies below the device, too.

    @property
    def _num_holding(self) -> int:
        """Requests that hold blocks."""
        return len(self._running) + len(self._loading) + len(self._loaded)

    @property
    def _awaits(self) -> bool:
        awaits_kv = self._lower_tiers is not None and bool(self._loading or self._waiting)
        return awaits_kv or any(request.awaits_grammar for request in self._waiting)

    def _num_ready(self, request: Request, num_cached_blocks: int) -> tuple[int, bool]:
        """Return the leading blocks that it need not compute, and whether it should wait for more."""
        if self._lower_tiers is None:
            return num_cached_blocks, False
        return self._lower_tiers.num_ready_blocks(request, num_cached_blocks)

    def _load(self, request: Request, cached_block_ids: Sequence[int], num_ready_blocks: int) -> None:
        assert self._lower_tiers is not None
        self._manager.hold(request, cached_block_ids)
        request.num_expected_tokens = request.num_tokens - num_ready_blocks * self._manager.block_size
        self._loading.append(request)
        shares = self._lower_tiers.load(request, len(cached_block_ids), num_ready_blocks)
        if request.num_preemptions == 0:
            num_loaded_blocks = num_ready_blocks - len(cached_block_ids)
            request.num_slower_tier_tokens = num_loaded_blocks * self._manager.block_size
            request.num_disk_tokens, request.num_pulled_tokens = shares

    def _start_loaded(self, prefills: list[Chunk], budget: int) -> int:
        """Start requests whose KV has arrived, within the budget; returns the rest of the budget."""
        if self._lower_tiers is None:
            return budget
        for request, num_blocks in self._lower_tiers.take_loaded():
            self._loading.remove(request)
            self._count_cached(request, num_blocks)
            insort(self._loaded, request, key=_rank)
        while self._loaded and budget > 0:
            budget = self._start(self._loaded.pop(0), prefills, budget)
        return budget

    def _queue_of(self, request: Request) -> list[Request]:
        if not request.block_ids:
            return self._waiting
        return self._loaded if request in self._loaded else self._running

    def _end(self, request: Request) -> None:
        del self._requests[request.key]
        self._manager.free(request)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        if self._lower_tiers is not None:
            self._lower_tiers.forget(request)
        if request.constraint is not None:
            request.constraint.end()

    def _preempt_last(self) -> Request:
        """Take the blocks of the last in rank; it recomputes what is no longer cached by its turn."""
        request = self._running.pop()
        self._manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._enqueue(request)
        return request

    def _enqueue(self, request: Request) -> None:
        num_cached_blocks = len(self._manager.find_cached(request))
        request.num_expected_tokens = request.num_tokens - num_cached_blocks * self._manager.block_size
        if self._lower_tiers is not None:
            num_tokens_before = self.load().num_pending_tokens
            self._lower_tiers.arrived(request, num_cached_blocks, num_tokens_before)
        insort(self._waiting, request, key=_rank)

    def _append(self, request: Request, sampled: SampledToken) -> TokenDelta:
        is_first = len(request.token_ids) == request.num_submitted_tokens
        usage = prompt_usage(request, self._manager.block_size) if is_first else None
        try:
            is_complete = request.constraint is not None and request.constraint.consume(sampled.token_id)
        except (ConstraintFailed, ConstraintExhausted) as failed:
            return last_delta(request.key, failed, usage)
        request.token_ids.append(sampled.token_id)
        return TokenDelta(
            request.key,
            (sampled.token_id,),
            FinishReason.STOP if is_complete else self._finish_reason(request, sampled.token_id),
            usage,
            None if sampled.logprobs is None else (sampled.logprobs,),
        )

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        """Whether the token just appended is the last. A stopping token counts from `min_tokens` on."""
        sampling = request.sampling
        num_tokens = len(request.token_ids)
        num_output_tokens = num_tokens - request.num_prompt_tokens
        if num_output_tokens >= sampling.min_tokens and (
            token_id in sampling.stop_token_ids
            or (token_id in self._eos_token_ids and not sampling.ignore_eos)
        ):
            return FinishReason.STOP
        if num_output_tokens >= sampling.max_tokens or num_tokens >= self._max_total_tokens:
            return FinishReason.LENGTH
        return None
