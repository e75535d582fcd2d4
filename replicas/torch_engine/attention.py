"""KVPool: the paged key-value cache of a model, and attention over it.

Owns the memory of all blocks and the way from a block table to keys and values. Block tables come with the
chunks.

A layer first writes the keys and values of the whole batch, then attends. So a request may read blocks
that another one fills in the same step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from replicas.checkpoints.model_config import ModelConfig
from replicas.scheduling.request import Chunk

_MAX_GATHERED_TOKENS = 32_768
"""Most tokens (padding included) whose keys one decode group gathers: bounds the scratch memory."""
_QUERIES_PER_PIECE = 256
"""A chunk behind a prefix attends in pieces, each over the keys up to its own end: half the work."""


@dataclass(frozen=True, slots=True)
class _SingleGroup:
    """Chunks of one token and similar length, attended as one padded batch. `rows` lie side by side."""

    rows: slice
    num_requests: int
    block_ids: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries of one chunk, `num_keys` keys of its sequence, and who may look at whom."""

    rows: slice
    num_keys: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Span:
    """A chunk of several tokens. `block_ids` None: it starts its sequence, and needs nothing cached."""

    rows: slice
    block_ids: torch.Tensor | None
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where the batch's keys go and what each row attends to; the same for every layer of a step."""

    slots: torch.Tensor
    groups: tuple[_SingleGroup, ...]
    spans: tuple[_Span, ...]


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


