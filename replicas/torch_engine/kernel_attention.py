"""KernelAttention: rows of one token read keys and values where they lie, by torch's flex_attention.

Owns the way from block tables to the kernel's block masks. The kernel is compiled for this machine: by
Triton on CUDA, by a C++ compiler on a CPU. Whether that works here is not its concern.

All blocks of a sequence are named as partial, also those that are full: the kernel for few queries splits a
sequence among a GPU's processors by the partial blocks that it has, but by the size of the whole cache if any
block is full.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from replicas.torch_engine.rows import CachedAttend, CachedAttention, KVBlocks, Rows

SINGLES = (1, 8, 64)
"""Sequences per call of the kernel. It is compiled for each of these numbers, because they determine how it
splits long sequences. Unused places cost almost nothing."""
_QUERY_BLOCK = 128


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of the kernel besides queries, keys and values. `rows` has as many as there are places, of
    which the first `num_rows` are wanted. `newest` is the slot of each sequence's newest token."""

    rows: torch.Tensor
    num_rows: int
    newest: torch.Tensor
    num_blocks: torch.Tensor
    block_ids: torch.Tensor


class KernelAttention:
    """The scratch memory of a step depends on the batch and on the cache's size, not on the context.

    Rows of several tokens are left to `spans`.
    """

    def __init__(self, blocks: KVBlocks, spans: CachedAttention) -> None:
        self._blocks = blocks
        self._spans = spans
        # A compiled function of its own for each cache, so that none uses up another's recompilations.
        self._kernel = torch.compile(  # type: ignore[call-overload]  # its stubs lack the newest argument
            partial(_attend_singles, block_size=blocks.block_size),
            fullgraph=True,
            dynamic=False,
            isolate_recompiles=True,
        )

    def plan(self, rows: Sequence[Rows]) -> CachedAttend:
        singles = [single for single in rows if single.num_tokens == 1]
        most = SINGLES[-1]
        calls = [self._call(singles[begin : begin + most]) for begin in range(0, len(singles), most)]
        return partial(self._attend, calls, self._spans.plan(rows[len(singles) :]))

    def _attend(
        self,
        calls: Sequence[_Call],
        attend_spans: CachedAttend,
        layer: int,
        queries: torch.Tensor,
        outputs: torch.Tensor,
    ) -> None:
        keys, values = (store.transpose(0, 1).unsqueeze(0) for store in self._blocks.slots(layer))
        for call in calls:
            attended = self._kernel(
                queries.index_select(0, call.rows).unsqueeze(2),
                keys,
                values,
                call.newest,
                call.num_blocks,
                call.block_ids,
            )
            outputs.index_copy_(0, call.rows[: call.num_rows], attended[: call.num_rows, :, 0])
        attend_spans(layer, queries, outputs)

    def _call(self, singles: Sequence[Rows]) -> _Call:
        """Places beyond the sequences repeat the first row, and see nothing."""
        block_size, device = self._blocks.block_size, self._blocks.device
        size = next(size for size in SINGLES if size >= len(singles))
        rows = np.full(size, singles[0].first, dtype=np.int64)
        rows[: len(singles)] = [single.first for single in singles]
        lengths = np.zeros((size, 1, 1), dtype=np.int32)
        lengths[: len(singles), 0, 0] = [single.num_blocks(block_size) for single in singles]
        newest = np.zeros(size, dtype=np.int32)
        table = np.zeros((len(singles), lengths.max()), dtype=np.int32)
        for index, single in enumerate(singles):
            last, offset = divmod(single.start, block_size)
            table[index, : last + 1] = single.block_ids[: last + 1]
            newest[index] = table[index, last] * block_size + offset
        # The kernel wants rows that could hold every block.
        block_ids = torch.empty((size, 1, 1, self._blocks.num_blocks), dtype=torch.int32, device=device)
        block_ids[: len(singles), 0, 0, : table.shape[1]] = torch.from_numpy(table).to(device)
        return _Call(
            rows=torch.from_numpy(rows).to(device),
            num_rows=len(singles),
            newest=torch.from_numpy(newest).to(device),
            num_blocks=torch.from_numpy(lengths).to(device),
            block_ids=block_ids,
        )


def _attend_singles(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    newest: torch.Tensor,
    num_blocks: torch.Tensor,
    block_ids: torch.Tensor,
    *,
    block_size: int,
) -> torch.Tensor:
    """`queries` are `[sequences, heads, 1, head_dim]`, keys and values `[1, kv_heads, slots, head_dim]`."""

    def is_visible(
        sequence: torch.Tensor, head: torch.Tensor, query: torch.Tensor, slot: torch.Tensor
    ) -> torch.Tensor:
        """A sequence sees all of its blocks, except what follows its newest token in that token's block."""
        last = newest[sequence]
        return (slot <= last) | (slot // block_size != last // block_size)

    # The kernel for CPUs cannot be compiled without full blocks: it gets none of them.
    full = (None, None) if queries.is_cuda else (torch.zeros_like(num_blocks), torch.zeros_like(block_ids))
    mask = BlockMask(
        seq_lengths=(queries.shape[2], keys.shape[2]),
        kv_num_blocks=num_blocks,
        kv_indices=block_ids,
        full_kv_num_blocks=full[0],
        full_kv_indices=full[1],
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(_QUERY_BLOCK, block_size),
        mask_mod=is_visible,
    )
    attended = flex_attention(
        queries,
        keys,
        values,
        block_mask=mask,
        enable_gqa=queries.shape[1] != keys.shape[1],
        # Triton's kernel takes as many keys at a time as divide a block.
        kernel_options={"BLOCK_N": math.gcd(block_size, 64)},
    )
    assert isinstance(attended, torch.Tensor)
    return attended
