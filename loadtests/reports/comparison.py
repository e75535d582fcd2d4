"""Compares runs: which belong together, and by how much one is better. Pure.

Owns the choice of the compared figures, and the sentence about the winner.

Runs of one test and one workload are a *set*. In a set, runs that differ only in their seed are one
*variant*, shown by its medians. The first variant is the baseline; Kvasir's own policy never is, if there is
another. A variant that left most requests of a run unanswered has *failed*: its answers say nothing about the
whole traffic, so nothing is compared with it.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from loadtests.reports.report import Distribution, Origins, Report, Slo
from loadtests.reports.run_figures import RunFigures, TimeBin, end_of, figures_of, nice_bin_seconds
from loadtests.reports.run_file import Run, RunInfo

OUR_POLICY = "kvasir"
EQUAL_WITHIN = 0.02
"""Figures whose ratio differs by less are equal."""

Unit = Literal["%", "s", "x", "/s", ""]


@dataclass(frozen=True, slots=True)
class Figure:
    """`wants` is the better direction; None if neither is. Headlines are in the sentence about the winner."""

    label: str
    unit: Unit
    wants: Literal["more", "less"] | None
    of: Callable[[Report], float | None]
    is_headline: bool = False


@dataclass(frozen=True, slots=True)
class Spread:
    """Spread of one figure over a variant's runs."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class NamedRun:
    """A run and its file's name."""

    name: str
    run: Run
    figures: RunFigures


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    runs: tuple[NamedRun, ...]

    def spread(self, figure: Figure) -> Spread | None:
        values = [value for each in self.runs if (value := figure.of(each.figures.report)) is not None]
        return Spread(statistics.median(values), min(values), max(values)) if values else None

    @property
    def failure(self) -> str | None:
        """Count the unanswered requests in runs that answered fewer than half; None if there is none."""
        failed = [each for each in self.runs if _has_failed(each.figures.report)]
        if not failed:
            return None
        num_requests = sum(each.figures.report.num_requests for each in failed)
        num_lost = num_requests - sum(each.figures.report.num_answered for each in failed)
        where = "" if len(failed) == len(self.runs) else f" in {_listed(each.name for each in failed)}"
        return f"{self.name} failed: {num_lost} of {num_requests} requests were not answered{where}"

    @property
    def ttft_seconds(self) -> list[float]:
        """Return the TTFTs of all its runs, sorted."""
        return sorted(seconds for each in self.runs for seconds in each.figures.ttft_seconds)

    @property
    def bins(self) -> list[TimeBin]:
        """Return its runs' bins combined: tokens added up, goodput averaged."""
        merged = []
        most = max((len(each.figures.bins) for each in self.runs), default=0)
        for number in range(most):
            there = [each.figures.bins[number] for each in self.runs if number < len(each.figures.bins)]
            merged.append(
                TimeBin(
                    there[0].start_seconds,
                    max(each.num_seconds for each in there),
                    sum((each.origins for each in there), Origins()),
                    statistics.fmean(each.goodput for each in there),
                )
            )
        return merged


@dataclass(frozen=True, slots=True)
class RunSet:
    """Variants of one workload of one test; the first is the baseline."""

    test: str
    workload: str
    """Name and parameters, in words."""
    variants: tuple[Variant, ...]

    @property
    def baseline(self) -> Variant:
        return self.variants[0]

    @property
    def failures(self) -> list[str]:
        return [each.failure for each in self.variants if each.failure is not None]

    def without_failed(self) -> "RunSet":
        """Return the set without failed variants; possibly empty."""
        return replace(self, variants=tuple(each for each in self.variants if each.failure is None))


def _times(
    name: str, of: Callable[[Report], Distribution | None], headlines: tuple[str, ...]
) -> list[Figure]:
    def quantile(which: str) -> Callable[[Report], float | None]:
        return lambda report: None if (found := of(report)) is None else float(getattr(found, which))

    return [
        Figure(f"{name} {which}", "s", "less", quantile(which), which in headlines)
        for which in ("p50", "p90", "p99")
    ]


