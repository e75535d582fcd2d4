"""Copies KV between vLLM's blocks and the slots of an arena.

Owns the layout of each layer's pages in a slot: layer after layer, each with the chunk's blocks in order.
Does not know chunks' names or their slots. Imports vLLM; its interface for this is experimental.

On a CPU, copies are complete at once. On CUDA, vLLM's own worker makes them, on streams of their own,
directly in the arena, whose memory it pins.
"""

import logging
import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.host_register import host_unregister

from replicas.errors import StartupError
from replicas.kvstore.arena import Arena
from replicas.kvstore.layout import HEADER_BYTES

_NUM_MEASUREMENTS = 3
"""Copies of a chunk back and forth, from which routers learn the loading speed before the first load."""

logger = logging.getLogger(__name__)


class RowCopier(OffloadingWorker):  # type: ignore[misc]
    """Index copies, for devices in the host's memory.

    vLLM asserts that every transfer succeeds. `on_failed` receives the slots that could not be filled, and
    the transfer counts as done: their content must not be used.
    """

    def __init__(
        self,
        kv_caches: Any,
        arena: Arena,
        blocks_per_chunk: int,
        *,
        on_failed: Callable[[Collection[int]], None],
        on_loaded: Callable[[int, float], None],
    ) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._on_failed = on_failed
        self._on_loaded = on_loaded
        rows = np.frombuffer(arena.memory, np.int8, arena.num_slots * arena.slot_bytes)
        rows = rows.reshape(arena.num_slots, arena.slot_bytes)
        start = HEADER_BYTES
        self._pages: list[tuple[Any, Any]] = []
        for entry in kv_caches.tensors:
            page_bytes = entry.page_size_bytes
            end = start + blocks_per_chunk * page_bytes
            host = rows[:, start:end].reshape(arena.num_slots, blocks_per_chunk, page_bytes)
            assert np.shares_memory(host, rows), "a view, not a copy"
            device = entry.tensor.view(torch.int8).view(-1, page_bytes).numpy()
            self._pages.append((device, host))
            start = end
        self._done: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Whole chunks, which need not follow each other."""
        slots, block_ids = dst_spec.block_ids, src_spec.block_ids
        try:
            self.copy_out(
                block_ids,
                np.repeat(slots, self._blocks_per_chunk),
                np.tile(np.arange(self._blocks_per_chunk), len(slots)),
            )
        except Exception:
            logger.exception("KV could not be copied to host memory")
            self._on_failed(slots.tolist())
        self._done.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Blocks that follow each other. The first may lie inside its chunk. `expedited` is vLLM's from 0.33
        on, and is what every copy is here."""
        block_ids = dst_spec.block_ids
        (first_block,) = dst_spec.block_indices
        blocks = first_block % self._blocks_per_chunk + np.arange(len(block_ids))
        started_at = time.perf_counter()
        chunks, places = np.divmod(blocks, self._blocks_per_chunk)
        self.copy_in(src_spec.block_ids[chunks], places, block_ids)
        self._on_loaded(len(block_ids), time.perf_counter() - started_at)
        self._done.append(TransferResult(job_id, success=True))
        return True

    def copy_out(self, block_ids: Any, slots: Any, places: Any) -> None:
        """Each block to its place in its slot."""
        for device, host in self._pages:
            host[slots, places] = device[block_ids]

    def copy_in(self, slots: Any, places: Any, block_ids: Any) -> None:
        for device, host in self._pages:
            device[block_ids] = host[slots, places]

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Return at once, since nothing is under way."""

    def shutdown(self) -> None:
        self._pages.clear()


class DeviceCopier(CPUOffloadingWorker):  # type: ignore[misc]
    """vLLM's worker for accelerators, over an arena of ours. It pins the arena's memory where it can."""

    def __init__(
        self, kv_caches: Any, arena: Arena, blocks_per_chunk: int, *, on_loaded: Callable[[int, float], None]
    ) -> None:
        region: Any = _ArenaRegion(arena)
        super().__init__(kv_caches, blocks_per_chunk, arena.num_slots, mmap_region=region)
        self._num_blocks: dict[int, int] = {}
        self._on_loaded = on_loaded

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **options: Any) -> bool:
        """`options` are those of vLLM's version: `expedited` from 0.33 on."""
        self._num_blocks[job_id] = len(dst_spec.block_ids)
        return bool(super().submit_load(job_id, src_spec, dst_spec, **options))

    def get_finished(self) -> list[Any]:
        finished: list[Any] = super().get_finished()
        for transfer in finished:
            num_blocks = self._num_blocks.pop(transfer.job_id, 0)
            if num_blocks and transfer.transfer_time:
                self._on_loaded(num_blocks, transfer.transfer_time)
        return finished


