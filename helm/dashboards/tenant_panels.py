"""The dashboard of the tenants: their traffic, and what the cache saves each."""

from expressions import quantile, rate
from grafana import Dashboard, Panel, Query, Row


def _in_range(counter: str) -> str:
    return f"sum by (tenant) (increase({counter}{{TENANT}}[$__range]))"


def _share(counter: str) -> str:
    return (
        rate(counter, "TENANT", "tenant")
        + " / "
        + rate("router_tenant_prompt_tokens_total", "TENANT", "tenant")
    )


ALL = (
    Panel(
        title="In the time shown",
        description="A tenant is who its API keys say. Without keys it is all requests with one cache_salt,"
        " shown as a digest, and 'default' are those without one. Beyond 100 tenants the rest is 'other'.",
        kind="table",
        width=24,
        calm="text",
        queries=(
            Query(_in_range("router_tenant_requests_total"), "requests"),
            Query(_in_range("router_tenant_prompt_tokens_total"), "prompt tokens"),
            Query(_in_range("router_tenant_cached_tokens_total"), "cached tokens"),
            Query(_in_range("router_tenant_cross_user_cached_tokens_total"), "of these across users"),
            Query(_in_range("router_tenant_output_tokens_total"), "output tokens"),
        ),
    ),
)

EACH = (
    Panel(
        title="Requests per second",
        description="Who asks. One tenant far above the rest takes the queue from the others.",
        unit="reqps",
        is_stacked=True,
        queries=(Query(rate("router_tenant_requests_total", "TENANT", "tenant"), "{{tenant}}"),),
    ),
    Panel(
        title="Hit rate",
        description="Share of each tenant's prompt tokens that were cached. Tenants share no blocks: a "
        "low one has prompts without a common prefix, or too little traffic, or neighbours evict its blocks.",
        unit="percentunit",
        maximum=1,
        queries=(Query(_share("router_tenant_cached_tokens_total"), "{{tenant}}"),),
    ),
    Panel(
        title="Cross-user hit rate",
        description="Share of each tenant's prompt tokens that one of its users computed and another read.",
        unit="percentunit",
        maximum=1,
        queries=(Query(_share("router_tenant_cross_user_cached_tokens_total"), "{{tenant}}"),),
    ),
    Panel(
        title="Time to first token, p50",
        description="A tenant above the others with the same hit rate has longer prompts or comes in bursts.",
        unit="s",
        width=12,
        queries=(Query(quantile(0.5, "router_tenant_ttft_seconds", "TENANT", "tenant"), "{{tenant}}"),),
    ),
    Panel(
        title="Time to first token, p99",
        description="What the slowest requests of each tenant wait. The buckets are coarse.",
        unit="s",
        width=12,
        queries=(Query(quantile(0.99, "router_tenant_ttft_seconds", "TENANT", "tenant"), "{{tenant}}"),),
    ),
    Panel(
        title="Prompt tokens per second",
        description="What each tenant sends.",
        width=12,
        is_stacked=True,
        queries=(Query(rate("router_tenant_prompt_tokens_total", "TENANT", "tenant"), "{{tenant}}"),),
    ),
    Panel(
        title="Output tokens per second",
        description="What each tenant gets.",
        width=12,
        is_stacked=True,
        queries=(Query(rate("router_tenant_output_tokens_total", "TENANT", "tenant"), "{{tenant}}"),),
    ),
)

COSTS = (
    Panel(
        title="Costs in the time shown",
        description="In plain prompt tokens, by the ratios that the routers were set to. What was saved is"
        " the difference. Keys have no series of their own: kvasir usage shows them.",
        kind="table",
        width=24,
        calm="text",
        queries=(
            Query(_in_range("router_tenant_cost_tokens_total"), "cost"),
            Query(_in_range("router_tenant_cost_without_cache_tokens_total"), "cost without a cache"),
        ),
    ),
    Panel(
        title="Cost, as a share of what it would be without a cache",
        description="Above 1, more is paid for keeping than reading saves.",
        unit="percentunit",
        queries=(
            Query(
                rate("router_tenant_cost_tokens_total", "TENANT", "tenant")
                + " / "
                + rate("router_tenant_cost_without_cache_tokens_total", "TENANT", "tenant"),
                "{{tenant}}",
            ),
        ),
    ),
    Panel(
        title="Cached tokens per second, by tier",
        description="Where each tenant's prompts were read from.",
        is_stacked=True,
        queries=(
            Query(
                rate("router_tenant_cached_tokens_by_tier_total", "TENANT", "tenant, tier"),
                "{{tenant}} {{tier}}",
            ),
        ),
    ),
    Panel(
        title="Written tokens per second, by time kept",
        description="What each tenant adds to the caches, and how much of it under which lease.",
        is_stacked=True,
        queries=(
            Query(rate("router_tenant_written_tokens_total", "TENANT", "tenant, ttl"), "{{tenant}} {{ttl}}"),
        ),
    ),
)

TENANT = Dashboard(
    uid="kvasir-tenant",
    title="Kvasir / Tenants",
    description="Who asks how much, and what the cache does for each.",
    rows=(Row("All tenants", ALL), Row("Each tenant", EACH), Row("Costs", COSTS)),
)
