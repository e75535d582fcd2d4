"""A simulated fleet whose size follows the prompt tokens that wait."""

import dataclasses
import itertools

from loadtests.simulation.options import Autoscale, FleetOptions
from loadtests.simulation.request import prepare
from loadtests.simulation.scaling import BETWEEN_DRAINS_SECONDS, DOWN_SECONDS, Autoscaler
from loadtests.workloads import Workload
from router.queue.held import QueueRules
from tests.loadtests.simulation.builders import new_fleet, random_workload, request, small_shape

RULE = Autoscale(2, 6, target_tokens=100.0)


def test_it_grows_at_once_to_what_the_sum_asks_for_and_no_further() -> None:
    assert Autoscaler(RULE).wanted(0.0, 410, 2) == 5
    assert Autoscaler(RULE).wanted(0.0, 9999, 2) == 6
    assert Autoscaler(RULE).wanted(0.0, 219, 2) == 2, "within the tolerance"
    assert Autoscaler(RULE).wanted(0.0, 0, 2) == 2
    assert Autoscaler(RULE).wanted(0.0, 0, 0) == 2, "all of them were killed"


def test_it_shrinks_one_by_one_when_fewer_have_been_enough_for_long() -> None:
    scaler, size, sizes = Autoscaler(RULE), 5, []
    scaler.wanted(0.0, 500, size)
    for look in range(1, 40):
        now = 15.0 * look
        size = scaler.wanted(now, 0, size)
        sizes.append((now, size))
    changes = [now for (now, size), (_, before) in zip(sizes[1:], sizes, strict=False) if size < before]
    assert changes[0] > DOWN_SECONDS
    assert all(later - now >= BETWEEN_DRAINS_SECONDS for now, later in itertools.pairwise(changes))
    assert sizes[-1][1] == 2


def test_replicas_come_for_a_load_and_go_after_it() -> None:
    busy = random_workload(1, num_requests=600, qps=30.0).requests
    late = [request(900.0 + 30 * number, [1, 2], block_tokens=16) for number in range(3)]
    workload = Workload("peak", 16, (*busy, *late))
    options = FleetOptions(
        small_shape(), num_replicas=6, queue=QueueRules(), autoscale=Autoscale(1, 6, 400.0, 5.0)
    )
    fleet = new_fleet(options)
    assert [host.replica is not None for host in fleet.hosts] == [True, *[False] * 5]
    result = fleet.serve(prepare(workload))
    assert len(result.records) == len(workload.requests)
    assert max(fleet._sizes) > 1
    assert fleet._sizes[0] == fleet._sizes[-1] == 1
    assert result.mean_replicas is not None and 1 < result.mean_replicas < 6
    few = new_fleet(dataclasses.replace(options, num_replicas=1, autoscale=None)).serve(prepare(workload))
    num_failed = [sum(record.error is not None for record in each.records) for each in (result, few)]
    assert num_failed[0] < num_failed[1]
    assert few.mean_replicas is None
