"""The dashboard of the routers: traffic, latency, decisions, and the routers themselves."""

from grafana import Dashboard, Panel, Query, Row, events, quantile, quantiles, rate

TRAFFIC = (
    Panel(
        title="Requests by route and status",
        description="4xx is the client's doing, 429 means full queues, 5xx is ours; 499 are clients that did "
        "not wait.",
        unit="reqps",
        is_stacked=True,
        queries=(Query(rate("router_requests_total", "MODEL", "route, code"), "{{route}} {{code}}"),),
    ),
    Panel(
        title="Errors by kind",
        description="overloaded: more replicas, or slower clients. no_replica: none is ready for the model. "
        "failed: a replica died and so did the retries. internal: a bug; the router's log has it.",
        unit="reqps",
        is_stacked=True,
        queries=(Query(rate("router_request_errors_total", "MODEL", "kind"), "{{kind}}"),),
    ),
    Panel(
        title="Accidents",
        description="Submissions that were lost with their replica, repeated before the first token, or "
        "continued elsewhere after it. Clients saw nothing of them except time.",
        queries=(
            Query(events("router_lost_attempts_total", "ROUTER"), "lost"),
            Query(events("router_overdue_attempts_total", "ROUTER"), "overdue"),
            Query(events("router_retries_total", "ROUTER"), "retried"),
            Query(events("router_resumes_total", "ROUTER"), "resumed"),
        ),
    ),
    Panel(
        title="Tokens per second",
        description="Prompt tokens that came, prompt tokens that were read from a cache, tokens generated.",
        queries=(
            Query(rate("router_prompt_tokens_total", "MODEL"), "prompt"),
            Query(rate("router_cached_tokens_total", "MODEL"), "cached"),
            Query(rate("router_output_tokens_total", "MODEL"), "generated"),
        ),
    ),
)

OVERLOAD = (
    Panel(
        title="Requests in flight",
        description="Requests being served, by router. At max_in_flight a router answers 429.",
        queries=(Query("router_in_flight{ROUTER}", "{{router}}"),),
    ),
    Panel(
        title="Held in fair order",
        description="Requests whose replica has too much to do, how many tenants they are of, and what was "
        "refused: too long a wait expected (too_long), waited until it was too late, or the queue is full.",
        queries=(
            Query("router_queue_waiting{ROUTER}", "{{router}}"),
            Query("router_queue_tenants{ROUTER}", "tenants, {{router}}"),
            Query(events("router_queue_refusals_total", "ROUTER", "cause"), "{{cause}}"),
        ),
    ),
    Panel(
        title="Time held",
        description="Of those that went, on average; and of the one that has waited longest.",
        unit="s",
        queries=(
            Query(
                f"{rate('router_queue_seconds_total', 'ROUTER')}"
                f" / {rate('router_queue_released_total', 'ROUTER')}",
                "mean",
            ),
            Query("router_queue_oldest_seconds{ROUTER}", "longest, {{router}}"),
        ),
    ),
    Panel(
        title="Waiting in line",
        description="Generations that wait for a replica: of a model that has none just now, and had one a "
        "moment ago; refused: no room in the line.",
        queries=(
            Query("router_waiting{ROUTER}", "{{router}}"),
            Query(events("router_waiting_refusals_total", "ROUTER"), "refused"),
        ),
    ),
    Panel(
        title="Refused at the door",
        description="Connections that a router ended or did not take, by reason, and bodies for which it had "
        "no memory, or which were too much work.",
        queries=(
            Query(events("router_ended_connections_total", "ROUTER", "reason"), "connections, {{reason}}"),
            Query(events("router_refused_bodies_total", "ROUTER"), "bodies, no memory"),
            Query(
                events("router_large_bodies_total", 'ROUTER,outcome!="done"', "outcome"),
                "large bodies, {{outcome}}",
            ),
        ),
    ),
    Panel(
        title="Lag of the event loop",
        description="How late a router's timers run: all streams wait that long. Above 50 ms a router needs "
        "a second one next to it.",
        unit="s",
        limits=((0.05, "orange"), (0.2, "red")),
        queries=(Query("router_event_loop_lag_seconds{ROUTER}", "{{router}}"),),
    ),
)

LATENCY = (
    Panel(
        title="Time to first token",
        description="From a request's arrival to its first token. If it rises while the hit rate falls, see "
        "the cache's dashboard; if queues grow, the fleet's.",
        unit="s",
        queries=quantiles("router_ttft_seconds", "MODEL"),
    ),
    Panel(
        title="Gaps between tokens",
        description="p99 far above p50: answers stutter, most likely because long prompts are computed in "
        "the same steps.",
        unit="s",
        queries=quantiles("router_itl_seconds", "MODEL"),
    ),
    Panel(
        title="The router's own part",
        description="Preparing (parsing, template, tokens, hashes) and deciding.",
        unit="s",
        queries=(
            Query(quantile(0.5, "router_prepare_seconds", "MODEL"), "preparing p50"),
            Query(quantile(0.99, "router_prepare_seconds", "MODEL"), "preparing p99"),
            Query(quantile(0.99, "router_decision_seconds", "ROUTER"), "deciding p99"),
        ),
    ),
)

PROMPTS = (
    Panel(
        title="Decisions by reason",
        description="overlap: no replica holds more of the prompt. home: the bucket's first replica, for "
        "prompts that none holds. spill: away from both, because both cost more: they were busy, or room in "
        "their caches was dear. Much spill means a fleet that is too small.",
        unit="reqps",
        is_stacked=True,
        queries=(Query(rate("router_decisions_total", "MODEL", "reason"), "{{reason}}"),),
    ),
    Panel(
        title="Conversations that go on, by outcome",
        description="Prompts with an earlier answer in them. Drifted ones would have missed the cache from "
        "that answer on, had their template written it. Many unknown: raise memory_bytes and redis_bytes.",
        unit="reqps",
        queries=(Query(rate("router_history_prompts_total", "ROUTER", "outcome"), "{{outcome}}"),),
    ),
    Panel(
        title="Images that failed or were sent again",
        description="What a replica did not take, by its reason, and what it had forgotten before the prompt "
        "came. overloaded: image_bytes is full of images in use. Sent again and again: raise image_bytes.",
        queries=(
            Query(events("router_image_failures_total", "ROUTER", "reason"), "{{reason}}"),
            Query(events("router_images_sent_again_total", "ROUTER"), "sent again"),
        ),
    ),
)

ROUTER = Dashboard(
    uid="kvasir-router",
    title="Kvasir / Router",
    description="Traffic, overload, latency, and where requests go and why.",
    rows=(
        Row("Traffic", TRAFFIC),
        Row("Overload", OVERLOAD),
        Row("Latency", LATENCY),
        Row("Prompts", PROMPTS),
    ),
)
