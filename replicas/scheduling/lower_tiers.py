"""LowerTiers: KV below the device, for a scheduler's requests.

Owns the chunks of each request, which of them were copied out, and the loads under way. It does not decide
the order of requests, and knows neither the bytes nor the copying: the store says what is where, the engine's
copier moves it.

A chunk is copied to host memory when its last token has been computed. A request that finds more there than
on the device gets all its blocks, waits for the copies, and is hashed only then: a block is shared only when
it is complete. While more is on its way into host memory, the request waits without blocks, at most as long
as its plan says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec.structs import replace

from replicas.kvstore.leasing.lease_outcome import LeaseOutcome
from replicas.kvstore.plan import chunk_names, left_below
from replicas.kvstore.telling import told
from replicas.kvstore.tenant_shares import tenancy_of
from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import RequestKey, StepFrame, UserTag
from replicas.scheduling.kvcache_manager import KVCacheManager
from replicas.scheduling.request import Request

if TYPE_CHECKING:
    from replicas.kvstore.chunk import ChunkName
    from replicas.kvstore.store import ChunkStore

RESET_SECONDS = 1.0
"""How long a reset waits for copies to host memory to end."""

LOOK_AGAIN_SECONDS = 0.001
"""While copies are under way."""

UNMEASURED_TOKEN_SECONDS = 1e-4
"""Seconds to compute a token until a step has shown it."""


class Copy(Protocol):
    """One copy between device and host memory that may still be under way."""

    def is_done(self) -> bool: ...


class Copier(Protocol):
    """Copies whole blocks of the device, asynchronously."""

    def copy_out(self, block_ids: Sequence[int], slot: int) -> Copy:
        """Copy a chunk's present blocks into its slot."""

    def copy_in(self, slots: Sequence[int], first_block: int, block_ids: Sequence[int]) -> Copy:
        """Copy the slots, one chunk each, from block `first_block` of the first, into these blocks."""


@dataclass(slots=True)
class Progress:
    """A request's chunks: its plan, and its progress."""

    names: "list[ChunkName]"
    num_planned_tokens: int
    waits_until: float
    read: frozenset[BlockHash]
    """Chunks that are read from disk for it."""
    transfer: int | None
    """Transfer that pulls chunks from a peer for it."""
    binds: bool = False
    """Whether the plan holds, whatever is sooner."""
    waits_since: int | None = None
    """The store's change count when it had to start waiting for KV; None if it need not."""
    num_offered: int = 0
    """Leading chunks that host memory has been offered."""

    @property
    def is_brought(self) -> bool:
        """Whether anything is read or pulled for it."""
        return bool(self.read) or self.transfer is not None


class _TierLoad(NamedTuple):
    request: Request
    copy: Copy
    keys: list[BlockHash]
    writers: list[UserTag]
    first_block: int
    end_block: int
    started_at: float


class _Offload(NamedTuple):
    key: BlockHash
    copy: Copy


