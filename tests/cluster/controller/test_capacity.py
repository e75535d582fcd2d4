from dataclasses import replace

import pytest

from cluster.config import FleetSpec, PoolSpec
from cluster.controller.capacity import misfit

MACHINES = [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 2.0}, {"CPU": 8.0, "slot": 2.0}]


def gpu(count: int, gpus: float, **fields: object) -> PoolSpec:
    return PoolSpec(count, "gpu", num_gpus=gpus, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pools", "sentence"),
    [
        ([gpu(4, 1)], None),
        (
            [gpu(5, 1)],
            "the cluster cannot hold 5 replicas of pool gpu: each asks for 1 CPU, 1 GPU, and there",
        ),
        ([gpu(5, 1)], "is room for 4"),
        ([gpu(2, 2)], None),
        (
            [gpu(1, 4)],
            "no machine of the cluster can hold a replica of pool gpu, which asks for 1 CPU, 4 GPU",
        ),
        ([gpu(1, 4, bundle="gpu")], None),
        ([gpu(2, 4, bundle="gpu")], "there is room for 1"),
        ([gpu(8, 0.5), PoolSpec(8, "cpu")], None),
        ([PoolSpec(12, "cpu"), gpu(4, 1)], None),
        ([PoolSpec(13, "cpu"), gpu(4, 1)], "cannot hold 13 replicas of pool cpu"),
        ([PoolSpec(2, "s", custom_resources={"slot": 1})], None),
        (
            [PoolSpec(3, "s", custom_resources={"slot": 1})],
            "3 replicas of pool s: each asks for 1 CPU, 1 slot",
        ),
        ([PoolSpec(1, "s", custom_resources={"tpu": 1})], "no machine"),
        ([PoolSpec(0, "s", custom_resources={"tpu": 1})], None),
        ([PoolSpec(160, "s", num_cpus=0.1)], None),
    ],
)
def test_misfit(pools: list[PoolSpec], sentence: str | None) -> None:
    found = misfit(FleetSpec(tuple(pools)), MACHINES)
    assert found is None if sentence is None else found is not None and sentence in found


def test_a_cluster_that_grows_by_itself_is_never_too_small() -> None:
    assert misfit(FleetSpec((gpu(99, 1),), is_growing=True), MACHINES) is None


def test_a_rollout_needs_room_for_one_more_unless_an_old_one_leaves_first() -> None:
    full = gpu(4, 1)
    assert misfit(FleetSpec((full,)), MACHINES, rolling=["gpu"]) == (
        "there is no room for one more replica of pool gpu while it is rolled over; "
        "with surge 0 an old one leaves first"
    )
    assert misfit(FleetSpec((replace(full, surge=0),)), MACHINES, rolling=["gpu"]) is None
    assert misfit(FleetSpec((replace(full, num_replicas=3),)), MACHINES, rolling=["gpu"]) is None


def test_the_sentence_speaks_of_the_pool_that_has_grown() -> None:
    spec = FleetSpec((PoolSpec(16, "grown"), PoolSpec(1, "other")))
    assert (misfit(spec, MACHINES, grown=["grown"]) or "").startswith(
        "the cluster cannot hold 16 replicas of pool grown"
    )
