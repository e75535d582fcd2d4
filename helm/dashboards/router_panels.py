"""The dashboard of the routers: traffic, latency, decisions, and the routers themselves."""

from expressions import events, quantile, quantiles, rate
from grafana import Dashboard, Panel, Query, Row

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
        title="Requests in flight",
        description="Requests being served, by router. At max_in_flight a router answers 429.",
        queries=(Query("router_in_flight{ROUTER}", "{{router}}"),),
    ),
    Panel(
        title="Sequences in flight",
        description="Prompts times n of the requests being served, by router. At the bounds that "
        "follow from max_in_flight, a router answers 429: refused.",
        queries=(
            Query("router_admitted_sequences{ROUTER}", "{{router}}"),
            Query("sum(" + rate("router_admission_refusals_total", "ROUTER") + ")", "refused per second"),
        ),
    ),
    Panel(
        title="Tokens in flight",
        description="Tokens of the prompts of requests being served, and of their answers up to 1,024 each.",
        queries=(Query("router_admitted_tokens{ROUTER}", "{{router}}"),),
    ),
    Panel(
        title="Tokens per second",
        description="Prompt tokens that came, prompt tokens that had to be computed, tokens generated.",
        queries=(
            Query(rate("router_prompt_tokens_total", "MODEL"), "prompt"),
            Query(
                rate("router_prompt_tokens_total", "MODEL")
                + " - "
                + rate("router_cached_tokens_total", "MODEL"),
                "computed",
            ),
            Query(rate("router_output_tokens_total", "MODEL"), "generated"),
        ),
    ),
    Panel(
        title="Accidents",
        description="Submissions that were lost with their replica, repeated before the first token, or "
        "continued elsewhere after it. Clients saw nothing of them but time.",
        queries=(
            Query(events("router_lost_attempts_total", "ROUTER"), "lost"),
            Query(events("router_overdue_attempts_total", "ROUTER"), "overdue"),
            Query(events("router_retries_total", "ROUTER"), "retried"),
            Query(events("router_resumes_total", "ROUTER"), "resumed"),
        ),
    ),
    Panel(
        title="Waiting in line",
        description="Generations that wait for a replica: of a model that has none just now, but had one a "
        "moment ago; refused: no room in the line.",
        queries=(
            Query("router_waiting{ROUTER}", "{{router}}"),
            Query(events("router_waiting_refusals_total", "ROUTER"), "refused"),
        ),
    ),
    Panel(
        title="Longest wait in line",
        description="Of those that wait for a replica, the one that came first. At wait_seconds it is a 503.",
        unit="s",
        queries=(Query("router_waiting_oldest_seconds{ROUTER}", "{{router}}"),),
    ),
    Panel(
        title="Held in fair order",
        description="Requests whose replica has too much to do, how many tenants they are of, and what was "
        "refused: too long a wait expected (too_long), waited until it was too late, or the queue is full.",
        queries=(
            Query("router_queue_waiting{ROUTER}", "{{router}}"),
            Query("router_queue_tenants{ROUTER}", "tenants, {{router}}"),
            Query(
                "sum by (cause) (increase(router_queue_refusals_total{ROUTER}[$__rate_interval]))",
                "{{cause}}",
            ),
        ),
    ),
    Panel(
        title="Time held",
        description="Of those that went, on average; and of the one that has waited longest.",
        unit="s",
        queries=(
            Query(
                "sum(increase(router_queue_seconds_total{ROUTER}[$__rate_interval]))"
                " / sum(increase(router_queue_released_total{ROUTER}[$__rate_interval]))",
                "mean",
            ),
            Query("router_queue_oldest_seconds{ROUTER}", "longest, {{router}}"),
        ),
    ),
    Panel(
        title="Tenants apart",
        description="By how much work, for its weight, the tenant that was given most is ahead of the one "
        "given least, of those that wait.",
        queries=(Query("router_queue_counter_spread_tokens{ROUTER}", "{{router}}"),),
    ),
    Panel(
        title="Memory of those held",
        description="Of the prompts of requests that are held.",
        unit="bytes",
        queries=(Query("router_queue_bytes{ROUTER}", "{{router}}"),),
    ),
    Panel(
        title="Prompts that kill",
        description="Suspects were in flight at a replica's death and are tried alone; condemned have killed "
        "two and are refused.",
        queries=(
            Query("sum(router_suspects{ROUTER})", "suspects"),
            Query(events("router_condemned_prompts_total", "ROUTER"), "condemned"),
        ),
    ),
    Panel(
        title="Retry budget",
        description="Retries at living replicas that may still be made; at 0 they are not: refused.",
        queries=(
            Query("router_retry_budget{ROUTER}", "{{router}}"),
            Query(events("router_retries_refused_total", "ROUTER"), "refused"),
        ),
    ),
    Panel(
        title="Between routers and replicas",
        description="Submits and aborts that routers sent, and frames that came back: one for each engine "
        "step and router, however many requests it carries.",
        queries=(
            Query(rate("router_submits_total", "ROUTER"), "submits"),
            Query(rate("router_aborts_total", "ROUTER"), "aborts"),
            Query(rate("router_frames_total", "ROUTER"), "frames"),
        ),
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
        title="Time to first token, all of it",
        description="Two bands are hits and misses.",
        kind="heatmap",
        unit="reqps",
        queries=(Query(rate("router_ttft_seconds_bucket", "MODEL", "le"), "{{le}}"),),
    ),
    Panel(
        title="Time of a whole answer",
        description="From a request's arrival to the end of its answer; failed requests are not in it.",
        unit="s",
        queries=quantiles("router_e2e_seconds", "MODEL"),
    ),
    Panel(
        title="Time per output token",
        description="After the first: the mean of each answer.",
        unit="s",
        queries=quantiles("router_tpot_seconds", "MODEL"),
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
        description="Preparing (parsing, template, tokens, hashes) and deciding. Preparing is slow where "
        "the token cache misses; see below.",
        unit="s",
        queries=(
            Query(quantile(0.5, "router_prepare_seconds", "MODEL"), "preparing p50"),
            Query(quantile(0.99, "router_prepare_seconds", "MODEL"), "preparing p99"),
            Query(quantile(0.5, "router_decision_seconds", "ROUTER"), "deciding p50"),
            Query(quantile(0.99, "router_decision_seconds", "ROUTER"), "deciding p99"),
        ),
    ),
)

