"""Plots as SVG for a page: lines, stacked areas, and their frames. Pure.

Owns scales, ticks and the placement of labels. Colours are classes of the page's style sheet, so that one
drawing serves light, dark and paper; the drawn data are opaque here.

No library: of those that draw SVG without a browser, pygal brings a script and fixed colours into each
drawing, leather fixed colours, matplotlib tens of megabytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

Point = tuple[float, float]

CHARACTER_WIDTH = 7.2
LINE_HEIGHT = 14.0
"""Height of a label, in units of the drawing: bold, in a wide face."""
NUM_PLACES = 24
"""Places along a line that are tried for its label."""


@dataclass(frozen=True, slots=True)
class Axis:
    """`label` names quantity and unit. `ticks` are values with their texts."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return a value's position from 0 (low end) to 1; values outside are at the ends."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Line:
    """A line with its CSS classes. Without a label it is drawn faintly, behind the others."""

    css_class: str
    points: tuple[Point, ...]
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a stack: one height per interval."""

    css_class: str
    label: str
    heights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """The area of a plot. `shaded_until` is the end of the warm-up on the x axis."""

    title: str
    x: Axis
    y: Axis
    width: float = 460.0
    height: float = 250.0
    left: float = 46.0
    right: float = 14.0
    top: float = 30.0
    bottom: float = 40.0
    shaded_until: float = 0.0
    shows_title: bool = False

    def place(self, x: float, y: float) -> Point:
        inner_width = self.width - self.left - self.right
        inner_height = self.height - self.top - self.bottom
        return (
            self.left + inner_width * self.x.share(x),
            self.height - self.bottom - inner_height * self.y.share(y),
        )


def linear_axis(label: str, high: float, *, unit: str = "", most_ticks: int = 6, factor: float = 1.0) -> Axis:
    """Return an axis from zero to a round value. `factor` multiplies the values in its texts."""
    high = high if high > 0 else 1.0
    step = _round_up(high * factor / (most_ticks - 1)) / factor
    num_steps = max(1, math.ceil(high / step - 1e-9))
    ticks = tuple((step * number, f"{step * number * factor:g}{unit}") for number in range(num_steps + 1))
    return Axis(label, 0.0, step * num_steps, ticks)


def time_axis(seconds: float) -> Axis:
    """Return an axis that ends with the run, not at a round time."""
    is_long = seconds > 600
    divisor = 60.0 if is_long else 1.0
    high = seconds if seconds > 0 else 1.0
    step = _round_up(high / divisor / 6)
    ticks = tuple(
        (step * number * divisor, f"{step * number:g}") for number in range(int(high / divisor / step) + 1)
    )
    return Axis(f"time since the start, {'min' if is_long else 's'}", 0.0, high, ticks)


def log_seconds_axis(label: str, low: float, high: float) -> Axis:
    """Return a logarithmic axis around two positive times; texts in ms and s."""
    low, high = min(low, high), max(low, high)
    if high < low * 4:
        low, high = low / 2, high * 2
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    leading: tuple[int, ...] = (1, 2, 5) if math.log10(high / low) < 2 else (1, 3)
    if math.log10(high / low) > 3:
        leading = (1,)
    values = [lead * 10.0**exponent for exponent in range(first, last + 1) for lead in leading]
    ticks = tuple((value, _short_seconds(value)) for value in values if low <= value <= high)
    return Axis(label, low, high, ticks, is_log=True)


def percent_axis(label: str, high: float) -> Axis:
    return linear_axis(label, min(1.0, high), unit=" %", factor=100.0)


def _short_seconds(value: float) -> str:
    return f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms"


def _round_up(value: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(lead * power for lead in (1, 2, 5, 10) if lead * power >= value * (1 - 1e-9))


def line_plot(frame: Frame, lines: Sequence[Line]) -> str:
    faint = [_polyline(frame, line, "faint") for line in lines if line.label is None]
    named = [line for line in lines if line.label is not None]
    drawn = [_polyline(frame, line, "line") for line in named]
    return _drawing(frame, [*faint, *drawn, *_labels(frame, named)])


def stacked_plot(frame: Frame, edges: Sequence[float], layers: Sequence[Layer], *, has_labels: bool) -> str:
    """Draw steps between the edges; the first layer is at the bottom."""
    bases = [0.0] * (len(edges) - 1)
    parts = []
    for layer in layers:
        tops = [base + height for base, height in zip(bases, layer.heights, strict=True)]
        if any(layer.heights):
            parts.append(_area(frame, edges, bases, tops, layer.css_class))
            if has_labels:
                parts.append(_area_label(frame, edges, bases, tops, layer))
        bases = tops
    return _drawing(frame, parts)


def ecdf(samples: Sequence[float], frame: Frame) -> tuple[Point, ...]:
    """Return the rising steps of sorted samples: at most one point per half unit of the drawing."""
    points: list[Point] = []
    last_place = -math.inf
    for number, sample in enumerate(samples, start=1):
        place = frame.place(sample, 0.0)[0]
        point = sample, number / len(samples)
        if points and place - last_place < 0.5:
            points[-1] = (points[-1][0], point[1])
        else:
            points.append(point)
            last_place = place
    steps = [(points[0][0], 0.0)] if points else []
    for before, after in zip([*steps, *points], points, strict=False):
        steps += [(after[0], before[1]), after]
    return tuple(steps)


def swatch(css_class: str, *, is_line: bool) -> str:
    """Draw a legend's sample."""
    mark = (
        f'<path class="line {css_class}" d="M1 6H21"/>'
        if is_line
        else f'<rect class="area {css_class}" x="4" y="1" width="12" height="10" rx="2"/>'
    )
    return f'<svg class="swatch" viewBox="0 0 22 12" width="22" height="12" aria-hidden="true">{mark}</svg>'


