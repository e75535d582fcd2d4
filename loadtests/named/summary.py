"""The terminal output of `kvasir loadtest`: a table, one sentence, doubts and complaints. Pure.

Owns the choice of figures for a terminal, and the criteria for failure. comparison.py owns the figures'
meaning, and which runs belong together.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from loadtests.figures import aligned
from loadtests.reports.comparison import (
    EQUAL_WITHIN,
    FIGURES,
    OUR_POLICY,
    PHASE_HEADS,
    Figure,
    NamedRun,
    RunSet,
    Variant,
    in_ratio,
    in_units,
    phase_rows,
    ratio,
    value_of,
)
from loadtests.reports.fairness import fairness
from loadtests.reports.report import Slo

SHOWN = (
    "Token hit rate",
    "Cross-user hit rate",
    "Hit on the device",
    "Hit in host memory",
    "Hit on disk",
    "Image tokens cached",
    "Images uploaded, of those in prompts",
    "TTFT p50",
    "TTFT p90",
    "TTFT p99",
    "TPOT p90",
    "E2E p90",
    "Goodput",
    "Computed tokens, max / mean",
    "Requests",
    "Failed requests",
    "Client late by, p99",
)
LATE_SECONDS = 0.02
LATE_SHARE = 0.2
"""Share of the median TTFT. A client that is later than both has measured itself."""

_BY_LABEL = {figure.label: figure for figure in FIGURES}


def table(run_set: RunSet) -> str:
    """One figure a line, one variant a column; with two, by how much they differ."""
    has_ratio = len(run_set.variants) == 2
    rows = [["", *(variant.name for variant in run_set.variants), *([""] if has_ratio else [])]]
    for label in SHOWN:
        figure = _BY_LABEL[label]
        is_special = label.startswith(("Hit ", "Image"))
        if is_special and not any(each.spread(figure) for each in run_set.variants):
            continue  # all KV lies on devices, no prompt has images
        cells = [value_of(figure, variant) for variant in run_set.variants]
        if has_ratio:
            found = ratio(figure, run_set.variants[1], run_set.baseline) if figure.wants else None
            cells.append("" if found is None else in_ratio(found))
        rows.append([label, *cells])
    return aligned(rows)


def phase_table(run_set: RunSet) -> str | None:
    """Return a table of requests before, just after and long after the kills; None without any."""
    rows = phase_rows(run_set)
    return aligned([list(PHASE_HEADS), *rows]) if rows else None


def fairness_table(run_set: RunSet, slo: Slo) -> str:
    """How evenly tenants were served: one line for each run, and the largest tenant beside all others."""
    rows = [["", "Jain's index", "Largest tenant within SLO", "Others", "Others' TTFT p90"]]
    for each in (each for variant in run_set.variants for each in variant.runs):
        warmup = each.run.info.warmup_seconds
        found = fairness([record for record in each.run.records if record.arrival_seconds >= warmup], slo)
        largest = max(found.tenants.values(), key=lambda tenant: tenant.asked_tokens)
        others = [tenant for tenant in found.tenants.values() if tenant is not largest]
        num_others = sum(tenant.num_requests for tenant in others)
        num_good = sum(tenant.good_share * tenant.num_requests for tenant in others)
        rows.append(
            [
                each.name,
                "-" if found.jain is None else f"{found.jain:.3f}",
                in_units(largest.good_share, "%"),
                in_units(num_good / num_others if num_others else None, "%"),
                in_units(found.ttft_p90_of_others, "s"),
            ]
        )
    return aligned(rows)


def sentence(run_set: RunSet) -> str | None:
    """Return who failed, and how our policy, or the last one, compares with the first that did not.

    None if there is only one, which did not fail.
    """
    failed, standing = "; ".join(run_set.failures), run_set.without_failed()
    if len(standing.variants) < 2:
        if not failed:
            return None
        return f"{failed}." if len(run_set.variants) == 1 else f"{failed}, so there is nothing to compare."
    compared = _comparison(standing)
    return f"{failed}. {compared}" if failed else compared


def _comparison(run_set: RunSet) -> str:
    others = run_set.variants[1:]
    ours = next((each for each in others if each.runs[0].run.info.policy == OUR_POLICY), others[-1])
    base = run_set.baseline
    for each in (base, ours):
        if each.spread(_BY_LABEL["TTFT p90"]) is None:
            return f"{_policy(each)} answered no request, so there is nothing to compare."
    return f"{_policy(ours)} answered the same traffic {_hits(ours, base)}{_first_tokens(ours, base)}."


def _policy(variant: Variant) -> str:
    info = variant.runs[0].run.info
    return info.cluster or info.policy or variant.name


def _hits(ours: Variant, base: Variant) -> str:
    figure = _BY_LABEL["Token hit rate"]
    if (found := ratio(figure, ours, base)) is not None:
        return f"with {_number(found)} times the hits of {_policy(base)} {_both(figure, ours, base)}"
    spread = ours.spread(figure)
    if spread is None or spread.median == 0:
        return f"without a hit, as {_policy(base)} did"
    return f"with hits where {_policy(base)} had none {_both(figure, ours, base)}"


def _first_tokens(ours: Variant, base: Variant) -> str:
    figure = _BY_LABEL["TTFT p90"]
    found = ratio(figure, base, ours)
    if found is None:
        return ""
    if abs(found - 1) <= EQUAL_WITHIN:
        how = "as soon"
    else:
        how = f"{_number(found)} times sooner" if found > 1 else f"{_number(1 / found)} times later"
    return f", and its first tokens at p90 {how} {_both(figure, ours, base)}"


def _both(figure: Figure, ours: Variant, base: Variant) -> str:
    return f"({value_of(figure, ours)} against {value_of(figure, base)})"


def _number(found: float) -> str:
    return f"{found:.2f}" if found < 1.995 else f"{found:.1f}" if found < 100 else f"{found:.0f}"


def doubts(run_set: RunSet) -> list[str]:
    """Why the figures may say less than they seem to."""
    found = []
    for variant in run_set.variants:
        for each in variant.runs:
            report = each.figures.report
            if report.lateness is None or report.ttft is None:
                continue
            if report.lateness.p99 > max(LATE_SECONDS, LATE_SHARE * report.ttft.p50):
                late = in_units(report.lateness.p99, "s")
                found.append(
                    f"{each.name}: the load generator was late by {late} at p99: too much for this machine, "
                    "which the times show too."
                )
    return found


def complaints(run_set: RunSet, expected_errors: Collection[str], *, is_killing: bool) -> list[str]:
    """List the failures. `is_killing`: replicas took their counters with them."""
    return [
        f"{each.name}: {complaint}"
        for variant in run_set.variants
        for each in variant.runs
        for complaint in _of_run(each, expected_errors, is_killing=is_killing)
    ]


def _of_run(named: NamedRun, expected_errors: Collection[str], *, is_killing: bool) -> Sequence[str]:
    found = []
    records = named.run.records
    errors = Counter(each.error for each in records if each.error and each.error not in expected_errors)
    if errors:
        listed = ", ".join(f"{count} {kind}" for kind, count in errors.most_common())
        found.append(f"requests failed: {listed}.")
    if not any(each.error is None for each in records):
        found.append("no request was answered.")
    foreign = sum(each.num_other_tenant_tokens or 0 for each in records)
    if foreign:
        found.append(f"{foreign} cached tokens were of another tenant.")
    reconciliation = named.figures.reconciliation
    if reconciliation is None:
        if not is_killing:
            found.append("the engines' own counters could not be read.")
    elif any(each.difference for each in reconciliation.sums):
        found.append(reconciliation.verdict)
    return found
