from dataclasses import replace

import pytest

from loadtests.named.summary import complaints, doubts, fairness_table, sentence, table
from loadtests.reports.comparison import RunSet, compare
from loadtests.reports.report import RequestRecord, Slo
from loadtests.reports.run_file import EngineTotals, Run
from tests.loadtests.run_builder import dying, run_info, totals_of


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


@pytest.mark.parametrize(
    ("ours", "theirs", "hits", "first_tokens"),
    [
        (
            run_of("kvasir", cached=82, ttft=0.05),
            run_of("round_robin", cached=20, ttft=0.16),
            "with 4.1 times the hits of round_robin (82.0 % against 20.0 %)",
            "3.2 times sooner (50.0 ms against 160 ms)",
        ),
        (
            run_of("kvasir", cached=10, ttft=0.2),
            run_of("round_robin", cached=20, ttft=0.16),
            "with 0.50 times the hits of round_robin (10.0 % against 20.0 %)",
            "1.25 times later (200 ms against 160 ms)",
        ),
        (
            run_of("kvasir", cached=0),
            run_of("round_robin", cached=0),
            "without a hit, as round_robin did",
            "as soon (100 ms against 100 ms)",
        ),
    ],
)
def test_the_sentence_says_how_many_times_the_hits_and_how_much_sooner(
    ours: Run, theirs: Run, hits: str, first_tokens: str
) -> None:
    assert sentence(compared(theirs, ours)) == (
        f"kvasir answered the same traffic {hits}, and its first tokens at p90 {first_tokens}."
    )


@pytest.mark.parametrize("cached", [0, None])
@pytest.mark.parametrize("num_answered", [0, 4])
def test_a_policy_that_failed_most_requests_is_compared_with_nobody(
    num_answered: int, cached: int | None
) -> None:
    for theirs, ours in (("round_robin", "kvasir"), ("kvasir", "random")):
        dead = dying(run_of(theirs, cached=0), num_answered, cached=cached)
        runs = compared(dead, run_of(ours))
        said = f"{theirs} failed: {10 - num_answered} of 10 requests were not answered"
        assert sentence(runs) == f"{said}, so there is nothing to compare."
        assert "×" not in table(runs)
    assert sentence(compared(dead)) == f"{said}."


def test_nothing_is_wrong_with_runs_in_which_all_went_well() -> None:
    runs = compared(run_of("round_robin"), run_of("kvasir"))
    assert complaints(runs, (), is_killing=False) == []
    assert doubts(runs) == []


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
