"""A small engine for tests: it echoes, one token per request and step, and caches every prompt block."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from replicas.engine import EngineRequest, RequestRefused, SharedKv
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.events import AllBlocksCleared, BlockStored, CacheEvent
from replicas.protocol.frames import (
    FinishReason,
    LoadSnapshot,
    PromptUsage,
    RefusalCode,
    RequestKey,
    StepFrame,
    TokenDelta,
)
from replicas.protocol.hand_overs import StoreQuestion
from replicas.protocol.media import ImageQuery
from replicas.protocol.status import ModelCard

BLOCK_SIZE = 4

CARD = ModelCard(
    name="scripted",
    fingerprint="00" * 32,
    engine="scripted",
    block_size=BLOCK_SIZE,
    num_blocks=1000,
    context_length=256,
    vocab_size=512,
    eos_token_ids=(0,),
)


@dataclass
class _Running:
    request: EngineRequest
    num_done: int = 0


@dataclass
class ScriptedEngine:
    """Token n of a choice is the prompt's token n (cyclic). `gate` cleared holds every step up.

    `fail_at_step` raises in that step; `corrupt` changes the hashes that it reports.
    """

    card: ModelCard = CARD
    fail_at_step: int | None = None
    corrupt: Callable[[BlockHash], BlockHash] = lambda block_hash: block_hash
    gate: threading.Event = field(default_factory=threading.Event)
    num_steps: int = 0
    is_closed: bool = False
    added: list[EngineRequest] = field(default_factory=list)
    aborted: list[RequestKey] = field(default_factory=list)
    thread_ids: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.gate.set()
        self._running: dict[RequestKey, _Running] = {}
        self._events: list[CacheEvent] = []
        self._held: Counter[BlockHash] = Counter()

    @property
    def shared_kv(self) -> SharedKv | None:
        return None

    def add(self, request: EngineRequest) -> None:
        self.thread_ids.add(threading.get_ident())
        if len(request.token_ids) > self.card.context_length:
            raise RequestRefused(RefusalCode.CONTEXT_LENGTH_EXCEEDED, "the prompt is too long")
        self.added.append(request)
        self._running[request.key] = _Running(request)

    def abort(self, key: RequestKey) -> None:
        self.aborted.append(key)
        self._running.pop(key, None)

    def ask_store(self, question: StoreQuestion) -> None:
        """It has none."""

    def take_media(self, question: ImageQuery) -> None:
        """It reads text only."""

    def has_work(self) -> bool:
        return bool(self._running or self._events)

    def step(self) -> StepFrame:
        self.gate.wait(30)
        self.num_steps += 1
        if self.num_steps == self.fail_at_step:
            raise RuntimeError("scripted failure")
        num_prefill = 0
        started = [key for key, running in self._running.items() if running.num_done == 0]
        deltas = []
        for running in list(self._running.values()):
            if running.num_done == 0:
                num_prefill += len(running.request.token_ids)
            deltas.append(self._advance(running))
        events, self._events = self._events, []
        return StepFrame(
            deltas=deltas,
            events=events,
            load=LoadSnapshot(num_running=len(self._running), num_total_blocks=self.card.num_blocks),
            num_prefill_tokens=num_prefill,
            num_decode_tokens=len(deltas) if not num_prefill else 0,
            started=started,
        )

    def begin(self, wake: Callable[[], None]) -> None:
        """It has no earlier life."""

    def reset_prefix_cache(self) -> bool:
        if self._running:
            return False
        self._held.clear()
        self._events.append(AllBlocksCleared())
        return True

    def close(self) -> None:
        self.is_closed = True

    def _advance(self, running: _Running) -> TokenDelta:
        request = running.request
        usage = None
        if running.num_done == 0:
            usage = self._prefill(request)
        token = request.token_ids[running.num_done % len(request.token_ids)]
        running.num_done += 1
        is_last = running.num_done >= request.sampling.max_tokens
        if is_last:
            del self._running[request.key]
        return TokenDelta(
            key=request.key,
            token_ids=(token,),
            finish_reason=FinishReason.LENGTH if is_last else None,
            usage=usage,
        )

    def _prefill(self, request: EngineRequest) -> PromptUsage:
        submit = request.submit
        hashes = hash_blocks(submit.root, request.token_ids, self.card.block_size, published=submit.published)
        num_cached = 0
        while num_cached < len(hashes) and self._held[hashes[num_cached]]:
            num_cached += 1
        new = hashes[num_cached:]
        if new:
            self._held.update(new)
            reported = tuple(self.corrupt(block_hash) for block_hash in new)
            self._events.append(BlockStored(reported, num_cached, ends_prompt=True))
        size = self.card.block_size
        return PromptUsage(len(request.token_ids), num_cached * size, len(new) * size)
