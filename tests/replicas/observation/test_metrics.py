"""What frames of a real scheduler come to in a replica's metrics."""

from prometheus_client import CollectorRegistry

from replicas.observation.metrics import ReplicaMetrics
from replicas.protocol.events import BlockRemoved, Tier
from replicas.protocol.frames import LoadSnapshot, PromptUsage, RefusalCode, RequestKey, StepFrame, TokenDelta
from replicas.protocol.prefix_leases import LeaseBreak, LeaseRefusal, LeaseTotals
from replicas.protocol.status import ModelCard
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