DECISIONS = (
    Panel(
        title="Decisions by reason",
        description="overlap: no replica holds more of the prompt. home: the bucket's first replica, for "
        "prompts that none holds. spill: away from both, because both cost more: they were busy, or room in "
        "their caches was dear. policy: a baseline decides.",
        unit="reqps",
        is_stacked=True,
        queries=(Query(rate("router_decisions_total", "MODEL", "reason"), "{{reason}}"),),
    ),
    Panel(
        title="Decisions by rank",
        description="The place of the chosen replica in the bucket's affinity order; 0 is its home. Much "
        "beyond 1 for cold prompts means that homes are busy.",
        unit="reqps",
        is_stacked=True,
        queries=(Query(rate("router_decisions_total", "MODEL", "rank"), "rank {{rank}}"),),
    ),
    Panel(
        title="Spill",
        description="Share of requests that were sent away from home and cache, which cost more. A little is "
        "the price of balance; a lot means copies of prefixes everywhere: the fleet is too small.",
        unit="percentunit",
        limits=((0.2, "orange"), (0.5, "red")),
        queries=(
            Query(
                '(sum(rate(router_decisions_total{MODEL,reason="spill"}[$__rate_interval])) or vector(0))'
                " / sum(rate(router_decisions_total{MODEL}[$__rate_interval]))",
                "spill",
            ),
        ),
    ),
    Panel(
        title="Requests at each replica",
        description="As the routers see it, their own reservations included.",
        queries=(Query("max by (replica) (router_replica_requests{SEEN})", "{{replica}}"),),
    ),
    Panel(
        title="Prompt tokens that wait at each replica",
        description="As the routers see it, their own reservations included. Compare with the fleet's "
        "dashboard: a lasting difference means that loads arrive late.",
        queries=(Query("max by (replica) (router_replica_pending_tokens{SEEN})", "{{replica}}"),),
    ),
    Panel(
        title="Reservations",
        description="Load that the routers count on top of what replicas report. It returns to 0 when "
        "nothing runs; if it does not, that is a leak: please report it.",
        queries=(
            Query("sum by (router) (router_reservations{ROUTER})", "{{router}}"),
            Query("sum by (router) (router_runs{ROUTER})", "{{router}} generations"),
        ),
    ),
)

