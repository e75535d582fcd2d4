from dataclasses import replace

import pytest

from cluster.config import BackoffSpec, FleetSpec, PoolSpec
from replicas.config import ReplicaConfig
from replicas.protocol.settings import SettingsError
from replicas.protocol.status import ReplicaId


def test_replicas_are_named_after_their_pool() -> None:
    spec = FleetSpec((PoolSpec(2), PoolSpec(1, name="large-ones")))
    assert spec.pools[1].replica_id(7) == "large-ones-7"
    assert spec.pool_of(ReplicaId("large-ones-7")) is spec.pools[1]
    assert spec.pool_of(ReplicaId("small-7")) is None


def test_the_replicas_of_a_pool_differ_in_their_id_only() -> None:
    pool = PoolSpec(2, replica=ReplicaConfig(model_name="m", block_size=32))
    first, second = (pool.config_of(replica_id) for replica_id in map(pool.replica_id, range(2)))
    assert (first.replica_id, second.replica_id) == ("replica-0", "replica-1")
    assert first.block_size == second.block_size == 32


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: PoolSpec(-1), "cannot have -1 replicas"),
        (lambda: PoolSpec(1, name="a b"), "cannot be named 'a b'"),
        (lambda: PoolSpec(1, name=""), "cannot be named ''"),
        (lambda: PoolSpec(1, num_cpus=-0.1), "less than no CPU"),
        (lambda: PoolSpec(1, num_gpus=1.5), "only whole ones"),
        (lambda: PoolSpec(1, num_threads=0), "at least one thread"),
        (lambda: FleetSpec((PoolSpec(1), PoolSpec(2))), "two pools have one name"),
        (lambda: FleetSpec((PoolSpec(1),), drain_seconds=-1), "cannot be negative"),
        (lambda: BackoffSpec(initial_seconds=0), "initial_seconds"),
        (lambda: BackoffSpec(initial_seconds=2, max_seconds=1), "initial_seconds"),
        (lambda: BackoffSpec(healthy_seconds=-1), "cannot be negative"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_with_a_sentence(make, sentence) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SettingsError, match=sentence):
        make()


def test_a_replica_on_several_gpus_asks_for_one_machine_or_for_a_bundle_each() -> None:
    pool = PoolSpec(1, num_cpus=4, num_gpus=2, custom_resources={"slot": 1})
    assert pool.bundles() == ({"CPU": 4, "GPU": 2, "slot": 1},)
    assert replace(pool, bundle="gpu").bundles() == ({"CPU": 2, "GPU": 1, "slot": 1}, {"CPU": 2, "GPU": 1})


def test_a_replica_without_a_gpu_asks_for_one_bundle() -> None:
    assert PoolSpec(1, num_cpus=0.1).bundles() == ({"CPU": 0.1},)


def test_the_first_death_is_repaired_at_once_and_later_ones_ever_more_slowly() -> None:
    backoff = BackoffSpec(initial_seconds=0.5, max_seconds=3)
    assert [backoff.delay_seconds(deaths) for deaths in range(7)] == [0, 0, 0.5, 1, 2, 3, 3]
    assert backoff.delay_seconds(10_000) == 3
