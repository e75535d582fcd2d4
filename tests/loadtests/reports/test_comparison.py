import statistics
from dataclasses import replace

import pytest

from loadtests.reports.comparison import (
    FIGURES,
    Figure,
    RunSet,
    compare,
    is_better,
    ratio,
    verdict,
)
from loadtests.reports.report import Origins, RequestRecord, Slo
from loadtests.reports.run_file import Run
from tests.loadtests.run_builder import dying, random_run, run_info

SLO = Slo(2.0)


def figure(label: str) -> Figure:
    return next(each for each in FIGURES if each.label == label)


def run_of(policy: str, *, cached: int, ttft: float, cross_user: int | None = 10, seed: int = 1) -> Run:
    records = tuple(
        RequestRecord(
            arrival_seconds=10.0 + number,
            num_input_tokens=100,
            num_output_tokens=2,
            ttft_seconds=ttft,
            e2e_seconds=1.0,
            num_cached_tokens=cached,
            num_cross_user_tokens=cross_user,
        )
        for number in range(10)
    )
    return Run(run_info(policy=policy, seed=seed), records, (), None)


def compared(*runs: Run) -> RunSet:
    (found,) = compare([(f"run-{number}", run) for number, run in enumerate(runs)], SLO)
    return found


def test_runs_that_differ_in_their_seed_are_one_variant_shown_by_its_median() -> None:
    runs = [random_run(seed) for seed in (1, 2, 3)]
    found = compared(*runs)
    (variant,) = found.variants
    for each in FIGURES:
        values = [value for run in variant.runs if (value := each.of(run.figures.report)) is not None]
        spread = variant.spread(each)
        assert (spread is None) == (values == [])
        if spread is not None:
            assert (spread.lowest, spread.median, spread.highest) == (
                min(values),
                statistics.median(values),
                max(values),
            )


def test_pooled_bins_add_tokens_up_and_average_goodput() -> None:
    variant = compared(*(random_run(seed) for seed in (1, 2, 3))).variants[0]
    longest = max(len(run.figures.bins) for run in variant.runs)
    assert len(variant.bins) == longest
    for number, merged in enumerate(variant.bins):
        there = [run.figures.bins[number] for run in variant.runs if number < len(run.figures.bins)]
        assert merged.origins == sum((each.origins for each in there), Origins())
        assert merged.goodput == pytest.approx(sum(each.goodput for each in there) / len(there))
    assert len(variant.ttft_seconds) == sum(len(run.figures.ttft_seconds) for run in variant.runs)


def test_kvasirs_own_policy_is_never_what_others_are_compared_with() -> None:
    ours, theirs, third = (run_of(name, cached=50, ttft=0.1) for name in ("kvasir", "random", "lmetric"))
    assert [each.name for each in compared(ours, theirs, third).variants] == ["random", "lmetric", "kvasir"]
    assert compared(ours).baseline.name == "kvasir"


def test_tests_and_workloads_are_not_mixed() -> None:
    run = random_run()
    other_workload = replace(run, info=run_info(workload={"name": "b2b", "qps": 5.0}))
    other_test = replace(run, info=run_info(test="chat"))
    sets = compare([("a", run), ("b", other_workload), ("c", other_test), ("d", run)], SLO)
    assert [[each.name for each in found.variants[0].runs] for found in sets] == [["a", "d"], ["b"], ["c"]]


def test_more_hits_and_less_time_are_better() -> None:
    found = compared(run_of("random", cached=20, ttft=0.4), run_of("kvasir", cached=60, ttft=0.1))
    theirs, ours = found.variants
    hits, ttft, own = figure("Token hit rate"), figure("TTFT p50"), figure("Hit in own blocks")
    assert ratio(hits, ours, theirs) == pytest.approx(3.0)
    assert ratio(ttft, ours, theirs) == pytest.approx(0.25)
    assert (is_better(hits, ours, theirs), is_better(hits, theirs, ours)) == (True, False)
    assert (is_better(ttft, ours, theirs), is_better(ttft, theirs, ours)) == (True, False)
    assert is_better(own, ours, theirs) is None
    assert is_better(figure("Cross-user hit rate"), ours, theirs) is None, "equal"


@pytest.mark.parametrize("num_answered", [0, 4])
def test_who_failed_most_requests_neither_wins_nor_loses_by_any_figure(num_answered: int) -> None:
    dead = dying(run_of("random", cached=90, ttft=0.01), num_answered)
    found = compared(dead, run_of("kvasir", cached=20, ttft=0.4))
    theirs, ours = found.variants
    for each in FIGURES:
        assert is_better(each, ours, theirs) is is_better(each, theirs, ours) is None
        assert ratio(each, ours, theirs) is ratio(each, theirs, ours) is None
    said = f"random failed: {10 - num_answered} of 10 requests were not answered"
    assert verdict(found).startswith(f"{said}. kvasir: token hit rate 20.0 %, ")
    assert verdict(compared(dead)) == f"{said}."