class KVPool:
    """All KV blocks of a replica, allocated once. Block 0, the null block, stays zero: it pads tables."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self._dtype = dtype
        self._device = device
        self._num_kv_heads, self._head_dim = config.num_kv_heads, config.head_dim
        self._queries_per_kv_head = config.num_heads // config.num_kv_heads
        width = config.num_kv_heads * config.head_dim
        shape = (2, config.num_layers, num_blocks, block_size * width)
        self._blocks = torch.zeros(shape, dtype=dtype, device=device)
        self._ramp = torch.zeros((0, 0), dtype=dtype, device=device)

    def plan(self, chunks: Sequence[Chunk]) -> AttentionPlan:
        """`chunks` in the order of the batch's rows: those of one token first, by falling length."""
        num_singles = sum(chunk.num_tokens == 1 for chunk in chunks)
        assert all(chunk.num_tokens == 1 for chunk in chunks[:num_singles])
        row, spans = num_singles, []
        for chunk in chunks[num_singles:]:
            spans.append(self._span(chunk, row))
            row += chunk.num_tokens
        return AttentionPlan(
            slots=torch.from_numpy(self._slots(chunks)).to(self._device),
            groups=tuple(self._groups(chunks[:num_singles])),
            spans=tuple(spans),
        )

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """Store `keys` and `values` (`[tokens, kv_heads, head_dim]`); the heads' outputs, side by side."""
        if self._dtype == torch.float16:
            # An overflow in float16 must not outlive its request: masked or not, a NaN spreads.
            keys, values = keys.nan_to_num(0.0, 0.0, 0.0), values.nan_to_num(0.0, 0.0, 0.0)
        for store, new in zip(self._blocks, (keys, values), strict=True):
            store[layer].view(-1, self._num_kv_heads, self._head_dim).index_copy_(0, plan.slots, new)
        outputs = torch.empty_like(queries)
        for group in plan.groups:
            outputs[group.rows] = self._attend_singles(layer, queries[group.rows], group)
        for span in plan.spans:
            if span.block_ids is None:
                known = keys[span.rows], values[span.rows]
            else:
                known = self._gather(layer, span.block_ids, 1)
            self._attend_span(queries, known, span, outputs)
        return outputs.flatten(1)

    def _attend_singles(self, layer: int, queries: torch.Tensor, group: _SingleGroup) -> torch.Tensor:
        """The query heads that share a key head take the place of query positions: no copies of keys."""
        keys, values = self._gather(layer, group.block_ids, group.num_requests)
        grouped = queries.view(-1, self._num_kv_heads, self._queries_per_kv_head, self._head_dim)
        attended = scaled_dot_product_attention(
            grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=group.mask
        )
        return attended.reshape(queries.shape)

    def _attend_span(
        self,
        queries: torch.Tensor,
        known: tuple[torch.Tensor, torch.Tensor],
        span: _Span,
        outputs: torch.Tensor,
    ) -> None:
        keys, values = (
            self._as_heads(tensor.view(-1, self._num_kv_heads, self._head_dim)) for tensor in known
        )
        shared = keys.shape[1] != queries.shape[1]
        if not span.pieces:
            query = self._as_heads(queries[span.rows], expand=False)
            attended = scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=shared)
            outputs[span.rows] = attended[0].transpose(0, 1)
        for piece in span.pieces:
            attended = scaled_dot_product_attention(
                self._as_heads(queries[piece.rows], expand=False),
                keys[:, :, : piece.num_keys],
                values[:, :, : piece.num_keys],
                attn_mask=piece.mask,
                enable_gqa=shared,
            )
            outputs[piece.rows] = attended[0].transpose(0, 1)

    def _as_heads(self, tensor: torch.Tensor, *, expand: bool = True) -> torch.Tensor:
        """`[tokens, heads, head_dim]` as a batch of one. On CUDA keys are repeated for each query head,
        because the kernels that take a mask do not share them and the fallback holds all scores at once."""
        heads = tensor.transpose(0, 1).unsqueeze(0)
        if expand and self._device.type == "cuda" and self._queries_per_kv_head > 1:
            return heads.repeat_interleave(self._queries_per_kv_head, dim=1)
        return heads

    def _gather(
        self, layer: int, block_ids: torch.Tensor, num_tables: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of block tables of equal length: each `[tables, tokens, kv_heads, head_dim]`."""
        shape = (num_tables, -1, self._num_kv_heads, self._head_dim)
        keys, values = self._blocks
        return (
            keys[layer].index_select(0, block_ids).view(shape),
            values[layer].index_select(0, block_ids).view(shape),
        )

    def _slots(self, chunks: Sequence[Chunk]) -> npt.NDArray[np.int64]:
        """The place of every row's token in the pool, counted in tokens."""
        size = self.block_size
        places: list[npt.NDArray[np.int64]] = []
        singles: list[int] = []
        for request, start, num_tokens, _ in chunks:
            if num_tokens == 1:
                singles.append(request.block_ids[start // size] * size + start % size)
                continue
            positions = np.arange(start, start + num_tokens)
            first = start // size
            table = np.array(request.block_ids[first : (start + num_tokens - 1) // size + 1], dtype=np.int64)
            places.append(table[positions // size - first] * size + positions % size)
        return np.concatenate([np.array(singles, dtype=np.int64), *places])

    def _groups(self, chunks: Sequence[Chunk]) -> Iterator[_SingleGroup]:
        """Cut rows, sorted by falling length, where padding would more than double a row or memory ends."""
        begin = 0
        while begin < len(chunks):
            num_blocks = self._num_blocks(chunks[begin])
            most = max(1, _MAX_GATHERED_TOKENS // (num_blocks * self.block_size))
            end = begin + 1
            while (
                end < len(chunks) and end - begin < most and self._num_blocks(chunks[end]) * 2 >= num_blocks
            ):
                end += 1
            yield self._group(chunks[begin:end], begin, num_blocks)
            begin = end

    def _group(self, chunks: Sequence[Chunk], first_row: int, num_blocks: int) -> _SingleGroup:
        table = np.zeros((len(chunks), num_blocks), dtype=np.int64)
        for index, chunk in enumerate(chunks):
            used = self._num_blocks(chunk)
            table[index, :used] = chunk.request.block_ids[:used]
        newest = np.array([chunk.start for chunk in chunks])
        hidden = np.arange(num_blocks * self.block_size)[None, :] > newest[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
        return _SingleGroup(
            rows=slice(first_row, first_row + len(chunks)),
            num_requests=len(chunks),
            block_ids=torch.from_numpy(table.ravel()).to(self._device),
            mask=mask[:, None, None, :].to(self._device),
        )

    def _num_blocks(self, chunk: Chunk) -> int:
        """Blocks that hold the sequence up to the chunk's end; its table may already have more."""
        return (chunk.start + chunk.num_tokens - 1) // self.block_size + 1

    def _span(self, chunk: Chunk, row: int) -> _Span:
        rows = slice(row, row + chunk.num_tokens)
        if chunk.start == 0:
            return _Span(rows, None, ())
        pieces = []
        for begin in range(0, chunk.num_tokens, _QUERIES_PER_PIECE):
            end = min(begin + _QUERIES_PER_PIECE, chunk.num_tokens)
            mask = self._causal_mask(end - begin, chunk.start + begin)
            pieces.append(_Piece(slice(row + begin, row + end), chunk.start + end, mask))
        block_ids = torch.tensor(chunk.request.block_ids[: self._num_blocks(chunk)], device=self._device)
        return _Span(rows, block_ids, tuple(pieces))

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
            self._ramp = full.triu_(reach + 1).to(device=self._device, dtype=self._dtype)
        skip = self._ramp.shape[1] - _QUERIES_PER_PIECE - num_before
        window = self._ramp[:num_queries, skip : skip + num_before + num_queries]
        # CUDA kernels want aligned masks; on a CPU the window will do as it is.
        return window.contiguous() if self._device.type == "cuda" else window
