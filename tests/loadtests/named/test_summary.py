from dataclasses import replace

from loadtests.named.summary import complaints, doubts, fairness_table
from loadtests.reports.comparison import RunSet, compare
from loadtests.reports.report import RequestRecord, Slo
from loadtests.reports.run_file import EngineTotals, Run
from tests.loadtests.run_builder import run_info, totals_of


def run_of(policy: str, *, cached: int = 50, ttft: float = 0.1, **more: object) -> Run:
    fields: dict[str, object] = {
        "num_input_tokens": 100,
        "num_output_tokens": 2,
        "ttft_seconds": ttft,
        "e2e_seconds": 1.0,
        "num_cached_tokens": cached,
        "num_cross_user_tokens": min(cached, 10),
        "num_other_tenant_tokens": 0,
    }
    records = tuple(
        RequestRecord(arrival_seconds=10.0 + number, **(fields | more))  # type: ignore[arg-type]
        for number in range(10)
    )
    return Run(run_info(policy=policy), records, (), totals_of(records))


def compared(*runs: Run) -> RunSet:
    (found,) = compare([(f"run-{run.info.policy}", run) for run in runs], Slo(0.5))
    return found


def test_a_line_for_each_run_says_how_evenly_tenants_were_served() -> None:
    run = run_of("kvasir")
    large, small, cut, early = run.records[:4]
    refused = replace(large, tenant="large", error="refused (503)", ttft_seconds=None)
    records = (*[replace(large, tenant="large")] * 3, refused, replace(small, tenant="small"))
    records += (
        replace(cut, tenant="small", ttft_seconds=3.0),
        replace(early, arrival_seconds=0.0, error="failed"),
    )
    warm = replace(run.info, warmup_seconds=5.0)
    lines = fairness_table(compared(replace(run, info=warm, records=records)), Slo(0.5)).splitlines()
    assert lines[1].split() == ["run-kvasir", "1.000", "75.0", "%", "50.0", "%", "2.71", "s"]


def test_tokens_of_another_tenant_are_complained_about() -> None:
    runs = compared(run_of("kvasir", num_other_tenant_tokens=7))
    assert complaints(runs, (), is_killing=False) == ["run-kvasir: 70 cached tokens were of another tenant."]


def test_counters_that_differ_or_are_missing_are_complained_about() -> None:
    run = run_of("kvasir")
    totals = run.engine_totals
    assert totals is not None
    wrong = replace(
        run, engine_totals=replace(totals, num_cross_user_tokens=totals.num_cross_user_tokens + 1)
    )
    (complaint,) = complaints(compared(wrong), (), is_killing=False)
    assert "+1 cross-user tokens" in complaint
    missing = replace(run, engine_totals=None)
    (complaint,) = complaints(compared(missing), (), is_killing=False)
    assert complaint == "run-kvasir: the engines' own counters could not be read."
    assert complaints(compared(missing), (), is_killing=True) == [], "a killed replica takes them with it"


def test_a_killed_replicas_counters_are_not_held_against_it() -> None:
    run = replace(run_of("kvasir"), engine_totals=EngineTotals(1, 1, 1))
    assert complaints(compared(run), (), is_killing=True) != [], "those that are there must be right"


def test_a_client_that_was_late_is_doubted() -> None:
    (doubt,) = doubts(compared(run_of("round_robin"), run_of("kvasir", lateness_seconds=0.03)))
    assert doubt.startswith("run-kvasir: the load generator was late by 30.0 ms at p99")
    assert doubts(compared(run_of("kvasir", lateness_seconds=0.015))) == []
    slow = run_of("kvasir", lateness_seconds=0.03, ttft=2.0)
    assert doubts(compared(slow)) == [], "next to two seconds it is nothing"


def test_errors_are_complained_about_unless_the_test_expects_them() -> None:
    runs = compared(run_of("kvasir", error="refused (503)"), run_of("round_robin"))
    (complaint,) = complaints(runs, ("truncated",), is_killing=True)[1:]
    assert complaint == "run-kvasir: no request was answered."
    assert complaints(runs, ("truncated",), is_killing=True)[0] == (
        "run-kvasir: requests failed: 10 refused (503)."
    )
    assert complaints(runs, ("refused (503)",), is_killing=True) == ["run-kvasir: no request was answered."]
