"""What the controller tells of pools: as they should be, as they are, and from zero on."""

from prometheus_client import CollectorRegistry

from cluster.config import FleetSpec, FoundServer, PoolSpec, pool_of_id
from cluster.controller.metrics import FleetMetrics
from replicas.protocol.status import ReplicaId, ReplicaState
from tests.cluster.finding import finding

SPEC = FleetSpec((PoolSpec(2, "small"), PoolSpec(1, "large-ones")))


def sample(metrics: FleetMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_replicas_are_counted_by_pool_and_state() -> None:
    metrics = FleetMetrics(CollectorRegistry())
    metrics.see(
        SPEC,
        [
            (ReplicaId("small-0"), ReplicaState.READY),
            (ReplicaId("small-1"), ReplicaState.STARTING),
            (ReplicaId("large-ones-0"), ReplicaState.READY),
        ],
    )
    assert sample(metrics, "fleet_replicas", pool="small", state="ready") == 1
    assert sample(metrics, "fleet_replicas", pool="small", state="starting") == 1
    assert sample(metrics, "fleet_replicas", pool="large-ones", state="ready") == 1
    assert sample(metrics, "fleet_replicas", pool="large-ones", state="stopped") == 0
    assert sample(metrics, "fleet_replicas_desired", pool="small") == 2


def test_counters_of_a_pool_are_there_before_anything_has_happened() -> None:
    metrics = FleetMetrics(CollectorRegistry())
    metrics.see(SPEC, [])
    for name in ("starts", "restarts", "failures"):
        assert sample(metrics, f"fleet_replica_{name}_total", pool="small") == 0


def test_a_pool_that_is_given_up_goes_down_to_zero_and_stays() -> None:
    metrics = FleetMetrics(CollectorRegistry())
    left = (ReplicaId("small-0"), ReplicaState.DRAINING)
    metrics.see(SPEC, [left])
    fewer = FleetSpec(SPEC.pools[1:])
    metrics.see(fewer, [left])
    assert sample(metrics, "fleet_replicas_desired", pool="small") == 0
    assert sample(metrics, "fleet_replicas", pool="small", state="draining") == 1
    metrics.see(fewer, [])
    assert sample(metrics, "fleet_replicas", pool="small", state="draining") == 0


def test_a_replica_without_a_place_in_the_spec_has_its_pool_by_its_name() -> None:
    assert pool_of_id(ReplicaId("large-ones-0")) == "large-ones"
    assert pool_of_id(ReplicaId("large-ones-7")) == "large-ones"


def test_replicas_of_servers_that_were_found_count_for_the_pool_that_found_them() -> None:
    metrics = FleetMetrics(CollectorRegistry())
    spec = FleetSpec((finding("p"),))
    members = spec.with_servers({"p": [FoundServer("http://a:1"), FoundServer("http://b:1")]})
    metrics.see(members, [(ReplicaId("p_at_a-1-0"), ReplicaState.READY)])
    assert sample(metrics, "fleet_replicas_desired", pool="p") == 2
    assert sample(metrics, "fleet_replicas", pool="p", state="ready") == 1
    metrics.see(spec.with_servers({"p": []}), [])
    assert sample(metrics, "fleet_replicas_desired", pool="p") == 0
    assert {
        pool
        for sample in metrics.registry.collect()
        for each in sample.samples
        if (pool := each.labels.get("pool"))
    } == {"p"}
