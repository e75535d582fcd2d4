"""KernelAttention: attention that reads keys and values where they lie, by torch's flex_attention.

Owns the way from block tables to the kernel's block masks. The kernel is compiled for this machine: by
Triton on CUDA, by a C++ compiler on a CPU. Whether that works here is not its concern.

Queries attend in tiles, each of one sequence. A tile is given the blocks of its sequence in two lists::

    block table   b0 b1 b2 b3 b4 | not written yet
    a tile's queries      ^^^^^^^^
                  full    | partial: a query sees the keys up to its own position
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from replicas.torch_engine.rows import CachedAttend, KVBlocks, Rows

TILE_TOKENS = 128
SINGLES, TILES = (1, 8, 64), (4,)
"""Sequences of one token, and tiles, per call of the kernel. It is compiled for each of these numbers,
because they determine how it splits long sequences. Unused places cost almost nothing."""
_HIDDEN = 2**30


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of the kernel besides queries, keys and values. Its first `num_rows` rows are wanted."""

    rows: torch.Tensor
    num_rows: int
    positions: torch.Tensor
    full: tuple[torch.Tensor, torch.Tensor]
    partial: tuple[torch.Tensor, torch.Tensor]


class KernelAttention:
    """The scratch memory of a step depends on the batch and on the cache's size, not on the context."""

    def __init__(self, blocks: KVBlocks) -> None:
        self._blocks = blocks
        # Where the tokens of a block begin in their sequence; only blocks that are partial are asked for.
        self._starts = torch.full((blocks.num_blocks,), _HIDDEN, dtype=torch.int32, device=blocks.device)
        # A compiled function of its own for each cache, so that none uses up another's recompilations.
        self._kernel = torch.compile(  # type: ignore[call-overload]  # its stubs lack the newest argument
            partial(_attend_tiles, block_size=blocks.block_size),
            fullgraph=True,
            dynamic=False,
            isolate_recompiles=True,
        )

    def plan(self, rows: Sequence[Rows]) -> CachedAttend:
        singles = [single for single in rows if single.num_tokens == 1]
        tiles = [tile for span in rows[len(singles) :] for tile in span.pieces(TILE_TOKENS)]
        calls = [
            *(self._call(group, 1, SINGLES) for group in _groups(singles, SINGLES[-1])),
            *(self._call(group, TILE_TOKENS, TILES) for group in _groups(tiles, TILES[-1])),
        ]
        return partial(self._attend, calls)

    def _attend(
        self, calls: Sequence[_Call], layer: int, queries: torch.Tensor, outputs: torch.Tensor
    ) -> None:
        keys, values = (store.transpose(0, 1).unsqueeze(0) for store in self._blocks.slots(layer))
        for call in calls:
            tiles = queries.index_select(0, call.rows).view(*call.positions.shape, *queries.shape[1:])
            attended = self._kernel(
                tiles.transpose(1, 2), keys, values, self._starts, call.positions, call.full, call.partial
            )
            answers = attended.transpose(1, 2).flatten(0, 1)[: call.num_rows]
            outputs.index_copy_(0, call.rows[: call.num_rows], answers)

    def _call(self, tiles: Sequence[Rows], num_tokens: int, sizes: Sequence[int]) -> _Call:
        """A tile that is too short repeats its last token: the same answer comes out again."""
        block_size = self._blocks.block_size
        size = next(size for size in sizes if size >= len(tiles))
        lasts = np.array([tile.num_tokens - 1 for tile in tiles])[:, None]
        offsets = np.minimum(np.arange(num_tokens), lasts)
        rows = np.zeros((size, num_tokens), dtype=np.int64)
        rows[: len(tiles)] = np.array([tile.first for tile in tiles])[:, None] + offsets
        positions = np.zeros((size, num_tokens), dtype=np.int32)
        positions[: len(tiles)] = np.array([tile.start for tile in tiles])[:, None] + offsets
        full: list[Sequence[int]] = []
        part: list[Sequence[int]] = []
        begins: list[int] = []
        for tile in tiles:
            num_full = (tile.start + 1) // block_size
            full.append(tile.block_ids[:num_full])
            part.append(tile.block_ids[num_full : tile.num_blocks(block_size)])
            begins.extend(range(num_full * block_size, tile.start + tile.num_tokens, block_size))
        written = torch.tensor([block_id for block_ids in part for block_id in block_ids], dtype=torch.int64)
        starts = torch.tensor(begins, dtype=torch.int32)
        self._starts.index_copy_(0, written.to(self._starts.device), starts.to(self._starts.device))
        return _Call(
            rows=torch.from_numpy(rows.ravel()).to(self._blocks.device),
            num_rows=len(tiles) * num_tokens,
            positions=torch.from_numpy(positions).to(self._blocks.device),
            full=self._block_lists(full, size),
            partial=self._block_lists(part, size),
        )

    def _block_lists(self, lists: Sequence[Sequence[int]], size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the lists' lengths, and the lists at the head of rows that could hold every block."""
        lengths = np.zeros((size, 1, 1), dtype=np.int32)
        lengths[: len(lists), 0, 0] = [len(block_ids) for block_ids in lists]
        table = np.zeros((len(lists), lengths.max()), dtype=np.int32)
        for row, block_ids in zip(table, lists, strict=True):
            row[: len(block_ids)] = block_ids
        device = self._blocks.device
        indices = torch.empty((size, 1, 1, self._blocks.num_blocks), dtype=torch.int32, device=device)
        indices[: len(lists), 0, 0, : table.shape[1]] = torch.from_numpy(table).to(device)
        return torch.from_numpy(lengths).to(device), indices


def _groups(tiles: Sequence[Rows], most: int) -> list[Sequence[Rows]]:
    return [tiles[begin : begin + most] for begin in range(0, len(tiles), most)]


def _attend_tiles(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    positions: torch.Tensor,
    full: tuple[torch.Tensor, torch.Tensor],
    partial: tuple[torch.Tensor, torch.Tensor],
    *,
    block_size: int,
) -> torch.Tensor:
    """`queries` are `[tiles, heads, tokens, head_dim]`, keys and values `[1, kv_heads, slots, head_dim]`."""

    def is_visible(
        tile: torch.Tensor, head: torch.Tensor, query: torch.Tensor, slot: torch.Tensor
    ) -> torch.Tensor:
        return starts[slot // block_size] + slot % block_size <= positions[tile, query]

    mask = BlockMask(
        seq_lengths=(queries.shape[2], keys.shape[2]),
        kv_num_blocks=partial[0],
        kv_indices=partial[1],
        full_kv_num_blocks=full[0],
        full_kv_indices=full[1],
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(TILE_TOKENS, block_size),
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
