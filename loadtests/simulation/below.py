"""Below: what becomes of a simulated replica's requests where KV lies below its device, too.

Owns what was planned for a request when it came, the loads that are under way, and the chunks that the step
completes. Does not decide who is computed next, and knows no bytes: the store does.
"""

from bisect import insort
from collections.abc import Callable
from operator import attrgetter

from loadtests.simulation.request import VirtualRequest
from loadtests.simulation.splits import Following
from loadtests.simulation.store import PATIENCE, OnDisk, VirtualStore
from replicas.kvcache.block_pool import BlockPool


class Below:
    """`token_seconds` says what a prompt token takes to compute now."""

    def __init__(
        self, store: VirtualStore, pool: BlockPool, block_size: int, token_seconds: Callable[[], float]
    ) -> None:
        self.store = store
        self.loading: list[VirtualRequest] = []
        """By rank. They have blocks, into which KV is copied from host memory."""
        self._pool = pool
        self._block_size = block_size
        self._token_seconds = token_seconds
        self._completed: list[OnDisk] = []

    def arrived(
        self,
        request: VirtualRequest,
        now: float,
        *,
        num_cached_blocks: int,
        num_tokens_before: int,
        peer: VirtualStore | None,
        encode_seconds: Callable[[int], float] | None = None,
    ) -> None:
        """A request waits behind others that will compute `num_tokens_before` tokens. `peer`'s KV may be
        pulled.

        `encode_seconds` returns the time to encode its images, by ready leading tokens.
        """
        request.chunk_names = self.store.names(request.hashes(request.num_tokens // self._block_size))
        token_seconds = self._token_seconds()
        wait_seconds = num_tokens_before * token_seconds
        way = self.store.bring(
            request.chunk_names,
            now,
            num_device_blocks=num_cached_blocks,
            num_findable_blocks=request.num_findable_blocks(self._block_size),
            wait_seconds=wait_seconds,
            token_seconds=token_seconds,
            encode_seconds=encode_seconds,
            peer=peer,
        )
        request.num_planned_tokens = way.num_ready_tokens
        request.waits_until = now + PATIENCE * (wait_seconds + way.extra_seconds)

    def follow(
        self, request: VirtualRequest, now: float, following: Following, *, num_cached_blocks: int
    ) -> None:
        """Let it wait while another replica computes its prompt."""
        request.num_planned_tokens = following.num_tokens
        request.waits_until = now + following.wait_seconds
        request.is_awaited = lambda: not following.is_over
        size = self.store.blocks_per_chunk
        end = following.num_tokens // (size * self._block_size)
        following.begin(request.chunk_names[num_cached_blocks // size : end], now)

    def num_ready_blocks(
        self, request: VirtualRequest, num_cached_blocks: int, now: float
    ) -> tuple[int, bool]:
        """Its leading blocks on the device, and in host memory if they are sooner loaded than computed; and
        whether it should wait for more.
        """
        num_ready, is_more_coming = self.store.num_ready_blocks(
            request.chunk_names, num_cached_blocks, request.num_findable_blocks(self._block_size)
        )
        num_loaded = num_ready - num_cached_blocks
        compute_seconds = num_loaded * self._block_size * self._token_seconds()
        if num_loaded and self.store.load_seconds(num_loaded, now) >= compute_seconds:
            num_ready = num_cached_blocks
        lacks_planned = num_ready * self._block_size < request.num_planned_tokens
        is_more_coming = is_more_coming or request.is_awaited()
        return num_ready, is_more_coming and lacks_planned and now < request.waits_until

    def load(
        self,
        request: VirtualRequest,
        num_ready_blocks: int,
        now: float,
        loaded: Callable[[VirtualRequest], None],
    ) -> None:
        """Copy its KV from host memory to new blocks, and call `loaded` then. It keeps its writers."""
        first = len(request.block_ids)
        request.block_ids.extend(self._pool.allocate(num_ready_blocks - first, request.tenant))
        insort(self.loading, request, key=attrgetter("rank"))

        def end() -> None:
            self.loading.remove(request)
            writers = self.store.writers(request.chunk_names, first, num_ready_blocks)
            for block_hash, writer in zip(request.hashes(num_ready_blocks)[first:], writers, strict=True):
                self._pool.writers.wrote([block_hash], writer)
            loaded(request)

        self.store.load(request.chunk_names, first, num_ready_blocks, now, end)

    def computed(self, request: VirtualRequest, first_block: int, end_block: int) -> None:
        """The step computes these blocks, and with them maybe chunks."""
        size, hashes = self.store.blocks_per_chunk, request.hashes(end_block)
        for name in self.store.names(hashes, first_block // size):
            end = name.last_block + 1
            self._completed.append((name, self._pool.writers.tags(hashes[end - size : end])))

    def copy_out(self, now: float) -> None:
        """The step has ended."""
        self.store.copy_out(self._completed, now)
        self._completed.clear()
