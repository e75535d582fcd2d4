"""Rows, KVBlocks, CachedAttention: shared by the implementations of attention to cached keys.

Owns the layout of the paged cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

CachedAttend = Callable[[int, torch.Tensor, torch.Tensor], None]
"""(layer, queries, outputs), both `[tokens, heads, head_dim]`: write the outputs of the rows planned for."""


class Rows(NamedTuple):
    """Rows of a batch, `first` and the following: tokens `[start, start + num_tokens)` of one sequence.

    `block_ids` is the sequence's block table, which may have more blocks than it takes.
    """

    first: int
    start: int
    num_tokens: int
    block_ids: Sequence[int]

    @property
    def place(self) -> slice:
        return slice(self.first, self.first + self.num_tokens)

    def num_blocks(self, block_size: int) -> int:
        """Blocks that hold the sequence up to the last of these tokens."""
        return (self.start + self.num_tokens - 1) // block_size + 1

    def pieces(self, most: int) -> "list[Rows]":
        """These rows cut into pieces of `most` tokens; the last may have fewer."""
        return [
            Rows(self.first + begin, self.start + begin, min(most, self.num_tokens - begin), self.block_ids)
            for begin in range(0, self.num_tokens, most)
        ]


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """The memory of all blocks: `tensor` is `[2, layers, blocks, block_size * kv_heads * head_dim]`."""

    tensor: torch.Tensor
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_blocks(self) -> int:
        return self.tensor.shape[2]

    @property
    def queries_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def slots(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values by slot, the place of one token: each `[slots, kv_heads,
        head_dim]`."""
        keys, values = (store[layer].view(-1, self.num_kv_heads, self.head_dim) for store in self.tensor)
        return keys, values


class CachedAttention(Protocol):
    """Attention of rows to the keys of their sequences, all of which are in blocks by then."""

    def plan(self, rows: Sequence[Rows]) -> CachedAttend:
        """For one step. Those of one token come first, by falling length."""
