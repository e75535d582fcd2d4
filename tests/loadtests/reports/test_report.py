import math

import pytest

from loadtests.reports.report import RequestRecord, Slo, make_report
from loadtests.reports.table import render
from loadtests.workloads import IdealHits


def answered(arrival: float = 0.0, **more: object) -> RequestRecord:
    fields: dict[str, object] = {
        "arrival_seconds": arrival,
        "num_input_tokens": 100,
        "num_output_tokens": 11,
        "ttft_seconds": 0.5,
        "e2e_seconds": 1.5,
        "num_cached_tokens": 40,
        "num_cross_user_tokens": 10,
        "replica": "a",
    }
    return RequestRecord(**(fields | more))  # type: ignore[arg-type]


def failed(error: str, arrival: float = 0.0) -> RequestRecord:
    return RequestRecord(arrival_seconds=arrival, num_input_tokens=100, e2e_seconds=0.1, error=error)


def test_hit_rates_are_shares_of_the_prompt_tokens_whose_usage_is_known() -> None:
    records = [
        answered(num_input_tokens=100, num_cached_tokens=96, num_cross_user_tokens=48),
        answered(num_input_tokens=300, num_cached_tokens=0, num_cross_user_tokens=0),
        failed("refused (429)"),
        answered(num_cached_tokens=None),
    ]
    report = make_report(records)
    assert report.token_hit_rate == 96 / 400
    assert report.cross_user_hit_rate == 48 / 400


def test_a_server_that_says_nothing_of_users_has_no_cross_user_hit_rate_of_zero() -> None:
    report = make_report([answered(num_cross_user_tokens=None)])
    assert report.cross_user_hit_rate is None
    assert report.token_hit_rate == 0.4
    assert "the server does not say" in render(report, IdealHits(0.5, 0.25))


def test_time_per_output_token_leaves_the_first_token_out() -> None:
    report = make_report([answered(ttft_seconds=1.0, e2e_seconds=3.0, num_output_tokens=5)])
    assert report.tpot is not None
    assert report.tpot.mean == 0.5
    assert make_report([answered(num_output_tokens=1)]).tpot is None


def test_distributions_are_of_the_answers_that_came_whole() -> None:
    records = [answered(ttft_seconds=float(number)) for number in range(1, 12)]
    cut = answered(ttft_seconds=1000.0, error="truncated")
    report = make_report([*records, cut, failed("timed out")])
    assert report.ttft is not None
    assert (report.ttft.mean, report.ttft.p50, report.ttft.p90, report.ttft.most) == (6.0, 6.0, 10.0, 11.0)
    assert report.ttft.p99 == pytest.approx(10.9)


@pytest.mark.parametrize(
    "error", ["refused (429)", "refused (503)", "timed out", "truncated", "connection lost"]
)
def test_whatever_goes_wrong_misses_the_slo(error: str) -> None:
    wrong = answered(error=error)
    report = make_report([answered(), wrong, answered()], Slo(ttft=2.0))
    assert report.good_share == pytest.approx(2 / 3)
    assert report.num_answered == 2
    assert report.errors == {error: 1}


def test_goodput_is_good_requests_per_second_until_the_last_answer() -> None:
    records = [
        answered(10.0),
        answered(11.0, ttft_seconds=2.01, e2e_seconds=2.5),
        answered(12.0, ttft_seconds=2.0, e2e_seconds=3.0),
        failed("refused (503)", 14.0),
    ]
    report = make_report(records, Slo(ttft=2.0))
    assert report.duration_seconds == 5.0
    assert report.goodput == 2 / 5.0


def test_every_limit_of_the_slo_counts() -> None:
    record = answered(ttft_seconds=0.5, e2e_seconds=1.5, num_output_tokens=11)  # TPOT 0.1 s
    assert make_report([record], Slo(ttft=0.5, tpot=0.1, e2e=1.5)).good_share == 1
    assert make_report([record], Slo(ttft=0.49)).good_share == 0
    assert make_report([record], Slo(ttft=None, tpot=0.09)).good_share == 0
    assert make_report([record], Slo(ttft=None, e2e=1.49)).good_share == 0
    assert make_report([answered(ttft_seconds=None)], Slo(ttft=None)).good_share == 0


def test_imbalance_is_of_requests_of_computed_tokens_and_of_time_in_flight() -> None:
    records = [
        answered(replica="a", num_input_tokens=100, num_cached_tokens=90, e2e_seconds=1.0),
        answered(replica="a", num_input_tokens=100, num_cached_tokens=90, e2e_seconds=1.0),
        answered(replica="a", num_input_tokens=100, num_cached_tokens=100, e2e_seconds=4.0),
        answered(replica="b", num_input_tokens=100, num_cached_tokens=40, e2e_seconds=2.0),
        failed("refused (429)"),
    ]
    report = make_report(records)
    assert report.requests_per_replica == {"a": 3, "b": 1}
    assert report.imbalance_requests is not None
    assert report.imbalance_requests.max_over_mean == 1.5
    assert report.imbalance_requests.variation == 0.5
    assert report.imbalance_computed_tokens is not None
    assert report.imbalance_computed_tokens.max_over_mean == 60 / 40
    assert report.imbalance_in_flight is not None
    assert report.imbalance_in_flight.max_over_mean == 6.0 / 4.0


def test_replicas_that_got_nothing_count_into_the_imbalance() -> None:
    report = make_report([answered(), answered()], num_replicas=4)
    assert report.imbalance_requests is not None
    assert report.imbalance_requests.max_over_mean == 4.0
    assert report.imbalance_requests.variation == pytest.approx(math.sqrt(3))


def test_the_routers_expectation_is_held_against_what_was_cached() -> None:
    records = [
        answered(num_cached_tokens=64, predicted_tokens=64),
        answered(num_cached_tokens=64, predicted_tokens=96),
        answered(num_cached_tokens=64, predicted_tokens=48),
        answered(num_cached_tokens=64, predicted_tokens=64),
        answered(predicted_tokens=None),
        answered(num_cached_tokens=None, predicted_tokens=64),
    ]
    prediction = make_report(records).prediction
    assert prediction is not None
    assert prediction.mean_error == 4
    assert prediction.mean_absolute_error == 12
    assert prediction.share_exact == 0.5


def test_a_run_without_answers_has_a_report_too() -> None:
    report = make_report([failed("connection lost")])
    assert (report.ttft, report.token_hit_rate, report.imbalance_requests, report.good_share) == (
        None,
        None,
        None,
        0,
    )
    assert "0 answered, 1 connection lost" in render(report)
    assert make_report([]).goodput == 0
