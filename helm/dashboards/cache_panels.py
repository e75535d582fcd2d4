"""The dashboard of the cache: savings, the index's accuracy, the block pools."""

from expressions import CROSS_USER_RATIO, FILL, HIT_RATIO, events, quantile, rate
from grafana import Dashboard, Panel, Query, Row

HITS = (
    Panel(
        title="Prompt tokens by origin",
        description="computed; own: cached, from the same user's requests; cross_user: from another user's; "
        "unattributed: cached, but one of the two requests named no user. They add up to all prompt tokens.",
        is_stacked=True,
        queries=(Query(rate("router_prompt_tokens_by_origin_total", "MODEL", "origin"), "{{origin}}"),),
    ),
    Panel(
        title="Hit rate",
        description="Share of prompt tokens that were read from a cache. If it falls with the same traffic: "
        "evictions (below) mean pools that are too small, spill (router) a fleet that is too busy, a high "
        "error of the overlap an index that does not keep up.",
        unit="percentunit",
        maximum=1,
        queries=(
            Query(HIT_RATIO, "all"),
            Query(CROSS_USER_RATIO, "cross-user"),
        ),
    ),
    Panel(
        title="Hit rate by replica",
        description="As each replica measures it. One far below the rest gets the prompts that none holds.",
        unit="percentunit",
        maximum=1,
        queries=(
            Query(
                rate("replica_cached_tokens_total", "REPLICA", "replica")
                + " / "
                + rate("replica_prompt_tokens_total", "REPLICA", "replica"),
                "{{replica}}",
            ),
        ),
    ),
    Panel(
        title="Tokens not computed, in the time shown",
        description="What the cache has saved: prompt tokens that no replica had to compute.",
        kind="stat",
        width=6,
        calm="text",
        queries=(Query("sum(increase(router_cached_tokens_total{MODEL}[$__range]))", "saved"),),
    ),
    Panel(
        title="Of these, across users",
        description="Tokens that one user's request computed and another's read.",
        kind="stat",
        width=6,
        calm="text",
        queries=(
            Query("sum(increase(router_cross_user_cached_tokens_total{MODEL}[$__range]))", "across users"),
        ),
    ),
    Panel(
        title="Prefill for each token computed",
        description="Prompt tokens served for each one computed. At 4 the fleet without a cache would need "
        "four times its time for prompts.",
        kind="stat",
        width=6,
        unit="suffix: ×",
        calm="text",
        queries=(
            Query(
                "sum(increase(router_prompt_tokens_total{MODEL}[$__range]))"
                " / (sum(increase(router_prompt_tokens_total{MODEL}[$__range]))"
                " - sum(increase(router_cached_tokens_total{MODEL}[$__range])))",
                "prompt tokens for each one computed",
            ),
        ),
    ),
    Panel(
        title="From below the device",
        description="Cached tokens that were read from host memory or disk instead of the device, in the "
        "time shown. Only replicas with such tiers have any.",
        kind="stat",
        width=6,
        calm="text",
        queries=(
            Query(
                'sum(increase(router_cached_tokens_by_tier_total{MODEL,tier!="device"}[$__range]))',
                "host memory and disk",
            ),
        ),
    ),
)

ACCURACY = (
    Panel(
        title="Overlap: expected and measured",
        description="Tokens that the router expected to be cached, and those that were. Expected above "
        "measured: blocks went before the prompt came (evictions). Below: the index is late.",
        queries=(
            Query(rate("router_overlap_tokens_total", "MODEL"), "expected"),
            Query(rate("router_cached_tokens_total", "MODEL"), "measured"),
        ),
    ),
    Panel(
        title="Error of the overlap, as a share of the prompts",
        description="Distance between expected and measured, request by request (absolute), and their "
        "difference in sum (signed: above 0 the router expects too much).",
        unit="percentunit",
        minimum=None,
        limits=((0.2, "red"),),
        queries=(
            Query(
                rate("router_overlap_error_tokens_sum", "MODEL")
                + " / "
                + rate("router_prompt_tokens_total", "MODEL"),
                "absolute",
            ),
            Query(
                "("
                + rate("router_overlap_tokens_total", "MODEL")
                + " - "
                + rate("router_cached_tokens_total", "MODEL")
                + ") / "
                + rate("router_prompt_tokens_total", "MODEL"),
                "signed",
            ),
        ),
    ),
    Panel(
        title="Error of the overlap, tokens",
        description="A block and the last token are always in doubt; p90 beyond some hundred tokens means "
        "that decisions are made on wrong numbers.",
        queries=(
            Query(quantile(0.5, "router_overlap_error_tokens", "MODEL"), "p50"),
            Query(quantile(0.9, "router_overlap_error_tokens", "MODEL"), "p90"),
        ),
    ),
    Panel(
        title="Index, behind",
        description="How far routers lie behind the stream, and how old the events of a replica's latest "
        "write were. Both stand still while Redis is away: 'Index, connected' shows that.",
        unit="s",
        limits=((5, "red"),),
        queries=(
            Query("router_index_lag_seconds{MODEL}", "{{router}} {{model}}"),
            Query("replica_index_lag_seconds{REPLICA}", "{{replica}}"),
        ),
    ),
    Panel(
        title="Index, connected",
        description="1 while a router follows the stream in Redis. At 0 requests go on, and decisions are "
        "made on what was known: bring Redis back; the rest repairs itself.",
        maximum=1,
        queries=(Query("router_index_connected{MODEL}", "{{router}} {{model}}"),),
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
    Panel(
        title="Index, size",
        description="Pairs of replica and hash in each router's mirror, and what the replicas say should be "
        "there in all. They are equal when nothing runs.",
        queries=(
            Query("sum by (router) (router_index_entries{MODEL})", "{{router}}"),
            Query("sum(replica_index_hashes{REPLICA})", "all replicas"),
        ),
    ),
    Panel(
        title="Index, changes",
        description="Changes that replicas wrote and that each router applied. Routers level with the "
        "replicas keep up.",
        queries=(
            Query(rate("replica_index_changes_total", "REPLICA"), "written"),
            Query(rate("router_index_changes_total", "MODEL", "router"), "{{router}} applied"),
        ),
    ),
    Panel(
        title="Blocks that are expected",
        description="Requests whose blocks a router counts on before they are computed, and requests whose "
        "blocks replicas have announced. Near 0 when nothing runs.",
        queries=(
            Query("sum by (router) (router_index_predictions{MODEL})", "{{router}} predictions"),
            Query("sum(replica_announcements{REPLICA})", "announcements"),
        ),
    ),
)

POOLS = (
    Panel(
        title="Blocks in use",
        description="Share of the pool that running requests hold. Near 100 % requests are preempted.",
        unit="percentunit",
        maximum=1,
        limits=((0.9, "orange"), (0.97, "red")),
        queries=(Query(FILL, "{{replica}}"),),
    ),
    Panel(
        title="Blocks that can be found by hash",
        description="Share of the pool that holds cached prefixes. Full is good: a cache that is not "
        "full has forgotten nothing yet.",
        unit="percentunit",
        maximum=1,
        queries=(Query("replica_cached_blocks{REPLICA} / replica_total_blocks{REPLICA}", "{{replica}}"),),
    ),
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
        title="Distinct blocks, by tier",
        description="Block hashes of which a tier holds a copy.",
        is_stacked=True,
        queries=(Query("sum by (tier) (replica_resident_hashes{REPLICA})", "{{tier}}"),),
    ),
)

