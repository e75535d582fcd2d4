"""A sweep: one thing varied, and what is read from the results.

Owns the answer to "how many do I need?" and the plot in text. Knows no fleet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtests.simulation.summary import Summary, in_units

PLOTTED = (
    ("token_hit_rate", "token hit rate", "%"),
    ("ttft_p90", "TTFT p90", "s"),
    ("good_share", "within the SLO", "%"),
    ("goodput", "goodput, requests/s", ""),
)
BAR_WIDTH = 40


@dataclass(frozen=True, slots=True)
class SweepKind:
    """A parameter to vary, and its cheap end: few replicas, but a high rate."""

    name: str
    unit: str
    cheapest_is_largest: bool = False


SWEEPS = {
    kind.name: kind
    for kind in (
        SweepKind("replicas", "replicas"),
        SweepKind("capacity", "tokens of KV cache per replica"),
        SweepKind("rate", "requests/s", cheapest_is_largest=True),
    )
}


def plot(kind: SweepKind, points: Mapping[float, Summary]) -> str:
    """Bars of each figure, from 0 to its largest value."""
    lines: list[str] = []
    for name, label, unit in PLOTTED:
        values = {point: summary.figures.get(name) for point, summary in points.items()}
        most = max((value for value in values.values() if value is not None), default=0.0)
        lines.append(f"{label} by {kind.name}")
        for point, value in values.items():
            bar = "█" * round(BAR_WIDTH * value / most) if value and most else ""
            lines.append(f"{point:>10g} │{bar} {in_units(value, unit)}")
    return "\n".join(lines)


def answer(kind: SweepKind, points: Mapping[float, Summary], *, slo: str, share: float) -> str:
    """Return the cheapest point from which on the SLO is kept all the way to the most generous one."""
    enough: float | None = None
    for point in generous_first(kind, list(points)):
        if not _keeps(points[point], share):
            break
        enough = point
    wanted = f"{100 * share:g} % of the requests {slo}"
    if enough is None:
        most = max((summary.figures["good_share"] or 0.0) for summary in points.values())
        return f"No value tried keeps {wanted}; the best one keeps {in_units(most, '%')}."
    kept = in_units(points[enough].figures["good_share"], "%")
    return f"{enough:g} {kind.unit} keep {wanted} ({kept})."


def generous_first(kind: SweepKind, points: Sequence[float]) -> list[float]:
    return sorted(points, reverse=not kind.cheapest_is_largest)


def _keeps(summary: Summary, share: float) -> bool:
    good = summary.figures["good_share"]
    return good is not None and good >= share
