"""ResumePoints: where a hit may end in a cache that several groups of layers keep differently.

Owns the copies per group and block, and what follows from them: the points, and how far full attention
reaches. Pure: vLLM's hashes are bytes here, and its events are read elsewhere (`sparse_translation.py`).

What a hit of p tokens needs of each group is `kvcache/cache_groups.py`'s. A group that a draft model reads
must hold one block more, the one behind p on the same chain. A hit is then found by the hash at the end of
that block, `peek` tokens behind p, and that hash is the point.

Each group's blocks form a forest: a block's parent is the one before it in its chain. A block's *run* is the
number of held blocks that end with it, up to the number that any position can need; in a group of full
attention it is 1 if all before it are held, else 0. A hit ends where every group's run is long enough. A
block that comes or goes changes its own run and those of its descendants, until a run stays as it was; only
positions whose run changed are looked at again.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from replicas.kvcache.cache_groups import CHUNKED, KINDS, WINDOW_KINDS, CacheGroup
from replicas.kvcache.hash_map import UnknownBlock
from replicas.protocol.blocks import BlockHash


def peek_of(groups: Sequence[CacheGroup], alignment: int) -> int:
    return max(group.peek(alignment) for group in groups)


def problem_of(groups: Sequence[CacheGroup], alignment: int) -> str | None:
    """Why the resume points of such a cache cannot be told; None if they can."""
    groups = [group for group in groups if group.is_cacheable]
    for group in groups:
        if group.kind not in KINDS:
            return f"a cache of kind {group.kind}"
        if group.kind in WINDOW_KINDS | {CHUNKED} and (group.window or 0) < 2:
            return f"a cache of kind {group.kind} with a window of {group.window} tokens"
    if all(group.kind == CHUNKED for group in groups):
        return "attention within chunks in all layers"
    has_mamba = any(group.is_state for group in groups)
    for group in groups:
        may_be_wider = group.is_state or (group.is_full and has_mamba)
        if alignment % group.block_size and not may_be_wider:
            return f"blocks of {group.block_size} tokens where hits are multiples of {alignment}"
    drafted = [group for group in groups if group.peek(alignment)]
    if drafted and (
        len(groups) == 1
        or peek_of(groups, alignment) != alignment
        or any(group.kind == CHUNKED or group.block_size > alignment for group in drafted)
        or any(group.block_size != alignment for group in drafted if not group.is_full)
    ):
        return f"a draft model that reads other blocks than hits are multiples of, {alignment} tokens"
    return None


class Reached(NamedTuple):
    """Consecutive blocks of a chain that full attention reaches from now on; `first_index` is the first's."""

    names: list[BlockHash]
    first_index: int


class PointsChange(NamedTuple):
    """The difference between two states. No block is reached and lost at once, nor a point added and
    removed."""

    added: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]
    reached: list[Reached]
    lost: tuple[BlockHash, ...]


class _PointBlock:
    """The copies of one block in one group. `names` are ours of the positions that end in it, where needed;
    `asked` has for each group the hash at which it is to be asked, if that differs between groups."""

    __slots__ = ("asked", "before", "copies", "end", "names", "run")

    def __init__(
        self, end: int, before: bytes | None, names: tuple[BlockHash, ...], asked: tuple[bytes, ...]
    ) -> None:
        self.end = end
        self.before = before
        self.names = names
        self.asked = asked
        self.copies = 1
        self.run = 0


