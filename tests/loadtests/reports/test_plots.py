import math
import random
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from loadtests.reports.plots import (
    Axis,
    Frame,
    Layer,
    Line,
    ecdf,
    line_plot,
    linear_axis,
    log_seconds_axis,
    stacked_plot,
    time_axis,
)


def frame(high: float = 10.0, **more: object) -> Frame:
    fields: dict[str, object] = {"title": "t", "x": time_axis(high), "y": linear_axis("requests", high)}
    return Frame(**(fields | more))  # type: ignore[arg-type]


def coordinates(drawing: ET.Element, css_class: str) -> list[list[tuple[float, float]]]:
    found = []
    for path in drawing.iter("path"):
        if css_class in path.get("class", "").split():
            points = path.get("d", "").removeprefix("M").removesuffix("Z").split("L")
            found.append([(float(x), float(y)) for x, y in (point.split() for point in points)])
    return found


@pytest.mark.parametrize("seed", range(3))
def test_an_ecdf_says_how_many_samples_were_at_most_that(seed: int) -> None:
    rng = random.Random(seed)
    samples = sorted(rng.lognormvariate(-2, 1) for _ in range(3000))
    room = frame(x=log_seconds_axis("TTFT", samples[0], samples[-1]))
    points = ecdf(samples, room)
    assert points[0] == (samples[0], 0.0) and points[-1][1] == 1.0
    assert len(points) < 2000, "no more points than can be seen"
    assert all(x <= to_x and y <= to_y for (x, y), (to_x, to_y) in pairwise(points))
    for x, y in points[2::7]:
        near = [math.exp(math.log(x) + delta) for delta in (-0.02, 0.02)]
        low, high = (sum(sample <= each for sample in samples) / len(samples) for each in near)
        assert low - 0.01 <= y <= high + 0.01
    assert ecdf([], room) == ()
    alike = [samples[0]] * 9 + [samples[0] * 1.0001]
    assert [y for _, y in ecdf(alike, room)][-1] == 1.0, "samples in one place count all"


def test_layers_lie_on_top_of_each_other() -> None:
    room = frame()
    layers = [
        Layer("own", "own", (1.0, 2.0)),
        Layer("none", "none", (0.0, 0.0)),
        Layer("cross", "x", (3.0, 4.0)),
    ]
    drawing = ET.fromstring(stacked_plot(room, (0.0, 5.0, 10.0), layers, has_labels=False))
    (own,), (cross,) = coordinates(drawing, "own"), coordinates(drawing, "cross")
    assert own[:4] == [
        pytest.approx(room.place(x, y), abs=0.06) for x, y in ((0, 1), (5, 1), (5, 2), (10, 2))
    ]
    assert cross[:4] == [
        pytest.approx(room.place(x, y), abs=0.06) for x, y in ((0, 4), (5, 4), (5, 6), (10, 6))
    ]
    assert cross[:3:-1] == own[:4]
    assert coordinates(drawing, "none") == []


def test_names_are_text() -> None:
    hostile = '"><script>alert(1)</script>'
    axis = Axis(hostile, 0.0, 1.0, ((0.5, hostile),))
    room = Frame(hostile, axis, axis, shows_title=True)
    flat = Line("v0", ((0.0, 0.5), (1.0, 0.5)), "<b>")
    layer = Layer("own", "<i>", (1.0,))
    for drawing in (line_plot(room, [flat]), stacked_plot(room, (0.0, 1.0), [layer], has_labels=True)):
        tree = ET.fromstring(drawing)
        assert {each.tag for each in tree.iter()} <= {"svg", "title", "path", "rect", "text"}
        assert tree.get("aria-label") == hostile
