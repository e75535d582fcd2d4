"""open_store: builds a replica's KV below its device from its settings.

Owns the way from bytes in settings to slots and files. The engine supplies a chunk's size and layout.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from replicas.config import ReplicaConfig
from replicas.kvstore.arena import Arena
from replicas.kvstore.layout import Layout, file_bytes
from replicas.kvstore.on_disk.disk import Disk, DiskOptions
from replicas.kvstore.store import ChunkShape, ChunkStore, DiskShare
from replicas.kvstore.write_budget import WriteBudget
from replicas.process.settings import SettingsError

if TYPE_CHECKING:
    from replicas.kvstore.pulling.pull import Puller


def open_store(config: ReplicaConfig, layout: Layout, payload_bytes: int) -> ChunkStore | None:
    """Open the store; None if it is off. Raises SettingsError if memory or folder is unavailable."""
    if config.host_kv_bytes is None:
        return None
    chunk_bytes = file_bytes(payload_bytes)
    num_slots = _num_chunks(config, "host_kv_bytes", chunk_bytes)
    arena = Arena(num_slots, payload_bytes, has_table=config.pull_bytes_per_second is not None)
    try:
        puller = _open_puller(config, layout, payload_bytes)
        share = None if config.disk_kv_bytes is None else _open_disk(config, layout, chunk_bytes)
    except BaseException:
        arena.close()
        raise
    shape = ChunkShape(config.tokens_per_block, config.tokens_per_chunk // config.tokens_per_block)
    return ChunkStore(
        arena, shape, clock=time.monotonic, share=share, lease_share=config.lease_share, puller=puller
    )


def _open_puller(config: ReplicaConfig, layout: Layout, payload_bytes: int) -> "Puller | None":
    if config.pull_bytes_per_second is None:
        return None
    # Here, since a replica that does not pull needs no gRPC beside its engine.
    from replicas.kvstore.pulling.pull_opening import open_puller

    return open_puller(config, layout, payload_bytes, config.pull_bytes_per_second)


def _open_disk(config: ReplicaConfig, layout: Layout, chunk_bytes: int) -> DiskShare:
    assert config.disk_kv_bytes is not None and config.kv_folder is not None
    max_chunks = _num_chunks(config, "disk_kv_bytes", chunk_bytes)
    options = DiskOptions(
        folder=Path(config.kv_folder),
        layout=layout.digest(),
        slot_bytes=chunk_bytes,
        max_bytes=config.disk_kv_bytes,
        reserve_bytes=config.disk_reserve_bytes,
    )
    budget = WriteBudget(config.disk_write_bytes_per_second, config.disk_write_bytes_per_day)
    return DiskShare(Disk(options), layout.digest(), max_chunks, budget)


def _num_chunks(config: ReplicaConfig, name: str, chunk_bytes: int) -> int:
    """How many the setting holds, one at least."""
    num_chunks: int = getattr(config, name) // chunk_bytes
    if num_chunks < 1:
        raise SettingsError(
            f"setting {name} holds no chunk of {config.tokens_per_chunk} tokens, which takes"
            f" {chunk_bytes:,} bytes"
        )
    return num_chunks
