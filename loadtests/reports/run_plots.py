"""The plots of a comparison of runs, and their axes. Pure.

Owns the choice. plots.py draws them; the page places them.
"""

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from loadtests.reports.comparison import RunSet
from loadtests.reports.plots import (
    Axis,
    Frame,
    Layer,
    Line,
    ecdf,
    line_plot,
    linear_axis,
    log_seconds_axis,
    percent_axis,
    stacked_plot,
    swatch,
    time_axis,
)
from loadtests.reports.report import Origins
from loadtests.reports.run_figures import LoadPoint, TimeBin

NUM_COLOURS = 8
MOST_PANELS = 16
"""Replicas of a run whose load is drawn; of more, the busiest."""
LEAST_SECONDS = 1e-4
"""Smallest start of a logarithmic time axis."""

ORIGINS = (
    ("own", "own", "num_own_tokens"),
    ("cross", "other users'", "num_cross_user_tokens"),
    ("other", "other tenants'", "num_other_tenant_tokens"),
    ("unknown", "writer unknown", "num_unattributed_tokens"),
)
"""From the bottom up: class, name, field of Origins."""


def plots(run_set: RunSet) -> str:
    return "".join((_ttft(run_set), _goodput(run_set), *_hits(run_set)))


def _figure(
    title: str, explanation: str, legend: Sequence[tuple[str, str]], drawing: str, *, lines: bool
) -> str:
    items = "".join(
        f"<li>{swatch(css_class, is_line=lines)}{escape(name)}</li>" for css_class, name in legend
    )
    said = f"<small>{escape(explanation)}</small>" if explanation else ""
    key = f'<ul class="legend">{items}</ul>' if items else ""
    return f"<figure><figcaption>{escape(title)}{said}</figcaption>{key}{drawing}</figure>"


def _legend(run_set: RunSet) -> list[tuple[str, str]]:
    return [(_class_of(number, run_set), variant.name) for number, variant in enumerate(run_set.variants)]


def _class_of(number: int, run_set: RunSet) -> str:
    """Return the variant's class: the first is grey; the last, Kvasir's own policy if there is one, blue."""
    if number == 0:
        return "v0"
    if number == len(run_set.variants) - 1:
        return "v1"
    return f"v{2 + (number - 1) % (NUM_COLOURS - 2)}"


def _ttft(run_set: RunSet) -> str:
    samples = [variant.ttft_seconds for variant in run_set.variants]
    everything = [max(each, LEAST_SECONDS) for times in samples for each in times]
    if not everything:
        return ""
    x = log_seconds_axis("time to first token (logarithmic)", min(everything), max(everything))
    marks = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
    y = Axis("share of answers", 0.0, 1.0, tuple((mark, f"{100 * mark:g} %") for mark in marks))
    frame = Frame(f"Time to first token of {', '.join(v.name for v in run_set.variants)}", x, y)
    lines = []
    for number, variant in enumerate(run_set.variants):
        css_class = _class_of(number, run_set)
        if len(variant.runs) > 1:
            lines += [Line(css_class, ecdf(run.figures.ttft_seconds, frame)) for run in variant.runs]
        if samples[number]:
            lines.append(Line(css_class, ecdf(samples[number], frame), variant.name))
    seeds = "; thin lines are single runs" if any(len(each.runs) > 1 for each in run_set.variants) else ""
    return _figure(
        "Time to first token",
        f"Share of the whole answers that had begun by then{seeds}",
        _legend(run_set),
        line_plot(frame, lines),
        lines=True,
    )


def _goodput(run_set: RunSet) -> str:
    bins = [variant.bins for variant in run_set.variants]
    everything = [each for found in bins for each in found]
    if not everything:
        return ""
    frame = Frame(
        "Goodput over time",
        time_axis(max(map(_end, everything))),
        linear_axis("good answers per second", max(each.goodput for each in everything)),
        shaded_until=_warmup(run_set),
    )
    lines = [
        Line(_class_of(number, run_set), tuple((_middle(each), each.goodput) for each in found), variant.name)
        for number, (variant, found) in enumerate(zip(run_set.variants, bins, strict=True))
    ]
    explanation = "By when they ended" + _shade_note(run_set)
    return _figure(
        "Good answers per second over time",
        explanation,
        _legend(run_set),
        line_plot(frame, lines),
        lines=True,
    )


def _end(time_bin: TimeBin) -> float:
    return time_bin.start_seconds + time_bin.num_seconds