def _share_of(origin: str) -> Callable[[Report], float | None]:
    def share(report: Report) -> float | None:
        tokens = getattr(report.origins, f"num_{origin}_tokens")
        return report.origins.share(tokens) if tokens else None

    return share


def _share_in(tier: str) -> Callable[[Report], float | None]:
    """Return the figure only if KV lies in more than one tier."""

    def share(report: Report) -> float | None:
        origins = report.origins
        if not origins.num_host_tokens + origins.num_disk_tokens:
            return None
        return origins.share(getattr(origins, f"num_{tier}_tokens"))

    return share


FIGURES = (
    Figure("Token hit rate", "%", "more", lambda report: report.token_hit_rate, True),
    Figure("Cross-user hit rate", "%", "more", lambda report: report.cross_user_hit_rate, True),
    *_times("TTFT", lambda report: report.ttft, ("p50", "p90", "p99")),
    Figure("Goodput", "/s", "more", lambda report: report.goodput, True),
    Figure("Good answers", "%", "more", lambda report: report.good_share),
    *_times("ITL", lambda report: report.itl, ()),
    *_times("TPOT", lambda report: report.tpot, ()),
    *_times("E2E", lambda report: report.e2e, ()),
    Figure(
        "Image tokens cached",
        "%",
        "more",
        lambda report: None if report.images is None else report.images.cached_share,
    ),
    Figure(
        "Images uploaded, of those in prompts",
        "%",
        "less",
        lambda report: None if report.images is None else report.images.taken_share,
    ),
    Figure("Hit in own blocks", "%", None, _share_of("own")),
    Figure("Hit, writer unknown", "%", None, _share_of("unattributed")),
    Figure("Hit of another tenant", "%", "less", _share_of("other_tenant")),
    Figure("Hit on the device", "%", None, _share_in("device")),
    Figure("Hit in host memory", "%", None, _share_in("host")),
    Figure("Hit on disk", "%", None, _share_in("disk")),
    Figure(
        "Computed tokens, max / mean",
        "x",
        "less",
        lambda report: (
            None
            if report.imbalance_computed_tokens is None
            else report.imbalance_computed_tokens.max_over_mean
        ),
    ),
    Figure(
        "Requests in flight, max / mean",
        "x",
        "less",
        lambda report: (
            None if report.imbalance_in_flight is None else report.imbalance_in_flight.max_over_mean
        ),
    ),
    Figure("Requests", "", None, lambda report: report.num_requests),
    Figure("Failed requests", "", "less", lambda report: report.num_requests - report.num_answered),
    Figure(
        "Client late by, p99",
        "s",
        None,
        lambda report: None if report.lateness is None else report.lateness.p99,
    ),
)
HEADLINES = tuple(figure for figure in FIGURES if figure.is_headline)


PHASE_HEADS = (
    "When replicas were killed",
    "Run",
    "Requests",
    "Failed",
    "Token hits",
    "on the device",
    "in host memory",
    "on disk",
    "TTFT p50",
    "TTFT p90",
)


def phase_rows(run_set: RunSet) -> list[list[str]]:
    """Return a row per phase of each run, under PHASE_HEADS; none without a kill."""
    rows = []
    for variant in run_set.variants:
        for run in variant.runs:
            for phase in run.figures.phases:
                report, origins = phase.report, phase.report.origins
                tiers = (origins.num_device_tokens, origins.num_host_tokens, origins.num_disk_tokens)
                ttft = report.ttft
                rows.append(
                    [
                        phase.name,
                        variant.name if len(variant.runs) == 1 else f"{variant.name}, {run.name}",
                        str(report.num_requests),
                        str(report.num_requests - report.num_answered),
                        in_units(report.token_hit_rate, "%"),
                        *(in_units(origins.share(tokens), "%") for tokens in tiers),
                        in_units(ttft.p50 if ttft else None, "s"),
                        in_units(ttft.p90 if ttft else None, "s"),
                    ]
                )
    return rows


