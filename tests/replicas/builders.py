"""Requests, schedulers and a stand-in for KV memory, for the tests of everything that schedules."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from replicas.engine import EngineRequest
from replicas.protocol.blocks import BlockHash, pack_token_ids
from replicas.protocol.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    ResumePointsChanged,
    Tier,
)
from replicas.protocol.frames import (
    RequestKey,
    SamplingParams,
    StepFrame,
    Submit,
    TokenDelta,
)
from replicas.scheduling.kvcache_manager import KVCacheManager
from replicas.scheduling.request import Chunk, Request, SampledToken
from replicas.scheduling.scheduler import Scheduler

ROOT = BlockHash(b"one namespace !!")
OTHER_ROOT = BlockHash(b"another one  !!!")
ANOTHER_ROOT = BlockHash(b"of everyone   !!")
EOS = 2
SUBMIT_FIELDS = Submit.__struct_fields__


def engine_request(
    token_ids: Sequence[int],
    *,
    serial: int = 1,
    choice: int = 0,
    root: BlockHash = ROOT,
    max_tokens: int = 4,
    **fields: Any,
) -> EngineRequest:
    """`fields` are those of the submit and of its sampling."""
    own = {name: fields.pop(name) for name in SUBMIT_FIELDS if name in fields}
    params = SamplingParams(max_tokens=max_tokens, **fields)
    packed_tokens = pack_token_ids([token_id % 2**32 for token_id in token_ids])  # there are no others
    submit = Submit(serial, packed_tokens, params, root, **own)
    return EngineRequest(RequestKey(serial, choice), submit, token_ids)


def request(token_ids: Sequence[int], **fields: Any) -> Request:
    return Request(engine_request(token_ids, **fields), arrival=0)


def admit(manager: KVCacheManager, request: Request, num_tokens: int | None = None) -> int | None:
    """Find, allocate and "compute" all of a request (or its first tokens): cached tokens, or None."""
    cached_block_ids = manager.find_cached(request)
    num_cached_tokens = len(cached_block_ids) * manager.block_size
    end = request.num_tokens if num_tokens is None else num_tokens
    if not manager.allocate(request, end - num_cached_tokens, cached_block_ids):
        return None
    request.num_computed_tokens = end
    return num_cached_tokens


def decode(manager: KVCacheManager, request: Request, token_id: int) -> bool:
    """Append a token and compute it."""
    request.token_ids.append(token_id)
    if not manager.allocate(request, 1):
        request.token_ids.pop()
        return False
    request.num_computed_tokens += 1
    return True


LIMITS: dict[str, Any] = {
    "max_batched_tokens": 64,
    "max_running": 16,
    "max_waiting": 64,
    "context_length": 4096,
    "vocab_size": 1000,
    "eos_token_ids": (EOS,),
}
"""A scheduler's, where a test names no others."""


def scheduler(num_blocks: int = 65, block_size: int = 4, **limits: Any) -> Scheduler:
    return Scheduler(KVCacheManager(num_blocks, block_size), **(LIMITS | limits))


def next_token(request: Request) -> int:
    """Deterministic, so that equal prompts continue equally; never EOS."""
    return 10 + (sum(request.token_ids) + request.num_tokens) % 900


class EventBalance:
    """What a reader of the events believes to be cached in a tier, copy by copy."""

    def __init__(self, tier: Tier = Tier.DEVICE) -> None:
        self._tier = tier
        self.held: Counter[BlockHash] = Counter()
        self.stored: Counter[BlockHash] = Counter()
        self.removed: Counter[BlockHash] = Counter()

    def apply(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            if isinstance(event, ResumePointsChanged) or event.tier is not self._tier:
                continue
            match event:
                case BlockStored(block_hashes):
                    self.held.update(block_hashes)
                    self.stored.update(block_hashes)
                case BlockRemoved(block_hashes):
                    self.held.subtract(block_hashes)
                    self.removed.update(block_hashes)
                    assert min(self.held[block_hash] for block_hash in block_hashes) >= 0
                case AllBlocksCleared():
                    self.held.clear()
        self.held = +self.held


class FakeModel:
    """Drives a scheduler like an engine does, over slots that remember whose KV they hold.

    KV of a position is the chain and all tokens up to it. A step writes all its chunks first and then
    reads the whole context of each, so a block that is shared but holds something else is found out.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.manager = scheduler._manager
        self.slots: dict[int, object] = {}
        self.events = EventBalance()
        self.chunks: list[Chunk] = []
        self.deltas: list[TokenDelta] = []

    def step(self, *, token_ids: dict[RequestKey, int] | None = None) -> StepFrame:
        self.chunks = self.scheduler.schedule()
        for chunk in self.chunks:
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                self.slots[self._slot(chunk.request, position)] = self._kv(chunk.request, position)
        for chunk in self.chunks:
            for position in range(chunk.start + chunk.num_tokens):
                assert self.slots[self._slot(chunk.request, position)] == self._kv(chunk.request, position)
        sampled = {
            chunk.request.key: SampledToken(
                (token_ids or {}).get(chunk.request.key, next_token(chunk.request))
            )
            for chunk in self.chunks
            if chunk.samples
        }
        frame = self.scheduler.finish_step(self.chunks, sampled)
        self.events.apply(frame.events)
        self.deltas += frame.deltas
        self.check()
        return frame

    def run(self, max_steps: int = 1000) -> list[TokenDelta]:
        """Until nothing is left to do; every delta since the model was made."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return self.deltas
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps")

    def check(self) -> None:
        pool = self.manager.pool
        pool.check()
        hashes = [pool.hash_of(block_id) for block_id in range(pool.num_blocks)]
        assert self.events.held == Counter(block_hash for block_hash in hashes if block_hash is not None)

    def _slot(self, request: Request, position: int) -> int:
        block, offset = divmod(position, self.manager.block_size)
        assert request.block_ids[block] != 0
        return request.block_ids[block] * self.manager.block_size + offset

    def _kv(self, request: Request, position: int) -> object:
        return hash((request.submit.root, tuple(request.token_ids[: position + 1])))


def tokens_of(deltas: Iterable[TokenDelta], serial: int) -> list[int]:
    return [token for delta in deltas if delta.key.number == serial for token in delta.token_ids]
