"""Figures of runs, against slow and obvious twins."""

from dataclasses import replace

import pytest

from loadtests.reports.report import Images, Origins, RequestRecord, Slo, make_report, origins_of
from loadtests.reports.run_figures import (
    figures_of,
    over_time,
)
from loadtests.reports.run_file import Run
from loadtests.reports.table import render
from tests.loadtests.run_builder import random_run, run_info, totals_of

SEEDS = range(5)
SLO = Slo(2.0)


def record(**more: object) -> RequestRecord:
    fields: dict[str, object] = {"arrival_seconds": 0.0, "num_input_tokens": 100, "num_cached_tokens": 60}
    return RequestRecord(**(fields | more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_cross_user_tokens": 20}, Origins(100, 40, 20, 0, 0)),
        ({"num_cross_user_tokens": 20, "num_own_tokens": 30}, Origins(100, 30, 20, 0, 10)),
        ({}, Origins(100, 0, 0, 0, 60)),
        ({"num_own_tokens": 25}, Origins(100, 25, 0, 0, 35)),
        ({"num_cross_user_tokens": 20, "num_other_tenant_tokens": 15}, Origins(100, 40, 5, 15, 0)),
        ({"num_cross_user_tokens": 0, "num_other_tenant_tokens": 60}, Origins(100, 0, 0, 60, 0)),
        ({"num_cached_tokens": None, "num_cross_user_tokens": 20}, Origins()),
        ({"num_cached_tokens": 0, "num_cross_user_tokens": 0}, Origins(100)),
    ],
)
def test_origins_add_up_to_what_was_cached(fields: dict[str, object], expected: Origins) -> None:
    found = origins_of(record(**fields))
    assert found == expected
    assert found.num_cached_tokens == (record(**fields).num_cached_tokens or 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_split_by_origin_adds_up_to_the_hit_rate(seed: int) -> None:
    report = make_report(random_run(seed).records)
    assert report.origins.share(report.origins.num_cached_tokens) == report.token_hit_rate


def test_gaps_between_tokens_are_those_of_whole_answers() -> None:
    records = [
        record(itl_seconds=(0.1, 0.3)),
        record(itl_seconds=(0.2,)),
        record(itl_seconds=(9.0,), error="truncated"),
    ]
    report = make_report(records)
    assert report.itl is not None
    assert (report.itl.p50, report.itl.most) == (0.2, 0.3)
    assert make_report([record()]).itl is None


@pytest.mark.parametrize("seed", SEEDS)
def test_the_warm_up_is_in_no_figure(seed: int) -> None:
    run = random_run(seed)
    late = [each for each in run.records if each.arrival_seconds >= 5.0]
    figures = figures_of(run, SLO)
    assert figures.report == make_report(late, SLO, num_replicas=2)
    assert figures.num_warmup_requests == len(run.records) - len(late) > 0
    assert list(figures.ttft_seconds) == sorted(
        each.ttft_seconds for each in late if each.error is None and each.ttft_seconds is not None
    )
    assert sum(figures.reasons.values()) == len(late)
    assert sum(each.num_requests for each in figures.tenants.values()) == len(late)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bin_seconds", [0.7, 5.0, 11.0, 1000.0])
def test_bins_hold_every_token_and_every_good_answer_once(seed: int, bin_seconds: float) -> None:
    records = random_run(seed).records
    bins = over_time(records, SLO, bin_seconds)

    def ended(each: RequestRecord) -> float:
        return each.arrival_seconds + each.lateness_seconds + (each.e2e_seconds or 0)

    edges = [each.start_seconds for each in bins]
    assert edges == [number * bin_seconds for number in range(len(bins))]
    assert bins[-1].start_seconds + bins[-1].num_seconds == pytest.approx(max(map(ended, records)))
    for number, each in enumerate(bins):
        start = each.start_seconds
        end = float("inf") if number == len(bins) - 1 else start + bin_seconds
        arrived = [one for one in records if start <= one.arrival_seconds < end]
        good = [one for one in records if start <= ended(one) < end and SLO.is_met(one)]
        assert each.origins == sum(map(origins_of, arrived), Origins())
        assert each.goodput * each.num_seconds == pytest.approx(len(good))


@pytest.mark.parametrize("seed", SEEDS)
def test_without_samples_a_replicas_load_is_what_the_client_had_in_flight(seed: int) -> None:
    run = replace(random_run(seed), samples=())
    loads = figures_of(run, SLO).loads
    assert not loads.is_sampled
    assert set(loads.of_replicas) == {"a", "b"}
    for replica, points in loads.of_replicas.items():
        for point in points:
            starts = [
                (each.arrival_seconds + each.lateness_seconds, each.e2e_seconds or 0)
                for each in run.records
                if each.replica == replica
            ]
            in_flight = sum(start <= point.seconds < start + length for start, length in starts)
            assert (point.num_running, point.num_waiting) == (in_flight, 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_over_all_requests_warm_up_included_are_held_against_the_engines(seed: int) -> None:
    figures = figures_of(random_run(seed), SLO)
    assert figures.reconciliation is not None
    assert [each.difference for each in figures.reconciliation.sums] == [0, 0, 0]
    assert figures.reconciliation.verdict == "Requests and engines count the same, to the token."


def test_tokens_from_below_the_device_are_held_against_the_engines_too() -> None:
    whole = record(num_cached_tokens=40, num_cross_user_tokens=10, num_host_tokens=24, num_disk_tokens=8)
    totals = replace(totals_of((whole,)), num_host_tokens=24, num_disk_tokens=9)
    found = figures_of(Run(run_info(), (whole,), (), totals), SLO).reconciliation
    assert found is not None
    assert [each.difference for each in found.sums] == [0, 0, 0, 0, 1]
    assert "+1 disk's tokens" in found.verdict


def test_what_became_of_images_is_told_of_all_whose_usage_is_known_warm_up_included() -> None:
    early, late = (record(arrival_seconds=at, num_images=4, num_image_tokens=400) for at in (0.0, 9.0))
    lost = record(num_cached_tokens=None, error="timed out", num_images=4, num_image_tokens=400)
    totals = replace(
        totals_of((early, late)), num_images=3, num_image_bytes=9000, num_encoded_image_tokens=100
    )
    report = figures_of(Run(run_info(), (early, late, lost), (), totals), SLO).report
    images = report.images
    assert images == Images(8, 3, 9000, 800, 100)
    assert "8 in prompts, 3 uploaded to replicas (0.0 MB); 87.5% of their 800 tokens cached" in render(report)
    assert "uploaded" not in render(replace(report, images=None))
    assert images.taken_share == 3 / 8
    assert images.cached_share == 7 / 8
    assert replace(images, num_encoded_tokens=900).cached_share == 0.0  # some were preempted
    for records, known in (((record(),), totals), ((early,), None)):
        assert figures_of(Run(run_info(), records, (), known), SLO).report.images is None
