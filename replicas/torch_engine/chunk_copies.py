"""ChunkCopier: copies KV between the blocks of a KVPool and the slots of host memory.

Owns the layout of a chunk's payload: `[2, layers, blocks_per_chunk, block_size * kv_heads * head_dim]`, as in
the pool. Does not know which chunk is which.

On a CPU a copy has ended when the call returns. On CUDA, copies run on a stream of their own, over pinned
memory. KV that leaves the pool is first gathered on the computing stream, so that the next step may overwrite
the blocks at once; KV that arrives is written to blocks without readers.
"""

import contextlib
import logging
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from replicas.kvstore.arena import Arena
from replicas.kvstore.layout import Layout
from replicas.scheduling.lower_tiers import Copy
from replicas.torch_engine.rows import KVBlocks

logger = logging.getLogger(__name__)

PROBE_CHUNKS = 8


def payload_bytes(blocks: KVBlocks, blocks_per_chunk: int) -> int:
    """Bytes of a chunk's KV."""
    stores, layers, _, width = blocks.tensor.shape
    return stores * layers * blocks_per_chunk * width * blocks.tensor.element_size()


def chunk_layout(blocks: KVBlocks, chunk_tokens: int, model: str) -> Layout:
    """Return everything in which two torch engines must agree to read each other's chunks."""
    return Layout(
        engine="torch",
        engine_version="1",
        kv_layout="keys and values, layers, blocks, tokens, heads",
        attention_backend="any",
        dtype=str(blocks.dtype).removeprefix("torch."),
        num_layers=blocks.tensor.shape[1],
        num_kv_heads=blocks.num_kv_heads,
        head_size=blocks.head_dim,
        block_size=blocks.block_size,
        chunk_tokens=chunk_tokens,
        tensor_parallel_size=1,
        model=model,
        engine_arguments="",
    )


class _CopyDone:
    def is_done(self) -> bool:
        return True


class _OnStream:
    def __init__(self, stream: Any) -> None:
        self._event = stream.record_event()

    def is_done(self) -> bool:
        return bool(self._event.query())


DONE = _CopyDone()


class ChunkCopier:
    """Between `blocks` and `arena`, whose payloads have `payload_bytes(blocks, blocks_per_chunk)`."""

    def __init__(self, blocks: KVBlocks, arena: Arena, blocks_per_chunk: int) -> None:
        self._pool = blocks.tensor
        self._blocks_per_chunk = blocks_per_chunk
        stores, layers, _, width = self._pool.shape
        shape = (stores, layers, blocks_per_chunk, width)
        self._slots = [
            torch.frombuffer(arena.payload(slot), dtype=self._pool.dtype).view(shape)
            for slot in range(arena.num_slots)
        ]
        self._stream: Any = None
        if self._pool.device.type == "cuda":
            self._stream = torch.cuda.Stream(self._pool.device)  # type: ignore[no-untyped-call]
            address = _pin(arena, self._pool.device)
            if address is not None:
                # Before the memory goes: CUDA would refuse what comes to lie in its place.
                weakref.finalize(self, _unpin, address).atexit = False

    def copy_out(self, block_ids: Sequence[int], slot: int) -> Copy:
        """Copy a chunk's present blocks into its slot."""
        ids = torch.tensor(block_ids, device=self._pool.device)
        if self._stream is None:
            torch.index_select(self._pool, 2, ids, out=self._slots[slot])
            return DONE
        gathered = self._pool.index_select(2, ids)
        self._stream.wait_stream(torch.cuda.current_stream(self._pool.device))
        with torch.cuda.stream(self._stream):
            self._slots[slot].copy_(gathered, non_blocking=True)
            gathered.record_stream(self._stream)
        return _OnStream(self._stream)

    def copy_in(self, slots: Sequence[int], first_block: int, block_ids: Sequence[int]) -> Copy:
        """Copy the slots, one chunk each, from block `first_block` of the first, into these blocks."""
        if self._stream is None:
            self._copy_in(slots, first_block, block_ids)
            return DONE
        self._stream.wait_stream(torch.cuda.current_stream(self._pool.device))
        with torch.cuda.stream(self._stream):
            self._copy_in(slots, first_block, block_ids)
        return _OnStream(self._stream)

    def seconds_per_chunk(self, block_ids: Sequence[int]) -> float:
        """Measure the seconds to copy a chunk in, with one chunk's blocks that hold nothing."""
        slots = [slot % len(self._slots) for slot in range(PROBE_CHUNKS)]
        self._wait(slots, block_ids)  # the first time, the system still gives the memory
        started = time.perf_counter()
        self._wait(slots, block_ids)
        return (time.perf_counter() - started) / PROBE_CHUNKS

    def _wait(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        for slot in slots:
            copy = self.copy_in([slot], 0, block_ids)
        while not copy.is_done():
            time.sleep(0.0001)

    def _copy_in(self, slots: Sequence[int], first_block: int, block_ids: Sequence[int]) -> None:
        device = self._pool.device
        done = 0
        for slot in slots:
            kept = self._slots[slot][:, :, first_block : first_block + len(block_ids) - done]
            ids = torch.tensor(block_ids[done : done + kept.shape[2]], device=device)
            self._pool.index_copy_(2, ids, kept.to(device, non_blocking=True))
            done += len(ids)
            first_block = 0


def _pin(arena: Arena, device: torch.device) -> int | None:
    """Page-locked memory, without which copies to and from CUDA are slower and not beside the computing.

    Returns its address, or None if it cannot be had.
    """
    address = torch.frombuffer(arena.memory, dtype=torch.uint8).data_ptr()
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(cudart.cudaHostRegister(address, arena.num_slots * arena.slot_bytes, 0))
    if error == 0:
        return address
    logger.warning("host memory for KV cannot be page-locked (CUDA error %d): copies are slower", error)
    # CUDA keeps the error for whoever asks next, which would be a step.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
    return None


def _unpin(address: int) -> None:
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cudart.cudaHostUnregister(address)
