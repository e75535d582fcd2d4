"""CacheGroup: layers that keep their KV alike, which of it a hit needs, and which of it stays cached.

The rules are those of vLLM's cache for models that mix full attention, sliding windows, chunked attention and
states (mamba and its like). Pure: knows no pool and no request.
"""

import enum
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


class GroupKind(enum.StrEnum):
    FULL = "full"
    """Reads everything before a token."""
    WINDOW = "window"
    """Reads the last `span` tokens, the token itself included."""
    CHUNKED = "chunked"
    """Reads from the last multiple of `span` on."""
    STATE = "state"
    """Reads a state of fixed size, which is written at the end of each step."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """A block is a page of the pool, which all groups of a model share. `span` is in tokens."""

    kind: GroupKind
    block_size: int
    span: int = 0

    def __post_init__(self) -> None:
        has_span = self.kind in (GroupKind.WINDOW, GroupKind.CHUNKED)
        if self.block_size < 1 or (self.span > 1) != has_span:
            raise ValueError(f"a {self.kind} group has no block of {self.block_size} and span of {self.span}")

    @property
    def is_full(self) -> bool:
        return self.kind is GroupKind.FULL

    def first_read(self, num_tokens: int) -> int:
        """Return the first block that is read when the token after `num_tokens` is computed."""
        match self.kind:
            case GroupKind.FULL:
                return 0
            case GroupKind.WINDOW:
                return max(0, num_tokens - self.span + 1) // self.block_size
            case GroupKind.CHUNKED:
                return num_tokens // self.span * self.span // self.block_size
            case GroupKind.STATE:
                return max(0, -(-num_tokens // self.block_size) - 1)

    def needed(self, position: int) -> range:
        """Return the blocks that a hit of `position` tokens needs."""
        end = position // self.block_size
        match self.kind:
            case GroupKind.FULL:
                return range(end)
            case GroupKind.WINDOW:
                return range(max(0, end - self._tail), end)
            case GroupKind.CHUNKED:
                return range(position // self.span * self.span // self.block_size, end)
            case GroupKind.STATE:
                return range(end - 1, end)

    def keeps(self, block: int, boundaries: Collection[int], retention: int) -> bool:
        """Whether a computed block stays cached after its request.

        `boundaries` are positions at which hits are foreseen. `retention` is the interval of further ones,
        in tokens; 0 is none.
        """
        if self.kind in (GroupKind.FULL, GroupKind.CHUNKED):
            return True
        num_kept = 1 if self.kind is GroupKind.STATE else self._tail
        if retention and -(block + 1) % (retention // self.block_size) < num_kept:
            return True
        return any(0 < at // self.block_size - block <= num_kept for at in boundaries)

    def most_blocks(self, num_tokens: int, max_batched_tokens: int) -> int:
        """Return the blocks that a request of `num_tokens` holds at a time, at most."""
        all_blocks = -(-num_tokens // self.block_size)
        match self.kind:
            case GroupKind.FULL:
                return all_blocks
            case GroupKind.WINDOW:
                return min(all_blocks, -(-(self.span - 1 + max_batched_tokens) // self.block_size) + 1)
            case GroupKind.CHUNKED:
                return min(all_blocks, -(-(self.span + max_batched_tokens) // self.block_size))
            case GroupKind.STATE:
                return min(all_blocks, 2)

    @property
    def _tail(self) -> int:
        """Blocks of the window before a hit."""
        return -(-(self.span - 1) // self.block_size)


def alignment_of(groups: Sequence[CacheGroup]) -> int:
    """Return the tokens of which every hit is a multiple."""
    return math.lcm(*(group.block_size for group in groups))


def num_blocks_for(capacity_tokens: int, groups: Sequence[CacheGroup]) -> int:
    """Return the pool's blocks if `capacity_tokens` fit when no group forgets anything."""
    return sum(capacity_tokens // group.block_size for group in groups)


def most_blocks(groups: Sequence[CacheGroup], num_tokens: int, max_batched_tokens: int) -> int:
    """Return the blocks that a request holds at a time, at most, if a step computes that many tokens."""
    return sum(group.most_blocks(num_tokens, max_batched_tokens) for group in groups)


def longest_prompt(num_blocks: int, groups: Sequence[CacheGroup], max_batched_tokens: int) -> int:
    """Return the tokens of the longest prompt that fits into a pool, a multiple of the alignment."""
    alignment, low, high = alignment_of(groups), 0, num_blocks
    while low < high:
        middle = (low + high + 1) // 2
        if most_blocks(groups, middle * alignment, max_batched_tokens) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low * alignment


MODELS: Mapping[str, str] = {
    "gpt-oss": "window:16:128 full:16",
    "gemma-3": "5*window:16:1024 full:16",
    "llama-4": "3*chunked:16:8192 full:16",
    "qwen3-next": "3*state:528 full:528",
    "deepseek-v4": "full:256 window:64:128 window:8:12 window:4:8",
}
"""Shapes of models by name."""

_GROUP = re.compile(r"(?:(\d+)\*)?(full|window|chunked|state):(\d+)(?::(\d+))?")


def parse_groups(text: str) -> tuple[CacheGroup, ...]:
    """Parse one of MODELS' names or groups as written there: `[COUNT*]KIND:BLOCK_SIZE[:SPAN]`, by spaces.

    Raises ValueError.
    """
    groups: list[CacheGroup] = []
    for word in MODELS.get(text, text).split():
        match = _GROUP.fullmatch(word)
        if match is None:
            raise ValueError(
                f"cache groups are {', '.join(MODELS)}, or words like 3*state:528, full:16 and window:16:128,"
                f" not {word}"
            )
        count, kind, block_size, span = match.groups()
        groups += [CacheGroup(GroupKind(kind), int(block_size), int(span or 0))] * int(count or 1)
    if not groups:
        raise ValueError("a model has at least one cache group")
    return tuple(groups)