class LowerTiers:
    """`token_seconds` returns the present time per prompt token, 0 if unknown."""

    def __init__(
        self,
        store: "ChunkStore",
        copier: Copier,
        manager: KVCacheManager,
        *,
        clock: Callable[[], float],
        token_seconds: Callable[[], float],
    ) -> None:
        self._store = store
        self._copier = copier
        self._manager = manager
        self._clock = clock
        self._token_seconds_now = token_seconds
        self._progress: dict[RequestKey, Progress] = {}
        self._loads: list[_TierLoad] = []
        self._loading_keys: set[BlockHash] = set()
        self._offloads: list[_Offload] = []

    # What a request finds.

    def arrived(self, request: Request, num_device_blocks: int, num_tokens_before: int) -> None:
        """A request waits behind others that will compute that many tokens."""
        names = chunk_names(request.block_hashes, self._store.shape.blocks_per_chunk)
        wait_seconds = num_tokens_before * self._token_seconds
        peer = request.submit.pull
        if peer is not None and request.num_preemptions:
            peer = peer.without_waiting()
        plan = self._store.arrived(
            names,
            num_device_tokens=num_device_blocks * self._manager.block_size,
            num_findable_tokens=self._manager.num_findable_blocks(request) * self._manager.block_size,
            wait_seconds=wait_seconds,
            token_seconds=self._token_seconds,
            peer=peer,
            tenancy=tenancy_of(request.submit),
        )
        if plan.binding_seconds:
            request.num_expected_tokens = request.num_tokens - plan.way.num_ready_tokens
        if request.num_preemptions == 0:
            request.lease_outcome = self._lease(request, names, num_device_blocks)
        self._progress[request.key] = Progress(
            names,
            plan.way.num_ready_tokens,
            waits_until=self._clock() + plan.patience_seconds(wait_seconds),
            read=frozenset(plan.to_read),
            transfer=plan.transfer,
            binds=plan.binding_seconds > 0,
        )

    def _lease(self, request: Request, names: "list[ChunkName]", num_device_blocks: int) -> LeaseOutcome:
        """Request its leases, once, for its first choice."""
        of_prompt = names[: request.num_prompt_tokens // self._store.shape.tokens]
        leases = request.submit.leases if request.key.choice == 0 else ()
        tenancy, bucket = tenancy_of(request.submit), request.submit.bucket
        return self._store.leases.ask(of_prompt, leases, num_device_blocks, tenancy, bucket)

    def still_waits(self, request: Request) -> bool:
        """Whether nothing that could end its wait for KV has happened since the last look."""
        progress = self._progress[request.key]
        return progress.waits_since == self._store.num_changes and self._clock() < progress.waits_until

    def num_ready_blocks(self, request: Request, num_device_blocks: int) -> tuple[int, bool]:
        """Its leading blocks on the device, and in host memory if they are sooner loaded than computed; and
        whether it should wait for more.
        """
        progress = self._progress[request.key]
        progress.waits_since = None
        if self._is_loaded_by_another(progress, num_device_blocks):
            return num_device_blocks, True
        num_ready, is_more_coming = self._store.num_ready_blocks(
            progress.names, num_device_blocks, self._manager.num_findable_blocks(request)
        )
        num_planned_tokens = progress.num_planned_tokens if progress.is_brought else 0
        num_tokens = (num_ready - num_device_blocks) * self._manager.block_size
        if (
            num_tokens
            and not progress.binds
            and self._store.load_seconds(num_tokens) >= num_tokens * self._token_seconds
        ):
            num_ready, num_planned_tokens = num_device_blocks, 0
        lacks_planned = num_ready * self._manager.block_size < progress.num_planned_tokens
        is_more_coming = is_more_coming or self._store.awaits_room(progress.transfer)
        must_wait = is_more_coming and lacks_planned and self._clock() < progress.waits_until
        if must_wait:
            progress.waits_since = self._store.num_changes
            return num_ready, True
        if progress.binds:
            self._store.unbind(progress.transfer)
        if request.num_preemptions == 0:
            request.num_lost_tokens, request.num_unmoved_tokens = left_below(
                self._store.directory,
                progress.names,
                chunk_tokens=self._store.shape.tokens,
                num_found_tokens=num_ready * self._manager.block_size,
                num_findable_tokens=self._manager.num_findable_blocks(request) * self._manager.block_size,
                num_planned_tokens=num_planned_tokens,
            )
        return num_ready, False

    def _is_loaded_by_another(self, progress: Progress, num_device_blocks: int) -> bool:
        """Whether its first missing chunk is already on its way to the device, and soon shared."""
        first_chunk = num_device_blocks // self._store.shape.blocks_per_chunk
        return first_chunk < len(progress.names) and progress.names[first_chunk].key in self._loading_keys

    def forget(self, request: Request) -> None:
        """Forget an ended request: its blocks are free, or will be when copies into them have ended."""
        progress = self._progress.pop(request.key, None)
        if progress is not None and progress.binds:
            self._store.unbind(progress.transfer)

    # From host memory to the device.

    def load(self, request: Request, num_device_blocks: int, num_ready_blocks: int) -> tuple[int, int]:
        """Copy host memory's share of the ready blocks into the request's, all of which it holds. Returns how
        many of these tokens had been read from disk for it, and how many pulled from a peer.
        """
        size = self._store.shape.blocks_per_chunk
        first_chunk = num_device_blocks // size
        progress = self._progress[request.key]
        names = progress.names[first_chunk : -(-num_ready_blocks // size)]
        keys = [name.key for name in names]
        slots = self._store.pin(keys)
        started_at = self._clock()
        copy = self._copier.copy_in(
            slots,
            num_device_blocks - first_chunk * size,
            request.block_ids[num_device_blocks:num_ready_blocks],
        )
        writers = [writer for slot in slots for writer in self._store.writers(slot)]
        writers = writers[num_device_blocks - first_chunk * size :][: num_ready_blocks - num_device_blocks]
        self._loading_keys.update(keys)
        self._loads.append(
            _TierLoad(request, copy, keys, writers, num_device_blocks, num_ready_blocks, started_at)
        )
        num_read = num_pulled = 0
        for number, (key, slot) in enumerate(zip(keys, slots, strict=True), first_chunk):
            end = min(num_ready_blocks, (number + 1) * size)
            num_tokens = (end - max(num_device_blocks, number * size)) * self._manager.block_size
            transfer = self._store.transfer(slot)
            if transfer is not None and transfer == progress.transfer:
                num_pulled += num_tokens
            elif key in progress.read:
                num_read += num_tokens
        return num_read, num_pulled

    def take_loaded(self) -> list[tuple[Request, int]]:
        """Return the requests whose loads ended since the last call, and how many of their leading blocks now
        have KV on the device, for all to share."""
        ended: list[_TierLoad] = []
        under_way: list[_TierLoad] = []
        for load in self._loads:
            (ended if load.copy.is_done() else under_way).append(load)
        self._loads = under_way
        for load in ended:
            self._store.unpin(load.keys)
            num_tokens = (load.end_block - load.first_block) * self._manager.block_size
            self._store.loaded(num_tokens, self._clock() - load.started_at)
            self._loading_keys.difference_update(load.keys)
        loaded: list[tuple[Request, int]] = []
        for load in ended:
            if load.request.key in self._progress:
                self._manager.share_loaded(load.request, load.first_block, load.end_block, load.writers)
                loaded.append((load.request, load.end_block))
            else:
                self._manager.free(load.request)
        return loaded

    # From the device to host memory.

    def computed(self, request: Request) -> None:
        """More of its tokens have KV: copy the chunks that are complete now, and those that only it had."""
        progress = self._progress[request.key]
        size = self._store.shape.blocks_per_chunk
        num_complete = request.num_computed_tokens // self._store.shape.tokens
        if num_complete <= progress.num_offered:
            return
        hashes = request.block_hashes[: num_complete * size]
        progress.names += chunk_names(hashes, size, len(progress.names))
        for number in range(progress.num_offered, num_complete):
            if not self._offer(request, progress.names[number], number * size):
                break
        progress.num_offered = num_complete

    def _offer(self, request: Request, name: "ChunkName", first_block: int) -> bool:
        """False if every slot is in use."""
        if self._store.is_kept(name.key):
            return True
        blocks = slice(first_block, first_block + self._store.shape.blocks_per_chunk)
        writers = self._manager.pool.writers.tags(request.block_hashes[blocks])
        slot = self._store.offer(name, writers, tenancy_of(request.submit))
        if slot is not None:
            self._offloads.append(_Offload(name.key, self._copier.copy_out(request.block_ids[blocks], slot)))
        return slot is not None

    # Beside requests.

    @property
    def has_work(self) -> bool:
        """Whether anything is being loaded, or must be reported."""
        return bool(self._loads) or self._store.has_news

    def poll(self) -> None:
        """Process finished moves between the tiers, and start more."""
        under_way = []
        for offload in self._offloads:
            if offload.copy.is_done():
                self._store.filled(offload.key)
            else:
                under_way.append(offload)
        self._offloads = under_way
        self._store.poll()

    def fill(self, frame: StepFrame) -> StepFrame:
        """Add to the frame the tiers' changes in this step, the speeds of moves, and when to look again."""
        self.poll()
        frame = told(frame, self._store)
        look_again = LOOK_AGAIN_SECONDS if self._loads or self._offloads else frame.look_again_seconds
        return replace(frame, events=frame.events + self._store.take_events(), look_again_seconds=look_again)

    def wait(self, seconds: float) -> None:
        """Wait until something has come to host memory, at most `seconds`."""
        self._store.wait(seconds)
        self.poll()

    def reset(self) -> bool:
        """Forget every chunk. Returns False and does nothing while any of them moves."""
        ends_at = self._clock() + RESET_SECONDS
        self.poll()
        while self._offloads and self._clock() < ends_at:
            self.wait(LOOK_AGAIN_SECONDS)
        return not self._loads and self._store.clear()

    @property
    def _token_seconds(self) -> float:
        return self._token_seconds_now() or UNMEASURED_TOKEN_SECONDS
