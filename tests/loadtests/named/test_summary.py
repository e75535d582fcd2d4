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


def test_images_have_lines_of_their_own_where_prompts_have_any() -> None:
    assert "mage" not in table(compared(run_of("round_robin"), run_of("kvasir")))
    runs = []
    for policy, num_taken, num_encoded in (("round_robin", 20, 4000), ("kvasir", 5, 1000)):
        run = run_of(policy, num_images=2, num_image_tokens=500)
        assert run.engine_totals is not None
        totals = replace(run.engine_totals, num_images=num_taken, num_encoded_image_tokens=num_encoded)
        runs.append(replace(run, engine_totals=totals))
    lines = {line[:36].strip(): line[36:].split() for line in table(compared(*runs)).splitlines()}
    assert lines["Image tokens cached"] == ["20.0", "%", "80.0", "%", "4.00×"]
    assert lines["Images uploaded, of those in prompts"] == ["100.0", "%", "25.0", "%", "0.25×"]


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


def test_a_third_policy_that_failed_is_named_before_those_that_did_not() -> None:
    runs = compared(run_of("random"), dying(run_of("round_robin"), 1), run_of("kvasir"))
    assert (sentence(runs) or "").startswith(
        "round_robin failed: 9 of 10 requests were not answered. kvasir answered the same traffic with "
    )


def test_a_policy_that_failed_the_smaller_half_is_compared() -> None:
    runs = compared(dying(run_of("round_robin"), 5), run_of("kvasir"))
    assert (sentence(runs) or "").startswith("kvasir answered the same traffic with ")


def test_where_a_policy_had_no_hit_no_ratio_is_told() -> None:
    runs = compared(run_of("round_robin", cached=0), run_of("kvasir", cached=5))
    assert (sentence(runs) or "").startswith(
        "kvasir answered the same traffic with hits where round_robin had none (5.0 % against 0.0 %), and "
    )


def test_the_sentence_is_about_our_policy_whatever_the_order_and_however_many_there_are() -> None:
    runs = compared(
        run_of("kvasir", cached=90), run_of("round_robin", cached=30), run_of("random", cached=10)
    )
    assert (sentence(runs) or "").startswith(
        "kvasir answered the same traffic with 3.0 times the hits of round_"
    )


def test_one_policy_alone_is_compared_with_nothing() -> None:
    assert sentence(compared(run_of("kvasir"))) is None
    assert "×" not in table(compared(run_of("kvasir")))


def test_the_table_has_a_column_for_each_policy_and_one_for_what_they_differ_by() -> None:
    lines = table(compared(run_of("round_robin", cached=20), run_of("kvasir", cached=80))).splitlines()
    assert lines[0].split() == ["round_robin", "kvasir"]
    assert lines[1].split() == ["Token", "hit", "rate", "20.0", "%", "80.0", "%", "4.00×"]


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