class _ArenaRegion:
    """An arena in the form that vLLM's worker and pinning expect: rows with views in them."""

    rank = 0

    def __init__(self, arena: Arena) -> None:
        total = arena.num_slots * arena.slot_bytes
        self._base = torch.frombuffer(arena.memory, dtype=torch.int8, count=total)
        self._row_stride = arena.slot_bytes
        self._num_slots = arena.num_slots
        self._end = HEADER_BYTES
        self.total_size_bytes = total
        self.pinned_addresses: list[int] = []
        self.is_pinned = False

    def create_next_worker_view(self, num_bytes: int) -> torch.Tensor:
        """Return a view of the next `num_bytes` of every slot, after those of the previous call."""
        start, self._end = self._end, self._end + num_bytes
        return self._base.as_strided((self._num_slots, num_bytes), (self._row_stride, 1), start)

    def cleanup(self) -> None:
        for address in self.pinned_addresses:
            host_unregister(address)
        self.pinned_addresses.clear()


def copier(
    kv_caches: Any,
    arena: Arena,
    blocks_per_chunk: int,
    *,
    on_failed: Callable[[Collection[int]], None],
    on_loaded: Callable[[int, float], None],
) -> Any:
    """Return the copier for vLLM's platform. Raises StartupError if there is none.

    `on_loaded` receives the number of blocks that came to the device, and the seconds.
    """
    num_bytes = blocks_per_chunk * sum(entry.page_size_bytes for entry in kv_caches.tensors)
    if num_bytes > arena.payload_bytes:
        raise StartupError(
            f"a chunk of KV has {num_bytes:,} bytes in vLLM's own layout, more than the"
            f" {arena.payload_bytes:,} of a slot in host memory: turn host_kv_bytes off for this model"
        )
    made: Any
    if current_platform.is_cpu():
        made = RowCopier(kv_caches, arena, blocks_per_chunk, on_failed=on_failed, on_loaded=on_loaded)
    elif current_platform.is_cuda_alike():
        made = DeviceCopier(kv_caches, arena, blocks_per_chunk, on_loaded=on_loaded)
    else:
        raise StartupError(
            f"vLLM has no way to copy KV between host memory and {current_platform.device_name}:"
            " turn host_kv_bytes off"
        )
    if kv_caches.tensors[0].tensor.shape[0] > blocks_per_chunk:
        _measure(made, blocks_per_chunk)
    return made


def _measure(worker: Any, blocks_per_chunk: int) -> None:
    """Measure copying a chunk back and forth, while device and arena are empty."""
    for attempt in range(_NUM_MEASUREMENTS):
        blocks = GPULoadStoreSpec([*range(1, blocks_per_chunk + 1)], [blocks_per_chunk], [0])
        slot = CPULoadStoreSpec([0])
        out, back = -1 - 2 * attempt, -2 - 2 * attempt
        worker.submit_store(out, blocks, slot)
        worker.wait({out})
        worker.submit_load(back, slot, blocks)
        worker.wait({back})
        worker.get_finished()
