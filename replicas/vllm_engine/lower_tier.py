"""LowerTier: the tiers below one vLLM, between its engine and vLLM's requests for KV.

Owns the store and the chunks of each request in vLLM. Does not know vLLM's interface (`offloading.py`) or the
copying (`row_copier.py`); imports nothing of vLLM.

vLLM builds the objects that ask, twice and far from the engine. They find the tier by their engine's id.
"""

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from replicas.config import ReplicaConfig
from replicas.kvstore.directory import ChunkPlace
from replicas.kvstore.layout import Layout
from replicas.kvstore.leasing.lease_outcome import LeaseOutcome, without_tiers
from replicas.kvstore.opening import open_store
from replicas.kvstore.plan import left_below
from replicas.kvstore.store import ChunkStore
from replicas.kvstore.telling import told
from replicas.kvstore.tenant_shares import Tenancy, tenancy_of
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import CacheEvent
from replicas.protocol.frames import StepFrame, Submit, UserTag
from replicas.protocol.pulls import PullHint
from replicas.scheduling.lower_tiers import UNMEASURED_TOKEN_SECONDS
from replicas.scheduling.speed_meter import SpeedMeter
from replicas.vllm_engine.chunk_chain import ChunkChain
from replicas.vllm_engine.media_spans import spans_of
from replicas.vllm_engine.salts import roots_in

RESET_SECONDS = 1.0
"""Seconds that a reset waits for the disk's running jobs."""

_tiers: "WeakValueDictionary[str, LowerTier]" = WeakValueDictionary()


class Requests(NamedTuple):
    """The engine's requests. They are vLLM's own; `inner` finds one by its id there."""

    inner: Callable[[str], Any]
    user: Callable[[Any], UserTag]
    writer: Callable[[BlockHash], UserTag | None]
    """Returns the user whose request computed a block on the device; None if unknown."""
    num_device_tokens: Callable[[Any], int]
    """How many of its leading tokens the device holds."""
    num_pending_tokens: Callable[[], int]
    """Tokens to compute before a request that comes now."""
    pull: Callable[[Any], PullHint | None]
    """From where a request that comes now may pull."""
    tenancy: Callable[[Any], Tenancy]


