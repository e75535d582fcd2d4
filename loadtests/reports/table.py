"""Formats a report for a terminal. Owns the wording and the units."""

from loadtests.reports.report import Distribution, Images, Imbalance, Origins, Report, Slo
from loadtests.workloads import IdealHits


def render(report: Report, ideal: IdealHits | None = None) -> str:
    """Format one figure per line; figures without data are left out."""
    ideal_hit_rate = None if ideal is None else ideal.token_hit_rate
    ideal_cross_user = None if ideal is None else ideal.cross_user_hit_rate
    rows = [
        ("requests", f"{report.num_requests} in {report.duration_seconds:.1f} s, {_errors(report)}"),
        ("token hit rate", _hit_rate(report.token_hit_rate, ideal_hit_rate)),
        ("cross-user hit rate", _hit_rate(report.cross_user_hit_rate, ideal_cross_user)),
        ("hits by origin", _origins(report.origins)),
        ("images", _images(report.images)),
        ("TTFT", _times(report.ttft)),
        ("TPOT", _times(report.tpot)),
        ("ITL", _times(report.itl)),
        ("E2E", _times(report.e2e)),
        (
            "goodput",
            f"{report.goodput:.2f} requests/s, {report.good_share:.1%} of all within {_limits(report.slo)}",
        ),
        ("tokens", f"{report.num_input_tokens} of prompts, {report.num_output_tokens} of answers"),
        ("replicas", ", ".join(f"{name} {count}" for name, count in report.requests_per_replica.items())),
        ("imbalance", _imbalances(report)),
        ("overlap", _prediction(report)),
        ("client was late by", _times(report.lateness)),
    ]
    return "\n".join(f"{name:<20}{text}" for name, text in rows if text)


def _errors(report: Report) -> str:
    if not report.errors:
        return "all answered"
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.errors.items())
    return f"{report.num_answered} answered, {kinds}"


def _hit_rate(rate: float | None, ideal: float | None) -> str:
    if rate is None:
        return "the server does not say"
    if not ideal:
        return f"{rate:.1%} of prompt tokens"
    return f"{rate:.1%} of prompt tokens, {rate / ideal:.1%} of the ideal {ideal:.1%}"


def _origins(origins: Origins) -> str:
    named = (
        ("own", origins.num_own_tokens),
        ("other users'", origins.num_cross_user_tokens),
        ("other tenants'", origins.num_other_tenant_tokens),
        ("writer unknown", origins.num_unattributed_tokens),
    )
    return ", ".join(f"{name} {origins.share(tokens):.1%}" for name, tokens in named if origins.share(tokens))


def _images(images: Images | None) -> str:
    if images is None:
        return ""
    return (
        f"{images.num_in_prompts} in prompts, {images.num_taken} uploaded to replicas"
        f" ({images.num_taken_bytes / 1e6:.1f} MB); {images.cached_share:.1%} of their {images.num_tokens}"
        " tokens cached"
    )


def _times(times: Distribution | None) -> str:
    if times is None:
        return ""
    named = (("mean", times.mean), ("p50", times.p50), ("p90", times.p90), ("p99", times.p99))
    return "   ".join(f"{name} {_seconds(value)}" for name, value in named)


def _seconds(value: float) -> str:
    return f"{value * 1e3:7.1f} ms" if value < 1 else f"{value:7.2f} s "


def _limits(slo: Slo) -> str:
    limits = (("TTFT", slo.ttft), ("TPOT", slo.tpot), ("E2E", slo.e2e))
    return ", ".join(f"{name} {limit:g} s" for name, limit in limits if limit is not None) or "no limit"


def _imbalances(report: Report) -> str:
    named = (
        ("requests", report.imbalance_requests),
        ("computed tokens", report.imbalance_computed_tokens),
        ("in flight", report.imbalance_in_flight),
    )
    found = [f"{name} {_imbalance(each)}" for name, each in named if each is not None]
    return "max/mean (CV) of " + ", ".join(found) if found else ""


def _imbalance(imbalance: Imbalance) -> str:
    return f"{imbalance.max_over_mean:.2f} ({imbalance.variation:.2f})"


def _prediction(report: Report) -> str:
    if report.prediction is None:
        return ""
    found = report.prediction
    return (
        f"expected against cached tokens: mean error {found.mean_error:+.1f}, "
        f"mean distance {found.mean_absolute_error:.1f}, exact for {found.share_exact:.1%}"
    )