BELOW = (
    Panel(
        title="KV in host memory and on disk",
        description="Share of its limit that each tier holds. Full is good: it has forgotten nothing yet.",
        unit="percentunit",
        maximum=1,
        queries=(
            Query("replica_tier_bytes{REPLICA} / replica_tier_bytes_limit{REPLICA}", "{{replica}} {{tier}}"),
        ),
    ),
    Panel(
        title="Cached tokens by tier",
        description="Where the prompt tokens that were not computed came from. Much from the disk and little "
        "from host memory: more host memory would make them come sooner.",
        is_stacked=True,
        queries=(Query(rate("router_cached_tokens_by_tier_total", "MODEL", "tier"), "{{tier}}"),),
    ),
    Panel(
        title="Missed tokens by cause",
        description="Why prompt tokens were not read from a cache. never_cached and below_a_block are no "
        "loss; evicted asks for more memory, held_elsewhere says what load costs in hits.",
        is_stacked=True,
        queries=(Query(rate("router_missed_tokens_total", "MODEL", "cause"), "{{cause}}"),),
    ),
    Panel(
        title="Tokens moved",
        description="load: host memory to device; read: disk to host memory; write: host memory to disk.",
        queries=(Query(rate("replica_tier_moved_tokens_total", "REPLICA", "way"), "{{way}}"),),
    ),
    Panel(
        title="Time of a move",
        description="Mean over the moves that ended. If reads take long, the disk is slow or shared, and "
        "prompts are computed instead.",
        unit="s",
        queries=(
            Query(
                rate("replica_tier_move_seconds_total", "REPLICA", "way")
                + " / "
                + rate("replica_tier_moves_total", "REPLICA", "way"),
                "{{way}}",
            ),
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
    Panel(
        title="Chunks that wait for the disk",
        description="They have grown old in host memory and are not written yet. Growing: the disk, or its "
        "write budget, is too small for what the replica computes.",
        queries=(Query("replica_disk_waiting_writes{REPLICA}", "{{replica}}"),),
    ),
    Panel(
        title="Write budget left",
        description="Below one half only KV that was used again or is leased is written, at 0 nothing is "
        "(disk_write_bytes_per_second and _per_day).",
        unit="percentunit",
        maximum=1,
        queries=(Query("replica_disk_write_budget_ratio{REPLICA}", "{{replica}}"),),
    ),
    Panel(
        title="Disks that are not written to, slots that are held",
        description="1 while a disk takes no writes, and slots of host memory that a read which was given up "
        "may still write to. Both are 0 while disks are well; the alerts say what to do.",
        queries=(
            Query("max by (replica) (replica_disk_writing_stopped{REPLICA})", "{{replica}} not written"),
            Query("replica_quarantined_slots{REPLICA}", "{{replica}} slots held"),
        ),
    ),
    Panel(
        title="Leased tokens that were lost",
        description="KV that was promised for longer, by what took it away.",
        queries=(Query(events("replica_prefix_lease_broken_tokens_total", "REPLICA", "cause"), "{{cause}}"),),
    ),
)

CACHE = Dashboard(
    uid="kvasir-cache",
    title="Kvasir / Cache",
    description="What the prefix cache saves and whom, whether the index tells the truth, the pools, and "
    "what lies below the device.",
    rows=(
        Row("What it saves", HITS),
        Row("Does the index tell the truth?", ACCURACY),
        Row("Pools", POOLS),
        Row("Below the device", BELOW),
    ),
)
