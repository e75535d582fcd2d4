"""Runs side by side as one HTML page that needs nothing besides itself.

Owns the page's order and words; its looks are page.css's, its drawings run_plots.py's. Whatever a run file
holds is text here, never markup.
"""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

from loadtests.reports.comparison import (
    FIGURES,
    HEADLINES,
    Figure,
    NamedRun,
    RunSet,
    Variant,
    in_ratio,
    in_units,
    in_words,
    is_better,
    ratio,
    short_commit,
    verdict,
)
from loadtests.reports.report import Slo
from loadtests.reports.run_plots import load_panels, plots

STYLE = Path(__file__).with_name("page.css")


def page(sets: Sequence[RunSet], slo: Slo) -> str:
    style = STYLE.read_text(encoding="utf-8")
    runs = [run for each in sets for variant in each.variants for run in variant.runs]
    tests = list(dict.fromkeys(each.test for each in sets))
    title = f"Load test {tests[0]}" if len(tests) == 1 else "Load tests"
    overview = _overview(sets) if len(sets) > 1 else ""
    sections = "".join(_section(number, each, slo, len(sets) > 1) for number, each in enumerate(sets))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1>{_meta(runs)}</header>\n<main>\n{overview}{sections}</main>\n"
        "</body>\n</html>\n"
    )


def _meta(runs: Sequence[NamedRun]) -> str:
    infos = [each.run.info for each in runs]
    parts = [
        f"{len(runs)} run{'s' * (len(runs) != 1)}",
        "commit " + ", ".join(_distinct(short_commit(info.commit) for info in infos)),
        ", ".join(_distinct(info.machine for info in infos)),
        ", ".join(_distinct(info.started_at[:10] for info in infos)),
    ]
    return f'<p class="meta">{escape(" · ".join(part for part in parts if part))}</p>'


def _overview(sets: Sequence[RunSet]) -> str:
    """All sets in one table, a line for each variant."""
    rows = []
    for number, run_set in enumerate(sets):
        for variant in run_set.variants:
            name = f'<a href="#set-{number}">{escape(run_set.test)}</a> · {escape(variant.name)}'
            cells = "".join(_cell(figure, variant, run_set) for figure in HEADLINES)
            rows.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    head = "".join(f'<th scope="col">{escape(figure.label)}</th>' for figure in HEADLINES)
    sentences = "".join(
        f'<p class="verdict"><a href="#set-{number}">{escape(each.test)}</a>: {escape(verdict(each))}</p>'
        for number, each in enumerate(sets)
    )
    return (
        f'<section class="set"><h2>All tests</h2>{sentences}<div class="scroll"><table class="small">'
        f'<thead><tr><th scope="col">Test and policy</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        f"{_table_note()}</section>\n"
    )


def _section(number: int, run_set: RunSet, slo: Slo, has_heading: bool) -> str:
    heading = f"<h2>{escape(run_set.test)}</h2>" if has_heading else ""
    others = [figure for figure in FIGURES if not figure.is_headline]
    return (
        f'<section class="set" id="set-{number}">{heading}'
        f'<p class="workload">{escape(run_set.workload)}</p><p class="verdict">{escape(verdict(run_set))}</p>'
        + _alarm(run_set)
        + _comparison_table(run_set, HEADLINES, "headlines")
        + _table_note(run_set, slo)
        + f'<div class="plots">{plots(run_set)}</div>'
        + load_panels(run_set)
        + "<h3>More figures</h3>"
        + _comparison_table(run_set, others, "others")
        + _reasons(run_set)
        + _tenants(run_set)
        + _reconciliations(run_set)
        + _runs(run_set)
        + "</section>\n"
    )


def _alarm(run_set: RunSet) -> str:
    bad = [
        (variant.name, tokens)
        for variant in run_set.variants
        if (tokens := sum(run.figures.report.origins.num_other_tenant_tokens for run in variant.runs))
    ]
    if not bad:
        return ""
    amounts = ", ".join(f"{name} {tokens}" for name, tokens in bad)
    return (
        f'<p class="alarm">Cached tokens that only another tenant can have computed: {escape(amounts)}.</p>'
    )