class LowerTier:
    """The lower tier of a vLLM with this id and model fingerprint. It allocates memory when vLLM reports its
    block size."""

    def __init__(self, config: ReplicaConfig, engine_id: str, fingerprint: str) -> None:
        self.engine_id = engine_id
        self.fingerprint = fingerprint
        self.engine_arguments = json.dumps(config.engine_args or {}, sort_keys=True, default=str)
        self.requests: Requests | None = None
        self.chains: dict[str, ChunkChain] = {}
        """By vLLM's id of the request."""
        self.failed_slots: set[int] = set()
        """Slots that could not be filled, of stores that vLLM has yet to call complete."""
        self.block_size = config.tokens_per_block
        self.blocks_per_chunk = config.tokens_per_chunk // config.tokens_per_block
        self._config = config
        self._meter = SpeedMeter()
        self._store: ChunkStore | None = None
        _tiers[engine_id] = self

    @property
    def store(self) -> ChunkStore:
        assert self._store is not None, "vLLM has built its connector"
        return self._store

    def open(self, layout: Layout, block_bytes: int) -> None:
        """Allocate memory for blocks of this size. Idempotent. Raises SettingsError."""
        if self._store is None:
            self._store = open_store(self._config, layout, block_bytes * self.blocks_per_chunk)

    # Requests.

    def arrived(self, request_id: str) -> ChunkChain | None:
        """Register a new request in vLLM. Its chunks on disk that are worth reading are read from now on."""
        request = None if self.requests is None else self.requests.inner(request_id)
        if self.requests is None or request is None or request.cache_salt is None:
            return None
        root, published = roots_in(request.cache_salt)
        chain = self.chains[request_id] = ChunkChain(
            root,
            request.all_token_ids,
            published=published,
            block_size=self.block_size,
            blocks_per_chunk=self.blocks_per_chunk,
            media=spans_of(request),
        )
        chain.tenancy = self.requests.tenancy(request)
        token_seconds = self._meter.prefill_seconds_per_token or UNMEASURED_TOKEN_SECONDS
        wait_seconds = self.requests.num_pending_tokens() * token_seconds
        num_device_tokens, peer = self.requests.num_device_tokens(request), self.requests.pull(request)
        if peer is not None and peer.num_tokens - num_device_tokens < self.store.shape.tokens:
            peer = None  # vLLM loads no less than a chunk
        plan = self.store.arrived(
            chain.names(),
            num_device_tokens=num_device_tokens,
            num_findable_tokens=len(request.all_token_ids),
            wait_seconds=wait_seconds,
            token_seconds=token_seconds,
            encode_seconds=self._meter.encode_seconds(chain.media),
            peer=peer,
            tenancy=chain.tenancy,
        )
        chain.read, chain.transfer = frozenset(plan.to_read), plan.transfer
        if plan.to_read or plan.transfer is not None:
            chain.num_planned_tokens = plan.way.num_ready_tokens
        chain.waits_until = time.monotonic() + plan.patience_seconds(wait_seconds)
        return chain

    def started(self, request_id: str) -> None:
        """vLLM schedules a request for the first time, with all that was found for it. Idempotent."""
        chain = self.chains.get(request_id)
        if chain is None or chain.has_started:
            return
        request = None if self.requests is None else self.requests.inner(request_id)
        if self.requests is not None and request is not None:
            chain.has_started = True
            self.store.unbind(chain.transfer)
            chain.user = self.requests.user(request)
            chain.num_found_tokens = request.num_computed_tokens
            chain.num_lost_tokens, chain.num_unmoved_tokens = left_below(
                self.store.directory,
                chain.names(),
                chunk_tokens=self.store.shape.tokens,
                num_found_tokens=chain.num_found_tokens,
                num_findable_tokens=(len(request.all_token_ids) - 1) // self.block_size * self.block_size,
                num_planned_tokens=chain.num_planned_tokens,
            )

    def finished(self, request_id: str) -> None:
        chain = self.chains.pop(request_id, None)
        if chain is not None:
            self.store.unbind(chain.transfer)

    def num_leading_tokens(self, request_id: str, num_device_tokens: int) -> int:
        """How many of a request's leading tokens lie on the device or in host memory, or are coming there."""
        chain = self.chains.get(request_id)
        if chain is None:
            return num_device_tokens
        num_tokens = num_device_tokens // self.store.shape.tokens * self.store.shape.tokens
        for place in self.store.directory.find(name.key for name in chain.names(num_tokens)):
            if place is ChunkPlace.DISK:
                break
            num_tokens += self.store.shape.tokens
        return max(num_device_tokens, num_tokens)

    def lease(self, request_id: str, submit: Submit, num_device_tokens: int, *, asks: bool) -> LeaseOutcome:
        """Return the outcome of earlier leases on a new request's prompt, and of those that it `asks` for
        now."""
        chain = self.chains.get(request_id)
        if chain is None:
            return without_tiers(submit.leases if asks else ())
        num_prompt_tokens = submit.num_tokens - submit.num_output_tokens
        names = chain.names()[: num_prompt_tokens // self.store.shape.tokens]
        leases = submit.leases if asks else ()
        num_device_blocks = num_device_tokens // self.block_size
        return self.store.leases.ask(names, leases, num_device_blocks, tenancy_of(submit), submit.bucket)

    # Beside requests.

    def fill(self, frame: StepFrame, seconds: float) -> StepFrame:
        """Add to the frame the store's report, and when to look again; the step took `seconds`."""
        self._meter.observe(frame, seconds)
        return told(frame, self.store)

    def take_events(self) -> list[CacheEvent]:
        return [] if self._store is None else self._store.take_events()

    def clear(self) -> bool:
        """False if the disk does not come to rest."""
        ends_at = time.monotonic() + RESET_SECONDS
        while not self.store.clear():
            if time.monotonic() > ends_at:
                return False
            self.store.wait(RESET_SECONDS / 100)
        return True

    def close(self) -> None:
        if self._store is not None:
            self._store.close(self._config.spill_seconds)

    def loaded(self, num_blocks: int, seconds: float) -> None:
        """Record the duration of copying blocks to the device."""
        self.store.loaded(num_blocks * self.block_size, seconds)


def tier_of(engine_id: str) -> LowerTier:
    return _tiers[engine_id]
