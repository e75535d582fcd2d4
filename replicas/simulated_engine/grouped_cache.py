"""GroupedCache: the device cache of a model whose layers keep different KV.

Owns one block pool for all groups, the tables of requests, and the resume points: prefixes at whose end
a hit can end. All positions are tokens. Hashes name blocks of `alignment` tokens. A smaller block is named by
the hash of the aligned block that it lies in, and its place there.

A hit ends at a multiple of the alignment where every group has what it needs (`kvcache/cache_groups.py`)::

    full attention   ████████████████████████████        reach
    window                 ███        ███     ██
                             ^          ^                 resume points

If full attention reaches deeper than the hit, the request keeps what later ones need to resume there: its
*junction*.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from replicas.kvcache.block_pool import BlockPool
from replicas.kvcache.cache_groups import CacheGroup, state_tokens_of
from replicas.kvcache.tenant_order import NO_TENANT
from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    ResumePointsChanged,
)
from replicas.protocol.frames import NO_USER, UserTag
from replicas.simulated_engine.groups import (
    alignment_of,
    first_read,
    keeps,
    longest_prompt,
    most_blocks,
    read_until,
)

Key = BlockHash
"""A group's block in the pool: the hash itself for the last block of the first group, else with a suffix."""


class Hit(NamedTuple):
    """`junction` is how far the most persistent group has the prompt, if that is further; else 0."""

    num_tokens: int
    junction: int


@dataclass(slots=True)
class _HeldGroups:
    """The blocks `[first, first + len(block_ids))` of one group that a request holds."""

    first: int = 0
    block_ids: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.block_ids)


class GroupTable:
    """A request's blocks in every group. `covered` tokens have blocks, `stored` of them have been shared.
    All are read until `read_until` tokens are computed.

    Every group keeps what hits at the `boundaries` need.
    """

    __slots__ = (
        "boundaries",
        "covered",
        "held",
        "num_prompt_tokens",
        "read_until",
        "stored",
        "tenant",
        "user",
    )

    def __init__(
        self,
        num_groups: int,
        num_prompt_tokens: int,
        boundaries: tuple[int, ...],
        tenant: bytes,
        user: UserTag,
    ) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.boundaries = boundaries
        self.tenant = tenant
        self.user = user
        self.held = [_HeldGroups() for _ in range(num_groups)]
        self.covered = 0
        self.stored = 0
        self.read_until: float = 0


@dataclass(slots=True)
class _Point:
    """A prefix that was a resume point once; it is one while no block is missing."""

    needed: tuple[Key, ...]
    num_missing: int = 0