# Parts of a drawing.


def _drawing(frame: Frame, content: Sequence[str]) -> str:
    title = escape(frame.title)
    size = f"0 0 {_n(frame.width)} {_n(frame.height)}"
    parts = [
        f'<svg class="plot" viewBox="{size}" role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        *_shade(frame),
        *_axes(frame),
        *content,
    ]
    if frame.shows_title:
        parts.append(f'<text class="panel" x="{_n(frame.left)}" y="12">{title}</text>')
    return "".join([*parts, "</svg>"])


def _shade(frame: Frame) -> list[str]:
    if frame.shaded_until <= frame.x.low:
        return []
    left, top = frame.place(frame.x.low, frame.y.high)
    right, bottom = frame.place(frame.shaded_until, frame.y.low)
    size = f'width="{_n(right - left)}" height="{_n(bottom - top)}"'
    return [f'<rect class="warmup" x="{_n(left)}" y="{_n(top)}" {size}/>']


def _axes(frame: Frame) -> list[str]:
    left, bottom = frame.place(frame.x.low, frame.y.low)
    right, top = frame.place(frame.x.high, frame.y.high)
    parts = []
    for value, text in frame.y.ticks:
        _, height = frame.place(frame.x.low, value)
        kind = "base" if value == frame.y.low else "grid"
        parts.append(f'<path class="{kind}" d="M{_n(left)} {_n(height)}H{_n(right)}"/>')
        parts.append(f'<text class="tick end" x="{_n(left - 5)}" y="{_n(height + 4)}">{escape(text)}</text>')
    for value, text in frame.x.ticks:
        place, _ = frame.place(value, frame.y.low)
        parts.append(f'<path class="base" d="M{_n(place)} {_n(bottom)}v4"/>')
        parts.append(f'<text class="tick middle" x="{_n(place)}" y="{_n(bottom + 16)}">{escape(text)}</text>')
    if frame.x.label:
        parts.append(
            f'<text class="axis end" x="{_n(right)}" y="{_n(bottom + 32)}">{escape(frame.x.label)}</text>'
        )
    if frame.y.label:
        parts.append(f'<text class="axis" x="2" y="{_n(top - 12)}">{escape(frame.y.label)}</text>')
    return parts


def _polyline(frame: Frame, line: Line, kind: str) -> str:
    places = [frame.place(*point) for point in line.points]
    if not places:
        return ""
    path = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in places)
    return f'<path class="{kind} {line.css_class}" d="{path}"/>'


