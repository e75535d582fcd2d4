"""The dashboard of the cache: hits, misses by cause, the index's accuracy, pools and tiers."""

from grafana import Dashboard, Panel, Query, Row, events, rate, ratio

HITS = (
    Panel(
        title="Hit rate",
        description="Share of prompt tokens that were read from a cache. If it falls with the same traffic: "
        "evictions (below) mean pools that are too small, spill (router) a fleet that is too busy, a high "
        "error of the overlap an index that does not keep up.",
        unit="percentunit",
        queries=(
            Query(ratio("router_cached_tokens_total", "router_prompt_tokens_total", "MODEL"), "all"),
            Query(
                ratio("router_cross_user_cached_tokens_total", "router_prompt_tokens_total", "MODEL"),
                "cross-user",
            ),
        ),
    ),
    Panel(
        title="Hit rate by replica",
        description="As each replica measures it. One far below the rest gets the prompts that none holds.",
        unit="percentunit",
        queries=(
            Query(
                ratio("replica_cached_tokens_total", "replica_prompt_tokens_total", "REPLICA", "replica"),
                "{{replica}}",
            ),
        ),
    ),
    Panel(
        title="Missed tokens by cause",
        description="Why prompt tokens were not read from a cache. never_cached and below_a_block are no "
        "loss; evicted asks for more memory, held_elsewhere says what load costs in hits.",
        is_stacked=True,
        queries=(Query(rate("router_missed_tokens_total", "MODEL", "cause"), "{{cause}}"),),
    ),
    Panel(
        title="Prompt tokens by origin",
        description="computed; own: cached, from the same user's requests; cross_user: from another user's; "
        "unattributed: cached, and one of the two requests named no user. They add up to all prompt tokens.",
        is_stacked=True,
        queries=(Query(rate("router_prompt_tokens_by_origin_total", "MODEL", "origin"), "{{origin}}"),),
    ),
)

ACCURACY = (
    Panel(
        title="Error of the overlap, as a share of the prompts",
        description="Distance between expected and measured, request by request (absolute), and expected "
        "and measured in sum. Expected above measured: blocks went before the prompt came. Below: the index "
        "is late.",
        unit="percentunit",
        limits=((0.2, "red"),),
        queries=(
            Query(ratio("router_overlap_error_tokens_sum", "router_prompt_tokens_total", "MODEL"), "error"),
            Query(ratio("router_overlap_tokens_total", "router_prompt_tokens_total", "MODEL"), "expected"),
            Query(ratio("router_cached_tokens_total", "router_prompt_tokens_total", "MODEL"), "measured"),
        ),
    ),
    Panel(
        title="Index, behind",
        description="How far routers lie behind the stream, and how old the events of a replica's latest "
        "write were. Both stand still while Redis is away.",
        unit="s",
        limits=((5, "red"),),
        queries=(
            Query("router_index_lag_seconds{MODEL}", "{{router}} {{model}}"),
            Query("replica_index_lag_seconds{REPLICA}", "{{replica}}"),
        ),
    ),
    Panel(
        title="Index, repairs",
        description="Sets that routers read again (start, gap in the stream, new incarnation), whole sets "
        "that replicas wrote again, changes that could not be read. All the time: raise "
        "events_stream_length, or look for replicas that run another version.",
        queries=(
            Query(events("router_index_resyncs_total", "MODEL", "router"), "{{router}} resyncs"),
            Query(events("replica_index_rewrites_total", "REPLICA", "replica"), "{{replica}} rewrites"),
            Query(events("router_index_malformed_total", "MODEL", "router"), "{{router}} unreadable"),
        ),
    ),
)

TIERS = (
    Panel(
        title="Blocks forgotten per second",
        description="Evictions, by tier. Many, with a falling hit rate: the pools are too small for the "
        "prefixes in use; more kv_cache_bytes or more replicas.",
        queries=(
            Query(rate("replica_evicted_blocks_total", "REPLICA", "replica, tier"), "{{replica}} {{tier}}"),
        ),
    ),
    Panel(
        title="Preemptions",
        description="Requests that lost their blocks and are computed again. Fewer at a time (max_running), "
        "or more blocks.",
        queries=(Query(events("replica_preemptions_total", "REPLICA", "replica"), "{{replica}}"),),
    ),
    Panel(
        title="Cached tokens by tier",
        description="Where the prompt tokens that were not computed came from. Much from the disk and little "
        "from host memory: more host memory would make them come sooner.",
        is_stacked=True,
        queries=(Query(rate("router_cached_tokens_by_tier_total", "MODEL", "tier"), "{{tier}}"),),
    ),
    Panel(
        title="KV in host memory and on disk",
        description="Share of its limit that each tier holds. Full is good: it has forgotten nothing yet.",
        unit="percentunit",
        queries=(
            Query("replica_tier_bytes{REPLICA} / replica_tier_bytes_limit{REPLICA}", "{{replica}} {{tier}}"),
        ),
    ),
    Panel(
        title="Moves that failed",
        description="What could not be read is computed, what could not be written is not on disk. Checksums "
        "that are wrong again and again mean a disk that is about to die.",
        queries=(
            Query(
                events("replica_tier_failed_moves_total", "REPLICA", "replica, way, reason"),
                "{{replica}} {{way}} {{reason}}",
            ),
        ),
    ),
)

CACHE = Dashboard(
    uid="kvasir-cache",
    title="Kvasir / Cache",
    description="Hits and misses, whether the index is right, the pools and the tiers below the device.",
    rows=(
        Row("Hits and misses", HITS),
        Row("Does the index tell the truth?", ACCURACY),
        Row("Pools and tiers", TIERS),
    ),
)
