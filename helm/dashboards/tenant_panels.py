"""The dashboard of the tenants: their traffic, and what the cache saves each."""

from grafana import Dashboard, Panel, Query, Row, quantile, rate, ratio

COLUMNS = (
    ("requests", "requests"),
    ("prompt_tokens", "prompt tokens"),
    ("cached_tokens", "cached tokens"),
    ("cross_user_cached_tokens", "of these across users"),
    ("output_tokens", "output tokens"),
    ("cost_tokens", "cost"),
    ("cost_without_cache_tokens", "cost without a cache"),
)

ALL = (
    Panel(
        title="In the time shown",
        description="A tenant is who its API keys say. Without keys it is all requests with one cache_salt,"
        " shown as a digest, and 'default' are those without one. Beyond 100 tenants the rest is 'other'. "
        "Costs are in plain prompt tokens, by the ratios that the routers were set to.",
        kind="table",
        queries=tuple(
            Query(f"sum by (tenant) (increase(router_tenant_{name}_total{{TENANT}}[$__range]))", title)
            for name, title in COLUMNS
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
        queries=(
            Query(
                ratio(
                    "router_tenant_cached_tokens_total",
                    "router_tenant_prompt_tokens_total",
                    "TENANT",
                    "tenant",
                ),
                "{{tenant}}",
            ),
        ),
    ),
    Panel(
        title="Time to first token, p99",
        description="What the slowest requests of each tenant wait. The buckets are coarse.",
        unit="s",
        queries=(Query(quantile(0.99, "router_tenant_ttft_seconds", "TENANT", "tenant"), "{{tenant}}"),),
    ),
)

TENANT = Dashboard(
    uid="kvasir-tenant",
    title="Kvasir / Tenants",
    description="Who asks how much, and what the cache does for each.",
    rows=(Row("All tenants", ALL), Row("Each tenant", EACH)),
)