def compare(runs: Sequence[tuple[str, Run]], slo: Slo) -> list[RunSet]:
    """Return the sets in order of their first runs. Runs are pairs of a name and a run."""
    sets: dict[tuple[str, str], list[tuple[str, Run]]] = {}
    for name, run in runs:
        key = run.info.test, json.dumps(run.info.workload, sort_keys=True, default=str)
        sets.setdefault(key, []).append((name, run))
    return [_set_of(members, slo) for members in sets.values()]


def ratio(figure: Figure, variant: Variant, baseline: Variant) -> float | None:
    """Return the ratio of the medians to the baseline's. None if one failed or lacks the figure."""
    if variant.failure or baseline.failure:
        return None
    ours, theirs = variant.spread(figure), baseline.spread(figure)
    return None if ours is None or theirs is None or theirs.median == 0 else ours.median / theirs.median


def is_better(figure: Figure, variant: Variant, other: Variant) -> bool | None:
    """Whether `variant` is better. None if they are equal, one failed, or one lacks the figure."""
    if variant.failure or other.failure:
        return None
    ours, theirs = variant.spread(figure), other.spread(figure)
    if figure.wants is None or ours is None or theirs is None:
        return None
    if abs(ours.median - theirs.median) <= EQUAL_WITHIN * max(abs(ours.median), abs(theirs.median)):
        return None
    return (ours.median > theirs.median) == (figure.wants == "more")


def overlaps(figure: Figure, variant: Variant, other: Variant) -> bool:
    """Whether the ranges over the seeds overlap."""
    ours, theirs = variant.spread(figure), other.spread(figure)
    assert ours is not None and theirs is not None
    return ours.lowest <= theirs.highest and theirs.lowest <= ours.highest


def leader(run_set: RunSet) -> tuple[Variant, Variant]:
    """Return the variant that is ahead most often, and one to compare it with: the baseline, or the
    second."""

    def num_wins(variant: Variant) -> int:
        return sum(
            is_better(figure, variant, other) is True for figure in HEADLINES for other in run_set.variants
        )

    ranked = sorted(run_set.variants, key=num_wins, reverse=True)
    return ranked[0], ranked[1] if ranked[0] is run_set.baseline else run_set.baseline


def in_units(value: float | None, unit: Unit) -> str:
    if value is None:
        return "–"
    match unit:
        case "%":
            return f"{100 * value:.1f} %"
        case "s":
            return _seconds(value)
        case "/s":
            return f"{value:.2f} /s"
        case "x":
            return f"{value:.2f}"
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def _seconds(value: float) -> str:
    milliseconds = 1e3 * value
    if abs(milliseconds) < 10:
        return f"{milliseconds:.2f} ms"
    if abs(milliseconds) < 100:
        return f"{milliseconds:.1f} ms"
    return f"{milliseconds:.0f} ms" if abs(milliseconds) < 1000 else f"{value:.2f} s"


def in_words(parameters: dict[str, object]) -> str:
    """Format a workload's name and parameters."""
    others = ", ".join(
        f"{name} {value if isinstance(value, str | int | float) else json.dumps(value, default=str)}"
        for name, value in parameters.items()
        if name != "name"
    )
    name = str(parameters.get("name", ""))
    return f"{name} ({others})" if name and others else name or others or "unnamed"


def verdict(run_set: RunSet) -> str:
    """Say who failed; then one sentence on who of the others wins, and by how much."""
    standing = run_set.without_failed()
    sentences = [f"{failure}." for failure in run_set.failures]
    if standing.variants:
        sentences.append(_comparison(standing))
    return " ".join(sentences)


