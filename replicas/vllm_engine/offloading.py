"""vLLM's offloading connector over a ChunkStore: an offloading spec of ours, which vLLM finds by its module.

Owns everything that answers to vLLM's experimental interface for that, except the copying of bytes. Decides
nothing: what is kept, and what goes, the store says. Imports vLLM.

vLLM builds a spec for its scheduler and another one for its worker. Both are of one process and find the
same `VllmTier` by the id of their engine. The scheduler's half, the manager, is called in the engine thread
and never waits. A chunk is named from its request's own tokens, as routers name it; vLLM's name for it is
only where it is looked up by. What becomes of it is told by the store's events, so vLLM gets none to pass on.

vLLM asks for a chunk's copy when its last token has been scheduled, and makes it before the next step. It
loads what it found before a request is scheduled; a load that could bring less than a chunk is none.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from replicas.config import ReplicaConfig
from replicas.kvstore.arena import Arena
from replicas.kvstore.directory import Place
from replicas.kvstore.layout import file_bytes
from replicas.kvstore.store import ChunkShape, ChunkStore
from replicas.process.settings import SettingsError
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import CacheEvent
from replicas.protocol.frames import UserTag
from replicas.vllm_engine.chunk_chain import ChunkChain
from replicas.vllm_engine.row_copier import copier

PENDING_SECONDS = 1.0
"""How long a request waits for a chunk that is on its way into host memory, before it computes it."""

_tiers: WeakValueDictionary[str, "VllmTier"] = WeakValueDictionary()


class Requests(NamedTuple):
    """What the engine knows of requests. `inner` finds vLLM's own by its id there."""

    inner: Callable[[str], Any]
    user: Callable[[Any], UserTag]
    writer: Callable[[BlockHash], UserTag | None]
    """Whose request computed a block that the device holds; None if that is not known."""


class VllmTier:
    """The tiers below one vLLM. Their memory is taken when vLLM says how large its blocks are."""

    def __init__(self, config: ReplicaConfig, engine_id: str) -> None:
        assert config.host_kv_bytes is not None
        self.requests: Requests | None = None
        self.failed_slots: set[int] = set()
        """Slots that could not be filled, of stores that vLLM has yet to call complete."""
        self._host_bytes = config.host_kv_bytes
        self._block_size = config.tokens_per_block
        self._blocks_per_chunk = config.tokens_per_chunk // config.tokens_per_block
        self._store: ChunkStore | None = None
        self._manager: TierManager | None = None
        self._engine_id = engine_id
        _tiers[engine_id] = self

    @property
    def transfer_config(self) -> dict[str, Any]:
        """For vLLM: the connector, and where it finds this."""
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": self._engine_id,
            "kv_connector_extra_config": {
                "spec_name": TierSpec.__name__,
                "spec_module_path": __name__,
                "blocks_per_chunk": self._blocks_per_chunk,
                # What was answered is part of the next prompt.
                "offload_prompt_only": False,
            },
        }

    @property
    def store(self) -> ChunkStore:
        assert self._store is not None, "vLLM has built its connector"
        return self._store

    def open(self, block_bytes: int) -> None:
        """Take the memory, for blocks of this size. Again for the same is nothing. Raises SettingsError."""
        if self._store is not None:
            return
        payload_bytes = block_bytes * self._blocks_per_chunk
        num_slots = self._host_bytes // file_bytes(payload_bytes)
        if not num_slots:
            raise SettingsError(
                f"setting host_kv_bytes is {self._host_bytes:,}, less than the {file_bytes(payload_bytes):,}"
                " that one chunk of this model takes"
            )
        self._store = ChunkStore(
            Arena(num_slots, payload_bytes),
            ChunkShape(self._block_size, self._blocks_per_chunk),
            clock=time.monotonic,
        )

    def manager(self) -> "TierManager":
        if self._manager is None:
            self._manager = TierManager(self)
        return self._manager

    def copier(self, kv_caches: Any) -> Any:
        return copier(
            kv_caches,
            self.store.arena,
            self._blocks_per_chunk,
            on_failed=self.failed_slots.update,
            on_loaded=self._loaded,
        )

    def chain(self, request_id: str) -> ChunkChain | None:
        """Of a request that vLLM has now, by vLLM's id."""
        return None if self._manager is None else self._manager.chains.get(request_id)

    def new_chain(self, request: Any) -> ChunkChain:
        return ChunkChain(
            BlockHash(bytes.fromhex(request.cache_salt)),
            request.all_token_ids,
            block_size=self._block_size,
            blocks_per_chunk=self._blocks_per_chunk,
        )

    def num_leading_tokens(self, request_id: str, num_device_blocks: int) -> int:
        """How many of a request's tokens lie on the device or in a tier here, of those the leading ones."""
        chain = self.chain(request_id)
        num_device_tokens = num_device_blocks * self._block_size
        if chain is None:
            return num_device_tokens
        first = num_device_blocks // self._blocks_per_chunk
        places = self.store.directory.find(name.key for name in chain.names()[first:])
        return max(num_device_tokens, (first + len(places)) * self.store.shape.tokens)

    @property
    def was_cleared(self) -> bool:
        """Whether the last reset found nothing that moves, and so cleared the store."""
        return self.manager().was_cleared

    def take_events(self) -> list[CacheEvent]:
        return self.store.take_events()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _loaded(self, num_blocks: int, seconds: float) -> None:
        self.store.loaded(num_blocks * self._block_size, seconds)


