"""The groups of a simulated model: as they are written, and which of their KV stays cached.

What a hit needs of them is `kvcache/cache_groups.py`'s. Which blocks stay is as in vLLM's cache. Pure: knows
no pool and no request.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence

from replicas.kvcache.cache_groups import CHUNKED, FULL, MAMBA, WINDOW, CacheGroup


def first_read(group: CacheGroup, num_tokens: int) -> int:
    """Return the first block that is read when the token after `num_tokens` is computed."""
    if group.is_full:
        return 0
    if group.is_state:
        return max(0, -(-num_tokens // group.block_size) - 1)
    if group.kind == CHUNKED:
        return num_tokens // group.span * group.span // group.block_size
    return max(0, num_tokens - group.span + 1) // group.block_size


def read_until(group: CacheGroup, block: int) -> float:
    """Return the least number of computed tokens after which this block is not read any more."""
    if group.is_full:
        return math.inf
    if group.is_state:
        return (block + 1) * group.block_size + 1
    if group.kind == CHUNKED:
        return (block * group.block_size // group.span + 1) * group.span
    return (block + 1) * group.block_size + group.span - 1


def keeps(group: CacheGroup, block: int, boundaries: Collection[int], retention: int) -> bool:
    """Whether a computed block stays cached after its request.

    `boundaries` are positions at which hits are foreseen. `retention` is the interval of further ones,
    in tokens; 0 is none.
    """
    if group.is_full or group.kind == CHUNKED:
        return True
    if retention and -(block + 1) % (retention // group.block_size) < group.tail:
        return True
    return any(0 < at // group.block_size - block <= group.tail for at in boundaries)


def alignment_of(groups: Sequence[CacheGroup]) -> int:
    """Return the tokens of which every hit is a multiple."""
    return math.lcm(*(group.block_size for group in groups))


def num_blocks_for(capacity_tokens: int, groups: Sequence[CacheGroup]) -> int:
    """Return the pool's blocks if `capacity_tokens` fit when no group forgets anything."""
    return sum(capacity_tokens // group.block_size for group in groups)


def most_blocks(groups: Sequence[CacheGroup], num_tokens: int, max_batched_tokens: int) -> int:
    """Return the blocks that a request holds at a time, at most, if a step computes that many tokens."""
    return sum(_most_blocks(group, num_tokens, max_batched_tokens) for group in groups)


def _most_blocks(group: CacheGroup, num_tokens: int, max_batched_tokens: int) -> int:
    all_blocks = -(-num_tokens // group.block_size)
    if group.is_full:
        return all_blocks
    if group.is_state:
        return min(all_blocks, 2)
    if group.kind == CHUNKED:
        return min(all_blocks, -(-(group.span + max_batched_tokens) // group.block_size))
    return min(all_blocks, -(-(group.span - 1 + max_batched_tokens) // group.block_size) + 1)


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

_KINDS: Mapping[str, str] = {"full": FULL, "window": WINDOW, "chunked": CHUNKED, "state": MAMBA}

_GROUP = re.compile(rf"(?:(\d+)\*)?({'|'.join(_KINDS)}):(\d+)(?::(\d+))?")


def parse_groups(text: str) -> tuple[CacheGroup, ...]:
    """Parse one of MODELS' names or groups as written there: `[COUNT*]KIND:BLOCK_SIZE[:WINDOW]`, by spaces.

    Raises ValueError, also for shapes that are not simulated.
    """
    groups: list[CacheGroup] = []
    for word in MODELS.get(text, text).split():
        match = _GROUP.fullmatch(word)
        if match is None:
            raise ValueError(
                f"cache groups are {', '.join(MODELS)}, or words like 3*state:528, full:16 and window:16:128,"
                f" not {word}"
            )
        count, kind, block_size, window = match.groups()
        has_window = _KINDS[kind] in (WINDOW, CHUNKED)
        if int(block_size) < 1 or (int(window or 0) > 1) != has_window:
            raise ValueError(f"a {kind} group has no block of {block_size} and window of {window or 0}")
        group = CacheGroup(_KINDS[kind], int(block_size), int(window) if window else None)
        groups += [group] * int(count or 1)
    if not groups:
        raise ValueError("a model has at least one cache group")
    _check_hits_are_whole(groups)
    return tuple(groups)


def _check_hits_are_whole(groups: Sequence[CacheGroup]) -> None:
    """Raises ValueError where vLLM would end hits within a state's block, which is not simulated."""
    smallest = math.gcd(*(group.block_size for group in groups))
    larger = [group.block_size for group in groups if group.is_state and group.block_size > smallest]
    others = [group for group in groups if not (group.is_full or group.is_state)]
    if larger and all(group.block_size == smallest for group in others):
        raise ValueError(
            f"states of {larger[0]} tokens, within which vLLM ends hits at multiples of {smallest}, are not"
            " simulated: give all groups one block size"
        )
