"""Summary: what one simulated run comes to, in figures that can be put side by side.

Owns the choice of figures, their names and their units, and the table. Knows neither how a run was
made nor who asked for it.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from loadtests.figures import aligned
from loadtests.reports.fairness import Fairness, TenantFigures
from loadtests.reports.report import Distribution, Report, RequestRecord, Slo
from loadtests.simulation.curve import Window, added
from loadtests.simulation.fleet import FleetResult


@dataclass(frozen=True, slots=True)
class Figure:
    """`unit` is one of %, s, ms, us, x, M (millions) or empty for a plain number."""

    name: str
    label: str
    unit: str = ""


FIGURES = (
    Figure("session_mean", "session mean", "s"),
    Figure("session_p90", "session p90", "s"),
    Figure("slowdown_mean", "session time / on an idle fleet, mean", "x"),
    Figure("slowdown_max", "  most", "x"),
    Figure("turns_per_minute", "turns a minute, minutes 5 to 25"),
    Figure("token_hit_rate", "token hit rate", "%"),
    Figure("share_of_ideal", "of the ideal", "%"),
    Figure("cross_user_hit_rate", "cross-user hit rate", "%"),
    Figure("image_hit_rate", "image tokens cached", "%"),
    Figure("images_taken", "images uploaded, of those in prompts", "%"),
    Figure("ttft_mean", "TTFT mean", "s"),
    Figure("ttft_p50", "TTFT p50", "s"),
    Figure("ttft_p90", "TTFT p90", "s"),
    Figure("ttft_p99", "TTFT p99", "s"),
    Figure("ttft_max", "longest wait for a first token", "s"),
    Figure("repeatable_cached", "repeatable tokens that were cached", "%"),
    Figure("repeatable_device", "  on the device", "%"),
    Figure("num_recomputed_tokens", "  computed again", "M"),
    Figure("num_refusals", "turns refused, and sent again"),
    Figure("tpot_mean", "TPOT mean", "ms"),
    Figure("tpot_p90", "TPOT p90", "ms"),
    Figure("good_share", "within the SLO", "%"),
    Figure("good_both", "  and TPOT is within its limit, too", "%"),
    Figure("goodput", "goodput, requests/s"),
    Figure("goodput_arriving", "  while requests arrive"),
    Figure("goodput_both", "  and TPOT is within its limit, too"),
    Figure("good_prompt_tokens", "  in prompt tokens/s"),
    Figure("jain", "Jain's index over tenants"),
    Figure("others_ttft_p90", "TTFT p90 of all but the largest", "s"),
    Figure("others_hit_rate", "  their token hit rate", "%"),
    Figure("imbalance_computed", "computed tokens, max/mean", "x"),
    Figure("imbalance_requests", "requests, max/mean", "x"),
    Figure("duplication", "copies of a block", "x"),
    Figure("prediction_error", "overlap expected - found, tokens"),
    Figure("prediction_distance", "  mean distance"),
    Figure("prediction_exact", "  exact", "%"),
    Figure("mean_replicas", "replicas, mean"),
    Figure("num_failed", "failed requests"),
    Figure("num_retries", "retries"),
    Figure("num_resumes", "resumes"),
    Figure("num_preemptions", "preemptions"),
    Figure("num_rereads", "index sets read again"),
    Figure("decision_us", "decision, real time", "us"),
    Figure("wall_seconds", "simulation, real time", "s"),
)
"""All over the requests after the warm-up, except images and the counts from `num_retries` on. A closed loop
of sessions has no warm-up; the first five and those of repeatable tokens and refusals are its own."""


@dataclass(frozen=True, slots=True)
class Summary:
    """`figures` by name; None where there is nothing to compute one from. Counts of decisions by reason. Of
    several runs, `windows` are the sums.
    """

    figures: Mapping[str, float | None]
    reasons: Mapping[str, float]
    windows: tuple[Window, ...] = ()
    tenants: Mapping[str, TenantFigures] = field(default_factory=dict)
    """Figures of one run, or of the first of several."""

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def summarise(
    result: FleetResult,
    report: Report,
    *,
    ideal_hit_rate: float,
    wall_seconds: float,
    windows: tuple[Window, ...] = (),
    fairness: Fairness | None = None,
    both: Slo,
) -> Summary:
    """`report` is of the requests after the warm-up, and so is `fairness`. `both` limits TTFT and TPOT."""
    prediction = report.prediction
    computed, requests = report.imbalance_computed_tokens, report.imbalance_requests
    hit_rate = report.token_hit_rate
    figures: dict[str, float | None] = {
        "token_hit_rate": hit_rate,
        "share_of_ideal": hit_rate / ideal_hit_rate if ideal_hit_rate and hit_rate is not None else None,
        "cross_user_hit_rate": report.cross_user_hit_rate,
        "image_hit_rate": result.images.cached_share if result.images else None,
        "images_taken": result.images.taken_share if result.images else None,
        **distribution_figures("ttft", report.ttft),
        **distribution_figures("tpot", report.tpot),
        "good_share": report.good_share,
        "good_both": good_share(result.records[-report.num_requests :], both),
        "goodput": report.goodput,
        **_by_arrivals(report, result.records[-report.num_requests :], both),
        **_fairness(fairness),
        "imbalance_computed": computed.max_over_mean if computed else None,
        "imbalance_requests": requests.max_over_mean if requests else None,
        "duplication": result.duplication,
        "prediction_error": prediction.mean_error if prediction else None,
        "prediction_distance": prediction.mean_absolute_error if prediction else None,
        "prediction_exact": prediction.share_exact if prediction else None,
        "mean_replicas": result.mean_replicas,
        "num_failed": report.num_requests - report.num_answered,
        "num_retries": result.num_retries,
        "num_resumes": result.num_resumes,
        "num_preemptions": result.num_preemptions,
        "num_rereads": result.num_rereads,
        "decision_us": 1e6 * result.decision_seconds / result.num_decisions if result.num_decisions else None,
        "wall_seconds": wall_seconds,
    }
    tenants = {} if fairness is None or len(fairness.tenants) < 2 else fairness.tenants
    return Summary(figures, dict(result.reasons), windows, tenants)


def median(summaries: Sequence[Summary]) -> Summary:
    """Figure by figure, over runs that differ in their seed."""
    assert summaries
    figures: dict[str, float | None] = {}
    for name in summaries[0].figures:
        values = [value for summary in summaries if (value := summary.figures[name]) is not None]
        figures[name] = statistics.median(values) if values else None
    reasons: Counter[str] = Counter()
    for summary in summaries:
        reasons.update(dict(summary.reasons))
    windows = added([summary.windows for summary in summaries])
    means = {reason: count / len(summaries) for reason, count in reasons.items()}
    return Summary(figures, means, windows, summaries[0].tenants)


def table(columns: Mapping[str, Summary]) -> str:
    """One column per summary, one figure a line, the decisions' reasons last."""
    lines = [["", *columns]]
    for figure in FIGURES:
        values = [summary.figures.get(figure.name) for summary in columns.values()]
        if any(values):
            lines.append([figure.label, *(in_units(value, figure.unit) for value in values)])
    for reason in sorted({reason for summary in columns.values() for reason in summary.reasons}):
        counts = [summary.reasons.get(reason, 0) for summary in columns.values()]
        lines.append([f"decided by {reason}", *(f"{count:.0f}" for count in counts)])
    return aligned(lines)


