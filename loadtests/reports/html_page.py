"""Formats a comparison of runs as one self-contained HTML page.

Owns the page's content and tables; page.html.jinja owns the order, page.css the looks, run_plots.py the
drawings. Content of run files is escaped as text.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from loadtests.reports.comparison import (
    FIGURES,
    HEADLINES,
    PHASE_HEADS,
    Figure,
    NamedRun,
    RunSet,
    Variant,
    in_ratio,
    in_units,
    in_words,
    is_better,
    phase_rows,
    range_of,
    ratio,
    short_commit,
    value_of,
    verdict,
)
from loadtests.reports.phases import AFTERMATH_SECONDS
from loadtests.reports.report import Slo
from loadtests.reports.run_plots import load_panels, plots

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Cell:
    """A policy's value of one figure. Empty texts are left out."""

    value: str
    ratio: str = ""
    judgement: str = ""
    """better, worse, or neither."""
    range: str = ""
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """The last `num_texts` columns hold sentences. An empty table is left out."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    num_texts: int = 0


def page(sets: Sequence[RunSet], slo: Slo) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        cell_of=_cell,
        has_figure=lambda run_set, figure: any(each.spread(figure) is not None for each in run_set.variants),
        against=_against,
        alarm=_alarm,
        note=_note,
        tables=_tables,
        facts=_facts,
        verdict=verdict,
        plots=plots,
        load_panels=load_panels,
    )
    tests = _distinct(each.test for each in sets)
    return environment.get_template("page.html.jinja").render(
        title=f"Load test {tests[0]}" if len(tests) == 1 else "Load tests",
        meta=_meta([run for each in sets for run in _runs_of(each)]),
        style=(FOLDER / "page.css").read_text(encoding="utf-8"),
        sets=sets,
        slo=slo,
        headlines=HEADLINES,
        others=[figure for figure in FIGURES if not figure.is_headline],
    )


def _runs_of(run_set: RunSet) -> list[NamedRun]:
    return [run for variant in run_set.variants for run in variant.runs]


def _meta(runs: Sequence[NamedRun]) -> str:
    infos = [each.run.info for each in runs]
    parts = [
        f"{len(runs)} run{'s' * (len(runs) != 1)}",
        "commit " + ", ".join(_distinct(short_commit(info.commit) for info in infos)),
        ", ".join(_distinct(info.machine for info in infos)),
        ", ".join(_distinct(info.started_at[:10] for info in infos)),
    ]
    return " · ".join(part for part in parts if part)


def _alarm(run_set: RunSet) -> str:
    bad = [
        (variant.name, tokens)
        for variant in run_set.variants
        if (tokens := sum(run.figures.report.origins.num_other_tenant_tokens for run in variant.runs))
    ]
    return ", ".join(f"{name} {tokens}" for name, tokens in bad)


def _against(run_set: RunSet, variant: Variant) -> str:
    runs = f"{len(variant.runs)} run{'s' * (len(variant.runs) != 1)}"
    return runs if variant is run_set.baseline else f"{runs}, against {run_set.baseline.name}"


def _cell(figure: Figure, variant: Variant, run_set: RunSet) -> Cell:
    if variant.spread(figure) is None:
        return Cell("–")
    others = [other for other in run_set.without_failed().variants if other is not variant]
    is_compared = variant is not run_set.baseline and figure.wants
    found = ratio(figure, variant, run_set.baseline) if is_compared else None
    judgement = ""
    if found:
        better = is_better(figure, variant, run_set.baseline)
        judgement = {True: "better", False: "worse", None: ""}[better]
    return Cell(
        value_of(figure, variant),
        in_ratio(found) if found else "",
        judgement,
        range_of(figure, variant),
        bool(others) and all(is_better(figure, variant, other) is True for other in others),
    )


def _note(run_set: RunSet | None = None, slo: Slo | None = None) -> str:
    parts = ["× is against the first policy: blue is better, orange worse, the best figure is bold."]
    if run_set is None or any(len(variant.runs) > 1 for variant in run_set.variants):
        parts.append("Medians over the runs, with the lowest to the highest.")
    else:
        parts.append("One run each.")
    if slo is not None:
        limits = [("TTFT", slo.ttft), ("TPOT", slo.tpot), ("E2E", slo.e2e)]
        listed = ", ".join(f"{name} ≤ {limit:g} s" for name, limit in limits if limit is not None)
        parts.append(f"Good: answered whole{' with ' + listed if listed else ''}.")
        parts.append("Requests of the warm-up do not count. Rates are shares of prompt tokens.")
    return " ".join(parts)


def _tables(run_set: RunSet) -> Iterator[Table]:
    yield Table(
        "Before and after the kills",
        PHASE_HEADS,
        phase_rows(run_set),
        f"Just after: sent within {AFTERMATH_SECONDS:g} s of a kill.",
        num_texts=0,
    )
    yield _reasons(run_set)
    yield _tenants(run_set)
    yield _reconciliations(run_set)
    yield _runs(run_set)


def _tenants(run_set: RunSet) -> Table:
    rows = []
    for variant in run_set.variants:
        run = variant.runs[0]
        for tenant, report in run.figures.tenants.items():
            ttft = report.ttft
            rows.append(
                [
                    tenant,
                    variant.name,
                    str(report.num_requests),
                    in_units(report.token_hit_rate, "%"),
                    in_units(report.cross_user_hit_rate, "%"),
                    str(report.origins.num_other_tenant_tokens),
                    in_units(ttft.p50 if ttft else None, "s"),
                    in_units(ttft.p99 if ttft else None, "s"),
                    in_units(report.good_share, "%"),
                ]
            )
    rows.sort(key=lambda row: row[0])
    heads = "Tenant|Policy|Requests|Token hit rate|Cross-user|Tokens of another tenant|TTFT p50|TTFT p99|Good"
    return Table("Tenants", heads.split("|"), rows, _first_run_note(run_set))


def _reasons(run_set: RunSet) -> Table:
    counts = [variant.runs[0].figures.reasons for variant in run_set.variants]
    reasons = _distinct(reason for each in counts for reason in each)
    rows = [
        [
            reason,
            *(
                f"{each[reason]} ({each[reason] / sum(each.values()):.1%})" if reason in each else "–"
                for each in counts
            ),
        ]
        for reason in reasons
    ]
    heads = ["Reason", *(variant.name for variant in run_set.variants)]
    return Table("Why the router chose its replicas", heads, rows, _first_run_note(run_set))


def _first_run_note(run_set: RunSet) -> str:
    return "Of each policy's first run." if any(len(each.runs) > 1 for each in run_set.variants) else ""


def _reconciliations(run_set: RunSet) -> Table:
    rows = []
    for variant in run_set.variants:
        for run in variant.runs:
            found = run.figures.reconciliation
            if found is None:
                rows.append([run.name, *["–"] * 3, "The engines' counters could not be read."])
            else:
                rows.append(
                    [
                        run.name,
                        *(
                            f"{each.num_of_records:,} / {each.num_of_engines:,} ({each.difference:+,})"
                            if each.difference
                            else f"{each.num_of_records:,} equal"
                            for each in found.sums
                        ),
                        found.verdict,
                    ]
                )
    heads = ["Run", "Prompt tokens", "Cached tokens", "Cross-user tokens", ""]
    note = "Sums over all requests, warm-up included / what the engines counted."
    return Table("Requests against the engines' counters", heads, rows, note, num_texts=1)


def _runs(run_set: RunSet) -> Table:
    rows = []
    for variant in run_set.variants:
        for run in variant.runs:
            info, figures = run.run.info, run.figures
            report = figures.report
            failed = ", ".join(f"{count} {kind}" for kind, count in report.errors.items()) or "none"
            rows.append(
                [
                    run.name,
                    variant.name,
                    info.engine or "–",
                    "–" if info.num_replicas is None else str(info.num_replicas),
                    str(info.seed),
                    info.started_at[:19].replace("T", " "),
                    in_units(report.duration_seconds, "s"),
                    f"{report.num_requests} + {figures.num_warmup_requests}",
                    failed,
                    " ".join(info.notes) or "–",
                ]
            )
    heads = "Run|Policy|Engine|Replicas|Seed|Started (UTC)|Lasted|Requests + warm-up|Failed|Notes"
    return Table("Runs", heads.split("|"), rows, num_texts=2)


def _facts(run_set: RunSet) -> list[tuple[str, list[tuple[str, str]]]]:
    runs = _runs_of(run_set)
    return [
        ("Workload", _by_value(runs, lambda run: in_words(run.run.info.workload))),
        ("Commit", _by_value(runs, lambda run: run.run.info.commit or "unknown")),
        ("Machine", _by_value(runs, lambda run: run.run.info.machine)),
        ("Command", _by_value(runs, lambda run: run.run.info.command)),
    ]


def _by_value(runs: Sequence[NamedRun], of: Callable[[NamedRun], str]) -> list[tuple[str, str]]:
    """Return names of runs and values; one value without a name if it is the same for all."""
    values = _distinct(of(run) for run in runs)
    return [("", values[0])] if len(values) == 1 else [(run.name, of(run)) for run in runs]


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
