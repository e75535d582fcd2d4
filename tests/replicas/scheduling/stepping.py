"""A scheduler over a model that only counts, step by step, alone or with host memory below it."""

import random
from collections.abc import Sequence
from typing import Any

from replicas.kvstore.arena import Arena
from replicas.kvstore.directory import ChunkPlace
from replicas.kvstore.store import ChunkShape, ChunkStore
from replicas.protocol.events import BlockStored, Tier
from replicas.protocol.frames import PromptUsage, RequestKey, StepFrame
from replicas.scheduling.kvcache_manager import KVCacheManager
from replicas.scheduling.lower_tiers import LowerTiers
from replicas.scheduling.scheduler import Scheduler
from tests.replicas.builders import LIMITS, EventBalance, FakeModel, engine_request, scheduler


def key(serial: int) -> RequestKey:
    return RequestKey(serial, 0)


def model(**limits: Any) -> FakeModel:
    return FakeModel(scheduler(**limits))


def plan(model: FakeModel) -> list[tuple[int, int, int, bool]]:
    """The chunks of the latest step: serial, first token, tokens, whether it samples."""
    return [
        (chunk.request.key.number, chunk.start, chunk.num_tokens, chunk.samples) for chunk in model.chunks
    ]


def usage(frame: StepFrame) -> PromptUsage:
    [found] = [delta.usage for delta in frame.deltas if delta.usage is not None]
    return found


def add(model: FakeModel, serial: int, num_tokens: int, **fields: Any) -> None:
    """A prompt of its own: no other serial shares a block with it."""
    start = 100 + 50 * serial
    token_ids = [start + position % 50 for position in range(num_tokens)]
    model.scheduler.add(engine_request(token_ids, serial=serial, **fields))


def stored(frame: StepFrame) -> list[BlockStored]:
    return [event for event in frame.events if isinstance(event, BlockStored)]


class SlowCopy:
    """Does its work when it is asked for the last time that it is not done."""

    def __init__(self, num_looks: int, work: Any) -> None:
        self._num_looks = num_looks
        self._work = work

    def is_done(self) -> bool:
        if self._num_looks > 0:
            self._num_looks -= 1
            return False
        if self._work is not None:
            self._work()
            self._work = None
        return True


class SlowCopier:
    """What is copied out is what the blocks hold when the copy is asked for; what is copied in arrives late,
    in the very blocks that were named, whoever has them by then.
    """

    def __init__(self, block_size: int, blocks_per_chunk: int, rng: random.Random, max_looks: int) -> None:
        self.device: dict[int, object] = {}
        self.host: dict[int, list[object]] = {}
        self._block_size = block_size
        self._blocks_per_chunk = blocks_per_chunk
        self._rng = rng
        self._max_looks = max_looks
        self.num_in = 0

    def copy_out(self, block_ids: Sequence[int], slot: int) -> SlowCopy:
        assert len(block_ids) == self._blocks_per_chunk
        kept = [self.device[place] for place in self._places(block_ids)]
        self.host[slot] = []
        return SlowCopy(self._looks(), lambda: self.host.update({slot: kept}))

    def copy_in(self, slots: Sequence[int], first_block: int, block_ids: Sequence[int]) -> SlowCopy:
        kept = [each for slot in slots for each in self.host[slot]]
        first = first_block * self._block_size
        places = self._places(block_ids)
        assert 0 < len(places) <= len(kept) - first < len(places) + self._blocks_per_chunk * self._block_size
        values = kept[first : first + len(places)]
        self.num_in += 1
        return SlowCopy(self._looks(), lambda: self.device.update(zip(places, values, strict=True)))

    def _looks(self) -> int:
        return self._rng.randrange(self._max_looks + 1)

    def _places(self, block_ids: Sequence[int]) -> list[int]:
        size = self._block_size
        return [block * size + offset for block in block_ids for offset in range(size)]


class TieredModel(FakeModel):
    """`clock` counts steps."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 4,
        blocks_per_chunk: int = 2,
        host_chunks: int = 8,
        seed: int = 0,
        max_looks: int = 0,
        lease_share: float = 0.0,
        **limits: Any,
    ) -> None:
        manager = KVCacheManager(num_blocks, block_size)
        self.copier = SlowCopier(block_size, blocks_per_chunk, random.Random(seed), max_looks)
        self.num_steps = 0
        self.store = ChunkStore(
            Arena(host_chunks, 1),
            ChunkShape(block_size, blocks_per_chunk),
            clock=lambda: float(self.num_steps),
            lease_share=lease_share,
        )
        self.tiers = LowerTiers(
            self.store,
            self.copier,
            manager,
            clock=lambda: float(self.num_steps),
            token_seconds=lambda: 1.0,
        )
        super().__init__(Scheduler(manager, **(LIMITS | limits), lower_tiers=self.tiers))
        self.slots = self.copier.device
        self.host_events = EventBalance(Tier.HOST)

    def step(self, *, token_ids: dict[RequestKey, int] | None = None) -> StepFrame:
        self.num_steps += 1
        frame = super().step(token_ids=token_ids)
        self.host_events.apply(frame.events)
        ready = {
            key for key in self.store.directory._chunks if self.store.directory.place(key) is ChunkPlace.HOST
        }
        assert set(self.host_events.held) == ready and set(self.host_events.held.values()) <= {1}
        return frame

    def settle(self) -> None:
        """Let every copy end."""
        for _ in range(20):
            self.step()
        assert not self.tiers.has_work
        assert all(chunk.may_leave_host for chunk in self.store.directory._chunks.values())
