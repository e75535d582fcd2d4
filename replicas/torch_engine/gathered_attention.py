"""GatheredAttention: attention over copies of the cached keys and values, with torch's own kernels.

Owns the grouping of sequences and the masks. Needs no compiler, so it works everywhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from replicas.torch_engine.rows import CachedAttend, KVBlocks, Rows

_MAX_GATHERED_TOKENS = 32_768
"""Most tokens (padding included) whose keys one decode group gathers: bounds the scratch memory."""
_QUERIES_PER_PIECE = 256
"""On a CPU a chunk behind a prefix attends in pieces, each over the keys up to its own end: half the work.
CUDA's kernels leave out by themselves what is masked."""


@dataclass(frozen=True, slots=True)
class _SingleGroup:
    """Rows of one token and similar length, attended as one padded batch. `rows` lie side by side."""

    rows: slice
    num_requests: int
    block_ids: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _ContextPiece:
    """Queries of one chunk, `num_keys` keys of its sequence, and their mask."""

    rows: slice
    num_keys: int
    mask: torch.Tensor | CausalBias


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A chunk of several tokens."""

    block_ids: torch.Tensor
    pieces: tuple[_ContextPiece, ...]


class GatheredAttention:
    """A step's scratch memory grows with the sequences that it reads."""

    def __init__(self, blocks: KVBlocks) -> None:
        self._blocks = blocks
        self._ramp = torch.zeros((0, 0), dtype=blocks.dtype, device=blocks.device)

    def plan(self, rows: Sequence[Rows]) -> CachedAttend:
        singles = [single for single in rows if single.num_tokens == 1]
        spans = [self._span(span) for span in rows[len(singles) :]]
        return partial(self._attend, tuple(self._groups(singles)), spans)

    def _attend(
        self,
        groups: Sequence[_SingleGroup],
        spans: Sequence[_Stretch],
        layer: int,
        queries: torch.Tensor,
        outputs: torch.Tensor,
    ) -> None:
        for group in groups:
            outputs[group.rows] = self._attend_singles(layer, queries[group.rows], group)
        for span in spans:
            self._attend_span(layer, queries, span, outputs)

    def _attend_singles(self, layer: int, queries: torch.Tensor, group: _SingleGroup) -> torch.Tensor:
        """The query heads that share a key head take the place of query positions: no copies of keys."""
        keys, values = self._gather(layer, group.block_ids, group.num_requests)
        grouped = queries.view(
            -1, self._blocks.num_kv_heads, self._blocks.queries_per_kv_head, self._blocks.head_dim
        )
        attended = scaled_dot_product_attention(
            grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=group.mask
        )
        return attended.reshape(queries.shape)

    def _attend_span(self, layer: int, queries: torch.Tensor, span: _Stretch, outputs: torch.Tensor) -> None:
        keys, values = (
            as_key_heads(known[0], self._blocks) for known in self._gather(layer, span.block_ids, 1)
        )
        for piece in span.pieces:
            attended = scaled_dot_product_attention(
                queries[piece.rows].transpose(0, 1).unsqueeze(0),
                keys[:, :, : piece.num_keys],
                values[:, :, : piece.num_keys],
                attn_mask=piece.mask,
                enable_gqa=keys.shape[1] != queries.shape[1],
            )
            outputs[piece.rows] = attended[0].transpose(0, 1)

    def _gather(
        self, layer: int, block_ids: torch.Tensor, num_tables: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of block tables of equal length: each `[tables, tokens, kv_heads, head_dim]`."""
        shape = (num_tables, -1, self._blocks.num_kv_heads, self._blocks.head_dim)
        keys, values = self._blocks.tensor
        return (
            keys[layer].index_select(0, block_ids).view(shape),
            values[layer].index_select(0, block_ids).view(shape),
        )

    def _groups(self, singles: Sequence[Rows]) -> Iterator[_SingleGroup]:
        """Cut rows, sorted by falling length, where padding would more than double a row or memory ends."""
        size = self._blocks.block_size
        begin = 0
        while begin < len(singles):
            num_blocks = singles[begin].num_blocks(size)
            most = max(1, _MAX_GATHERED_TOKENS // (num_blocks * size))
            end = begin + 1
            while (
                end < len(singles) and end - begin < most and singles[end].num_blocks(size) * 2 >= num_blocks
            ):
                end += 1
            yield self._group(singles[begin:end], num_blocks)
            begin = end

    def _group(self, singles: Sequence[Rows], num_blocks: int) -> _SingleGroup:
        size, dtype, device = self._blocks.block_size, self._blocks.dtype, self._blocks.device
        table = np.zeros((len(singles), num_blocks), dtype=np.int64)
        for index, single in enumerate(singles):
            used = single.num_blocks(size)
            table[index, :used] = single.block_ids[:used]
        newest = np.array([single.start for single in singles])
        hidden = np.arange(num_blocks * size)[None, :] > newest[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
        return _SingleGroup(
            rows=slice(singles[0].first, singles[0].first + len(singles)),
            num_requests=len(singles),
            block_ids=torch.from_numpy(table.ravel()).to(device),
            mask=mask[:, None, None, :].to(device),
        )

    def _span(self, span: Rows) -> _Stretch:
        device = self._blocks.device
        pieces = span.pieces(span.num_tokens if device.type == "cuda" else _QUERIES_PER_PIECE)
        block_ids = span.block_ids[: span.num_blocks(self._blocks.block_size)]
        return _Stretch(torch.tensor(block_ids, device=device), tuple(map(self._piece, pieces)))

    def _piece(self, piece: Rows) -> _ContextPiece:
        num_keys = piece.start + piece.num_tokens
        if self._blocks.device.type == "cuda":
            return _ContextPiece(piece.place, num_keys, causal_lower_right(piece.num_tokens, num_keys))
        return _ContextPiece(piece.place, num_keys, self._causal_mask(piece.num_tokens, piece.start))

    def _causal_mask(self, num_queries: int, num_before: int) -> torch.Tensor:
        """Query i sees the `num_before` keys before the first query, and queries 0 to i.

        Every such mask is a window of one band matrix, which grows as needed::

            . . . . . x x x
            . . . . . . x x        num_before 3: the columns from the third one on
            . . . . . . . x
        """
        if self._ramp.shape[1] < num_before + _QUERIES_PER_PIECE:
            reach = 2 * num_before
            full = torch.full((_QUERIES_PER_PIECE, reach + _QUERIES_PER_PIECE), -torch.inf)
            self._ramp = full.triu_(reach + 1).to(self._blocks.dtype)
        skip = self._ramp.shape[1] - _QUERIES_PER_PIECE - num_before
        return self._ramp[:num_queries, skip : skip + num_before + num_queries]


def as_key_heads(tensor: torch.Tensor, blocks: KVBlocks) -> torch.Tensor:
    """`[tokens, kv_heads, head_dim]` as a batch of one. In float32 on CUDA keys are repeated for each query
    head, because no kernel shares them there and the fallback holds all scores at once."""
    heads = tensor.transpose(0, 1).unsqueeze(0)
    if blocks.device.type == "cuda" and blocks.dtype == torch.float32:
        return heads.repeat_interleave(blocks.queries_per_kv_head, dim=1)
    return heads
