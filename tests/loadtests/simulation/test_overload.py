"""Tests of the queue in simulated fleets: what is held, refused and shared when there is too much to do."""

import dataclasses
import random

import pytest

from loadtests.reports.fairness import fairness, jain, max_min
from loadtests.reports.report import Slo
from loadtests.simulation.fleet import FleetResult, VirtualFleet
from loadtests.simulation.options import Delays, FleetOptions, Kill
from loadtests.simulation.request import prepare
from loadtests.simulation.shape import ReplicaShape
from loadtests.workloads import TraceRequest, Workload, with_tenants
from loadtests.workloads.tenants import FLOODER
from replicas.scheduling.speed_meter import SpeedMeter
from replicas.simulated_engine.hardware import HARDWARE
from router.queue.held import QueueRules

RULES = QueueRules()
SHAPE = ReplicaShape(HARDWARE["h100-8b"].cost, 2000, 16, 2048, 32)
SLO = 1.0


def workload(
    qps: float, *, seed: int = 1, seconds: float = 15.0, num_tenants: int = 1, flood: int = 1
) -> Workload:
    rng = random.Random(seed)
    requests, arrival = [], 0.0
    while arrival < seconds:
        arrival += rng.expovariate(qps)
        session = rng.randrange(40)
        num_tokens = rng.choice((200, 800, 1600))
        blocks = (
            *(session * 1000 + block for block in range(5)),
            *(10**6 + len(requests) * 1000 + block for block in range(-(-num_tokens // 16) - 5)),
        )
        requests.append(
            TraceRequest(arrival, num_tokens, rng.randint(20, 60), blocks, f"u{session}", f"s{session}")
        )
    return with_tenants(Workload("overload", 16, tuple(requests)), num_tenants, flood)


def serve(work: Workload, *, seed: int = 1, **options: object) -> tuple[VirtualFleet, FleetResult]:
    rng = random.Random(seed)
    settings = {"num_replicas": 2, "delays": Delays(0.01, 0.02), "queue": RULES, **options}
    fleet = VirtualFleet(
        FleetOptions(SHAPE, **settings),  # type: ignore[arg-type]
        rng=rng,
        new_rng=lambda: random.Random(rng.getrandbits(64)),
        new_meter=SpeedMeter,
        stopwatch=lambda: 0.0,
    )
    return fleet, fleet.serve(prepare(work))


def good(result: FleetResult) -> int:
    return sum(Slo(SLO).is_met(record) for record in result.records)


@pytest.mark.parametrize(
    ("seed", "num_routers"),
    [(1, 1), (2, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 3), (2, 1)))],
)
def test_each_request_ends_once_whatever_dies_and_nothing_stays_in_a_queue(
    num_routers: int, seed: int
) -> None:
    kills = (Kill(0, 3.0, back_after=2.0), Kill(1, 4.0, back_after=4.0), Kill(0, 12.0))
    work = workload(60.0, seed=seed, num_tenants=3, flood=2)
    for deadline in (None, SLO):
        fleet, result = serve(
            work, seed=seed, num_routers=num_routers, kills=kills, deadline_seconds=deadline
        )
        assert len(result.records) == len(work.requests)
        assert {record.error for record in result.records} <= {
            None,
            "overloaded",
            "too_late",
            "no replica",
            "attempts",
        }
        for router in fleet.routers:
            assert router.holding is not None
            assert router.holding.num_waiting == 0
            assert router.table.loads.num_reserved == 0
            counts = router.holding.counts
            assert counts.num_released <= counts.num_held
        assert sum(record.error is None for record in result.records) > 0


def test_with_room_for_all_nobody_is_held_for_long_and_nothing_is_refused() -> None:
    work = workload(10.0)
    fleet, result = serve(work)
    _, without = serve(work, queue=None)
    assert all(record.error is None for record in result.records)
    counts = fleet.routers[0].holding.counts  # type: ignore[union-attr]
    assert counts.num_passed > 0.95 * len(work.requests)
    assert good(result) >= good(without)


@pytest.mark.slow
def test_goodput_does_not_collapse_under_overload() -> None:
    """It stays near its highest at two and four times as much, where sending everything at once ends."""
    rates = (40.0, 80.0, 160.0, 320.0)
    held = [good(serve(workload(qps), deadline_seconds=SLO)[1]) for qps in rates]
    sent = [good(serve(workload(qps), queue=None)[1]) for qps in rates]
    highest = max(*held, *sent)
    assert held[2] >= 0.8 * highest and held[3] >= 0.8 * highest
    assert sent[3] < 0.2 * highest, "there is no overload in this test"


def test_others_do_not_notice_a_flood() -> None:
    quiet = workload(30.0, num_tenants=3)
    flooded = workload(30.0, num_tenants=3, flood=20)
    before = fairness(serve(quiet, deadline_seconds=SLO)[1].records, Slo(SLO))
    after = fairness(serve(flooded, deadline_seconds=SLO)[1].records, Slo(SLO))
    assert after.tenants[FLOODER].num_refused > 0.3 * after.tenants[FLOODER].num_requests
    for name in ("tenant-1", "tenant-2"):
        assert after.tenants[name].good_share > 0.95 * before.tenants[name].good_share
    sent = fairness(serve(flooded, queue=None)[1].records, Slo(SLO))
    assert sent.tenants["tenant-1"].good_share < 0.5, "there is no flood in this test"


def test_one_that_floods_an_idle_fleet_is_served_whole() -> None:
    """As soon as when everything is sent at once, if it waits for as long as it takes."""
    work = workload(200.0, seconds=4.0)
    rules = dataclasses.replace(RULES, longest_seconds=1e6)
    _, held = serve(work, queue=rules)
    _, sent = serve(work, queue=None)
    assert all(record.error is None for record in held.records)
    ends = [
        max(record.arrival_seconds + (record.e2e_seconds or 0.0) for record in result.records)
        for result in (held, sent)
    ]
    assert ends[0] < 1.1 * ends[1]


def test_a_fair_part_is_no_more_than_was_asked_for() -> None:
    parts = max_min({"a": 10.0, "b": 100.0, "c": 1000.0}, 300.0)
    assert parts == {"a": 10.0, "b": 100.0, "c": 190.0}
    assert jain([1.0, 1.0, 1.0]) == 1.0
    assert jain([3.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert jain([]) is None


@pytest.mark.parametrize("is_known", [False, True])
def test_a_flood_of_short_prompts_with_long_answers_leaves_places_for_others(is_known: bool) -> None:
    """Of 64 places in the fleet it would have all, for as long as its answers take."""
    flood = [
        TraceRequest(0.5 + number / 100, 16, 600, (10**7 + number,), "bob", f"b{number}", tenant="bob")
        for number in range(100)
    ]
    others = [
        TraceRequest(
            number / (4 if is_known else 2),
            400,
            16,
            (*range(20), *(10**6 + 9 * number + i for i in range(5))),
            "a",
            f"a{number}",
            tenant="zoe",
        )
        for number in range(0 if is_known else 6, 60 if is_known else 30)
    ]
    requests = sorted(flood + others, key=lambda request: request.arrival_seconds)
    _, result = serve(Workload("places", 16, tuple(requests)))
    assert all(record.error is None for record in result.records)
    assert max(record.ttft_seconds or 0.0 for record in result.records if record.tenant == "zoe") < 0.1
