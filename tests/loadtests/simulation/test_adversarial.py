"""Traffic that is made to break a router: what is lost by it stays within bounds, with room to spare.

Small fleets of the H100's cost model under about 300 requests; each bound is wide of what is found and
narrow of what a router does that pins, scatters or believes what it hears.
"""

import pytest

from loadtests.reports.report import Report, Slo, make_report
from loadtests.simulation.fleet import FleetResult
from loadtests.simulation.options import Delays, FleetOptions, Outage
from loadtests.simulation.request import prepare
from loadtests.simulation.shape import ReplicaShape
from loadtests.workloads import (
    Workload,
    agentic,
    ideal_hits,
    key_per_request,
    one_key,
    one_large_tenant,
    same_head,
    short_prompts,
    without_keys,
    zipf_b2b,
)
from replicas.simulated_engine.hardware import HARDWARE
from tests.loadtests.simulation.builders import new_fleet

NUM_WARM_UP = 60


def fleet_of(workload: Workload, capacity_tokens: int = 430_000, **changes: object) -> FleetOptions:
    block_size = workload.block_tokens
    hardware = HARDWARE["h100-8b"]
    shape = ReplicaShape(
        hardware.cost, capacity_tokens // block_size, block_size, hardware.max_batched_tokens, max_running=256
    )
    values: dict[str, object] = {"num_replicas": 4, "num_routers": 4, **changes}
    return FleetOptions(shape, **values)  # type: ignore[arg-type]


def served(workload: Workload, options: FleetOptions) -> tuple[FleetResult, Report]:
    result = new_fleet(options).serve(prepare(workload), num_warm_up=NUM_WARM_UP)
    return result, make_report(result.records[NUM_WARM_UP:], Slo(2.0), num_replicas=options.num_replicas)


def report_of(workload: Workload, capacity_tokens: int = 430_000, **changes: object) -> Report:
    _, report = served(workload, fleet_of(workload, capacity_tokens, **changes))
    assert report.num_answered == report.num_requests
    return report


def p90(report: Report) -> float:
    assert report.ttft is not None
    return report.ttft.p90


def hit_rate(report: Report) -> float:
    assert report.token_hit_rate is not None
    return report.token_hit_rate


def most_over_mean(report: Report) -> float:
    assert report.imbalance_requests is not None
    return report.imbalance_requests.max_over_mean


def test_one_head_for_all_does_not_gather_them() -> None:
    workload = same_head(seed=1, qps=20.0, num_requests=300, num_groups=60)
    report = report_of(workload)
    assert report.imbalance_computed_tokens is not None
    assert report.imbalance_computed_tokens.max_over_mean < 1.8
    assert most_over_mean(report) < 1.8 < most_over_mean(report_of(workload, policy="consistent_hash"))
    assert hit_rate(report) > 0.8 * ideal_hits(workload, warm_up=NUM_WARM_UP).token_hit_rate


def test_a_tenant_with_most_of_the_traffic_is_spread_when_one_replica_is_not_enough() -> None:
    """Its questions alone are more than one replica computes; the rest of the fleet would stand idle."""
    workload = one_large_tenant(seed=1, qps=200.0, num_requests=300, num_groups=20, share=0.9)
    report = report_of(workload)
    assert most_over_mean(report) < 2.0
    assert p90(report) < 0.5 * p90(report_of(workload, policy="consistent_hash"))


@pytest.mark.parametrize("make", [one_key, key_per_request])
def test_keys_that_say_nothing_cost_next_to_nothing(make) -> None:  # type: ignore[no-untyped-def]
    workload = make(seed=1, qps=20.0, num_requests=300, num_groups=60)
    report, without = report_of(workload), report_of(without_keys(workload))
    assert p90(report) < 1.5 * p90(without)
    assert hit_rate(report) > 0.9 * hit_rate(without)
    assert hit_rate(report) > 0.8 * ideal_hits(workload, warm_up=NUM_WARM_UP).token_hit_rate


def test_a_key_per_session_does_not_keep_agents_from_what_all_of_them_share() -> None:
    workload = agentic(seed=1, qps=2.0, num_sessions=30, mean_turns=8, tool_seconds=5.0)
    report, without = report_of(workload), report_of(without_keys(workload))
    assert p90(report) < 1.5 * p90(without)
    assert hit_rate(report) > 0.95 * hit_rate(without)
    assert (report.cross_user_hit_rate or 0.0) > 0.8 * (without.cross_user_hit_rate or 0.0) > 0.1


def test_prompts_around_the_length_of_a_head_are_served_and_found_again() -> None:
    workload = short_prompts(seed=1, qps=50.0, num_requests=300, num_groups=10)
    report = report_of(workload)
    assert hit_rate(report) > 0.8 * ideal_hits(workload, warm_up=NUM_WARM_UP).token_hit_rate
    assert most_over_mean(report) < 2.5


def small_zipf() -> Workload:
    return zipf_b2b(seed=1, qps=15.0, num_requests=300, num_groups=60, output_tokens=50)


@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_late_and_lost_events_cost_little(delay: float) -> None:
    fresh = report_of(small_zipf(), 100_000, delays=Delays(event=0.0, load=0.0))
    late = report_of(small_zipf(), 100_000, delays=Delays(event=delay), drop_share=0.01)
    assert hit_rate(late) > 0.9 * hit_rate(fresh)
    assert hit_rate(late) > 0.7 * ideal_hits(small_zipf(), warm_up=NUM_WARM_UP).token_hit_rate
    assert p90(late) < 2.0 * p90(fresh)


def test_a_middle_third_without_redis_fails_nobody_and_costs_little() -> None:
    workload = small_zipf()
    third = workload.duration_seconds / 3
    calm = report_of(workload, 100_000)
    down = report_of(workload, 100_000, outages=(Outage(third, 2 * third),))
    assert p90(down) < 2.0 * p90(calm)
    assert hit_rate(down) > 0.8 * hit_rate(calm)
    assert hit_rate(down) > 0.6 * ideal_hits(workload, warm_up=NUM_WARM_UP).token_hit_rate


def test_sixteen_routers_decide_nearly_as_well_as_one() -> None:
    one, many = (report_of(small_zipf(), 100_000, num_routers=number) for number in (1, 16))
    assert hit_rate(many) > hit_rate(one) - 0.05
    assert hit_rate(many) > 0.7 * ideal_hits(small_zipf(), warm_up=NUM_WARM_UP).token_hit_rate
    assert p90(many) < 1.5 * p90(one)