def _area(
    frame: Frame, edges: Sequence[float], bases: Sequence[float], tops: Sequence[float], css_class: str
) -> str:
    upper = [frame.place(edges[number + side], top) for number, top in enumerate(tops) for side in (0, 1)]
    lower = [frame.place(edges[number + side], base) for number, base in enumerate(bases) for side in (0, 1)]
    path = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in [*upper, *reversed(lower)]) + "Z"
    return f'<path class="area {css_class}" d="{path}"/>'


def _area_label(
    frame: Frame, edges: Sequence[float], bases: Sequence[float], tops: Sequence[float], layer: Layer
) -> str:
    """Place the label where the layer is high enough for its whole width; else only the legend has it."""
    width = len(layer.label) * CHARACTER_WIDTH
    best: tuple[float, float, float] | None = None
    for number in range(len(tops)):
        start, _ = frame.place(edges[number], 0.0)
        if start + width > frame.width - frame.right:
            break
        under = [
            each for each in range(number, len(tops)) if frame.place(edges[each], 0.0)[0] < start + width
        ]
        ceiling = max(frame.place(0.0, tops[each])[1] for each in under)
        floor = min(frame.place(0.0, bases[each])[1] for each in under)
        room = floor - ceiling
        if room >= LINE_HEIGHT + 2 and (best is None or room > best[0]):
            best = room, start + 3, (floor + ceiling) / 2 + 4
    if best is None:
        return ""
    place = f'x="{_n(best[1])}" y="{_n(best[2])}"'
    return f'<text class="inside {layer.css_class}" {place}>{escape(layer.label)}</text>'


def _labels(frame: Frame, lines: Sequence[Line]) -> list[str]:
    """Place each label next to its line, where it is farthest from the others; omit it without room."""
    placed = [[frame.place(*point) for point in line.points] for line in lines]
    boxes: list[tuple[float, float, float, float]] = []
    parts = []
    for number, line in enumerate(lines):
        assert line.label is not None
        others = [point for other, points in enumerate(placed) if other != number for point in _dense(points)]
        own = _dense(placed[number])
        width = len(line.label) * CHARACTER_WIDTH
        best: tuple[float, tuple[float, float, float, float]] | None = None
        for x, y in own[:: max(1, len(own) // NUM_PLACES)]:
            for left, top in (
                (x + 6, y + 3),
                (x - 6 - width, y - 3 - LINE_HEIGHT),
                (x + 6, y - 3 - LINE_HEIGHT),
            ):
                box = left, top, left + width, top + LINE_HEIGHT
                if not _is_inside(frame, box) or any(_overlap(box, other) for other in boxes):
                    continue
                if any(_distance(box, point) < 2 for point in own):
                    continue
                clearance = min((_distance(box, point) for point in others), default=100.0)
                if clearance > 4 and (best is None or min(clearance, 60.0) > best[0]):
                    best = min(clearance, 60.0), box
        if best is not None:
            left, top, _, bottom = best[1]
            boxes.append(best[1])
            parts.append(
                f'<text class="label {line.css_class}" x="{_n(left)}" y="{_n(bottom - 3)}">'
                f"{escape(line.label)}</text>"
            )
    return parts


def _dense(points: Sequence[Point]) -> list[Point]:
    """Return points along the line, about 6 units apart."""
    found: list[Point] = []
    for (x, y), (to_x, to_y) in pairwise(points):
        num_steps = max(1, int(math.hypot(to_x - x, to_y - y) / 6))
        found += [
            (x + (to_x - x) * step / num_steps, y + (to_y - y) * step / num_steps)
            for step in range(num_steps)
        ]
    return found


def _is_inside(frame: Frame, box: tuple[float, float, float, float]) -> bool:
    left, top, right, bottom = box
    return (
        left >= frame.left
        and right <= frame.width - frame.right
        and top >= frame.top
        and bottom <= frame.height - frame.bottom
    )


def _overlap(box: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


def _distance(box: tuple[float, float, float, float], point: Point) -> float:
    x, y = point
    return math.hypot(max(box[0] - x, 0.0, x - box[2]), max(box[1] - y, 0.0, y - box[3]))


def _n(value: float) -> str:
    """Format a coordinate to a tenth of a unit."""
    return f"{value:.1f}".removesuffix(".0")
