"""The checker of expressions finds what is wrong with them."""

import pytest

from tests.helm.promql import asked, parsed

KNOWN = {
    "a_total": frozenset({"job", "model", "code"}),
    "b": frozenset({"job", "model"}),
    "h_bucket": frozenset({"job", "model", "le"}),
}


@pytest.mark.parametrize(
    ("expression", "labels"),
    [
        ("a_total", {"job", "model", "code"}),
        ('sum by (model) (rate(a_total{code=~"5.."}[5m]))', {"model"}),
        ("sum(a_total) or vector(0)", set()),
        ("histogram_quantile(0.9, sum by (le, model) (rate(h_bucket[$__rate_interval])))", {"model"}),
        ("sum by (model) (b) - on (model) group_right () b", {"job", "model"}),
        ("b / on (model) group_left () (count by (model) (b) - 1)", {"job", "model"}),
        ("2 * b > 3 and b offset 1h", {"job", "model"}),
    ],
)
def test_the_labels_of_a_result_follow_from_those_of_the_metrics(expression: str, labels: set[str]) -> None:
    found = asked(expression, KNOWN)
    assert not found.complaints
    assert found.labels == labels


@pytest.mark.parametrize(
    ("expression", "missing"),
    [
        ('b{code="500"}', "code"),
        ("sum by (route) (b)", "route"),
        ("sum by (code) (sum by (model) (a_total))", "code"),
        ("histogram_quantile(0.9, sum by (model) (rate(h_bucket[5m])))", "le"),
        ("sum by (model) (b) / on (job) b", "job"),
        ("b / a_total", "code"),
    ],
)
def test_a_label_that_is_not_there_is_complained_about(expression: str, missing: str) -> None:
    (complaint,) = asked(expression, KNOWN).complaints
    assert missing in complaint


def test_all_metrics_are_found_wherever_they_stand() -> None:
    expression = "sum(x) / (y > 0) unless absent(z) or avg_over_time(u[1d] offset 1h) + rate(v[5m])"
    assert asked(expression, {}).metrics == set("xyzuv")


@pytest.mark.parametrize("wrong", ["sum by (a) (b", "rate(a)", "a{b=c}", "histogram_quantile(a)"])
def test_what_is_no_promql_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError):
        parsed(wrong)