class TierManager(OffloadingManager):  # type: ignore[misc]
    """What vLLM's scheduler asks, answered by the store. A key is vLLM's; a name is ours."""

    def __init__(self, tier: VllmTier) -> None:
        self._tier = tier
        self._store = tier.store
        self.chains: dict[str, ChunkChain] = {}
        self._filling: dict[BlockHash, int] = {}
        self._pinned: Counter[BlockHash] = Counter()
        self._abandoned: list[list[int]] = [[], []]
        """Slots that copies from before a reset may still be made to, by how many steps must end first."""
        self.was_cleared = False
        """Whether the last reset found nothing that moves."""

    def on_new_request(self, req_context: Any) -> Any:
        requests = self._tier.requests
        request = None if requests is None else requests.inner(req_context.req_id)
        if request is not None and request.cache_salt is not None:
            chain = self._tier.new_chain(request)
            req_context.set_state(chain)
            self.chains[req_context.req_id] = chain
            self._store.directory.use([name.key for name in chain.names()])
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self.chains.pop(req_context.req_id, None)

    def lookup(self, key: Any, req_context: Any) -> Any:
        chain = req_context.get_state(ChunkChain)
        if chain is None:
            return LookupResult.MISS
        place = self._store.directory.place(self._name(key, req_context).key)
        if place is Place.HOST:
            return LookupResult.HIT
        if place is not Place.COMING:
            return LookupResult.MISS
        now = time.monotonic()
        if chain.waits_until is None:
            chain.waits_until = now + PENDING_SECONDS
        return LookupResult.HIT_PENDING if now < chain.waits_until else LookupResult.MISS

    def get_load_source(self, key: Any, req_context: Any) -> Any:
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[Any], req_context: Any) -> Any:
        chain = req_context.get_state(ChunkChain)
        names = [self._name(key, req_context) for key in keys]
        pinned = [name.key for name in names]
        slots = self._store.pin(pinned)
        self._pinned.update(pinned)
        for name, slot in zip(names, slots, strict=True):
            chain.load(name, self._store.writers(slot))
        return CPULoadStoreSpec(slots)

    def complete_load(self, keys: Collection[Any], req_context: Any) -> None:
        pinned = [self._name(key, req_context).key for key in keys]
        self._pinned.subtract(pinned)
        self._pinned = +self._pinned
        self._store.unpin(pinned)

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> Any:
        chain, requests = req_context.get_state(ChunkChain), self._tier.requests
        offered: list[Any] = []
        slots: list[int] = []
        if chain is None or requests is None:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), evicted_keys=[])
        for key in keys:
            name = self._name(key, req_context)
            slot = self._store.offer(name, chain.writers(name, requests.writer))
            if slot is not None:
                self._filling[name.key] = slot
                offered.append(key)
                slots.append(slot)
            elif not self._store.is_kept(name.key):
                break  # no room, and what lies behind a hole is of no use
        return PrepareStoreOutput(offered, CPULoadStoreSpec(slots), evicted_keys=[])

    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        """`keys` come in no order. Their chunks are reported in that of the chain."""
        names = sorted((self._name(key, req_context) for key in keys), key=lambda name: name.last_block)
        for name in names:
            slot = self._filling.pop(name.key)
            if success and slot not in self._tier.failed_slots:
                self._store.filled(name.key)
            else:
                self._store.given_up(name.key)
            self._tier.failed_slots.discard(slot)

    def on_schedule_end(self, context: Any) -> None:
        if (requests := self._tier.requests) is not None:
            for request_id in context.new_req_ids:
                chain, request = self.chains.get(request_id), requests.inner(request_id)
                if chain is not None and request is not None:
                    chain.user = requests.user(request)
                    chain.num_found_tokens = request.num_computed_tokens
        for slot in self._abandoned.pop(0):
            self._store.give_back(slot)
        self._abandoned.append([])

    def take_events(self) -> Iterable[Any]:
        return ()

    def reset_cache(self) -> None:
        """vLLM forgets its transfers now, and says of none that it ended. It ends them in its next step."""
        for key, slot in self._filling.items():
            self._store.given_up(key, may_still_be_written=True)
            self._abandoned[-1].append(slot)
        self._filling.clear()
        self._tier.failed_slots.clear()
        self._store.unpin([*self._pinned.elements()])
        self._pinned.clear()
        self.was_cleared = self._store.clear()

    def _name(self, key: Any, req_context: Any) -> Any:
        return req_context.get_state(ChunkChain).name(req_context.get_offload_key_position(key))


class TierSpec(OffloadingSpec):  # type: ignore[misc]
    """What vLLM is given by name. Raises SettingsError and StartupError."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._tier = _tiers[config.engine_id]
        self._tier.open(config.worker_kv_bytes_per_block)

    def get_manager(self) -> Any:
        return self._tier.manager()

    def get_worker(self, kv_caches: Any) -> Any:
        return self._tier.copier(kv_caches)
