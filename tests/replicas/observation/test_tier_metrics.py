"""What the figures of a store come to in a replica's metrics."""

from prometheus_client import CollectorRegistry

from replicas.observation.metrics import ReplicaMetrics
from replicas.protocol.frames import StepFrame
from replicas.protocol.tier_figures import MoveFailure, Moves, TierFigures, TierFill, WriteStop
from tests.replicas.observation.test_metrics import sample

FIRST = TierFigures(
    TierFill(3, 300, 800),
    TierFill(5, 500, 9000),
    loads=Moves(2, 256, 0.5),
    reads=Moves(4, 512, 1.5, {MoveFailure.LATE: 1}),
    writes=Moves(6, 768, 2.5, {MoveFailure.NO_SPACE: 2}),
    num_quarantined_slots=1,
    num_waiting_writes=7,
    write_budget_ratio=0.25,
    is_write_budget_short=True,
    write_stop=WriteStop.FULL,
    num_other_bytes=40,
)
SECOND = TierFigures(
    TierFill(2, 200, 800),
    TierFill(6, 600, 9000),
    loads=Moves(3, 384, 0.75),
    reads=Moves(4, 512, 1.5, {MoveFailure.LATE: 1, MoveFailure.DAMAGED: 3}),
    writes=Moves(9, 1152, 3.0, {MoveFailure.NO_SPACE: 2}),
)


def observed(*figures: TierFigures) -> ReplicaMetrics:
    metrics = ReplicaMetrics(CollectorRegistry())
    for each in figures:
        metrics.observe(StepFrame(tiers=each), 0.0)
    return metrics


def ways(metrics: ReplicaMetrics, name: str) -> list[float]:
    return [sample(metrics, f"replica_tier_{name}_total", way=way) for way in ("load", "read", "write")]


def test_every_figure_has_its_number() -> None:
    metrics = observed(FIRST)
    for name, host, disk in (("chunks", 3, 5), ("bytes", 300, 500), ("bytes_limit", 800, 9000)):
        assert sample(metrics, f"replica_tier_{name}", tier="host") == host
        assert sample(metrics, f"replica_tier_{name}", tier="disk") == disk
    assert ways(metrics, "moves") == [2, 4, 6]
    assert ways(metrics, "moved_tokens") == [256, 512, 768]
    assert ways(metrics, "move_seconds") == [0.5, 1.5, 2.5]
    assert sample(metrics, "replica_tier_failed_moves_total", way="read", reason="late") == 1
    assert sample(metrics, "replica_tier_failed_moves_total", way="write", reason="no_space") == 2
    assert sample(metrics, "replica_quarantined_slots") == 1
    assert sample(metrics, "replica_disk_waiting_writes") == 7
    assert sample(metrics, "replica_disk_write_budget_ratio") == 0.25
    assert sample(metrics, "replica_disk_write_budget_short") == 1
    assert sample(metrics, "replica_disk_writing_stopped", reason="full") == 1
    assert sample(metrics, "replica_disk_writing_stopped", reason="fails") == 0
    assert sample(metrics, "replica_disk_other_bytes") == 40


def test_counters_grow_by_what_is_new_and_gauges_follow() -> None:
    metrics = observed(FIRST, SECOND)
    assert ways(metrics, "moves") == [3, 4, 9]
    assert ways(metrics, "moved_tokens") == [384, 512, 1152]
    assert ways(metrics, "move_seconds") == [0.75, 1.5, 3.0]
    assert sample(metrics, "replica_tier_failed_moves_total", way="read", reason="late") == 1
    assert sample(metrics, "replica_tier_failed_moves_total", way="read", reason="damaged") == 3
    assert sample(metrics, "replica_tier_chunks", tier="host") == 2
    assert sample(metrics, "replica_disk_writing_stopped", reason="full") == 0
    assert sample(metrics, "replica_disk_write_budget_ratio") == 1


def test_failures_stand_at_zero_before_the_first() -> None:
    """Prometheus sees no increase in a counter that is not there before."""
    metrics = observed(TierFigures(disk=TierFill()))
    for way in ("read", "write"):
        failed = [
            sample(metrics, "replica_tier_failed_moves_total", way=way, reason=reason)
            for reason in MoveFailure
        ]
        assert failed == [0] * len(MoveFailure)


def test_without_a_tier_there_is_no_series_of_it() -> None:
    def series(*figures: TierFigures) -> set[str]:
        registry = observed(*figures).registry
        labels = ("tier", "way", "reason")
        return {
            sample.labels[label]
            for family in registry.collect()
            if family.name.startswith(("replica_tier_", "replica_disk_"))
            for sample in family.samples
            for label in labels
            if label in sample.labels
        }

    assert series() == set()
    assert series(TierFigures()) == {"host", "load"}
    assert {"host", "disk", "load", "read", "write"} <= series(FIRST)
