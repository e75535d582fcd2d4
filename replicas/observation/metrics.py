"""ReplicaMetrics: a replica's metrics for Prometheus.

Owns the names and the HTTP port. The numbers come from frames.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from replicas.observation.leaving_metrics import LeavingMetrics
from replicas.observation.media_metrics import ImageMetrics
from replicas.observation.tier_metrics import TierMetrics
from replicas.protocol.events import BlockRemoved, Tier
from replicas.protocol.frames import RefusalCode, StepFrame
from replicas.protocol.prefix_leases import LeaseBreak, LeaseRefusal, LeaseTotals

WAIT_SECONDS_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0),
)
"""Bounds that the router's `router_ttft_seconds` has too, so that the two can be laid upon each other."""

STEP_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class CallRefusal(Enum):
    """Why a gRPC call was refused."""

    NO_TOKEN = "no_token"
    WRONG_TOKEN = "wrong_token"
    USED_TOKEN = "used_token"
    WRONG_ROLE = "wrong_role"


class DroppedSpans(Collector):
    """Reads a number that another thread counts."""

    def __init__(self) -> None:
        self.read: Callable[[], int] = lambda: 0

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "replica_dropped_spans",
            "Spans that were dropped because no collector accepted them",
            value=self.read(),
        )


class ReplicaMetrics:
    """Updated on the event loop, one call per frame."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.info = Gauge(
            "replica_info",
            "Always 1; its labels name the replica as routers know it",
            ["replica_id", "model", "engine"],
            registry=registry,
        )
        self.steps = Counter("replica_steps_total", "Engine steps", registry=registry)
        self.step_seconds = Histogram(
            "replica_step_seconds",
            "Time of one engine step",
            buckets=STEP_SECONDS_BUCKETS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "replica_prompt_tokens_total", "Prompt tokens of requests that have started", registry=registry
        )
        self.cached_tokens = Counter(
            "replica_cached_tokens_total", "Prompt tokens that were read from the cache", registry=registry
        )
        self.cross_user_tokens = Counter(
            "replica_cross_user_tokens_total",
            "Cached prompt tokens that another user's request had computed",
            registry=registry,
        )
        self.generated_tokens = Counter(
            "replica_generated_tokens_total", "Tokens generated", registry=registry
        )
        self.refusals = Counter(
            "replica_refusals_total", "Choices that the replica refused", ["code"], registry=registry
        )
        for code in RefusalCode:
            self.refusals.labels(code.value)  # from zero on, or the first ones are no increase
        self.running = Gauge("replica_running_requests", "Requests in the batch", registry=registry)
        self.waiting = Gauge(
            "replica_waiting_requests", "Requests that wait for a place in the batch", registry=registry
        )
        self.pending_tokens = Gauge(
            "replica_pending_tokens", "Prompt tokens that are still to be computed", registry=registry
        )
        self.used_blocks = Gauge("replica_used_blocks", "KV blocks that requests hold", registry=registry)
        self.cached_blocks = Gauge(
            "replica_cached_blocks", "KV blocks that can be found by hash", registry=registry
        )
        self.total_blocks = Gauge("replica_total_blocks", "KV blocks in the pool", registry=registry)
        self.streams = Gauge("replica_streams", "Open Serve streams, one per router", registry=registry)
        self._add_request_metrics(registry)
        self._add_pull_metrics(registry)
        self._add_engine_metrics(registry)
        self._add_cache_metrics(registry)
        self._add_lease_metrics(registry)
        self._add_index_metrics(registry)
        # vLLM's names for the same two numbers, so that its dashboards work unchanged.
        self._vllm_queries = Counter(
            "vllm:prefix_cache_queries_total", "Prompt tokens looked up in the cache", registry=registry
        )
        self._vllm_hits = Counter(
            "vllm:prefix_cache_hits_total", "Prompt tokens found in the cache", registry=registry
        )

    def _add_engine_metrics(self, registry: CollectorRegistry) -> None:
        """Add metrics on the engine's input and progress."""
        self.prefill_seconds = Gauge(
            "replica_prefill_seconds_per_token",
            "What computing a prompt takes for each token; 0 until it is measured",
            registry=registry,
        )
        self.arrived = Gauge(
            "replica_arrived_requests",
            "Requests that have arrived but are not yet in the engine's own counts",
            registry=registry,
        )
        self.open_sequences = Gauge(
            "replica_open_sequences",
            "Sequences (requests times n) that are accepted and have not ended",
            registry=registry,
        )
        self.open_tokens = Gauge(
            "replica_open_tokens",
            "Tokens of accepted sequences: prompts once, and up to 1,024 of each answer",
            registry=registry,
        )
        self.engine_silence = Gauge(
            "replica_engine_silence_ratio",
            "Time without a finished step while the engine has work, as a share of the limit after "
            "which it counts as hung",
            registry=registry,
        )

    def _add_request_metrics(self, registry: CollectorRegistry) -> None:
        self.ttft_seconds = Histogram(
            "replica_ttft_seconds",
            "Time from a request's arrival at the replica to its first token",
            buckets=WAIT_SECONDS_BUCKETS,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "replica_queue_seconds",
            "Time from a request's arrival at the replica to its first step",
            buckets=WAIT_SECONDS_BUCKETS,
            registry=registry,
        )
        self.submits = Counter("replica_submits_total", "Requests received from routers", registry=registry)
        self.refused_calls = Counter(
            "replica_refused_calls_total",
            "gRPC calls refused because the caller had no valid token",
            ["reason"],
            registry=registry,
        )
        for reason in CallRefusal:
            self.refused_calls.labels(reason.value)
        self.aborts = Counter(
            "replica_aborts_total", "Aborts of requests that were still running or waiting", registry=registry
        )
        self.frames = Counter("replica_frames_total", "Frames sent to routers", registry=registry)
        self.dropped_spans = DroppedSpans()
        registry.register(self.dropped_spans)
        self.lease_renewals = Counter(
            "replica_lease_renewals_total", "Heartbeats that renewed the lease", registry=registry
        )
        self.lease_prolongations = Counter(
            "replica_lease_prolongations_total",
            "Heartbeats that only extended the lease because Redis was full; the reported load is old",
            registry=registry,
        )
        self.lease_failures = Counter(
            "replica_lease_failures_total",
            "Heartbeats that failed: Redis was unreachable, or another process holds the lease",
            registry=registry,
        )

        self._tls_expiry = Gauge(
            "replica_tls_expiry_timestamp_seconds",
            "Expiry of the replica's certificate or of its routers' CA, in seconds since 1970",
            ["file"],
            registry=registry,
        )

    def _add_pull_metrics(self, registry: CollectorRegistry) -> None:
        self.pulled_chunks = Counter(
            "replica_sent_chunks_total",
            "Chunks of KV that other replicas have pulled from here",
            registry=registry,
        )
        self.open_splits = Gauge(
            "replica_open_splits", "Prompts being computed here for another replica", registry=registry
        )
        self.waiting_pulls = Gauge(
            "replica_waiting_pulls",
            "Pulls of other replicas that wait for KV which is being computed here",
            registry=registry,
        )

    def read_tls_ends(self, files: Iterable[str], read: Callable[[], Mapping[str, float]]) -> None:
        """With TLS: when these expire, asked anew at each scrape, from its thread."""
        for file in files:
            self._tls_expiry.labels(file).set_function(lambda file=file: read()[file])  # type: ignore[misc]

    def _add_cache_metrics(self, registry: CollectorRegistry) -> None:
        self.preemptions = Counter(
            "replica_preemptions_total",
            "Times that a running request lost its blocks to another",
            registry=registry,
        )
        self.evicted_blocks = Counter(
            "replica_evicted_blocks_total",
            "Cached blocks that were evicted; below the device, chunks of them",
            ["tier"],
            registry=registry,
        )
        self._evicted = {tier: self.evicted_blocks.labels(tier.value) for tier in Tier}
        self.tiers = TierMetrics(registry)
        self.leaving = LeavingMetrics(registry)
        self.media = ImageMetrics(registry)

    def _add_lease_metrics(self, registry: CollectorRegistry) -> None:
        """Add metrics on leases of prefixes, not of the replica itself."""
        self.granted_leases = Counter(
            "replica_prefix_leases_granted_total",
            "Leases on the KV of prompts that were granted",
            registry=registry,
        )
        self.refused_leases = Counter(
            "replica_prefix_leases_refused_total",
            "Leases on the KV of prompts that were refused",
            ["reason"],
            registry=registry,
        )
        self.broken_lease_tokens = Counter(
            "replica_prefix_lease_broken_tokens_total",
            "Tokens of leased KV that went before the end of their lease",
            ["cause"],
            registry=registry,
        )
        self.kept_lease_tokens = Counter(
            "replica_prefix_lease_kept_tokens_total",
            "Tokens of leased KV that were kept until the end of their lease",
            registry=registry,
        )
        self.leased_tokens = Gauge(
            "replica_prefix_leased_tokens", "Tokens of KV that are leased", registry=registry
        )
        for reason in LeaseRefusal:
            self.refused_leases.labels(reason.value)
        for cause in LeaseBreak:
            self.broken_lease_tokens.labels(cause.value)
        self._lease_totals = LeaseTotals()

    def _observe_leases(self, totals: LeaseTotals) -> None:
        before, self._lease_totals = self._lease_totals, totals
        self.granted_leases.inc(totals.num_granted - before.num_granted)
        self.kept_lease_tokens.inc(totals.num_kept_tokens - before.num_kept_tokens)
        self.leased_tokens.set(totals.num_leased_tokens)
        for reason, number in totals.num_refused.items():
            self.refused_leases.labels(reason.value).inc(number - before.num_refused.get(reason, 0))
        for cause, number in totals.num_broken_tokens.items():
            more = number - before.num_broken_tokens.get(cause, 0)
            self.broken_lease_tokens.labels(cause.value).inc(more)

    def _add_index_metrics(self, registry: CollectorRegistry) -> None:
        self.index_changes = Counter(
            "replica_index_changes_total", "Changes written to the index stream", registry=registry
        )
        self.index_rewrites = Counter(
            "replica_index_rewrites_total",
            "Times that the replica's whole block set was written to the index",
            registry=registry,
        )
        self.index_stream_bytes = Gauge(
            "replica_index_stream_bytes",
            "Memory of the index stream in Redis, as last measured by this replica",
            registry=registry,
        )
        self.index_withheld = Gauge(
            "replica_index_withheld",
            "1 while this replica keeps its share out of the index because Redis is too full, else 0",
            registry=registry,
        )
        self.redis_memory_ratio = Gauge(
            "replica_redis_memory_ratio",
            "Redis' used memory as a share of its maxmemory; 0 without maxmemory",
            registry=registry,
        )
        self.index_hashes = Gauge(
            "replica_index_hashes",
            "Block hashes that the index should hold for this replica",
            registry=registry,
        )
        self.resident_hashes = Gauge(
            "replica_resident_hashes",
            "Distinct block hashes that a tier of the cache holds",
            ["tier"],
            registry=registry,
        )
        self.announcements = Gauge(
            "replica_announcements",
            "Requests whose blocks are announced but not yet computed",
            registry=registry,
        )
        self.index_lag_seconds = Gauge(
            "replica_index_lag_seconds",
            "Age of the oldest change in the latest index write",
            registry=registry,
        )

    def observe(self, frame: StepFrame, step_seconds: float) -> None:
        if frame.leases is not None:
            self._observe_leases(frame.leases)
        if frame.tiers is not None:
            self.tiers.observe(frame.tiers)
        if step_seconds > 0:
            self.steps.inc()
            self.step_seconds.observe(step_seconds)
        if frame.num_preemptions:
            self.preemptions.inc(frame.num_preemptions)
        for event in frame.events:
            if isinstance(event, BlockRemoved):
                self._evicted[event.tier].inc(len(event.block_hashes))
        prompt = cached = cross_user = generated = 0
        for delta in frame.deltas:
            generated += delta.num_tokens
            if delta.usage is not None and delta.usage.num_cached_tokens is not None:
                prompt += delta.usage.num_prompt_tokens
                cached += delta.usage.num_cached_tokens
                cross_user += delta.usage.num_cross_user_tokens
                self.tiers.count(delta.usage)
            if delta.refusal is not None:
                self.refusals.labels(delta.refusal.code.value).inc()
        self.generated_tokens.inc(generated)
        if prompt:
            self.prompt_tokens.inc(prompt)
            self._vllm_queries.inc(prompt)
            self.cached_tokens.inc(cached)
            self._vllm_hits.inc(cached)
            self.cross_user_tokens.inc(cross_user)
        load = frame.load
        self.running.set(load.num_running)
        self.waiting.set(load.num_waiting)
        self.pending_tokens.set(load.num_pending_tokens)
        self.prefill_seconds.set(load.prefill_seconds_per_token)
        self.media.encoded(frame)
        self.used_blocks.set(load.num_used_blocks)
        self.cached_blocks.set(load.num_cached_blocks)
        self.total_blocks.set(load.num_total_blocks)


@asynccontextmanager
async def metrics_endpoint(registry: CollectorRegistry, host: str, port: int) -> AsyncIterator[int]:
    """Serve /metrics from a thread while the block runs; yields the port. Raises OSError if it is taken."""
    server, thread = start_http_server(port, host, registry)
    try:
        yield server.server_port
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        await asyncio.to_thread(thread.join)
