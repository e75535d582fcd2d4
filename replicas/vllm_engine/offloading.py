"""vLLM's offloading connector over a ChunkStore: our offloading spec, which vLLM finds by its module.

Owns all that implements vLLM's experimental interface, except the copying of bytes. The store decides what is
kept and evicted. Imports vLLM.

The manager is called in the engine thread and never waits. A chunk is named from its request's own tokens, as
routers name it; vLLM's name is only for its lookups. The store's events report chunks, so vLLM gets none to
pass on.

vLLM asks for a chunk's copy when its last token has been scheduled, and makes it before the next step. It
loads what it found before a request is scheduled; a load of less than a chunk is not made.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.directory import ChunkPlace
from replicas.kvstore.layout import Layout
from replicas.process.settings import SettingsError
from replicas.protocol.blocks import BlockHash
from replicas.vllm_engine.chunk_chain import ChunkChain
from replicas.vllm_engine.lower_tier import LowerTier, tier_of
from replicas.vllm_engine.row_copier import copier


class TierSpec(OffloadingSpec):  # type: ignore[misc]
    """The specification that vLLM finds by name. Raises SettingsError and StartupError."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._tier = tier_of(config.engine_id)
        self._tier.open(_layout(config, self._tier), config.worker_kv_bytes_per_block)

    def get_manager(self) -> Any:
        return TierManager(self._tier)

    def get_worker(self, kv_caches: Any) -> Any:
        return copier(
            kv_caches,
            self._tier.store.arena,
            self._tier.blocks_per_chunk,
            on_failed=self._tier.failed_slots.update,
            on_loaded=self._tier.loaded,
        )


class TierManager(OffloadingManager):  # type: ignore[misc]
    """Answers vLLM's scheduler. A key is vLLM's; a name is ours."""

    def __init__(self, tier: LowerTier) -> None:
        self._tier = tier
        self._store = tier.store
        self._filling: dict[BlockHash, int] = {}
        self._pinned: Counter[BlockHash] = Counter()
        self._abandoned: list[list[int]] = [[], []]
        """Slots that copies from before a reset may still be made to, by how many steps must end first."""

    # Requests.

    def on_new_request(self, req_context: Any) -> Any:
        chain = self._tier.arrived(req_context.req_id)
        if chain is not None:
            req_context.set_state(chain)
        return RequestOffloadingContext()

    def on_schedule_end(self, context: Any) -> None:
        for request_id in context.new_req_ids:
            self._tier.started(request_id)
        for slot in self._abandoned.pop(0):
            self._store.give_back(slot)
        self._abandoned.append([])

    def on_request_finished(self, req_context: Any) -> None:
        self._tier.finished(req_context.req_id)

    # To the device.

    def lookup(self, key: Any, req_context: Any) -> Any:
        chain = req_context.get_state(ChunkChain)
        if chain is None:
            return LookupResult.MISS
        place = self._store.directory.place(_name(key, req_context).key)
        if place is ChunkPlace.HOST:
            return LookupResult.HIT
        is_coming = place is ChunkPlace.COMING or self._store.awaits_room(chain.transfer)
        if is_coming and time.monotonic() < chain.waits_until:
            return LookupResult.HIT_PENDING
        return LookupResult.MISS

    def get_load_source(self, key: Any, req_context: Any) -> Any:
        chain = req_context.get_state(ChunkChain)
        is_read = chain is not None and _name(key, req_context).key in chain.read
        return CacheHitSource.DISK if is_read else CacheHitSource.HOST

    def prepare_load(self, keys: Collection[Any], req_context: Any) -> Any:
        chain = req_context.get_state(ChunkChain)
        names = [_name(key, req_context) for key in keys]
        pinned = [name.key for name in names]
        slots = self._store.pin(pinned)
        self._pinned.update(pinned)
        for name, slot in zip(names, slots, strict=True):
            chain.load(name, self._store.writers(slot), self._store.transfer(slot))
        return CPULoadStoreSpec(slots)

    def complete_load(self, keys: Collection[Any], req_context: Any) -> None:
        pinned = [_name(key, req_context).key for key in keys]
        self._pinned.subtract(pinned)
        self._pinned = +self._pinned
        self._store.unpin(pinned)

    # From the device.

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> Any:
        chain, requests = req_context.get_state(ChunkChain), self._tier.requests
        offered: list[Any] = []
        slots: list[int] = []
        if chain is None or requests is None:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), evicted_keys=[])
        self._tier.started(req_context.req_id)  # from 0.33 on, vLLM calls on_schedule_end after this
        for key in keys:
            name = _name(key, req_context)
            slot = self._store.offer(name, chain.writers(name, requests.writer), chain.tenancy)
            if slot is not None:
                self._filling[name.key] = slot
                offered.append(key)
                slots.append(slot)
            elif not self._store.is_kept(name.key):
                break  # no room, and what lies behind a hole is of no use
        return PrepareStoreOutput(offered, CPULoadStoreSpec(slots), evicted_keys=[])

    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        """`keys` come in no order. Their chunks are reported in that of the chain."""
        names = sorted((_name(key, req_context) for key in keys), key=lambda name: name.last_block)
        for name in names:
            slot = self._filling.pop(name.key)
            if success and slot not in self._tier.failed_slots:
                self._store.filled(name.key)
            else:
                self._store.given_up(name.key)
            self._tier.failed_slots.discard(slot)

    # Beside requests.

    def take_events(self) -> Iterable[Any]:
        return ()

    def reset_cache(self) -> None:
        """Handle vLLM's reset: it forgets its transfers without ending them, and ends them in its next step.
        Then nothing moves between device and host memory, and the caller clears the tier."""
        for key, slot in self._filling.items():
            self._store.given_up(key, may_still_be_written=True)
            self._abandoned[-1].append(slot)
        self._filling.clear()
        self._tier.failed_slots.clear()
        self._store.unpin([*self._pinned.elements()])
        self._pinned.clear()


def _name(key: Any, req_context: Any) -> ChunkName:
    chain: ChunkChain = req_context.get_state(ChunkChain)
    return chain.name(req_context.get_offload_key_position(key))


def _layout(config: Any, tier: LowerTier) -> Layout:
    """Return everything in which two vLLMs must agree to read each other's chunks. For heads, vLLM tells only
    the bytes here."""
    if len(config.groups) != 1:
        raise SettingsError(
            "the model's layers keep different KV caches, which are not kept below the device: it is served"
            " without host_kv_bytes"
        )
    (group,) = config.groups
    return Layout(
        engine="vllm",
        engine_version=vllm.__version__,
        kv_layout=f"{config.kv_cache_layout}, {config.worker_kv_bytes_per_block} bytes a block",
        attention_backend=f"{current_platform.device_type} {current_platform.get_device_capability()}",
        dtype=config.model.dtype,
        num_layers=len(group.layer_names),
        num_kv_heads=0,
        head_size=0,
        block_size=tier.block_size,
        chunk_tokens=tier.block_size * tier.blocks_per_chunk,
        tensor_parallel_size=1,
        model=tier.fingerprint,
        engine_arguments=tier.engine_arguments,
    )
