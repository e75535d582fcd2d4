"""What is read from a sweep: how much is needed, and how it looks."""

import pytest

from loadtests.simulation.summary import FIGURES, Summary, median
from loadtests.simulation.sweep import SWEEPS, answer


def summary(good_share: float, **figures: float | None) -> Summary:
    empty: dict[str, float | None] = dict.fromkeys(figure.name for figure in FIGURES)
    return Summary({**empty, "good_share": good_share, **figures}, {"home": 3})


def said(kind: str, shares: dict[float, float]) -> str:
    points = {value: summary(share) for value, share in shares.items()}
    return answer(SWEEPS[kind], points, slo="within 2 s", share=0.9)


@pytest.mark.parametrize(
    ("kind", "shares", "beginning"),
    [
        ("replicas", {4: 0.3, 8: 0.91, 16: 1.0}, "8 replicas keep 90 % of the requests within 2 s (91.0 %)"),
        ("replicas", {16: 1.0, 4: 0.95, 8: 0.5}, "16 replicas keep"),
        (
            "replicas",
            {4: 0.1, 8: 0.2},
            "No value tried keeps 90 % of the requests within 2 s",
        ),
        ("rate", {5: 1.0, 10: 0.9, 20: 0.4}, "10 requests/s keep"),
        ("rate", {5: 0.5, 10: 1.0}, "No value tried"),
    ],
)
def test_the_answer_is_the_cheapest_point_from_which_on_the_slo_is_kept(
    kind: str, shares: dict[float, float], beginning: str
) -> None:
    assert said(kind, shares).startswith(beginning)


def test_medians_are_taken_figure_by_figure() -> None:
    runs = [summary(share, ttft_p90=ttft) for share, ttft in ((0.1, 3.0), (0.3, 1.0), (0.2, None))]
    found = median(runs)
    assert (found.figures["good_share"], found.figures["ttft_p90"]) == (0.2, 2.0)
    assert found.reasons == {"home": 3.0}
