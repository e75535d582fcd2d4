"""CacheGroup: layers that cache alike, and what a hit needs of them.

vLLM's rule. A hit of p tokens, a multiple of the alignment, needs of each group:

=============  =====================================================================
full           every block up to p
sliding w      the `ceil((w - 1) / block)` blocks before p, or all if p is shorter
chunked c      the blocks from the start of p's chunk up to p; none if p begins one
mamba          the one state at p
=============  =====================================================================

Pure: knows no pool, no hashes and no request.
"""

from collections.abc import Iterable
from dataclasses import dataclass

FULL = "full_attention"
WINDOW = "sliding_window"
CHUNKED = "chunked_local_attention"
MAMBA = "mamba"
FULL_KINDS = frozenset({FULL, "mla_attention", "sink_full_attention"})
WINDOW_KINDS = frozenset({WINDOW, "sliding_window_mla"})
KINDS = FULL_KINDS | WINDOW_KINDS | {CHUNKED, MAMBA}


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """`kind` is as vLLM's events name it. `window` is the tokens of a sliding window, the token itself
    included, or of a chunk. `has_draft`: a draft model reads this cache."""

    kind: str
    block_size: int
    window: int | None = None
    has_draft: bool = False
    is_cacheable: bool = True

    @property
    def is_full(self) -> bool:
        return self.kind in FULL_KINDS

    @property
    def is_state(self) -> bool:
        """Whether a block is a state of fixed size, which is written at the end of a step."""
        return self.kind == MAMBA

    @property
    def span(self) -> int:
        """The window of a group that has one."""
        assert self.window is not None
        return self.window

    @property
    def tail(self) -> int:
        """Blocks of a sliding window before a hit; of a state, the state."""
        return 1 if self.is_state else -(-(self.span - 1) // self.block_size)

    def needed(self, end: int) -> range:
        """Return the blocks that a hit of `end` tokens needs."""
        if self.is_state:
            last = -(-end // self.block_size)
            return range(last - 1, last)
        last = end // self.block_size
        if self.is_full:
            return range(last)
        if self.kind == CHUNKED:
            return range(end // self.span * self.span // self.block_size, last)
        return range(max(0, last - self.tail), last)

    def peek(self, alignment: int) -> int:
        """Tokens behind a hit that this group must still hold."""
        if not self.has_draft or self.is_state:
            return 0
        return min(self.block_size, alignment) if self.is_full else self.block_size


def state_tokens_of(groups: Iterable[CacheGroup]) -> int:
    """Return the tokens of a state's block, the largest if they differ; 0 without states."""
    return max((group.block_size for group in groups if group.is_state), default=0)
