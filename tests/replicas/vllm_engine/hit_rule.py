"""The rule by which vLLM finds the longest hit, written down the slow way: from counts of copies alone."""

from collections import Counter
from collections.abc import Iterator, Sequence

from replicas.kvcache.cache_groups import CHUNKED, MAMBA, CacheGroup


class HitRule:
    """`copies` has for each group the hashes that it holds. A chain is a prompt's hashes, one per
    `hash_block` tokens."""

    def __init__(self, groups: Sequence[CacheGroup], hash_block: int, alignment: int) -> None:
        self.groups, self.hash_block, self.alignment = groups, hash_block, alignment
        self.copies: list[Counter[bytes]] = [Counter() for _ in groups]
        self.peek = max(group.peek(alignment) for group in groups)

    def hit(self, chain: Sequence[bytes], num_tokens: int) -> int:
        """The longest hit of a prompt in tokens; its last token is never one of them."""
        return max(self._hits(chain, num_tokens - 1), default=0)

    def is_point(self, chain: Sequence[bytes]) -> bool:
        """Whether every prompt that goes on behind this chain hits all of it, but for the peek."""
        hit = len(chain) * self.hash_block - self.peek
        limit = hit if len(self.groups) > 1 else len(chain) * self.hash_block
        return hit > 0 and hit in self._hits(chain, limit)

    def reach(self, chain: Sequence[bytes]) -> int:
        """The tokens of a chain that the first group of full attention holds without a gap."""
        number = next(number for number, group in enumerate(self.groups) if group.is_full)
        return self._full_reach(number, chain, len(chain) * self.hash_block)

    def _hits(self, chain: Sequence[bytes], limit: int) -> Iterator[int]:
        for end in range(limit // self.alignment * self.alignment, 0, -self.alignment):
            groups = [(number, group) for number, group in enumerate(self.groups) if group.is_cacheable]
            if all(self._has(number, group, chain, end, limit) for number, group in groups):
                yield end

    def _has(self, number: int, group: CacheGroup, chain: Sequence[bytes], end: int, limit: int) -> bool:
        peek, size = group.peek(self.alignment), group.block_size
        bound = limit
        if len(self.groups) > 1:
            bound = min(limit + peek, len(chain) * self.hash_block)
        if end + peek > bound:
            return False
        if group.is_full:
            return self._full_reach(number, chain, bound) >= end + peek
        if group.kind == MAMBA:
            needed = [end]
        elif group.kind == CHUNKED:
            assert group.window is not None
            start = end // group.window * group.window // size * size
            needed = [*range(start + size, end + 1, size)]
        else:
            assert group.window is not None
            num_tokens = -(-(group.window - 1) // size) * size
            needed = [*range(max(0, end - num_tokens) + size, end + peek + 1, size)]
        return all(self.copies[number][chain[each // self.hash_block - 1]] for each in needed)

    def _full_reach(self, number: int, chain: Sequence[bytes], bound: int) -> int:
        """With blocks larger than hashes the last one may be held in part."""
        copies, size, step = self.copies[number], self.groups[number].block_size, self.hash_block
        end = 0
        while end + size <= bound and copies[chain[(end + size) // step - 1]]:
            end += size
        parts = range(min(end + size - step, bound // step * step), end, -step)
        return next((part for part in parts if copies[chain[part // step - 1]]), end)
