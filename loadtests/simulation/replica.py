"""VirtualReplica: continuous batching over a real block pool, in virtual time.

Owns one replica's queue, batch and cache. Knows no router, no index and no delays. The rules are those of our
own engine's scheduler. Requests have no tokens, and steps in which every request just decodes are taken many
at a time (`lockstep.py`), up to the next arrival. The scheduler itself under a virtual clock takes 9 to 29
times the processor time on the ratchet's loads, and cannot decode beside prompts.
"""

import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, Protocol

from loadtests.simulation.below import Below
from loadtests.simulation.lockstep import Lockstep
from loadtests.simulation.request import VirtualRequest, num_common
from loadtests.simulation.shape import ReplicaShape
from loadtests.simulation.splits import Following
from loadtests.simulation.step import Step, VirtualChunk
from loadtests.simulation.store import OnDisk, VirtualStore
from replicas.kvcache.block_pool import BlockPool
from replicas.protocol.blocks import BlockHash, ImageTokens
from replicas.protocol.events import CacheEvent
from replicas.protocol.frames import LoadSnapshot, StepFrame
from replicas.scheduling.step_promise import StepPromise, open_promise, work_of

_rank = attrgetter("rank")

UNMEASURED_TOKEN_SECONDS = 1e-4
"""Seconds to compute a token until a step has shown it."""


class Meter(Protocol):
    """Measures a replica's speed from its steps, with the engine loop's own code."""

    def encode_seconds(self, media: Sequence[ImageTokens]) -> Callable[[int], float] | None: ...

    def observe(self, frame: StepFrame, seconds: float) -> None: ...

    def ran(self, num_requests: int, seconds: float, num_ended: int) -> None: ...

    def fill(self, load: LoadSnapshot) -> LoadSnapshot: ...


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A replica's load. It counts the first `num_counted` requests that came to the replica."""

    load: LoadSnapshot
    num_counted: int


class Foreseen(NamedTuple):
    """A prompt's hit at a replica. The model's full attention has `num_reached_blocks` of it."""

    num_hit_blocks: int
    num_reached_blocks: int


@dataclass(slots=True)
class StepOutcome:
    """The result of a step, or of a run of decoding steps."""

    first_tokens: list[VirtualRequest]
    finished: list[VirtualRequest]
    events: list[CacheEvent]
    report: LoadReport