def _comparison(run_set: RunSet) -> str:
    if len(run_set.variants) == 1:
        figures = _listed(f"{_lowered(each)} {value_of(each, run_set.baseline)}" for each in HEADLINES)
        return f"{run_set.baseline.name}: {figures}."
    first, other = leader(run_set)
    better = [each for each in HEADLINES if is_better(each, first, other) is True]
    worse = [each for each in HEADLINES if is_better(each, first, other) is False]
    same = [each for each in HEADLINES if is_better(each, first, other) is None]
    parts = []
    if better:
        listed = _listed(_against(each, first, other) for each in better)
        parts.append(f"{first.name} is ahead of {other.name} on {listed}")
    if worse:
        start = "behind on" if better else f"{first.name} is behind {other.name} on"
        parts.append(f"{start} {_listed(_against(each, first, other) for each in worse)}")
    known = [each for each in same if first.spread(each) is not None and other.spread(each) is not None]
    if known:
        listed = _listed(f"{_lowered(each)} ({value_of(each, first)})" for each in known)
        parts.append(
            f"level on {listed}" if parts else f"{first.name} and {other.name} are level on {listed}"
        )
    if not parts:
        return f"{first.name} and {other.name} have no figure in common to be compared by."
    return "; ".join(parts) + "."


def _against(figure: Figure, variant: Variant, other: Variant) -> str:
    found = ratio(figure, variant, other)
    times = "" if found is None else f"{in_ratio(found)}: "
    doubt = ""
    if len(variant.runs) > 1 and len(other.runs) > 1 and overlaps(figure, variant, other):
        doubt = ", within what other seeds give"
    return f"{_lowered(figure)} ({times}{value_of(figure, variant)} against {value_of(figure, other)}{doubt})"


def in_ratio(found: float) -> str:
    return f"{found:.2f}×" if found < 10 else f"{found:.0f}×"


def value_of(figure: Figure, variant: Variant) -> str:
    """Format the median."""
    spread = variant.spread(figure)
    return in_units(None if spread is None else spread.median, figure.unit)


def range_of(figure: Figure, variant: Variant) -> str:
    """Format the lowest and the highest value; empty if equal."""
    spread = variant.spread(figure)
    if spread is None or spread.lowest == spread.highest:
        return ""
    return f"{in_units(spread.lowest, figure.unit)} to {in_units(spread.highest, figure.unit)}"


def _lowered(figure: Figure) -> str:
    label = figure.label
    return label if label[:2].isupper() else label[0].lower() + label[1:]


def _listed(parts: Iterable[str]) -> str:
    words = list(parts)
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)


# From runs to variants.


def _has_failed(report: Report) -> bool:
    return 2 * report.num_answered < report.num_requests


def _set_of(members: Sequence[tuple[str, Run]], slo: Slo) -> RunSet:
    bin_seconds = nice_bin_seconds(max(end_of(run.records) for _, run in members))
    grouped: dict[tuple[object, ...], list[NamedRun]] = {}
    for name, run in members:
        named = NamedRun(name, run, figures_of(run, slo, bin_seconds=bin_seconds))
        grouped.setdefault(_variant_key(run.info), []).append(named)
    keys = sorted(grouped, key=lambda key: key[0] == OUR_POLICY)
    variants = tuple(Variant(_variant_name(key, keys), tuple(grouped[key])) for key in keys)
    info = members[0][1].info
    return RunSet(info.test, in_words(info.workload), variants)


def _variant_key(info: RunInfo) -> tuple[object, ...]:
    return info.policy, info.cluster, info.engine, info.num_replicas, info.commit, info.machine


def _variant_name(key: tuple[object, ...], keys: Sequence[tuple[object, ...]]) -> str:
    """Name the policy, and the properties in which the set's variants differ."""
    policy, cluster, engine, num_replicas, commit, machine = key
    parts = [str(policy or "unknown policy")]
    shown = (
        cluster,
        engine or "unknown engine",
        f"{num_replicas or '?'} replicas",
        f"commit {short_commit(str(commit))}",
        machine,
    )
    for place, text in enumerate(shown, start=1):
        if text and len({other[place] for other in keys}) > 1:
            parts.append(str(text))
    return ", ".join(parts)


def short_commit(commit: str) -> str:
    number, plus, edits = commit.partition("+")
    return number[:10] + plus + edits if commit else "unknown"
