"""Expressions that more than one dashboard shows.

Owns how a share, a quantile and a rate are written. Words in braces (ROUTER, MODEL, …) come from
`grafana.FILTERS`.
"""

from collections.abc import Iterable

from grafana import Query

HIT_RATIO = (
    "sum(rate(router_cached_tokens_total{MODEL}[$__rate_interval]))"
    " / sum(rate(router_prompt_tokens_total{MODEL}[$__rate_interval]))"
)
CROSS_USER_RATIO = (
    "sum(rate(router_cross_user_cached_tokens_total{MODEL}[$__rate_interval]))"
    " / sum(rate(router_prompt_tokens_total{MODEL}[$__rate_interval]))"
)
ERROR_RATIO = (
    '(sum(rate(router_requests_total{MODEL,code=~"5.."}[$__rate_interval])) or vector(0))'
    " / sum(rate(router_requests_total{MODEL}[$__rate_interval]))"
)
FILL = "replica_used_blocks{REPLICA} / replica_total_blocks{REPLICA}"


def quantile(share: float, histogram: str, filters: str, by: str = "") -> str:
    """Quantile of a histogram, over the fleet or by the label `by`."""
    labels = f"le, {by}" if by else "le"
    rates = f"rate({histogram}_bucket{{{filters}}}[$__rate_interval])"
    return f"histogram_quantile({share:g}, sum by ({labels}) ({rates}))"


def quantiles(histogram: str, filters: str, shares: Iterable[float] = (0.5, 0.9, 0.99)) -> tuple[Query, ...]:
    return tuple(Query(quantile(share, histogram, filters), f"p{100 * share:g}") for share in shares)


def rate(counter: str, filters: str, by: str = "") -> str:
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({counter}{{{filters}}}[$__rate_interval]))"


def events(counter: str, filters: str, by: str = "") -> str:
    """Number of events between two points of the graph, for rare events."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (increase({counter}{{{filters}}}[$__rate_interval]))"