def _middle(time_bin: TimeBin) -> float:
    return time_bin.start_seconds + time_bin.num_seconds / 2


def _warmup(run_set: RunSet) -> float:
    return max(run.run.info.warmup_seconds for variant in run_set.variants for run in variant.runs)


def _shade_note(run_set: RunSet) -> str:
    return "; shaded: warm-up" if _warmup(run_set) else ""


def _hits(run_set: RunSet) -> list[str]:
    """Draw one plot per variant, all on one scale. They end with the last prompt."""
    bins = [_until_last_prompt(variant.bins) for variant in run_set.variants]
    everything = [each for found in bins for each in found]
    if not everything:
        return []
    highest = max(each.origins.share(each.origins.num_cached_tokens) or 0.0 for each in everything)
    y = percent_axis("share of prompt tokens", highest)
    x = time_axis(max(map(_end, everything)))
    figures = []
    for variant, found in zip(run_set.variants, bins, strict=True):
        if not found:
            continue
        frame = Frame(
            f"Token hit rate over time by origin: {variant.name}", x, y, shaded_until=_warmup(run_set)
        )
        layers = [
            Layer(css_class, name, tuple(_share(each.origins, field) for each in found))
            for css_class, name, field in ORIGINS
        ]
        shown = [(layer.css_class, layer.label) for layer in layers if any(layer.heights)]
        edges = [*(each.start_seconds for each in found), _end(found[-1])]
        drawing = stacked_plot(frame, edges, layers, has_labels=True)
        title = f"Token hit rate over time: {variant.name}"
        explanation = "By whose request computed the blocks" + _shade_note(run_set)
        figures.append(_figure(title, explanation, shown, drawing, lines=False))
    return figures


def _until_last_prompt(bins: Sequence[TimeBin]) -> list[TimeBin]:
    last = max((number for number, each in enumerate(bins) if each.origins.num_prompt_tokens), default=-1)
    return list(bins[: last + 1])


def _share(origins: Origins, field: str) -> float:
    return origins.share(getattr(origins, field)) or 0.0


def load_panels(run_set: RunSet) -> str:
    """Draw small multiples, a row of replicas for each variant's first run, all on one scale."""
    runs = [(variant, variant.runs[0]) for variant in run_set.variants]
    loads = [run.figures.loads for _, run in runs]
    points = [point for each in loads for line in each.of_replicas.values() for point in line]
    if not points:
        return ""
    highest = max(point.num_running + point.num_waiting for point in points)
    x = replace(time_axis(max(point.seconds for point in points)), label="")
    y = linear_axis("", highest, most_ticks=4)
    blocks = []
    for variant, run in runs:
        panels = "".join(
            _panel(Frame(replica, x, y, 230.0, 104.0, 30.0, 6.0, 18.0, 20.0, shows_title=True), line)
            for replica, line in _busiest(run.figures.loads.of_replicas)
        )
        if panels:
            name = f"{variant.name}, seed {run.run.info.seed}" if len(variant.runs) > 1 else variant.name
            blocks.append(f'<h4>{escape(name)}</h4><div class="panels">{panels}</div>')
    said = "as the replicas say" if all(each.is_sampled for each in loads) else "as the client saw it"
    legend = "".join(
        f"<li>{swatch(css_class, is_line=False)}{css_class}</li>" for css_class in ("running", "waiting")
    )
    unit = "min" if x.high > 600 else "s"
    return (
        f'<h3>Load per replica over time</h3><p class="note-text">Requests, {said}; time in {unit}.</p>'
        f'<ul class="legend">{legend}</ul>{"".join(blocks)}'
    )


def _busiest(of_replicas: dict[str, tuple[LoadPoint, ...]]) -> list[tuple[str, tuple[LoadPoint, ...]]]:
    def load(item: tuple[str, tuple[LoadPoint, ...]]) -> int:
        return sum(point.num_running + point.num_waiting for point in item[1])

    return sorted(sorted(of_replicas.items(), key=load, reverse=True)[:MOST_PANELS])


def _panel(frame: Frame, points: Sequence[LoadPoint]) -> str:
    edges = [point.seconds for point in points]
    layers = [
        Layer("running", "running", tuple(float(point.num_running) for point in points[:-1])),
        Layer("waiting", "waiting", tuple(float(point.num_waiting) for point in points[:-1])),
    ]
    return stacked_plot(frame, edges, layers, has_labels=False)