class GroupedCache:
    """`num_blocks` counts the null block. A step computes at most `max_batched_tokens`.

    `retention` is that of `keeps`: vLLM's `prefix_cache_retention_interval`, whose None is the
    alignment.
    """

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[CacheGroup],
        *,
        max_batched_tokens: int,
        retention: int = 0,
    ) -> None:
        self.alignment = alignment_of(groups)
        if retention < 0 or retention % self.alignment:
            raise ValueError(f"retention is a multiple of {self.alignment} tokens, not {retention}")
        by_kind = sorted(range(len(groups)), key=lambda number: not groups[number].is_full)
        self.groups = [groups[number] for number in by_kind]
        """Full attention first."""
        self._freeing_order = [by_kind.index(number) for number in range(len(groups))]
        """The order in which the groups were given: what is freed first is handed out first."""
        self.pool = BlockPool(num_blocks)
        self._retention = retention
        self._max_batched_tokens = max_batched_tokens
        self._state_size = state_tokens_of(groups)
        self._suffixes = [
            [_suffix(number, place, group, self.alignment) for place in range(self._num_places(group))]
            for number, group in enumerate(self.groups)
        ]
        self._points: dict[BlockHash, _Point] = {}
        self._needing: dict[Key, list[BlockHash]] = {}
        self._before: dict[BlockHash, bool] = {}
        """Whether each prefix that may have changed was a point when events were last taken."""
        self._events: list[CacheEvent] = []

    def _num_places(self, group: CacheGroup) -> int:
        return self.alignment // group.block_size

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest request that fits, a multiple of the alignment."""
        return longest_prompt(self.pool.num_usable, self.groups, self._max_batched_tokens)

    # What is there.

    def is_point(self, block_hash: BlockHash) -> bool:
        point = self._points.get(block_hash)
        return point is not None and not point.num_missing

    def find(self, block_hashes: Sequence[BlockHash]) -> Hit:
        """Return the longest hit within these blocks of `alignment` tokens."""
        reaches = [
            self._reach(number, block_hashes) for number, group in enumerate(self.groups) if group.is_full
        ]
        end = min(reaches, default=len(block_hashes))
        num_blocks = next((each for each in range(end, 0, -1) if self.is_point(block_hashes[each - 1])), 0)
        if len(self.groups) == 1:
            return Hit(num_blocks * self.alignment, 0)
        longest = (
            max(reaches) if reaches else max(map(self._longest_of(block_hashes), range(len(self.groups))))
        )
        return Hit(num_blocks * self.alignment, longest * self.alignment if longest > num_blocks else 0)

    def _reach(self, number: int, block_hashes: Sequence[BlockHash]) -> int:
        """Leading aligned blocks that a group of full attention has."""
        if self._suffixes[number] == [b""]:
            return len(self.pool.find_prefix(block_hashes))
        for at, block_hash in enumerate(block_hashes):
            if any(self.pool.find(Key(block_hash + suffix)) is None for suffix in self._suffixes[number]):
                return at
        return len(block_hashes)

    def _longest_of(self, block_hashes: Sequence[BlockHash]) -> Callable[[int], int]:
        """Return the longest hit of one group alone, by its number."""

        def longest(number: int) -> int:
            return next(
                (
                    end
                    for end in range(len(block_hashes), 0, -1)
                    if all(
                        self.pool.find(key) is not None for key in self._needed_of(number, block_hashes, end)
                    )
                ),
                0,
            )

        return longest

    # What a request takes.

    def fits(self, block_hashes: Sequence[BlockHash], num_tokens: int, hit: Hit) -> bool:
        """Whether a request without blocks finds room for all of its tokens, beside its hit."""
        ids = [block_id for _, found in self._hit_blocks(block_hashes, hit) for block_id in found]
        num_new = most_blocks(self.groups, num_tokens, self._max_batched_tokens) - len(ids)
        return max(num_new, 0) + self.pool.num_free_among(ids) <= self.pool.num_free

    def begin(
        self, num_prompt_tokens: int, hit: Hit, tenant: bytes = NO_TENANT, user: UserTag = NO_USER
    ) -> GroupTable:
        """Make the table of a request that has found this hit, without any blocks yet."""
        replay = (num_prompt_tokens - 1) // self.alignment * self.alignment
        boundaries = (replay, hit.junction) if hit.junction else (replay,)
        return GroupTable(len(self.groups), num_prompt_tokens, boundaries, tenant, user)

    def take(self, table: GroupTable, block_hashes: Sequence[BlockHash], hit: Hit) -> None:
        """Give a request without blocks those of its hit."""
        for held, (first, block_ids) in zip(table.held, self._hit_blocks(block_hashes, hit), strict=True):
            self.pool.acquire(block_ids, table.tenant)
            held.first, held.block_ids = first, block_ids
        table.covered = table.stored = hit.num_tokens

    def allocate(self, table: GroupTable, start: int, end: int) -> bool:
        """Give a request blocks for tokens `[start, end)`, where it has computed all before.

        Blocks that are no longer read are released first. Returns False if the rest runs out.
        """
        if end <= table.covered and start < table.read_until:
            return True
        num_missing = 0
        for number in self._freeing_order:
            group, held = self.groups[number], table.held[number]
            num_past = min(first_read(group, start) - held.first, len(held.block_ids))
            if num_past > 0:
                self.pool.release(reversed(held.block_ids[:num_past]))
                del held.block_ids[:num_past]
                held.first += num_past
            num_missing += self._num_missing(group, held, end)
        table.read_until = min(
            read_until(group, held.first) for group, held in zip(self.groups, table.held, strict=True)
        )
        if num_missing > self.pool.num_free:
            return False
        block_ids = iter(self.pool.allocate(num_missing, table.tenant))
        for group, held in zip(self.groups, table.held, strict=True):
            count = self._num_missing(group, held, end)
            if count and group.is_state:
                table_end = -(-end // group.block_size)
                self._leave_gap(held, table_end - 1)
            held.block_ids += [next(block_ids) for _ in range(count)]
        table.covered = min(
            held.end * group.block_size for group, held in zip(self.groups, table.held, strict=True)
        )
        self._note_removed()
        return True

    def chunk_end(self, table: GroupTable, start: int, end: int, num_tokens: int) -> int:
        """Return where a step that computes tokens from `start` should end, at most at `end`.

        A state is written at the end of a step, so steps end where one is to be kept.
        """
        size = self._state_size
        prompt_end = max(table.num_prompt_tokens, num_tokens - 1)
        if not size or start >= prompt_end:
            return end
        if end < prompt_end and end // size * size > start:
            end = end // size * size
        stops = [
            (num_tokens - 1) // size * size,
            *(start + (at - start) // size * size for at in table.boundaries),
        ]
        if start % size:
            stops.append((start // size + 1) * size)
        return min((stop for stop in stops if start < stop < end), default=end)

    def store(self, table: GroupTable, block_hashes: Sequence[BlockHash], end: int) -> None:
        """Share what is to stay of the aligned blocks that are full after `end` computed tokens."""
        first, last = table.stored // self.alignment, end // self.alignment
        if last <= first:
            return
        table.stored = last * self.alignment
        for number, (group, held) in enumerate(zip(self.groups, table.held, strict=True)):
            if group.is_state:
                # Only the state at the end of a step is there.
                places = [last * self._num_places(group) - 1] if end % self.alignment == 0 else []
            else:
                num_places = self._num_places(group)
                places = list(range(max(first * num_places, held.first), last * num_places))
            self._store_group(number, table, block_hashes, places)
        for end_block in range(first + 1, last + 1):
            self._register(block_hashes, end_block)
        self.pool.take_events()
        if self.groups[0].is_full:
            self._tell_stored(table, block_hashes, first, last)

    def _tell_stored(
        self, table: GroupTable, block_hashes: Sequence[BlockHash], first: int, last: int
    ) -> None:
        """Tell that full attention has these aligned blocks, in two events if the prompt ends inside."""
        prompt_end = table.num_prompt_tokens // self.alignment
        for start, end in ((first, min(last, prompt_end)), (max(first, prompt_end), last)):
            if start < end:
                hashes = tuple(block_hashes[start:end])
                self._events.append(BlockStored(hashes, start, ends_prompt=end == prompt_end))

    def free(self, table: GroupTable) -> None:
        """Return all blocks of a request, tails first; what was stored stays until it is handed out again."""
        for number in self._freeing_order:
            held = table.held[number]
            self.pool.release(reversed(held.block_ids))
            held.first, held.block_ids = 0, []
        table.covered = table.stored = 0
        table.read_until = 0

    def clear(self) -> bool:
        """Forget everything; False, without effect, while any request holds blocks."""
        if not self.pool.clear():
            return False
        self.pool.take_events()
        self._points.clear()
        self._needing.clear()
        self._before.clear()
        self._events.append(AllBlocksCleared())
        return True

    @property
    def has_events(self) -> bool:
        return bool(self._events or self._before)

    def take_events(self) -> list[CacheEvent]:
        """Return the changes since the last call: full attention's blocks in order, then the points."""
        events, self._events = self._events, []
        changed = [(each, was, self.is_point(each)) for each, was in self._before.items()]
        self._before.clear()
        added = tuple([each for each, was, now in changed if now and not was])
        removed = tuple([each for each, was, now in changed if was and not now])
        if added or removed:
            events.append(ResumePointsChanged(added, removed))
        return events

    def check(self) -> None:
        """Assert the invariants; linear in the cache."""
        self.pool.check()
        for block_hash, point in self._points.items():
            missing = [key for key in point.needed if self.pool.find(key) is None]
            assert point.num_missing == len(missing), block_hash.hex()

    # Blocks and their names.

    def name_of(self, number: int, block_hashes: Sequence[BlockHash], block: int) -> Key:
        """Return the name of a group's block in a chain."""
        at, place = divmod(block, len(self._suffixes[number]))
        return Key(block_hashes[at] + self._suffixes[number][place])

    def _needed_of(self, number: int, block_hashes: Sequence[BlockHash], end_block: int) -> Iterator[Key]:
        """Yield the names of what a group needs for a hit of that many aligned blocks."""
        for block in self.groups[number].needed(end_block * self.alignment):
            yield self.name_of(number, block_hashes, block)

    def _hit_blocks(self, block_hashes: Sequence[BlockHash], hit: Hit) -> Iterator[tuple[int, list[int]]]:
        """Yield each group's first block of a hit that is still read, and the ids from there on."""
        for number, group in enumerate(self.groups):
            end = hit.num_tokens // group.block_size
            if self._suffixes[number] == [b""] and group.is_full:
                yield 0, self.pool.find_prefix(block_hashes[:end])
                continue
            first = min(first_read(group, hit.num_tokens), end)
            if group.is_state:
                first = max(0, end - 1)
            found = [self.pool.find(self.name_of(number, block_hashes, block)) for block in range(first, end)]
            ids = [block_id for block_id in found if block_id is not None]
            assert len(ids) == len(found), "a hit lacks blocks"
            yield first, ids

    def _num_missing(self, group: CacheGroup, held: _HeldGroups, end: int) -> int:
        """Count the blocks that a group lacks for `end` tokens. States need one for each step's end."""
        last = -(-end // group.block_size)
        return int(last > held.end) if group.is_state else max(0, last - held.end)

    def _leave_gap(self, held: _HeldGroups, first: int) -> None:
        """The next state's block is `first`; there is none for the blocks between."""
        if held.end < first:
            self.pool.release(reversed(held.block_ids))
            held.first, held.block_ids = first, []

    def _store_group(
        self, number: int, table: GroupTable, block_hashes: Sequence[BlockHash], blocks: Iterable[int]
    ) -> None:
        group, held = self.groups[number], table.held[number]
        block_ids: list[int] = []
        keys: list[Key] = []
        for block in blocks:
            if held.first <= block < held.end and keeps(group, block, table.boundaries, self._retention):
                block_id = held.block_ids[block - held.first]
                if self.pool.hash_of(block_id) is None:
                    block_ids.append(block_id)
                    keys.append(self.name_of(number, block_hashes, block))
        if not keys:
            return
        for key in keys:
            if self.pool.find(key) is None:
                self._appears(key)
        self.pool.store(block_ids, keys, first_block_index=0, user=table.user)

    # Resume points.

    def _touch(self, block_hash: BlockHash) -> None:
        """Whether it is a resume point may be about to change."""
        if block_hash not in self._before:
            self._before[block_hash] = self.is_point(block_hash)

    def _appears(self, key: Key) -> None:
        """A block is about to be stored that no other is a copy of."""
        for block_hash in self._needing.get(key, ()):
            self._touch(block_hash)
            self._points[block_hash].num_missing -= 1

    def _vanishes(self, key: Key) -> None:
        """The last copy of a block has been evicted."""
        for block_hash in tuple(self._needing.get(key, ())):
            self._touch(block_hash)
            point = self._points[block_hash]
            point.num_missing += 1
            if key[:HASH_BYTES] == block_hash:  # whoever computes it again registers the point again
                del self._points[block_hash]
                for needed in point.needed:
                    self._needing[needed].remove(block_hash)
                    if not self._needing[needed]:
                        del self._needing[needed]

    def _register(self, block_hashes: Sequence[BlockHash], end_block: int) -> None:
        """Note what a hit that ends here needs, if what ends here has been kept."""
        block_hash = block_hashes[end_block - 1]
        if block_hash in self._points:
            return
        needed: list[Key] = []
        for number, group in enumerate(self.groups):
            own = Key(block_hash + self._suffixes[number][-1])
            if group.is_full:
                needed.append(own)
            elif group.needed(end_block * self.alignment):
                if self.pool.find(own) is None:
                    return
                needed += self._needed_of(number, block_hashes, end_block)
        self._touch(block_hash)
        missing = [key for key in needed if self.pool.find(key) is None]
        self._points[block_hash] = _Point(tuple(needed), len(missing))
        for key in needed:
            self._needing.setdefault(key, []).append(block_hash)

    def _note_removed(self) -> None:
        """Tell what an allocation has evicted."""
        for event in self.pool.take_events():
            assert isinstance(event, BlockRemoved), "an allocation only evicts"
            for key in set(event.block_hashes):
                if self.pool.find(key) is None:
                    self._vanishes(key)
            if self.groups[0].is_full:
                evicted = tuple([key for key in event.block_hashes if len(key) == HASH_BYTES])
                if evicted:
                    self._events.append(BlockRemoved(evicted))


def _suffix(number: int, place: int, group: CacheGroup, alignment: int) -> bytes:
    """Return what names a group's block behind the hash of its aligned block."""
    is_last = (place + 1) * group.block_size == alignment
    return b"" if number == 0 and is_last else bytes((number,)) + place.to_bytes(2, "little")
