"""The dashboard of the fleet: replicas up, the hot one, deaths."""

from expressions import CROSS_USER_RATIO, ERROR_RATIO, FILL, HIT_RATIO, events, quantile, rate
from grafana import Dashboard, Panel, Query, Row

OVERVIEW = (
    Panel(
        title="Replicas that this router sends requests to",
        description="As the router sees it that knows of the fewest. 0: nothing is served; look at the "
        "replicas' logs, and whether Redis can be reached.",
        kind="stat",
        width=3,
        calm="red",
        limits=((1, "green"),),
        queries=(Query("min(router_replicas{ROUTER})", "replicas"),),
    ),
    Panel(
        title="Replicas wanted",
        description="What the fleet controller keeps alive. Empty where no controller runs.",
        kind="stat",
        width=3,
        calm="text",
        queries=(Query("sum(fleet_replicas_desired{FLEET})", "wanted"),),
    ),
    Panel(
        title="Requests per second",
        description="Answered requests, whatever the answer was.",
        kind="stat",
        width=3,
        unit="reqps",
        calm="text",
        queries=(Query(rate("router_requests_total", "MODEL"), "requests"),),
    ),
    Panel(
        title="Errors",
        description="Share of requests that ended with a status of 500 or above, streams that broke off "
        "included. The router's dashboard tells the kinds.",
        kind="stat",
        width=3,
        unit="percentunit",
        limits=((0.01, "orange"), (0.05, "red")),
        queries=(Query(ERROR_RATIO, "errors"),),
    ),
    Panel(
        title="Hit rate",
        description="Share of prompt tokens that were read from a cache instead of computed.",
        kind="stat",
        width=3,
        unit="percentunit",
        calm="text",
        queries=(Query(HIT_RATIO, "hit rate"),),
    ),
    Panel(
        title="Cross-user hit rate",
        description="Share of prompt tokens that were read from blocks which another user's request "
        "computed. 0 where clients send no user.",
        kind="stat",
        width=3,
        unit="percentunit",
        calm="text",
        queries=(Query(CROSS_USER_RATIO, "cross-user"),),
    ),
    Panel(
        title="Time to first token, p99",
        description="From a request's arrival at the router.",
        kind="stat",
        width=3,
        unit="s",
        calm="text",
        queries=(Query(quantile(0.99, "router_ttft_seconds", "MODEL"), "p99"),),
    ),
    Panel(
        title="Alerts that fire",
        description="Alerts of helm/rules/kvasir.yaml. Each says what to do.",
        kind="stat",
        width=3,
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
        title="Tokens taken and not finished, by replica",
        description="Prompts, and up to 1,024 tokens of each answer. At max_open_tokens a replica refuses "
        "more, and routers try another.",
        queries=(Query("replica_open_tokens{REPLICA}", "{{replica}}"),),
    ),
    Panel(
        title="Sequences taken and not finished, by replica",
        description="Requests times n, running and waiting. At max_running + max_waiting a replica "
        "refuses more.",
        queries=(Query("replica_open_sequences{REPLICA}", "{{replica}}"),),
    ),
    Panel(
        title="Time in the queue, p99",
        description="From a submit's arrival at a replica to its first step.",
        unit="s",
        queries=(Query(quantile(0.99, "replica_queue_seconds", "REPLICA", "replica"), "{{replica}}"),),
    ),
    Panel(
        title="Time of an engine step, p90",
        description="A step that computes long prompts holds up every answer in the batch; lower "
        "max_batched_tokens if answers stutter.",
        unit="s",
        queries=(Query(quantile(0.9, "replica_step_seconds", "REPLICA", "replica"), "{{replica}}"),),
    ),
    Panel(
        title="Engines without an end of a step",
        description="How long an engine has had work and ended no step, as a share of what counts as hung: "
        "at 100 % its replica ends.",
        unit="percentunit",
        queries=(Query("replica_engine_silence_ratio{REPLICA}", "{{replica}}"),),
    ),
    Panel(
        title="Tokens generated, by replica",
        description="A replica that generates less than the others with as full a batch is slower: other "
        "hardware, or something else on its machine.",
        queries=(Query(rate("replica_generated_tokens_total", "REPLICA", "replica"), "{{replica}}"),),
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
        title="Calls refused by replicas",
        description="Calls without a valid token of the cluster secret. no_token: the caller has none. "
        "wrong_token: another secret, or a token for another replica. used_token: one that was read on its "
        "way and shown again. wrong_role: a drain that the controller did not ask for.",
        queries=(
            Query(
                events("replica_refused_calls_total", "REPLICA", "replica, reason"), "{{replica}} {{reason}}"
            ),
        ),
    ),
    Panel(
        title="KV blocks that requests hold",
        description="Share of each replica's block pool. Near 100 % requests are preempted and computed "
        "again: fewer at a time (max_running), or more blocks.",
        unit="percentunit",
        maximum=1,
        limits=((0.9, "orange"), (0.97, "red")),
        queries=(Query(FILL, "{{replica}}"),),
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
        title="Replicas, as routers see them",
        description="Replicas with a lease, and those of them that each router sends requests to. If they "
        "differ for long, a router cannot reach a replica, or refuses it; its log says why.",
        queries=(
            Query("router_replicas_known{ROUTER}", "{{router}} known"),
            Query("router_replicas{ROUTER}", "{{router}} used"),
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
        title="Time to start a replica, mean",
        description="From the controller's decision until the replica is ready, of all starts since the "
        "controller's own: loading weights, mostly. This long a lost replica is missing.",
        unit="s",
        queries=(
            Query(
                "sum by (pool) (fleet_replica_start_seconds_sum{FLEET})"
                " / sum by (pool) (fleet_replica_start_seconds_count{FLEET})",
                "{{pool}}",
            ),
        ),
    ),
    Panel(
        title="Leases",
        description="Renewals that failed: Redis is away or slow. A replica that cannot renew for "
        "lease_seconds counts as dead for routers that have not connected to it yet.",
        queries=(
            Query(events("replica_lease_failures_total", "REPLICA", "replica"), "{{replica}} failures"),
            Query(events("replica_lease_renewals_total", "REPLICA"), "renewals"),
            Query(events("replica_lease_prolongations_total", "REPLICA", "replica"), "{{replica}} prolonged"),
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
    Panel(
        title="Memory of the index stream",
        description="As last measured by any replica: kept below events_stream_bytes.",
        unit="bytes",
        queries=(Query("max by (replica) (replica_index_stream_bytes{REPLICA})", "{{replica}}"),),
    ),
    Panel(
        title="Streams that routers lost",
        description="A router's stream to a replica broke: the replica died, or the network did. Requests on "
        "it went on elsewhere; see retries and resumes on the router's dashboard.",
        queries=(
            Query(events("router_lost_streams_total", "ROUTER", "router"), "{{router}} lost"),
            Query(events("router_refused_replicas_total", "ROUTER", "router"), "{{router}} refused"),
        ),
    ),
    Panel(
        title="Ignored records and messages",
        description="Registry entries and messages of replicas that break the contract and are ignored: "
        "they are unreadable or out of bounds. The routers' logs say what it was.",
        queries=(
            Query("sum by (router, reason) (router_refused_records{ROUTER})", "{{router}} {{reason}}"),
            Query(events("router_malformed_messages_total", "ROUTER", "router"), "{{router}} from replicas"),
        ),
    ),
    Panel(
        title="What Ray gives",
        description="Machines that are alive, and replicas that Ray would not even make: see whether the "
        "machines have the CPUs and GPUs that a replica asks for.",
        queries=(
            Query("sum(fleet_ray_nodes{FLEET})", "nodes"),
            Query(events("fleet_reconcile_errors_total", "FLEET"), "not made"),
        ),
    ),
    Panel(
        title="The controller's look at the fleet, p90",
        description="Observing, planning, setting about it. Slow looks delay repairs, not requests.",
        unit="s",
        queries=(Query(quantile(0.9, "fleet_reconcile_seconds", "FLEET"), "p90"),),
    ),
)

FLEET = Dashboard(
    uid="kvasir-fleet",
    title="Kvasir / Fleet",
    description="Is the cluster up, which replica is hot, and what dies.",
    rows=(Row("Is it up?", OVERVIEW), Row("Load", LOAD), Row("Replicas come and go", LIVES)),
)
