"""BlockPool: the blocks of one KV cache, their users, and the prefix in each.

Owns ref counts, the free queue, the map from hash to block, the writer of each hash, and the events. Does not
know requests, tokens, or the memory behind a block id.

A block is *used* (ref count above zero) or *free*; either kind may be *cached* (have a hash). A free cached
block stays an entry until it is handed out again::

    free queue   never used · released without a hash | released with a hash, oldest first
                 ^ handed out next                                       released last ^

With several active tenants, `tenant_order.py` may choose another cached block to evict. With one tenant
nothing is counted.

Block 0 is the null block: never handed out, never cached. It pads block tables.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from replicas.kvcache.tenant_order import NO_TENANT, TenantOrder
from replicas.kvcache.writers import BlockWriters
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from replicas.protocol.frames import NO_USER, UserTag

NULL_BLOCK = 0


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, not {num_blocks} blocks")
        self.num_blocks = num_blocks
        self.writers = BlockWriters(num_blocks)
        self._num_cached = 0
        self._ref_counts = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(NULL_BLOCK + 1, num_blocks))
        self._block_of: dict[BlockHash, int] = {}
        self._more_copies: dict[BlockHash, list[int]] = {}
        self._events: list[CacheEvent] = []
        self._first_tenant: bytes | None = None
        self._order: TenantOrder | None = None
        """Once a second tenant has come."""

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that hold a known prefix, used or free, each copy counted."""
        return self._num_cached

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def free_order(self) -> list[int]:
        """Free blocks in the order in which they will be handed out."""
        return list(self._free)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def hash_of(self, block_id: int) -> BlockHash | None:
        return self._hash_of[block_id]

    def find(self, block_hash: BlockHash) -> int | None:
        """Return the block that holds this prefix: of several copies, the one that was stored first."""
        return self._block_of.get(block_hash)

    def find_prefix(self, block_hashes: Iterable[BlockHash]) -> list[int]:
        """Return the leading cached blocks of a chain, up to the first miss."""
        block_of = self._block_of
        block_ids: list[int] = []
        for block_hash in block_hashes:
            block_id = block_of.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks sit in the free queue: acquiring them takes that much free capacity."""
        ref_counts = self._ref_counts
        return sum(1 for block_id in block_ids if ref_counts[block_id] == 0)

    def allocate(self, num_blocks: int, tenant: bytes = NO_TENANT) -> list[int]:
        """Hand out the next free blocks to a request of this tenant, evicting their prefixes. The caller has
        checked `num_free`."""
        assert num_blocks <= len(self._free), f"{num_blocks} blocks wanted, {len(self._free)} free"
        evicted: list[BlockHash] = []
        block_ids: list[int] = []
        order = self._order_with(tenant)
        for _ in range(num_blocks):
            block_id = self._next_free() if order is None else self._next_free_of(order)
            block_hash = self._hash_of[block_id]
            if block_hash is not None:
                self._forget(block_id, block_hash)
                evicted.append(block_hash)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        if order is not None:
            order.takes(block_ids, tenant)
            order.handed_out(num_blocks)
        if evicted:
            self.writers.forget([block_hash for block_hash in evicted if block_hash not in self._block_of])
            self._events.append(BlockRemoved(tuple(evicted)))
        return block_ids

    def acquire(self, block_ids: Iterable[int], tenant: bytes = NO_TENANT) -> None:
        """Use cached blocks once more, for a request of this tenant; those that were free leave the queue."""
        order = self._order_with(tenant)
        were_free: list[int] = []
        for block_id in block_ids:
            assert self._hash_of[block_id] is not None, f"block {block_id} is not cached"
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
                were_free.append(block_id)
            self._ref_counts[block_id] += 1
        if order is not None:
            order.takes(were_free, tenant)

    def store(
        self,
        block_ids: Sequence[int],
        block_hashes: Sequence[BlockHash],
        *,
        first_block_index: int,
        ends_prompt: bool = False,
        user: UserTag = NO_USER,
    ) -> None:
        """Record these used blocks, consecutive in one chain, as holding these prefixes, written by `user`.

        A hash that another block already has is stored as one more copy: block tables only grow, so a request
        cannot swap its block for the other.
        """
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            assert self._ref_counts[block_id] > 0, f"block {block_id} is stored while no request uses it"
            assert self._hash_of[block_id] is None, f"block {block_id} is stored twice"
            self._hash_of[block_id] = block_hash
            if self._block_of.setdefault(block_hash, block_id) != block_id:
                self._more_copies.setdefault(block_hash, []).append(block_id)
        self._num_cached += len(block_ids)
        self.writers.wrote(block_hashes, user)
        self._events.append(BlockStored(tuple(block_hashes), first_block_index, ends_prompt))

    def release(self, block_ids: Iterable[int]) -> None:
        """Stop using blocks in this order: the first is handed out first."""
        order = self._order
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} is released while no request uses it"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] > 0:
                continue
            self._free[block_id] = None
            if self._hash_of[block_id] is None:
                self._free.move_to_end(block_id, last=False)
                if order is not None:
                    order.is_empty(block_id)
            elif order is not None:
                order.is_free(block_id)

    def clear(self) -> bool:
        """Evict every cached block. Returns False and does nothing while any block is used."""
        if self.num_used:
            return False
        self._hash_of = [None] * self.num_blocks
        self._num_cached = 0
        self._block_of.clear()
        self._more_copies.clear()
        self.writers.clear()
        if self._order is not None:
            self._order.clear()
        self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[CacheEvent]:
        """Return the changes since the last call, in order."""
        events = self._events
        self._events = []
        return events

    def check(self) -> None:
        """Assert every invariant of the pool; linear in its size, for tests and for looking into a bug."""
        usable = range(NULL_BLOCK + 1, self.num_blocks)
        assert self._ref_counts[NULL_BLOCK] == 0 and self._hash_of[NULL_BLOCK] is None
        assert NULL_BLOCK not in self._free
        assert {block_id for block_id in usable if self._ref_counts[block_id] == 0} == set(self._free)
        assert min(self._ref_counts) == 0, "a ref count is negative"
        assert self.num_free + sum(1 for count in self._ref_counts if count) == self.num_usable
        mapped: dict[int, BlockHash] = {}
        for block_hash, block_id in self._block_of.items():
            for copy in [block_id, *self._more_copies.get(block_hash, ())]:
                assert copy not in mapped, f"block {copy} is mapped twice"
                mapped[copy] = block_hash
        assert self._more_copies.keys() <= self._block_of.keys() and all(self._more_copies.values())
        assert mapped == {
            i: block_hash for i, block_hash in enumerate(self._hash_of) if block_hash is not None
        }
        assert self._num_cached == len(mapped)
        assert len(self.writers) == len(self._block_of)
        if self._order is not None:
            self._order.check(
                [block_id for block_id in usable if self._ref_counts[block_id]],
                [block_id for block_id in self._free if self._hash_of[block_id] is not None],
            )

    def _order_with(self, tenant: bytes) -> TenantOrder | None:
        """Return the tenants' order; None while there was only one tenant. When a second comes, all present
        blocks are the first's."""
        if self._order is None and tenant != self._first_tenant:
            if self._first_tenant is None:
                self._first_tenant = tenant
                return None
            order = self._order = TenantOrder(self.num_usable)
            used = [block_id for block_id, count in enumerate(self._ref_counts) if count]
            free = [block_id for block_id in self._free if self._hash_of[block_id] is not None]
            order.comes(self._first_tenant)
            order.takes(used + free, self._first_tenant)
            for block_id in free:
                order.is_free(block_id)
        if self._order is not None:
            self._order.comes(tenant)
        return self._order

    def _next_free(self) -> int:
        return self._free.popitem(last=False)[0]

    def _next_free_of(self, order: TenantOrder) -> int:
        block_id = next(iter(self._free))
        if self._hash_of[block_id] is not None:
            victim = order.victim()
            block_id = block_id if victim is None else victim
            order.is_empty(block_id)
        del self._free[block_id]
        return block_id

    def _forget(self, block_id: int, block_hash: BlockHash) -> None:
        self._hash_of[block_id] = None
        self._num_cached -= 1
        copies = self._more_copies.get(block_hash)
        if copies is None:
            del self._block_of[block_hash]
            return
        if self._block_of[block_hash] == block_id:
            self._block_of[block_hash] = copies.pop(0)
        else:
            copies.remove(block_id)
        if not copies:
            del self._more_copies[block_hash]
