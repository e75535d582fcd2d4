"""The dashboard of the fleet: replicas up, the hot one, deaths."""

from grafana import Dashboard, Panel, Query, Row, events, quantile, rate, ratio

OVERVIEW = (
    Panel(
        title="Replicas that this router sends requests to",
        description="As the router sees it that knows of the fewest. 0: nothing is served; look at the "
        "replicas' logs, and whether Redis can be reached.",
        kind="stat",
        calm="red",
        limits=((1, "green"),),
        queries=(Query("min(router_replicas{ROUTER})", "replicas"),),
    ),
    Panel(
        title="Requests per second",
        description="Answered requests, whatever the answer was.",
        kind="stat",
        unit="reqps",
        queries=(Query(rate("router_requests_total", "MODEL"), "requests"),),
    ),
    Panel(
        title="Errors",
        description="Share of requests that ended with a status of 500 or above, streams that broke off "
        "included. The router's dashboard shows the kinds.",
        kind="stat",
        unit="percentunit",
        calm="green",
        limits=((0.01, "orange"), (0.05, "red")),
        queries=(
            Query(
                '(sum(rate(router_requests_total{MODEL,code=~"5.."}[$__rate_interval])) or vector(0)) / '
                + rate("router_requests_total", "MODEL"),
                "errors",
            ),
        ),
    ),
    Panel(
        title="Hit rate",
        description="Share of prompt tokens that were read from a cache instead of computed.",
        kind="stat",
        unit="percentunit",
        queries=(Query(ratio("router_cached_tokens_total", "router_prompt_tokens_total", "MODEL"), "hits"),),
    ),
    Panel(
        title="Time to first token, p99",
        description="From a request's arrival at the router.",
        kind="stat",
        unit="s",
        queries=(Query(quantile(0.99, "router_ttft_seconds", "MODEL"), "p99"),),
    ),
    Panel(
        title="Alerts that fire",
        description="Alerts of helm/rules/kvasir.yaml. Each says what to do.",
        kind="stat",
        calm="green",
        limits=((1, "red"),),
        queries=(Query('count(ALERTS{alertname=~"Kvasir.*",alertstate="firing"}) or vector(0)', "firing"),),
    ),
)

LOAD = (
    Panel(
        title="Prompt tokens that wait, by replica",
        description="What each replica has still to compute before its last prompt has a first token. One "
        "line far above the others is a hot replica: see 'Decisions by reason' on the router's dashboard. "
        "Mostly overlap: one prefix draws everything there; more replicas or a lower room_price spread it.",
        queries=(Query("replica_pending_tokens{REPLICA}", "{{replica}}"),),
    ),
    Panel(
        title="Requests in the batch, by replica",
        description="Requests that are being computed. A line at max_running means that others wait.",
        queries=(Query("replica_running_requests{REPLICA}", "{{replica}}"),),
    ),
    Panel(
        title="Requests that wait, by replica",
        description="Queues inside the replicas. All lines rising: the fleet is too small. One: it is hot.",
        queries=(Query("replica_waiting_requests{REPLICA}", "{{replica}}"),),
    ),
    Panel(
        title="Time in the queue, p99",
        description="From a submit's arrival at a replica to its first step.",
        unit="s",
        queries=(Query(quantile(0.99, "replica_queue_seconds", "REPLICA", "replica"), "{{replica}}"),),
    ),
    Panel(
        title="Refused by replicas",
        description="overloaded: it has as many sequences or tokens as it takes. draining: it is about to "
        "leave. Routers try another replica before a client hears of either. The rest is refused for good.",
        queries=(
            Query(events("replica_refusals_total", "REPLICA", "replica, code"), "{{replica}} {{code}}"),
        ),
    ),
    Panel(
        title="KV blocks that requests hold",
        description="Share of each replica's block pool. Near 100 % requests are preempted and computed "
        "again: fewer at a time (max_running), or more blocks.",
        unit="percentunit",
        limits=((0.9, "orange"), (0.97, "red")),
        queries=(Query("replica_used_blocks{REPLICA} / replica_total_blocks{REPLICA}", "{{replica}}"),),
    ),
)

LIVES = (
    Panel(
        title="Replicas by state",
        description="As the fleet controller sees them, next to the number that it wants.",
        is_stacked=True,
        queries=(
            Query("sum by (state) (fleet_replicas{FLEET})", "{{state}}"),
            Query("sum(fleet_replicas_desired{FLEET})", "wanted"),
        ),
    ),
    Panel(
        title="Starts, restarts, failures",
        description="Restarts that come again and again: read the log of the replica that fails. The first "
        "restart is immediate, each further one waits twice as long.",
        queries=(
            Query(events("fleet_replica_starts_total", "FLEET", "pool"), "{{pool}} starts"),
            Query(events("fleet_replica_restarts_total", "FLEET", "pool"), "{{pool}} restarts"),
            Query(events("fleet_replica_failures_total", "FLEET", "pool"), "{{pool}} failures"),
        ),
    ),
    Panel(
        title="Room in Redis",
        description="Memory that Redis uses, as a share of its maxmemory, and replicas that hold their share "
        "of the index back because it is full. Leases are written even then.",
        queries=(
            Query("max by (replica) (replica_redis_memory_ratio{REPLICA})", "{{replica}} sees in use"),
            Query("sum(replica_index_withheld{REPLICA})", "replicas that hold back"),
        ),
    ),
)

FLEET = Dashboard(
    uid="kvasir-fleet",
    title="Kvasir / Fleet",
    description="Is the cluster up, which replica is hot, and what dies.",
    rows=(Row("Is it up?", OVERVIEW), Row("Load", LOAD), Row("Replicas come and go", LIVES)),
)