def tenant_table(tenants: Mapping[str, TenantFigures]) -> str:
    """One tenant a line."""
    head = f"{'':12}  {'requests':>8}  {'refused':>7}  {'in SLO':>7}  {'TTFT p50':>8}  {'p90':>8}"
    lines = [f"{head}  {'hits':>7}  {'served/fair':>11}"]
    for name, own in tenants.items():
        part = own.served_tokens / own.fair_tokens if own.fair_tokens else None
        lines.append(
            f"{name:12}  {own.num_requests:8d}  {own.num_refused:7d}  {in_units(own.good_share, '%'):>7}"
            f"  {in_units(own.ttft_p50, 's'):>8}  {in_units(own.ttft_p90, 's'):>8}"
            f"  {in_units(own.token_hit_rate, '%'):>7}  {in_units(part, 'x'):>11}"
        )
    return "\n".join(lines)


def in_units(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    match unit:
        case "%":
            return f"{100 * value:.1f} %"
        case "s":
            return f"{value:.3f} s" if abs(value) < 10 else f"{value:.1f} s"
        case "ms":
            return f"{1e3 * value:.1f} ms"
        case "us":
            return f"{value:.0f} us"
        case "M":
            return f"{value / 1e6:.2f} M"
        case "x":
            return f"{value:.2f}"
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}"


def good_share(records: Sequence[RequestRecord], slo: Slo) -> float | None:
    return sum(map(slo.is_met, records)) / len(records) if records else None


def _by_arrivals(report: Report, records: Sequence[RequestRecord], both: Slo) -> dict[str, float | None]:
    """Per second from the first arrival to the last: the answers' own time is not counted."""
    seconds = records[-1].arrival_seconds - records[0].arrival_seconds if records else 0.0
    if not seconds:
        return dict.fromkeys(("goodput_arriving", "goodput_both", "good_prompt_tokens"))
    good = [record for record in records if report.slo.is_met(record)]
    return {
        "goodput_arriving": len(good) / seconds,
        "goodput_both": sum(map(both.is_met, records)) / seconds,
        "good_prompt_tokens": sum(each.num_input_tokens for each in good) / seconds,
    }


def _fairness(found: Fairness | None) -> dict[str, float | None]:
    """Return the fairness figures; none for a single tenant."""
    if found is None or len(found.tenants) < 2:
        return dict.fromkeys(("jain", "others_ttft_p90", "others_hit_rate"))
    return {
        "jain": found.jain,
        "others_ttft_p90": found.ttft_p90_of_others,
        "others_hit_rate": found.hit_rate_of_others,
    }


def distribution_figures(name: str, found: Distribution | None) -> dict[str, float | None]:
    if found is None:
        return dict.fromkeys((f"{name}_mean", f"{name}_p50", f"{name}_p90", f"{name}_p99"))
    return {
        f"{name}_mean": found.mean,
        f"{name}_p50": found.p50,
        f"{name}_p90": found.p90,
        f"{name}_p99": found.p99,
    }
