"""TierMetrics: a replica's metrics on its memory below the device.

Owns the names. The numbers are the store's, from the last frame that had any; a replica without such memory
has no series with a tier.
"""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from replicas.protocol.events import Tier
from replicas.protocol.frames import PromptUsage
from replicas.protocol.tier_figures import MoveFailure, Moves, TierFigures, TierFill, WriteStop


class TierMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._figures = TierFigures()
        self._add_gauges(registry)
        self._add_moves(registry)
        self._add_disk(registry)
        self.cached_tokens = Counter(
            "replica_cached_tokens_by_tier_total",
            "Prompt tokens that were read from the cache, by the tier that they came from",
            ["tier"],
            registry=registry,
        )
        self._cached = {tier: self.cached_tokens.labels(tier.value) for tier in Tier}

    def _add_gauges(self, registry: CollectorRegistry) -> None:
        self._chunks = Gauge(
            "replica_tier_chunks", "Chunks of KV that a tier holds", ["tier"], registry=registry
        )
        self._bytes = Gauge(
            "replica_tier_bytes", "Bytes of KV that a tier holds", ["tier"], registry=registry
        )
        self._limit = Gauge(
            "replica_tier_bytes_limit", "Bytes of KV that a tier may hold", ["tier"], registry=registry
        )
        self._quarantined = Gauge(
            "replica_quarantined_slots",
            "Slots of host memory that are not used because a read that was given up may still write there",
            registry=registry,
        )

    def _add_moves(self, registry: CollectorRegistry) -> None:
        """Counters begin at zero when the tier that they are about is known to be there."""
        self._moves = Counter(
            "replica_tier_moves_total",
            "Moves of KV between tiers: load (host memory to device), read (disk to host memory), "
            "write (host memory to disk) or pull (peer to host memory)",
            ["way"],
            registry=registry,
        )
        self._moved_tokens = Counter(
            "replica_tier_moved_tokens_total",
            "Tokens whose KV was moved between tiers",
            ["way"],
            registry=registry,
        )
        self._move_seconds = Counter(
            "replica_tier_move_seconds_total",
            "Time of all moves of KV between tiers; moves may overlap",
            ["way"],
            registry=registry,
        )
        self._failed_moves = Counter(
            "replica_tier_failed_moves_total",
            "Moves of KV that failed; what was not read is computed again",
            ["way", "reason"],
            registry=registry,
        )

    def _add_disk(self, registry: CollectorRegistry) -> None:
        self._waiting_writes = Gauge(
            "replica_disk_waiting_writes",
            "Chunks of KV that wait to be written to the disk",
            registry=registry,
        )
        self._budget = Gauge(
            "replica_disk_write_budget_ratio",
            "Write budget that is left, as a share of what it can hold; 1 without a bound",
            registry=registry,
        )
        self._budget.set(1)
        self._is_short = Gauge(
            "replica_disk_write_budget_short",
            "1 while the write budget is short and only KV that was used again is written, else 0",
            registry=registry,
        )
        self._stopped = Gauge(
            "replica_disk_writing_stopped",
            "1 while nothing is written to the disk for this reason, else 0",
            ["reason"],
            registry=registry,
        )
        self._other_bytes = Gauge(
            "replica_disk_other_bytes",
            "Bytes of KV on the disk that other layouts and versions have left there",
            registry=registry,
        )

    def count(self, usage: PromptUsage) -> None:
        """Count one prompt's tokens read, by tier."""
        self._cached[Tier.DEVICE].inc(usage.num_device_tokens)
        self._cached[Tier.HOST].inc(usage.num_host_tokens)
        self._cached[Tier.DISK].inc(usage.num_disk_tokens)

    def observe(self, figures: TierFigures) -> None:
        before, self._figures = self._figures, figures
        self._fill(Tier.HOST, figures.host)
        self._quarantined.set(figures.num_quarantined_slots)
        self._moved("load", before.loads, figures.loads)
        if figures.pulls is not None:
            self._moved("pull", before.pulls or Moves(), figures.pulls)
        if figures.disk is None:
            return
        self._fill(Tier.DISK, figures.disk)
        self._moved("read", before.reads, figures.reads)
        self._moved("write", before.writes, figures.writes)
        self._waiting_writes.set(figures.num_waiting_writes)
        self._budget.set(figures.write_budget_ratio)
        self._is_short.set(figures.is_write_budget_short)
        for stop in WriteStop:
            self._stopped.labels(stop.value).set(figures.write_stop is stop)
        self._other_bytes.set(figures.num_other_bytes)

    def _fill(self, tier: Tier, fill: TierFill) -> None:
        self._chunks.labels(tier.value).set(fill.num_chunks)
        self._bytes.labels(tier.value).set(fill.num_bytes)
        self._limit.labels(tier.value).set(fill.max_bytes)

    def _moved(self, way: str, before: Moves, now: Moves) -> None:
        self._moves.labels(way).inc(now.num - before.num)
        self._moved_tokens.labels(way).inc(now.num_tokens - before.num_tokens)
        self._move_seconds.labels(way).inc(max(0.0, now.seconds - before.seconds))
        if way != "load":
            self._failed(way, before.num_failed, now.num_failed)

    def _failed(self, way: str, before: Mapping[MoveFailure, int], now: Mapping[MoveFailure, int]) -> None:
        for reason in MoveFailure:
            more = now.get(reason, 0) - before.get(reason, 0)
            self._failed_moves.labels(way, reason.value).inc(more)