def _comparison_table(run_set: RunSet, figures: Sequence[Figure], css_class: str) -> str:
    """A line for each figure that at least one variant has, a column for each variant."""
    head = "".join(
        f'<th scope="col">{escape(variant.name)}'
        f'<span class="against">{_against(run_set, variant)}</span></th>'
        for variant in run_set.variants
    )
    rows = [
        f'<tr><th scope="row">{escape(figure.label)}</th>'
        + "".join(_cell(figure, variant, run_set) for variant in run_set.variants)
        + "</tr>"
        for figure in figures
        if any(variant.spread(figure) is not None for variant in run_set.variants)
    ]
    return (
        f'<div class="scroll"><table class="compare {css_class}"><thead><tr><th scope="col">'
        f'<span class="unseen">Figure</span></th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _against(run_set: RunSet, variant: Variant) -> str:
    runs = f"{len(variant.runs)} run{'s' * (len(variant.runs) != 1)}"
    return runs if variant is run_set.baseline else f"{runs}, against {escape(run_set.baseline.name)}"


def _cell(figure: Figure, variant: Variant, run_set: RunSet) -> str:
    spread = variant.spread(figure)
    if spread is None:
        return '<td><span class="value">–</span></td>'
    others = [other for other in run_set.without_failed().variants if other is not variant]
    is_best = bool(others) and not any(is_better(figure, variant, other) is not True for other in others)
    text = f'<span class="value">{escape(in_units(spread.median, figure.unit))}</span>'
    found = (
        None if variant is run_set.baseline or not figure.wants else ratio(figure, variant, run_set.baseline)
    )
    if found:
        better = is_better(figure, variant, run_set.baseline)
        css_class = {True: " better", False: " worse", None: ""}[better]
        unseen = f'<span class="unseen">{css_class}</span>' if css_class else ""
        text += f'<span class="ratio{css_class}">{in_ratio(found)}{unseen}</span>'
    if spread.lowest < spread.highest:
        low, high = in_units(spread.lowest, figure.unit), in_units(spread.highest, figure.unit)
        text += f'<span class="range">{escape(low)} to {escape(high)}</span>'
    return f'<td class="best">{text}</td>' if is_best else f"<td>{text}</td>"


def _table_note(run_set: RunSet | None = None, slo: Slo | None = None) -> str:
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
    return f'<p class="note-text">{escape(" ".join(parts))}</p>'


def _tenants(run_set: RunSet) -> str:
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
    return _titled("Tenants", heads.split("|"), rows, _first_run_note(run_set))


def _reasons(run_set: RunSet) -> str:
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
    return _titled("Why the router chose its replicas", heads, rows, _first_run_note(run_set))


def _first_run_note(run_set: RunSet) -> str:
    return "Of each policy's first run." if any(len(each.runs) > 1 for each in run_set.variants) else ""


def _reconciliations(run_set: RunSet) -> str:
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
    return _titled("Requests against the engines' counters", heads, rows, note, num_texts=1)


def _runs(run_set: RunSet) -> str:
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
                    info.started_at,
                    in_units(report.duration_seconds, "s"),
                    f"{report.num_requests} + {figures.num_warmup_requests}",
                    failed,
                    " ".join(info.notes) or "–",
                ]
            )
    heads = "Run|Policy|Engine|Replicas|Seed|Started (UTC)|Lasted|Requests + warm-up|Failed|Notes"
    runs = [run for variant in run_set.variants for run in variant.runs]
    facts = [
        ("Workload", _by_value(runs, lambda run: in_words(run.run.info.workload))),
        ("Commit", _by_value(runs, lambda run: run.run.info.commit or "unknown")),
        ("Machine", _by_value(runs, lambda run: run.run.info.machine)),
        ("Command", _by_value(runs, lambda run: run.run.info.command)),
    ]
    lines = "".join(f"<p><b>{name}</b> {text}</p>" for name, text in facts)
    return _titled("Runs", heads.split("|"), rows, "", num_texts=2) + f'<div class="note-text">{lines}</div>'


def _by_value(runs: Sequence[NamedRun], of: Callable[[NamedRun], str]) -> str:
    """What is said once if it is the same for all, else for each."""
    values = _distinct(of(run) for run in runs)
    if len(values) == 1:
        return f"<code>{escape(values[0])}</code>"
    return "<br>".join(f"{escape(run.name)}: <code>{escape(of(run))}</code>" for run in runs)


def _titled(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], note: str, *, num_texts: int = 0
) -> str:
    """A table under a heading; nothing without rows. The last `num_texts` columns hold sentences."""
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in heads)
    body = []
    for row in rows:
        first, *others = row
        cells = [
            f"<td{' class=text' * (number >= len(others) - num_texts)}>{escape(each)}</td>"
            for number, each in enumerate(others)
        ]
        body.append(f'<tr><th scope="row">{escape(first)}</th>{"".join(cells)}</tr>')
    said = f'<p class="note-text">{escape(note)}</p>' if note else ""
    return (
        f'<h3>{escape(title)}</h3>{said}<div class="scroll"><table class="small">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