DOOR = (
    Panel(
        title="Connections",
        description="Connections of clients, and how many there may be; beyond, and beyond one address's "
        "share, they are refused.",
        queries=(
            Query("router_connections{ROUTER}", "{{router}}"),
            Query("min(router_connections_limit{ROUTER})", "limit of each"),
        ),
    ),
    Panel(
        title="Connections ended",
        description="Connections that a router ended or did not take, by what was wrong: too many, a head "
        "too large or too slow, an answer that is not read.",
        queries=(Query(events("router_ended_connections_total", "ROUTER", "reason"), "{{reason}}"),),
    ),
    Panel(
        title="Memory of bodies",
        description="Of the request bodies that are read or prepared. At the limit, and beyond one address's "
        "share of it, clients get 503: refused.",
        unit="bytes",
        queries=(
            Query("router_body_bytes{ROUTER}", "{{router}}"),
            Query("min(router_body_bytes_limit{ROUTER})", "limit of each"),
        ),
    ),
    Panel(
        title="Bodies refused",
        description="For want of memory, or, if large, since too many others waited. ended: large bodies "
        "that took more time or memory than one may.",
        queries=(
            Query(events("router_refused_bodies_total", "ROUTER"), "no memory"),
            Query(
                'sum by (outcome) (increase(router_large_bodies_total{ROUTER,outcome!="done"}'
                "[$__rate_interval]))",
                "large, {{outcome}}",
            ),
        ),
    ),
    Panel(
        title="Large bodies",
        description="Bodies that are prepared beside the event loop: at work, waiting, and done.",
        queries=(
            Query("sum(router_large_bodies{ROUTER})", "at work"),
            Query("sum(router_large_bodies_waiting{ROUTER})", "waiting"),
            Query(
                'sum(increase(router_large_bodies_total{ROUTER,outcome="done"}[$__rate_interval]))', "done"
            ),
        ),
    ),
    Panel(
        title="Memory of those in line",
        description="Of the prompts that wait for a replica; bounded by a share of memory_bytes.",
        unit="bytes",
        queries=(Query("router_waiting_bytes{ROUTER}", "{{router}}"),),
    ),
)

