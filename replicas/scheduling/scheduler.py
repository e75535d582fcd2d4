"""Scheduler: which requests an engine computes in the next step, and what came of the last one.

Owns every Request from `add` to its last delta, the queue, the order of service, preemption and the
stop rules. Models, sampling, threads and time are the engine's: the torch engine and the simulated one drive
the same scheduler, one `schedule()` and one `finish_step()` per step.

Requests are served by *rank*: priority first, then arrival. Running and waiting ones are both kept in
that order, so the one to preempt is always the last that runs, and in one step it always comes after
everything that has been scheduled already: no block is ever shared that this step will not compute.
"""

from bisect import insort
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter

from replicas.engine import EngineRequest, RequestRefused
from replicas.protocol.frames import (
    FinishReason,
    LoadSnapshot,
    PromptUsage,
    RefusalCode,
    RequestKey,
    StepFrame,
    TokenDelta,
)
from replicas.scheduling.admission import AdmissionLimits, check_admission
from replicas.scheduling.kvcache_manager import KVCacheManager
from replicas.scheduling.request import Chunk, Request, SampledToken

_rank = attrgetter("rank")


class Scheduler:
    """Continuous batching with chunked prefill over a prefix cache.

    A request may produce up to `context_length` tokens, or fewer where the whole KV cache holds less:
    then its last delta says FinishReason.LENGTH, as at the context's end.
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
    ) -> None:
        assert min(max_batched_tokens, max_running, max_waiting) >= 1
        self._manager = manager
        self._max_batched_tokens = max_batched_tokens
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._eos_token_ids = frozenset(eos_token_ids)
        self._limits = AdmissionLimits(context_length, manager.capacity_tokens, vocab_size)
        self._max_total_tokens = self._limits.max_total_tokens
        self._requests: dict[RequestKey, Request] = {}
        self._running: list[Request] = []
        self._waiting: list[Request] = []
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
        self._num_added += 1
        request = Request(engine_request, self._num_added)
        self._requests[request.key] = request
        self._enqueue(request)

    def abort(self, key: RequestKey) -> None:
        """Forget a request and free its blocks now; no delta of it follows. Unknown keys are ignored."""
        request = self._requests.pop(key, None)
        if request is None:
            return
        (self._running if request.block_ids else self._waiting).remove(request)
        self._manager.free(request)

    def has_work(self) -> bool:
        """Whether a step has anything to do: a waiting or running request, or an event to report."""
        return bool(self._requests) or self._manager.pool.has_events

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False, and nothing happens, while any request holds blocks."""
        return self._manager.reset()

    def schedule(self) -> list[Chunk]:
        """The next step's work, decoding requests first; every chunk is computed in one batch.

        Blocks are allocated here, and those that the step will fill are shared already. So the engine
        must write the KV of all chunks of the step before any of them reads (layer by layer
        is enough). At least one chunk, unless there is no request.
        """
        decodes: list[Chunk] = []
        prefills: list[Chunk] = []
        budget = self._max_batched_tokens - self._num_decoding()
        # A request is admitted only where all that run have had a token and one is left for it.
        assert budget >= 0, "more requests decode than a step has tokens"
        num_running = len(self._running)
        budget = self._schedule_running(decodes, prefills, budget)
        if len(self._running) == num_running:
            self._admit(prefills, budget)
        assert decodes or prefills or not self._requests, "requests are left, and none can be computed"
        return decodes + prefills

    def finish_step(self, chunks: Iterable[Chunk], sampled: Mapping[RequestKey, SampledToken]) -> StepFrame:
        """Take in what `schedule()`'s chunks yielded, one token for each that samples.

        A stopping token (EOS or a stop token) is part of its delta. Requests that were aborted since
        they were scheduled are passed over.
        """
        deltas: list[TokenDelta] = []
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
            if samples:
                delta = self._append(request, sampled[request.key])
                deltas.append(delta)
                if delta.finish_reason is not None:
                    any_finished = True
                    del self._requests[request.key]
                    self._manager.free(request)
        if any_finished:
            self._running = [request for request in self._running if request.block_ids]
        started, self._started = self._started, []
        num_preemptions, self._num_preemptions = self._num_preemptions, 0
        return StepFrame(
            deltas,
            self._manager.take_events(),
            self.load(),
            num_prefill_tokens,
            num_decode_tokens,
            started=started,
            num_preemptions=num_preemptions,
        )

    def load(self) -> LoadSnapshot:
        """How busy the engine is; its speed is for others to measure."""
        num_context_tokens = 0
        num_pending_tokens = sum(request.num_expected_tokens for request in self._waiting)
        for request in self._running:
            num_computed_tokens = request.num_computed_tokens
            num_context_tokens += num_computed_tokens
            num_left = len(request.token_ids) - num_computed_tokens
            if num_left > 1:
                num_pending_tokens += num_left
        pool = self._manager.pool
        return LoadSnapshot(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_pending_tokens=num_pending_tokens,
            num_context_tokens=num_context_tokens,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_total_blocks=pool.num_usable,
        )

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

        One starts only if its whole prompt fits into what is free, even if the first chunk is smaller:
        half a prompt that must be preempted for the other half of another was computed in vain.
        """
        waiting = self._waiting
        num_admitted = 0
        while num_admitted < len(waiting) and budget > 0 and len(self._running) < self._max_running:
            request = waiting[num_admitted]
            cached_block_ids = self._manager.find_cached(request)
            if not self._manager.fits(request, cached_block_ids):
                break
            start = len(cached_block_ids) * self._manager.block_size
            num_left = len(request.token_ids) - start
            num_tokens = min(num_left, budget)
            allocated = self._manager.allocate(request, num_tokens, cached_block_ids)
            assert allocated, "the whole prompt fits, but not its first chunk"
            request.num_computed_tokens = start
            if request.num_preemptions == 0:
                request.num_cached_tokens = start
                shares = self._manager.token_shares(request, len(cached_block_ids))
                request.num_own_tokens, request.num_cross_user_tokens = shares
                self._started.append(request.key)
            insort(self._running, request, key=_rank)
            prefills.append(Chunk(request, start, num_tokens, num_tokens == num_left))
            budget -= num_tokens
            num_admitted += 1
        del waiting[:num_admitted]

    def _preempt_last(self) -> Request:
        """Take the blocks of the last in rank; it computes again what is no longer cached by its turn."""
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
        insort(self._waiting, request, key=_rank)

    def _append(self, request: Request, sampled: SampledToken) -> TokenDelta:
        request.token_ids.append(sampled.token_id)
        is_first = len(request.token_ids) == request.num_submitted_tokens + 1
        return TokenDelta(
            request.key,
            (sampled.token_id,),
            self._finish_reason(request, sampled.token_id),
            self._usage(request) if is_first else None,
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

    def _usage(self, request: Request) -> PromptUsage:
        """Measured at the first schedule; a later preemption changes nothing of it."""
        block_size = self._manager.block_size
        num_full_block_tokens = request.num_prompt_tokens // block_size * block_size
        return PromptUsage(
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=min(request.num_cached_tokens, request.num_prompt_tokens),
            num_written_tokens=max(0, num_full_block_tokens - request.num_cached_tokens),
            num_cross_user_tokens=request.num_cross_user_tokens,
            num_own_tokens=request.num_own_tokens,
        )
