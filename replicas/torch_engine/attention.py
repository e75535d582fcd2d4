"""KVPool: the paged key-value cache of a model, and attention over it.

Owns the memory of all blocks, and the writing of a batch's own keys and values. Block tables come with the
chunks.

A layer first writes the keys and values of the whole batch, then attends. So a request may read blocks that
another one fills in the same step.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from replicas.checkpoints.model_config import ModelConfig
from replicas.process.settings import SettingsError
from replicas.scheduling.request import Chunk
from replicas.torch_engine.gathered_attention import GatheredAttention, as_key_heads
from replicas.torch_engine.kernel_attention import KernelAttention
from replicas.torch_engine.kernel_proof import complaint
from replicas.torch_engine.rows import CachedAttend, CachedAttention, KVBlocks, Rows

logger = logging.getLogger(__name__)
KERNEL_DEVICES = ("cuda",)
"""Devices on which auto tries the kernel. On a CPU, a start would wait for a C++ compiler."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The places of the batch's keys, and what each row attends to; equal for every layer of a step.

    Rows in `fresh` start their sequence: they attend to each other, and need nothing cached.
    """

    slots: torch.Tensor
    fresh: tuple[slice, ...]
    attend_cached: CachedAttend


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


class KVPool:
    """All KV blocks of a replica, allocated once. Block 0, the null block, stays zero: it pads tables.

    `attention` is the way to cached keys: gather, kernel, or auto. Raises SettingsError for a kernel that
    cannot be had on this machine.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        attention: str = "auto",
    ) -> None:
        width = config.num_kv_heads * config.head_dim
        shape = (2, config.num_layers, num_blocks, block_size * width)
        self._blocks = KVBlocks(
            torch.zeros(shape, dtype=dtype, device=device),
            block_size=block_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        self.attention, self._cached = _choose(attention, self._blocks)

    @property
    def blocks(self) -> KVBlocks:
        return self._blocks

    def plan(self, chunks: Sequence[Chunk]) -> AttentionPlan:
        """`chunks` in the order of the batch's rows: those of one token first, by falling length."""
        num_singles = sum(chunk.num_tokens == 1 for chunk in chunks)
        assert all(chunk.num_tokens == 1 for chunk in chunks[:num_singles])
        row, fresh, behind = 0, [], []
        for request, start, num_tokens, _ in chunks:
            rows = Rows(row, start, num_tokens, request.block_ids)
            if start == 0 and num_tokens > 1:
                fresh.append(rows.place)
            else:
                behind.append(rows)
            row += num_tokens
        slots = torch.from_numpy(self._slots(chunks)).to(self._blocks.device)
        return AttentionPlan(slots, tuple(fresh), self._cached.plan(behind))

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """Store `keys` and `values` (`[tokens, kv_heads, head_dim]`); the heads' outputs, side by side."""
        if self._blocks.dtype == torch.float16:
            # An overflow in float16 must not outlive its request: masked or not, a NaN spreads.
            keys, values = keys.nan_to_num(0.0, 0.0, 0.0), values.nan_to_num(0.0, 0.0, 0.0)
        for store, new in zip(self._blocks.slots(layer), (keys, values), strict=True):
            store.index_copy_(0, plan.slots, new)
        outputs = torch.empty_like(queries)
        for rows in plan.fresh:
            outputs[rows] = self._attend_fresh(queries[rows], keys[rows], values[rows])
        plan.attend_cached(layer, queries, outputs)
        return outputs.flatten(1)

    def _attend_fresh(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        key_heads = as_key_heads(keys, self._blocks)
        attended = scaled_dot_product_attention(
            queries.transpose(0, 1).unsqueeze(0),
            key_heads,
            as_key_heads(values, self._blocks),
            is_causal=True,
            enable_gqa=key_heads.shape[1] != queries.shape[1],
        )
        return attended[0].transpose(0, 1)

    def _slots(self, chunks: Sequence[Chunk]) -> npt.NDArray[np.int64]:
        """Return the place of every row's token in the pool, counted in tokens."""
        size = self._blocks.block_size
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


def _choose(wanted: str, blocks: KVBlocks) -> tuple[str, CachedAttention]:
    """Return the name of a way to cached keys, and that way. Of the two, the kernel comes first."""
    gathered = GatheredAttention(blocks)
    if wanted == "gather" or (wanted == "auto" and blocks.device.type not in KERNEL_DEVICES):
        return "gather", gathered
    kernel = KernelAttention(blocks, gathered)
    reason = complaint(kernel, gathered, blocks)
    if reason is None:
        return "kernel", kernel
    if wanted == "kernel":
        raise SettingsError(f"setting attention is kernel, which cannot be had here: {reason}")
    logger.warning("attention copies cached keys, because its kernel cannot be had here: %s", reason)
    return "gather", gathered