IMAGES = (
    Panel(
        title="Images by way",
        description="How the images of prompts got to their replicas: sent; shared, while another prompt was "
        "sending it; known, since it was there; or failed. Many known mean that prompts go where their "
        "pictures are.",
        is_stacked=True,
        queries=(Query(rate("router_images_total", "ROUTER", "way"), "{{way}}"),),
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
    Panel(
        title="Bytes of images sent",
        description="As files, from routers to replicas, once for each replica and image while that "
        "remembers it.",
        unit="Bps",
        queries=(Query(rate("router_image_bytes_total", "ROUTER", "router"), "{{router}}"),),
    ),
    Panel(
        title="Time to send an image",
        description="Until the replica has read it, which the prompt waits for.",
        unit="s",
        queries=quantiles("router_image_upload_seconds", "ROUTER"),
    ),
    Panel(
        title="Images at replicas, by outcome",
        description="taken; unreadable: no picture that the model could read; full: no room in image_bytes, "
        "since all of it is in use or the image is larger.",
        queries=(
            Query(rate("replica_images_total", "REPLICA", "replica, outcome"), "{{replica}} {{outcome}}"),
        ),
    ),
    Panel(
        title="Bytes of images taken",
        description="As files, by replica. Far more at one than at the rest: it is the home of the pictures "
        "that everybody asks about.",
        unit="Bps",
        queries=(Query(rate("replica_image_bytes_total", "REPLICA", "replica"), "{{replica}}"),),
    ),
    Panel(
        title="Time to read an image",
        description="Mean time to decode one and to prepare what the model computes with, in a thread beside "
        "the engine. Near 0 for simulated engines, which read headers only.",
        unit="s",
        queries=(
            Query(
                rate("replica_image_read_seconds_total", "REPLICA", "replica")
                + " / "
                + 'sum by (replica) (rate(replica_images_total{REPLICA,outcome="taken"}[$__rate_interval]))',
                "{{replica}}",
            ),
        ),
    ),
    Panel(
        title="Image tokens encoded",
        description="Tokens of images that engines put through the vision part: those that were not cached. "
        "Much of it with few new pictures: prompts do not meet where their pictures are, or go under.",
        queries=(Query(rate("replica_encoded_image_tokens_total", "REPLICA", "replica"), "{{replica}}"),),
    ),
    Panel(
        title="Time to encode a token of an image",
        description="Beside computing it, as each replica measures it; routers count it when they choose. 0 "
        "until an image came.",
        unit="s",
        queries=(Query("replica_encode_seconds_per_image_token{REPLICA}", "{{replica}}"),),
    ),
)

ITSELF = (
    Panel(
        title="Lag of the event loop",
        description="How late a router's timers run: all streams wait that long. Above 50 ms a router needs "
        "a second one beside it.",
        unit="s",
        limits=((0.05, "orange"), (0.2, "red")),
        queries=(Query("router_event_loop_lag_seconds{ROUTER}", "{{router}}"),),
    ),
    Panel(
        title="Token cache, hit rate",
        description="Share of the text segments that were found encoded. Low with a full cache: raise "
        "memory_bytes.",
        unit="percentunit",
        maximum=1,
        queries=(
            Query(
                rate("router_token_cache_hits_total", "MODEL", "model")
                + " / ("
                + rate("router_token_cache_hits_total", "MODEL", "model")
                + " + "
                + rate("router_token_cache_misses_total", "MODEL", "model")
                + ")",
                "{{model}}",
            ),
        ),
    ),
    Panel(
        title="Spans dropped",
        description="Spans that no trace collector took: see whether otlp_endpoint answers. Requests do not "
        "wait for it.",
        queries=(
            Query(events("router_dropped_spans_total", "ROUTER", "router"), "{{router}}"),
            Query("sum(increase(replica_dropped_spans_total{FLEET}[$__rate_interval]))", "all replicas"),
        ),
    ),
    Panel(
        title="Token cache, memory",
        description="Bounded by a share of memory_bytes, for each model and router.",
        unit="bytes",
        queries=(Query("router_token_cache_bytes{MODEL}", "{{router}} {{model}}"),),
    ),
    Panel(
        title="Hash cache, hit rate",
        description="Share of the prompt blocks whose hash was known. Low while prompts begin alike and the "
        "cache is full: raise memory_bytes.",
        unit="percentunit",
        maximum=1,
        queries=(
            Query(
                rate("router_hash_cache_hits_total", "ROUTER", "router")
                + " / ("
                + rate("router_hash_cache_hits_total", "ROUTER", "router")
                + " + "
                + rate("router_hash_cache_misses_total", "ROUTER", "router")
                + ")",
                "{{router}}",
            ),
        ),
    ),
    Panel(
        title="Hash cache, memory",
        description="Bounded by a share of memory_bytes, for each router.",
        unit="bytes",
        queries=(Query("router_hash_cache_bytes{ROUTER}", "{{router}}"),),
    ),
    Panel(
        title="Conversations that go on, by outcome",
        description="Prompts with an earlier answer in them. Drifted ones would have missed the cache from "
        "that answer on, had their template written it. Many unknown: raise memory_bytes and "
        "redis_bytes, and see what becomes of looks for answers of other routers.",
        unit="reqps",
        queries=(Query(rate("router_history_prompts_total", "ROUTER", "outcome"), "{{outcome}}"),),
    ),
    Panel(
        title="Remembered conversations, memory",
        description="Bounded by a share of memory_bytes, for each router.",
        unit="bytes",
        queries=(Query("router_history_bytes{ROUTER}", "{{router}}"),),
    ),
    Panel(
        title="Looks for answers of other routers, by outcome",
        description="Conversations whose last answer this router does not know. Missing: no router gave that "
        "answer, or it was evicted (redis_bytes). Late, failed and resting: Redis does not answer "
        "within 20 ms, and requests continue without it.",
        unit="reqps",
        queries=(Query(rate("router_history_lookups_total", "ROUTER", "outcome"), "{{outcome}}"),),
    ),
    Panel(
        title="Answers told to other routers, by outcome",
        description="Written to Redis after they have ended. Let go: removed again for want of room "
        "(redis_bytes). Wrong: found there and not believed, which is normal only while the cluster "
        "secret or the version changes.",
        unit="reqps",
        queries=(
            Query(rate("router_history_told_total", "ROUTER", "outcome"), "{{outcome}}"),
            Query("sum(rate(router_history_let_go_total{ROUTER}[$__rate_interval]))", "let go"),
            Query("sum(rate(router_history_wrong_total{ROUTER}[$__rate_interval]))", "wrong"),
        ),
    ),
    Panel(
        title="Answers of all routers, in Redis",
        description="Bounded by a third of redis_bytes, for all routers. Each shows what it saw last.",
        unit="bytes",
        queries=(Query("router_history_redis_bytes{ROUTER}", "{{router}}"),),
    ),
    Panel(
        title="Answers that wait to be told",
        description="Bounded by 4,096 and 16 MiB, for each router. They wait while Redis is away. Resting is "
        "1 while a router does not ask Redis, since it has not answered within 20 ms.",
        queries=(
            Query("router_history_untold{ROUTER}", "{{router}}"),
            Query("router_history_resting{ROUTER}", "{{router}} resting"),
        ),
    ),
)

ROUTER = Dashboard(
    uid="kvasir-router",
    title="Kvasir / Router",
    description="Traffic, latency, where requests go and why, and the routers themselves.",
    rows=(
        Row("Traffic", TRAFFIC),
        Row("The door", DOOR),
        Row("Latency", LATENCY),
        Row("Decisions", DECISIONS),
        Row("Images", IMAGES),
        Row("The routers themselves", ITSELF),
    ),
)