class VirtualReplica:
    """`submit` and `advance` with the time that it is; `ends_at` says when to call `advance` next.

    With memory below the device, `moves_end_at` says when to call `end_moves` next. `restored` is what an
    earlier life has left on disk.
    """

    def __init__(self, shape: ReplicaShape, meter: Meter, restored: Iterable[OnDisk] = ()) -> None:
        self.shape = shape
        self.pool = BlockPool(shape.num_blocks + 1)
        self.num_computed_tokens = 0
        """Prompt tokens that were computed, those of preempted requests each time."""
        self.num_preemptions = 0
        self.num_encoded_tokens = 0
        """Tokens of images, counted each time that one is encoded."""
        self.images: set[bytes] = set()
        """Images brought by prompts. None is evicted."""
        self._meter = meter
        self._below: Below | None = None
        if shape.tiers is not None:
            store = VirtualStore(shape.tiers, shape.block_size, restored)
            self._below = Below(store, self.pool, shape.block_size, self._token_seconds)
        self._inbox: list[VirtualRequest] = []
        self._waiting: list[VirtualRequest] = []
        self._running: list[VirtualRequest] = []
        self._prefilling: list[VirtualRequest] = []
        self._decoding = Lockstep(shape.cost, shape.block_size)
        self._num_waiting_tokens = self._num_wanted_tokens = 0
        """To be computed of prompts that wait, and their room."""
        self._num_added = 0
        self._step: Step | None = None
        self._promise = open_promise(None if shape.decodes_beside else shape.slo_tpot, shape.alignment)
        self._owed_seconds = 0.0
        """Time that passed with prompts and that decoding beside them has not used yet."""

    @property
    def ends_at(self) -> float | None:
        """Return the end of the current step; None when idle."""
        return None if self._step is None else self._step.ends_at

    @property
    def store(self) -> VirtualStore | None:
        """Its memory below the device, if it has any."""
        return None if self._below is None else self._below.store

    @property
    def moves_end_at(self) -> float | None:
        return None if self._below is None else self._below.store.ends_at

    @property
    def _loading(self) -> list[VirtualRequest]:
        return [] if self._below is None else self._below.loading

    @property
    def num_requests(self) -> int:
        return len(self._running) + len(self._loading) + len(self._waiting) + len(self._inbox)

    def foresee(self, block_hashes: Sequence[BlockHash]) -> Foreseen:
        """Return what a prompt of these blocks finds here once all prompts before it are computed, if nothing
        is evicted until then."""
        stored = len(self.pool.find_prefix(block_hashes))
        coming = max((num_common(block_hashes, each.block_hashes) for each in self._pending()), default=0)
        return Foreseen(max(stored, coming), max(stored, coming))

    def _pending(self) -> list[VirtualRequest]:
        """Requests whose prompts are not computed whole."""
        return self._inbox + self._waiting + self._loading + self._prefilling

    def accepts(self, request: VirtualRequest) -> bool:
        """Whether it can ever run: its known tokens must fit into the whole cache."""
        return request.num_tokens <= self.shape.capacity_tokens

    def submit(
        self,
        request: VirtualRequest,
        now: float,
        *,
        peer: VirtualStore | None = None,
        following: Following | None = None,
    ) -> None:
        """Take a request. It is looked at when the step that is being computed has ended.

        What `peer` has of its prompt may be pulled from there, and `following` brings the prompt of a split.
        """
        assert self.accepts(request)
        limit = self.shape.capacity_tokens + 1 - request.num_prompt_tokens
        request.max_tokens = min(request.max_tokens, limit)
        if request.encoding is not None:
            self.images.update(span.content_hash for span in request.encoding.media)
            self._expect_images(request, self._num_expected_tokens(request))
        if self._below is not None:
            self._below.arrived(
                request,
                now,
                num_cached_blocks=len(self._find_cached(request)),
                num_tokens_before=self._num_waiting_tokens,
                encode_seconds=None
                if request.encoding is None
                else self._meter.encode_seconds(request.encoding.media),
                peer=peer,
            )
            if following is not None:
                num_cached_blocks = len(self._find_cached(request))
                self._below.follow(request, now, following, num_cached_blocks=num_cached_blocks)
        self._inbox.append(request)
        self._look_soon(now)

    def look(self, now: float) -> None:
        """Something that a request waited for has changed."""
        if self._waiting:
            self._look_soon(now)

    def _look_soon(self, now: float) -> None:
        """Something may be computed that could not be before: at once, or after the step of now."""
        step = self._step
        if step is None:
            self._start(now)
        elif not step.chunks and step.num_steps > 1 and step.ends_at > now:
            step.num_steps = self._num_steps_until(step, now)
            step.decode_seconds = self._decode_seconds(step.num_steps)
            step.ends_at = step.started_at + step.decode_seconds

    def advance(self, now: float) -> StepOutcome:
        """The step has ended; the next one begins."""
        step = self._step
        assert step is not None and step.ends_at == now
        outcome = self._finish(step)
        self._start(now)
        return outcome

    def end_moves(self, now: float) -> list[CacheEvent]:
        """KV has come to where it was moved, and requests may have waited for it."""
        assert self._below is not None
        self._below.store.advance(now)
        if self._loading or self._waiting or self._prefilling:
            self._look_soon(now)
        return self._take_events()

    def crash(self, now: float) -> list[VirtualRequest]:
        """Everything stops. The requests that were here, with what they had produced so far."""
        step = self._step
        if step is not None and not step.chunks:
            self._decoding.advance(self._num_steps_until(step, now) - 1)
        for request in self._running:
            if request.is_decoding:
                request.num_tokens = self._decoding.num_computed(request) + 1
        self._step = None
        return self._running + self._loading + self._waiting + self._inbox

    # A step begins.

    def _start(self, now: float) -> None:
        for request in self._inbox:
            self._num_added += 1
            request.rank = self._num_added
            self._enqueue(request)
        self._inbox.clear()
        if not self._running and not self._waiting:
            self._step = None
            return
        step = self._step = Step(now)
        if self._owed_seconds and self._catch_up(step):
            return
        num_preemptions = self.num_preemptions
        self._schedule(step)
        if not step.chunks and not self._decoding.num_requests and self._waits_for_moves():
            self._step = None  # all wait for KV that is on its way
            return
        if step.chunks:
            seconds = self.shape.cost.prefill_seconds(step.chunks)
            encode_seconds = step.num_encoded_tokens * self.shape.cost.encode
            if not self.shape.decodes_beside:
                num_attended = self._decoding.num_context_tokens - self._num_shared_tokens()
                num_attended += sum(chunk.start + 1 for chunk in step.chunks if chunk.is_decode)
                is_shared = num_attended > 0
                seconds = self.shape.cost.with_weights(seconds, is_shared=is_shared) + encode_seconds
                seconds += self.shape.cost.d1 * num_attended
            else:
                seconds = (seconds or self.shape.cost.d0) + encode_seconds
                self._owed_seconds += seconds
                self._take_owed_steps(step)
        else:
            assert self._decoding.num_requests, "requests are here, and none can be computed"
            # A step that preempts admits no request, so the next one may.
            if self.num_preemptions == num_preemptions:
                step.num_steps = self._decoding.num_steps_to_next_note()
            seconds = step.decode_seconds = self._decode_seconds(step.num_steps)
        step.ends_at = now + seconds

    def _waits_for_moves(self) -> bool:
        return self.moves_end_at is not None or any(request.is_awaited() for request in self._waiting)

    def _catch_up(self, step: Step) -> bool:
        """Decoding that fits into the prompts' time but not into their step: a run that takes no time."""
        for request in sorted(self._decoding.take_growing(), key=_rank):
            if request.is_decoding:
                self._grow(request)
        self._take_owed_steps(step)
        step.ends_at = step.started_at
        return step.num_steps > 0

    def _take_owed_steps(self, step: Step) -> None:
        """Take the decode steps for which there is time, until a request ends or needs a block."""
        if not self._decoding.num_requests:
            step.num_steps, self._owed_seconds = 0, 0.0
            return
        num_steps = int(self._owed_seconds / self._decode_seconds(1))
        step.num_steps = min(num_steps, self._decoding.num_steps_to_next_note())
        step.decode_seconds = self._decode_seconds(step.num_steps)
        self._owed_seconds = max(0.0, self._owed_seconds - step.decode_seconds)

    def _schedule(self, step: Step) -> None:
        """Blocks for the requests that run, in order of rank, then for those that may start to."""
        num_single = sum(request.num_left == 1 for request in self._prefilling)
        num_decoding = self._decoding.num_requests + num_single
        budget = self.shape.max_batched_tokens - num_decoding
        if self._promise is not None and num_decoding:
            budget = min(budget, self._num_promised(self._promise))
        num_preempted = self.num_preemptions
        for request in sorted([*self._decoding.take_growing(), *self._prefilling], key=_rank):
            if request.is_decoding:
                self._grow(request)
            elif request in self._prefilling:
                num_left = request.num_left
                num_tokens = 1 if num_left == 1 else self._num_chunk_tokens(request, budget)
                if num_tokens and self._allocate(request, request.num_computed + num_tokens):
                    self._add_chunk(step, request, num_tokens)
                    budget -= num_tokens if num_left > 1 else 0
        if self.num_preemptions == num_preempted:
            self._admit(step, budget)

    def _num_promised(self, promise: StepPromise) -> int:
        """Prompt tokens that the requests that decode leave time for."""
        num_context_tokens = self._decoding.num_context_tokens
        num_pending_tokens = self._num_waiting_tokens
        starts = []
        for request in self._prefilling:
            if request.num_left == 1:
                num_context_tokens += request.num_computed + 1
            else:
                starts.append(request.num_computed)
                num_pending_tokens += request.num_left
        return promise.num_prompt_tokens(num_context_tokens, starts[0] if starts else 0, num_pending_tokens)

    def _grow(self, request: VirtualRequest) -> None:
        """One more block for a request whose next token begins one."""
        num_computed = self._decoding.num_computed(request)
        self._store_up_to(request, num_computed // self.shape.block_size)
        if self._allocate(request, num_computed + 1):
            self._decoding.note_growth(request, self._read_until(request))

    def _read_until(self, request: VirtualRequest) -> float:
        """All blocks of the request are read until it has that many computed tokens."""
        return math.inf

    def _admit(self, step: Step, budget: int) -> None:
        """One starts only if its whole prompt fits into what is free, even if its first chunk is smaller.

        One whose KV is on its way from disk or from a peer lets those behind it go first.
        """
        left: list[VirtualRequest] = []
        for position, request in enumerate(self._waiting):
            if budget <= 0 or len(self._running) + len(self._loading) >= self.shape.max_running:
                left += self._waiting[position:]
                break
            cached = self._find_cached(request)
            num_ready, is_more_coming = len(cached), False
            if self._below is not None:
                num_ready, is_more_coming = self._below.num_ready_blocks(
                    request, len(cached), step.started_at
                )
            if is_more_coming:
                left.append(request)
                continue
            if not self._take_blocks(request, cached):
                left += self._waiting[position:]
                break
            if self._below is not None and num_ready > len(cached):
                self._below.load(request, num_ready, step.started_at, self._end_load)
            else:
                self._count_cached(request)
                budget -= self._begin_prefill(step, request, budget)
        self._waiting = left

    def _take_blocks(self, request: VirtualRequest, cached: list[int]) -> bool:
        """Its cached blocks, if the rest of its prompt fits into what is free as well."""
        pool = self.pool
        num_missing = -(-request.num_tokens // self.shape.block_size) - len(cached)
        if num_missing + pool.num_free_among(cached) > pool.num_free:
            return False
        pool.acquire(cached, request.tenant)
        request.block_ids.extend(cached)
        request.num_stored_blocks = len(cached)
        request.num_computed = len(cached) * self.shape.block_size
        if request.num_preemptions == 0:
            request.num_device_tokens = request.num_computed
        self._num_waiting_tokens -= request.num_expected_tokens
        self._num_wanted_tokens -= request.num_tokens
        return True

    def _begin_prefill(self, step: Step, request: VirtualRequest, budget: int) -> int:
        """Its first chunk of tokens, whose number it returns."""
        self._run(request)
        num_tokens = self._num_chunk_tokens(request, budget)
        allocated = self._allocate(request, request.num_computed + num_tokens)
        assert allocated, "the whole prompt fits, but not its first chunk"
        self._add_chunk(step, request, num_tokens)
        return num_tokens

    def _num_chunk_tokens(self, request: VirtualRequest, budget: int) -> int:
        return min(request.num_left, budget)

    def _count_cached(self, request: VirtualRequest) -> None:
        """At its first start: what it need not compute, and whose that is."""
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed
            request.num_cross_user_tokens = self.pool.writers.token_shares(
                request.hashes(request.num_stored_blocks),
                request.user,
                block_size=self.shape.block_size,
                num_prompt_tokens=request.num_prompt_tokens,
            ).cross_user

    def _run(self, request: VirtualRequest) -> None:
        """From now on it is computed, once it is its turn in a step."""
        insort(self._running, request, key=_rank)
        insort(self._prefilling, request, key=_rank)

    def _end_load(self, request: VirtualRequest) -> None:
        """Its KV has come from below the device."""
        self._store_up_to(request, len(request.block_ids), is_computed=False)
        request.num_computed = len(request.block_ids) * self.shape.block_size
        self._count_cached(request)
        self._run(request)

    def _token_seconds(self) -> float:
        return self._meter.fill(LoadSnapshot()).prefill_seconds_per_token or UNMEASURED_TOKEN_SECONDS

    def _add_chunk(self, step: Step, request: VirtualRequest, num_tokens: int) -> None:
        """The blocks that it fills are shared at once: the whole batch writes before any of it reads."""
        start = request.num_computed
        end = start + num_tokens
        self._store_up_to(request, end // self.shape.block_size)
        step.chunks.append(VirtualChunk(request, start, num_tokens, end == request.num_tokens))
        if request.encoding is not None:
            step.num_encoded_tokens += request.encoding.encode(start, end)

    def _allocate(self, request: VirtualRequest, num_tokens: int) -> bool:
        """Blocks for its tokens; where they run out the last in rank is preempted, maybe itself."""
        num_missing = -(-num_tokens // self.shape.block_size) - len(request.block_ids)
        while num_missing > self.pool.num_free:
            if self._preempt_last() is request:
                return False
        if num_missing > 0:
            request.block_ids.extend(self.pool.allocate(num_missing, request.tenant))
        return True

    def _preempt_last(self) -> VirtualRequest:
        request = self._running.pop()
        if request.is_decoding:
            self._decoding.stop(request)
            self._store_up_to(request, (request.num_tokens - 1) // self.shape.block_size)
        else:
            self._prefilling.remove(request)
        self._release(request)
        request.num_computed = request.num_stored_blocks = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(request)
        return request

    def _enqueue(self, request: VirtualRequest) -> None:
        request.num_expected_tokens = self._num_expected_tokens(request)
        self._num_waiting_tokens += request.num_expected_tokens
        self._num_wanted_tokens += request.num_tokens
        self._expect_images(request, request.num_expected_tokens)
        insort(self._waiting, request, key=_rank)

    def _expect_images(self, request: VirtualRequest, num_expected_tokens: int) -> None:
        if request.encoding is not None:
            request.encoding.expect(request.num_tokens - num_expected_tokens)

    def _num_expected_tokens(self, request: VirtualRequest) -> int:
        """Return the tokens that it would have to compute, given what is cached and on its way."""
        num_cached_tokens = len(self._find_cached(request)) * self.shape.block_size
        return request.num_tokens - max(num_cached_tokens, request.num_planned_tokens)

    def _find_cached(self, request: VirtualRequest) -> list[int]:
        return self.pool.find_prefix(request.hashes(request.num_findable_blocks(self.shape.block_size)))

    # A step ends.

    def _finish(self, step: Step) -> StepOutcome:
        first_tokens: list[VirtualRequest] = []
        finished: list[VirtualRequest] = []
        if self._promise is not None:
            self._observe(self._promise, step)
        num_decoded = self._decoding.num_requests * step.num_steps
        self._decoding.advance(step.num_steps)
        for request in self._decoding.take_ending():
            self._decoding.stop(request)
            finished.append(request)
        num_prefilled = 0
        for chunk in step.chunks:
            request = chunk.request
            num_prefilled += chunk.num_tokens
            request.num_computed = chunk.start + chunk.num_tokens
            if not chunk.samples:
                continue
            self._prefilling.remove(request)
            if request.num_tokens == request.num_submitted_tokens:
                first_tokens.append(request)
            request.num_tokens += 1
            if request.num_output_tokens >= request.max_tokens:
                finished.append(request)
            else:
                self._decoding.begin(request, self._read_until(request))
        for request in finished:
            self._running.remove(request)
            self._store_up_to(request, (request.num_tokens - 1) // self.shape.block_size)
            self._release(request)
        self.num_computed_tokens += num_prefilled
        self.num_encoded_tokens += step.num_encoded_tokens
        self._meter.ran(len(self._running) + len(finished), step.ends_at - step.started_at, len(finished))
        self._measure(step, num_prefilled, num_decoded)
        if self._below is not None:
            self._below.copy_out(step.ends_at)
        return StepOutcome(first_tokens, finished, self._take_events(), self.report(step.ends_at))

    def _observe(self, promise: StepPromise, step: Step) -> None:
        """Say what a step, or each of a run of decoding steps, has computed and taken."""
        work, decoding = work_of(step.chunks), self._decoding
        num_context_tokens = decoding.num_context_tokens + decoding.num_requests * (step.num_steps - 1) // 2
        work = work._replace(num_context_tokens=work.num_context_tokens + num_context_tokens)
        promise.observe(work, (step.ends_at - step.started_at) / step.num_steps)

    def _take_events(self) -> list[CacheEvent]:
        events = self.pool.take_events()
        return events if self._below is None else [*events, *self._below.store.take_events()]

    def _measure(self, step: Step, num_prefilled: int, num_decoded: int) -> None:
        seconds = step.ends_at - step.started_at
        if step.chunks and not self.shape.decodes_beside:
            frame = StepFrame(
                num_prefill_tokens=num_prefilled,
                num_decode_tokens=num_decoded,
                num_encoded_tokens=step.num_encoded_tokens,
            )
            self._meter.observe(frame, seconds)
            return
        if step.chunks:
            frame = StepFrame(num_prefill_tokens=num_prefilled, num_encoded_tokens=step.num_encoded_tokens)
            self._meter.observe(frame, seconds)
        if num_decoded:
            frame = StepFrame(num_decode_tokens=num_decoded // step.num_steps)
            self._meter.observe(frame, step.decode_seconds / step.num_steps)

    def report(self, now: float) -> LoadReport:
        """How busy it is. What is being computed counts as not computed yet."""
        num_pending_tokens, num_context_tokens = self._num_waiting_tokens, self._decoding.num_context_tokens
        counted_inbox = self._inbox if self.shape.counts_arrivals else ()
        num_wanted_tokens = self._num_wanted_tokens
        for request in counted_inbox:
            num_pending_tokens += self._num_expected_tokens(request)
            num_wanted_tokens += request.num_tokens
        for request in self._prefilling:
            num_context_tokens += request.num_computed
            num_pending_tokens += request.num_left
            num_wanted_tokens += request.num_left
        for request in self._loading:
            num_pending_tokens += request.num_tokens - len(request.block_ids) * self.shape.block_size
        load = LoadSnapshot(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._loading) + len(counted_inbox),
            num_pending_tokens=num_pending_tokens,
            num_context_tokens=num_context_tokens - self._decoding.num_requests,
            num_used_blocks=self.pool.num_used,
            num_cached_blocks=self.pool.num_cached,
            num_total_blocks=self.pool.num_usable,
            num_room_tokens=self.pool.num_free * self.shape.block_size - num_wanted_tokens,
            num_pending_image_tokens=self._num_pending_image_tokens(counted_inbox) if self.images else 0,
        )
        if self._below is not None:
            load = self._below.store.fill(load, now)
        return LoadReport(self._meter.fill(load), self._num_added + len(counted_inbox))

    def _num_pending_image_tokens(self, inbox: Iterable[VirtualRequest]) -> int:
        waiting = (inbox, self._waiting, self._loading, self._prefilling)
        return sum(
            request.encoding.num_tokens_left
            for requests in waiting
            for request in requests
            if request.encoding is not None
        )

    # Prices.

    def _num_steps_until(self, step: Step, now: float) -> int:
        """Return the step of a decoding run that is being computed at `now`, from 1; the last one at its
        end."""
        low, high = 1, step.num_steps
        while low < high:
            middle = (low + high) // 2
            if step.started_at + self._decode_seconds(middle) >= now:
                high = middle
            else:
                low = middle + 1
        return low

    def _decode_seconds(self, num_steps: int) -> float:
        return self._decoding.seconds(num_steps, self._num_shared_tokens())

    def _num_shared_tokens(self) -> int:
        """Context that is counted for more than one decoding request but read once, if it is."""
        if not self.shape.reads_shared_once:
            return 0
        num_distinct = self.pool.num_used * self.shape.block_size
        return max(0, self._decoding.num_context_tokens - num_distinct)

    # Blocks.

    def _store_up_to(self, request: VirtualRequest, num_blocks: int, *, is_computed: bool = True) -> None:
        """Share full blocks, in two events if the prompt's last full block lies inside."""
        first, prompt_end = request.num_stored_blocks, request.num_prompt_tokens // self.shape.block_size
        if first >= num_blocks:
            return
        request.num_stored_blocks = num_blocks
        hashes = request.hashes(num_blocks)
        for start, end in ((first, min(num_blocks, prompt_end)), (max(first, prompt_end), num_blocks)):
            if start < end:
                self.pool.store(
                    request.block_ids[start:end],
                    hashes[start:end],
                    first_block_index=start,
                    ends_prompt=end == prompt_end,
                    user=request.user,
                )
        if self._below is not None and is_computed:
            self._below.computed(request, first, num_blocks)

    def _release(self, request: VirtualRequest) -> None:
        self.pool.release(reversed(request.block_ids))
        request.block_ids.clear()
