"""LeavingMetrics: a replica's metrics on leased KV that moves between replicas.

Owns the names. The leaving replica counts what it hands over, while it can be scraped; the receiver what it
takes.
"""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter

from replicas.protocol.hand_overs import HandOverOutcome


class LeavingMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._chunks = Counter(
            "replica_handed_over_chunks_total",
            "Chunks of leased KV that this replica offered to others when it drained, by what became of them",
            ["outcome"],
            registry=registry,
        )
        self._bytes = Counter(
            "replica_handed_over_bytes_total",
            "Bytes of leased KV that others have taken over while this replica drained",
            registry=registry,
        )
        self._seconds = Counter(
            "replica_hand_over_seconds_total",
            "Time that a drain has spent on handing leased KV over",
            registry=registry,
        )
        self.taken_over_chunks = Counter(
            "replica_taken_over_chunks_total",
            "Chunks of leased KV that draining replicas have offered to this one, by what became of them",
            ["outcome"],
            registry=registry,
        )
        for outcome in HandOverOutcome:
            self._chunks.labels(outcome.value)
            self.taken_over_chunks.labels(outcome.value)

    def handed_over(self, outcomes: Mapping[HandOverOutcome, int], num_bytes: int, seconds: float) -> None:
        for outcome, number in outcomes.items():
            self._chunks.labels(outcome.value).inc(number)
        self._bytes.inc(num_bytes)
        self._seconds.inc(seconds)