class _Forest:
    """One group's blocks."""

    def __init__(self, group: CacheGroup, alignment: int) -> None:
        self.group = group
        self.peek = group.peek(alignment)
        self.num_peeked = 0 if group.is_full else self.peek // group.block_size
        self.blocks: dict[bytes, _PointBlock] = {}
        self.after: dict[bytes, tuple[bytes, ...]] = {}
        self.most = 1
        if group.window is not None and not group.is_full:
            self.most = -(-group.window // group.block_size) + 1 + self.num_peeked

    def holds(self, theirs: bytes, end: int) -> bool:
        """Whether a hit of `end` tokens has what it needs of this group, which `theirs` ends."""
        num_needed = 1 if self.group.is_full else len(self.group.needed(end)) + self.num_peeked
        if not num_needed:
            return True
        block = self.blocks.get(theirs)
        return block is not None and block.run >= num_needed

    def add(self, theirs: bytes, block: _PointBlock) -> Iterator[tuple[bytes, _PointBlock]]:
        """Yield the blocks whose run changed."""
        self.blocks[theirs] = block
        if block.before is not None:
            self.after[block.before] = (*self.after.get(block.before, ()), theirs)
        block.run = self._run(block)
        yield theirs, block
        if block.run:
            yield from self._follow(theirs)

    def drop(self, theirs: bytes) -> Iterator[tuple[bytes, _PointBlock]]:
        """Yield the blocks whose run changed."""
        block = self.blocks.pop(theirs)
        if block.before is not None:
            others = tuple(each for each in self.after[block.before] if each != theirs)
            if others:
                self.after[block.before] = others
            else:
                del self.after[block.before]
        yield theirs, block
        yield from self._follow(theirs)

    def _follow(self, theirs: bytes) -> Iterator[tuple[bytes, _PointBlock]]:
        stack = [theirs]
        while stack:
            for each in self.after.get(stack.pop(), ()):
                block = self.blocks[each]
                run = self._run(block)
                if run != block.run:
                    block.run = run
                    yield each, block
                    stack.append(each)

    def _run(self, block: _PointBlock) -> int:
        if block.before is None:
            return 1
        before = self.blocks.get(block.before)
        run = 0 if before is None else before.run
        return run if self.group.is_full else min(run + 1, self.most)


class ResumePoints:
    """`hash_block` is the tokens of one of vLLM's hashes; hits are multiples of `alignment`."""

    def __init__(self, groups: Sequence[CacheGroup], hash_block: int, alignment: int) -> None:
        assert problem_of(groups, alignment) is None
        self._hash_block = hash_block
        self._alignment = alignment
        self._forests = [_Forest(group, alignment) for group in groups]
        self._asked = [forest for forest in self._forests if forest.group.is_cacheable]
        self.peek = peek_of(groups, alignment)
        self._anchor = self._anchor_of(self._asked)
        self._lead = next((forest for forest in self._asked if forest.group.is_full), None)
        self._points: dict[bytes, BlockHash] = {}
        self._doubtful: dict[bytes, _PointBlock] = {}
        """Blocks of the anchor at which a hit may begin, or cease, to end."""
        self._askers: dict[bytes, tuple[bytes, ...]] = {}
        """With drafts: the anchor's blocks that ask other groups at this hash."""
        self._told: set[bytes] = set()
        """Blocks of the lead that were reached at the last take."""
        self.num_copies = 0
        """Blocks of all groups, every copy counted."""
        self._reach_changed: dict[bytes, _PointBlock] = {}

    def _anchor_of(self, forests: Sequence[_Forest]) -> _Forest:
        """Return a group that holds a block at every point; of several the one with the fewest."""
        candidates = [
            forest for forest in forests if forest.peek == self.peek and forest.group.kind != CHUNKED
        ]
        return min(candidates, key=lambda forest: (not forest.group.is_state, forest.group.is_full))

    def num_leading(self, chain: Sequence[bytes], num_tokens: int) -> int:
        """Return the tokens of a prompt that a hit would have, as of the last take."""
        last = min(len(chain) * self._hash_block, num_tokens if self.peek else num_tokens - 1)
        for end in range(last // self._alignment * self._alignment, 0, -self._alignment):
            if chain[end // self._hash_block - 1] in self._points:
                return end - self.peek
        return 0

    def stored(self, group: int, chain: Sequence[bytes], index: int, names: Sequence[BlockHash]) -> None:
        """One copy of the block that ends with hash `index` of a chain, of which `names` are ours, one per
        `alignment` tokens."""
        forest, theirs = self._forests[group], chain[index]
        self.num_copies += 1
        block = forest.blocks.get(theirs)
        if block is not None:
            block.copies += 1
            return
        end = (index + 1) * self._hash_block
        start = (end - 1) // forest.group.block_size * forest.group.block_size
        if forest.group.is_state:
            start = 0
        before = chain[start // self._hash_block - 1] if start else None
        first, last = start // self._alignment, end // self._alignment
        here: tuple[BlockHash, ...] = ()
        if forest is self._lead:
            here = tuple(names[first:last])
        elif forest is self._anchor and not end % self._alignment:
            here = (names[last - 1],)
        asked: tuple[bytes, ...] = ()
        if self.peek and forest is self._anchor and here and end > self.peek:
            asked = self._hashes_to_ask(chain, theirs, end)
        self._note(forest, forest.add(theirs, _PointBlock(end, before, here, asked)))

    def removed(self, group: int, theirs: bytes) -> None:
        """One copy less. Raises UnknownBlock."""
        forest = self._forests[group]
        block = forest.blocks.get(theirs)
        if block is None:
            raise UnknownBlock(f"the removed block {theirs.hex()} is not held in group {group}")
        block.copies -= 1
        self.num_copies -= 1
        if block.copies:
            return
        for each in set(block.asked) - {theirs}:
            others = tuple(asker for asker in self._askers[each] if asker != theirs)
            if others:
                self._askers[each] = others
            else:
                del self._askers[each]
        self._note(forest, forest.drop(theirs))

    def cleared(self) -> None:
        """Forget all copies, and all that was taken: readers forget it as well."""
        self.num_copies = 0
        for forest in self._forests:
            forest.blocks.clear()
            forest.after.clear()
        self._points.clear()
        self._doubtful.clear()
        self._askers.clear()
        self._told.clear()
        self._reach_changed.clear()

    def take(self) -> PointsChange:
        """Return what has changed since the last call: after all events of a step."""
        added: list[BlockHash] = []
        removed: list[BlockHash] = []
        for theirs, block in self._doubtful.items():
            is_point = self._may_end(theirs)
            if is_point and theirs not in self._points:
                self._points[theirs] = block.names[-1]
                added.append(block.names[-1])
            elif not is_point and theirs in self._points:
                removed.append(self._points.pop(theirs))
        self._doubtful.clear()
        reached, lost = self._take_reach()
        return PointsChange(tuple(added), tuple(removed), reached, lost)

    def _take_reach(self) -> tuple[list[Reached], tuple[BlockHash, ...]]:
        reached: list[Reached] = []
        lost: list[BlockHash] = []
        previous: bytes | None = None
        is_run = False
        for theirs, block in self._reach_changed.items():
            assert self._lead is not None
            now = self._lead.blocks.get(theirs)
            is_reached = now is not None and now.run > 0
            if is_reached == (theirs in self._told):
                continue
            if not is_reached:
                self._told.discard(theirs)
                lost += block.names
                continue
            self._told.add(theirs)
            is_run = is_run and block.before == previous
            previous = theirs
            if block.names:
                if is_run:
                    reached[-1].names.extend(block.names)
                else:
                    first_index = block.end // self._alignment - len(block.names)
                    reached.append(Reached([*block.names], first_index))
                    is_run = True
        self._reach_changed.clear()
        return reached, tuple(lost)

    def _hashes_to_ask(self, chain: Sequence[bytes], theirs: bytes, end: int) -> tuple[bytes, ...]:
        hit = end - self.peek
        asked = tuple(chain[(hit + forest.peek) // self._hash_block - 1] for forest in self._asked)
        for each in set(asked) - {theirs}:
            self._askers[each] = (*self._askers.get(each, ()), theirs)
        return asked

    def _note(self, forest: _Forest, changed: Iterator[tuple[bytes, _PointBlock]]) -> None:
        """Every block of `changed` has another run than before, is new or is gone."""
        anchored = self._anchor.blocks
        for theirs, block in changed:
            if forest is self._lead:
                self._reach_changed.setdefault(theirs, block)
            here = block if forest is self._anchor else anchored.get(theirs)
            if here is not None and here.names and not here.end % self._alignment:
                self._doubtful.setdefault(theirs, here)
            for asker in self._askers.get(theirs, ()) if self._askers else ():
                self._doubtful.setdefault(asker, anchored[asker])

    def _may_end(self, theirs: bytes) -> bool:
        block = self._anchor.blocks.get(theirs)
        if block is None or block.end <= self.peek:
            return False
        hit = block.end - self.peek
        if block.asked:
            return all(forest.holds(each, hit) for forest, each in zip(self._asked, block.asked, strict=True))
        return all(forest.holds(theirs, hit) for forest in self._asked)
