"""Metrics of a replica, and of the tiers below its device."""

from prometheus_client import CollectorRegistry

from replicas.observation.metrics import ReplicaMetrics
from replicas.protocol.events import BlockRemoved, Tier
from replicas.protocol.frames import LoadSnapshot, PromptUsage, RefusalCode, RequestKey, StepFrame, TokenDelta
from replicas.protocol.prefix_leases import LeaseBreak, LeaseRefusal, LeaseTotals
from replicas.protocol.status import ModelCard
from replicas.protocol.tier_figures import MoveFailure, Moves, TierFigures, TierFill, WriteStop
from replicas.simulated_engine.engine import SimulatedEngine
from replicas.simulated_engine.hardware import FREE
from tests.replicas.builders import engine_request

CARD = ModelCard("m", "f", "simulated", 16, 20, 4096, 1000, (2,))


def sample(metrics: ReplicaMetrics, name: str, **labels: str) -> float:
    value = metrics.registry.get_sample_value(name, labels)
    assert value is not None, name
    return value


def test_refusals_stand_at_zero_before_the_first() -> None:
    """Prometheus sees no increase in a counter that is not there before."""
    metrics = ReplicaMetrics(CollectorRegistry())
    assert {sample(metrics, "replica_refusals_total", code=code) for code in RefusalCode} == {0}


def test_evictions_and_preemptions_are_counted_as_they_happen() -> None:
    metrics = ReplicaMetrics(CollectorRegistry())
    engine = SimulatedEngine(
        CARD,
        FREE,
        num_blocks=21,
        max_batched_tokens=512,
        max_running=16,
        max_waiting=64,
        sleep=lambda seconds: None,
    )
    num_removed = 0
    for serial, start in ((1, 100), (2, 500)):
        engine.add(engine_request(range(start, start + 140), serial=serial, max_tokens=100, ignore_eos=True))
    while engine.has_work():
        frame = engine.step()
        metrics.observe(frame, 0.0)
        num_removed += sum(
            len(event.block_hashes) for event in frame.events if isinstance(event, BlockRemoved)
        )
    assert sample(metrics, "replica_preemptions_total") >= 1
    assert sample(metrics, "replica_evicted_blocks_total", tier="device") == num_removed > 0
    assert sample(metrics, "replica_evicted_blocks_total", tier="host") == 0


def test_tokens_of_slower_tiers_and_evictions_there_have_their_own_numbers() -> None:
    metrics = ReplicaMetrics(CollectorRegistry())
    usage = PromptUsage(100, 96, 0, 32, num_own_tokens=16, num_slower_tier_tokens=48, num_disk_tokens=20)
    removed = BlockRemoved((), Tier.DISK), BlockRemoved((b"h" * 16, b"i" * 16), Tier.HOST)  # type: ignore[arg-type]
    metrics.observe(StepFrame([TokenDelta(RequestKey(1, 0), (5,), usage=usage)], [*removed]), 0.0)
    by_tier = {tier.value: sample(metrics, "replica_cached_tokens_by_tier_total", tier=tier) for tier in Tier}
    assert by_tier == {"device": 48, "host": 28, "disk": 20}
    assert sample(metrics, "replica_cached_tokens_total") == 96
    assert sample(metrics, "replica_evicted_blocks_total", tier="host") == 2


def test_leases_are_counted_by_what_became_of_them() -> None:
    metrics = ReplicaMetrics(CollectorRegistry())
    reasons = {
        sample(metrics, "replica_prefix_leases_refused_total", reason=reason) for reason in LeaseRefusal
    }
    causes = {sample(metrics, "replica_prefix_lease_broken_tokens_total", cause=each) for each in LeaseBreak}
    assert reasons == causes == {0}
    for number in (1, 3):
        totals = LeaseTotals(
            num_granted=2 * number,
            num_refused={LeaseRefusal.BUDGET: 5 * number},
            num_leased_tokens=128,
            num_kept_tokens=256 * number,
            num_broken_tokens={LeaseBreak.LOST: 384 * number},
        )
        metrics.observe(StepFrame(leases=totals), 0.0)
        metrics.observe(StepFrame(), 0.0)
    assert sample(metrics, "replica_prefix_leases_granted_total") == 6
    assert sample(metrics, "replica_prefix_leases_refused_total", reason="budget") == 15
    assert sample(metrics, "replica_prefix_leased_tokens") == 128
    assert sample(metrics, "replica_prefix_lease_kept_tokens_total") == 768
    assert sample(metrics, "replica_prefix_lease_broken_tokens_total", cause="lost") == 1152


def test_what_engines_encode_of_images_is_counted() -> None:
    metrics = ReplicaMetrics(CollectorRegistry())
    for num_encoded in (64, 0, 100):
        load = LoadSnapshot(encode_seconds_per_token=0.25, prefill_seconds_per_token=0.125)
        metrics.observe(StepFrame(num_encoded_tokens=num_encoded, load=load), 0.0)
    assert sample(metrics, "replica_encoded_image_tokens_total") == 164
    assert sample(metrics, "replica_encode_seconds_per_image_token") == 0.25
    assert sample(metrics, "replica_prefill_seconds_per_token") == 0.125


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
