"""PartMetrics: what a router's parts count for themselves, as Prometheus shall see it.

Owns the names. Each `read_…` copies the numbers of one part, just before a scrape, on the event loop where
that part lives.
"""

from collections.abc import Mapping

from replicas.protocol.status import ReplicaId
from router.caches.named_caches import CacheStatistics
from router.dispatch.dispatch_state import DispatchStatistics
from router.explain.story import StoryStatistics
from router.fleet.image_traffic import UPLOAD_BOUNDS, ImageTraffic
from router.fleet.index_mirror import MirrorStatistics
from router.fleet.membership import MembershipStatistics
from router.history.remembered import HistoryStatistics
from router.large_bodies.offload import OffloadStatistics
from router.limits.admission import AdmissionStatistics
from router.limits.body_budget import BodyStatistics
from router.limits.connections import ConnectionStatistics
from router.observation.body_recorder import RecordedBodies
from router.observation.instruments import Distributions, Numbers
from router.prompt.catalog import ModelCatalog
from router.prompt.chains import ChainStatistics
from router.queue.held import HoldingStatistics
from router.responses.response_store import ResponseStatistics
from router.routing.load import ReplicaLoad
from router.siblings.history_exchange import HistoryExchangeStatistics
from router.siblings.story_exchange import StoryExchangeStatistics
from router.tenants.keys_in_force import KeyStatistics
from router.tenants.rate_exchange import ExchangeStatistics
from router.tenants.rate_limits import RateStatistics
from router.tenants.usage_store import UsageStatistics


class PartMetrics:
    def __init__(self) -> None:
        self.families: list[Numbers | Distributions] = []
        self._in_flight = self._gauge("router_in_flight", "Requests being served")
        self._admitted_sequences = self._gauge(
            "router_admitted_sequences", "Sequences (prompts times n) of the requests being served"
        )
        self._admitted_tokens = self._gauge(
            "router_admitted_tokens",
            "Tokens of the requests being served: their prompts, and up to 1,024 of each answer",
        )
        self._admission_refusals = self._counter(
            "router_admission_refusals_total",
            "Requests refused because too many sequences or tokens were in flight",
        )
        self._connections = self._gauge("router_connections", "Client connections")
        self._max_connections = self._gauge("router_connections_limit", "Limit of client connections")
        self._ended_connections = self._counter(
            "router_ended_connections_total",
            "Connections that the router refused or closed, by reason",
            "reason",
        )
        self._body_bytes = self._gauge(
            "router_body_bytes", "Memory of request bodies that are being read or prepared"
        )
        self._max_body_bytes = self._gauge("router_body_bytes_limit", "Limit of the memory of request bodies")
        self._refused_bodies = self._counter(
            "router_refused_bodies_total",
            "Request bodies refused because all bodies together used too much memory",
        )
        self._lag = self._gauge(
            "router_event_loop_lag_seconds",
            "Worst delay of a due task on the event loop within the last 10 to 20 seconds",
        )
        self._dropped_spans = self._counter(
            "router_dropped_spans_total", "Spans that were dropped because no collector accepted them"
        )
        self._recorded_bodies = self._counter(
            "router_recorded_bodies_total",
            "Request bodies that were appended to the file of record_bodies, or left out of it",
            "outcome",
        )
        self._declare_keys()
        self._declare_rates()
        self._declare_caches()
        self._declare_responses()
        self._declare_usage()
        self._declare_offload()
        self._hash_bytes = self._gauge("router_hash_cache_bytes", "Memory of block hashes of earlier prompts")
        self._hash_hits = self._counter(
            "router_hash_cache_hits_total", "Prompt blocks whose hash was found in the cache of hashes"
        )
        self._hash_misses = self._counter(
            "router_hash_cache_misses_total", "Prompt blocks that had to be hashed"
        )
        self._declare_history()
        self._declare_dispatch()
        self._declare_queue()
        self._declare_fleet()
        self._declare_images()
        self._declare_models()

    def _declare_keys(self) -> None:
        self._keys = self._gauge("router_keys", "API keys in force")
        self._key_tenants = self._gauge("router_key_tenants", "Tenants of the API keys in force")
        self._keys_age = self._gauge(
            "router_keys_age_seconds",
            "Time since the API keys in force were last seen to be the newest: it grows while their file or "
            "Redis cannot be read, and while what is there is wrong",
        )
        self._keys_refused = self._gauge(
            "router_keys_refused", "1 while the newest API keys are wrong and older ones in force, else 0"
        )
        self._key_changes = self._counter("router_key_changes_total", "Times that API keys were read anew")

    def _declare_rates(self) -> None:
        self._rate_accounts = self._gauge(
            "router_rate_accounts", "Tenants and keys whose use within the last minutes is remembered"
        )
        self._rate_sequences = self._gauge(
            "router_rate_limited_sequences", "Sequences being served of tenants and keys that have limits"
        )
        self._rate_refusals = self._counter(
            "router_rate_limit_refusals_total",
            "Requests refused by the limits of their tenant or key, by what there was too much of",
            "limit",
        )

        self._rate_routers = self._gauge(
            "router_rate_exchange_routers", "Other routers that have told lately what tenants and keys use"
        )
        self._rate_news = self._counter(
            "router_rate_news_total",
            "Messages between routers of what tenants and keys use: told, heard, failed or wrong",
            "outcome",
        )
        for outcome in ("told", "heard", "failed", "wrong"):
            self._rate_news.of(outcome)  # so that an alert has something to go by where there are no keys

    def _declare_caches(self) -> None:
        self._caches_created = self._counter(
            "router_named_caches_created_total", "Named caches that were created through this router"
        )
        self._cache_uses = self._counter(
            "router_named_cache_uses_total",
            "Uses of named caches by where this router found them: memory or redis",
            "source",
        )
        self._cache_refusals = self._counter(
            "router_named_cache_refusals_total",
            "Requests about named caches that were refused: not_found, expired, deleted, lost, full "
            "or unavailable",
            "reason",
        )
        self._caches_not_ours = self._counter(
            "router_named_caches_not_ours_total",
            "Values of named caches in Redis that were changed or sealed under another secret",
        )
        self._caches_remembered = self._gauge(
            "router_named_caches_remembered", "Named caches in this router's memory"
        )
        self._cache_memory = self._gauge(
            "router_named_cache_memory_bytes", "Memory of the named caches that this router has used lately"
        )

    def _declare_responses(self) -> None:
        self._responses_kept = self._counter(
            "router_stored_responses_total", "Responses of this router that were to be stored"
        )
        self._response_uses = self._counter(
            "router_stored_response_uses_total",
            "Uses of stored responses by where this router found them: memory or redis",
            "source",
        )
        self._response_refusals = self._counter(
            "router_stored_response_refusals_total",
            "Requests about stored responses that were refused: not_found or unavailable",
            "reason",
        )
        self._responses_failed = self._counter(
            "router_stored_response_failures_total",
            "Attempts to write a response that Redis did not take; they are repeated",
        )
        self._responses_dropped = self._counter(
            "router_stored_responses_dropped_total",
            "Responses that were not stored, or forgotten, for want of memory in this router",
        )
        self._responses_not_ours = self._counter(
            "router_stored_responses_not_ours_total",
            "Stored responses in Redis that were changed",
        )
        self._responses_remembered = self._gauge(
            "router_stored_responses_remembered", "Responses that only this router's memory has"
        )
        self._response_memory = self._gauge(
            "router_stored_response_memory_bytes",
            "Memory of the responses that this router has yet to store, and of questions being answered",
        )

    def _declare_usage(self) -> None:
        self._usage_entries = self._gauge(
            "router_usage_entries", "Numbers of what was used that are in memory, by tenant, key, model, hour"
        )
        self._usage_unwritten = self._gauge(
            "router_usage_unwritten", "Numbers of what was used that have changed since they were written"
        )
        self._usage_failed = self._counter(
            "router_usage_write_failures_total", "Writes of what was used that Redis did not take"
        )
        self._usage_emptied = self._counter(
            "router_usage_emptied_total", "Times that Redis had lost what was used"
        )
        self._usage_lumped = self._counter(
            "router_usage_lumped_total",
            "Requests that were counted under a shared name, because there were too many tenants or keys",
        )
        self._usage_dropped = self._counter(
            "router_usage_dropped_total",
            "Requests whose use was never written: Redis was away for longer than usage is kept",
        )
        self._usage_not_ours = self._counter(
            "router_usage_unreadable_total", "Numbers of what was used that could not be read"
        )

    def _declare_offload(self) -> None:
        self._large_working = self._gauge(
            "router_large_bodies", "Large bodies that are being prepared in a helper process"
        )
        self._large_waiting = self._gauge(
            "router_large_bodies_waiting", "Large bodies that wait for the helper process"
        )
        self._large = self._counter(
            "router_large_bodies_total",
            "Large bodies by outcome: done, ended (too much time or memory), or refused (too many "
            "were waiting)",
            "outcome",
        )

    def _declare_dispatch(self) -> None:
        self._retries = self._counter(
            "router_retries_total", "Attempts that were repeated on another replica before the first token"
        )
        self._resumes = self._counter(
            "router_resumes_total", "Answers that were continued on another replica"
        )
        self._lost_attempts = self._counter(
            "router_lost_attempts_total", "Attempts that ended because the replica or its stream was lost"
        )
        self._overdue_attempts = self._counter(
            "router_overdue_attempts_total",
            "Attempts that moved to another replica because theirs made no progress",
        )
        self._late_requests = self._counter(
            "router_late_requests_total",
            "Generations that were stopped because their deadline passed before the first token",
        )
        self._runs = self._gauge("router_runs", "Generations that are being dispatched")
        self._retry_budget = self._gauge("router_retry_budget", "Retries that the retry budget allows now")
        self._retries_refused = self._counter(
            "router_retries_refused_total", "Retries that were not made because the retry budget was used up"
        )
        self._suspects = self._gauge(
            "router_suspects", "Prompts that are remembered because a replica died while computing them"
        )
        self._condemned = self._counter(
            "router_condemned_prompts_total",
            "Prompts that are refused because replicas died while computing them",
        )
        self._waiting = self._gauge("router_waiting", "Generations that wait for a replica")
        self._waiting_bytes = self._gauge(
            "router_waiting_bytes", "Memory of the prompts of waiting generations"
        )
        self._waiting_oldest = self._gauge(
            "router_waiting_oldest_seconds", "Wait of the generation that has waited longest"
        )
        self._waiting_refusals = self._counter(
            "router_waiting_refusals_total", "Generations refused because too many were waiting"
        )
        self._reservations = self._gauge("router_reservations", "Reservations of load that are open")

    def _declare_queue(self) -> None:
        self._held = self._gauge("router_queue_waiting", "Requests that are held until a replica has room")
        self._held_bytes = self._gauge("router_queue_bytes", "Memory of the prompts of held requests")
        self._held_oldest = self._gauge(
            "router_queue_oldest_seconds", "Wait of the request that has been held longest"
        )
        self._held_tenants = self._gauge("router_queue_tenants", "Tenants of which requests are held")
        self._counter_spread = self._gauge(
            "router_queue_counter_spread_tokens",
            "What the tenant of held requests that was given most had more than the one given least, in "
            "tokens of work by weight",
        )
        self._held_requests = self._counter("router_queue_held_total", "Requests that have been held")
        self._held_seconds = self._counter(
            "router_queue_seconds_total", "Time that requests were held until they went to a replica"
        )
        self._queue_refusals = self._counter(
            "router_queue_refusals_total",
            "Requests refused because they would have waited too long (too_long), have (too_late), or too "
            "many waited (full)",
            "cause",
        )

    def _declare_fleet(self) -> None:
        self._replicas_known = self._gauge("router_replicas_known", "Replicas that have a lease")
        self._replicas = self._gauge("router_replicas", "Replicas that this router sends requests to")
        self._lost_streams = self._counter("router_lost_streams_total", "Streams to replicas that were lost")
        self._refused = self._counter(
            "router_refused_replicas_total", "Replicas that this router refused to use"
        )
        self._tls_expiry = self._gauge(
            "router_tls_expiry_timestamp_seconds",
            "Expiry of this router's certificate or of its replicas' CA, in seconds since 1970",
            "file",
        )
        self._refused_records = self._gauge(
            "router_refused_records",
            "Registry entries that the latest read ignored: malformed, unsigned, signed with "
            "another cluster secret (other_secret) or wrongly (forged), or replayed (old)",
            "reason",
        )
        self._malformed_words = self._counter(
            "router_malformed_messages_total",
            "Messages from replicas that broke the contract and were ignored",
        )
        self._frames = self._counter("router_frames_total", "Frames received from replicas")
        self._submits = self._counter("router_submits_total", "Requests sent to replicas, attempts included")
        self._aborts = self._counter("router_aborts_total", "Aborts sent to replicas")
        self._replica_requests = self._gauge(
            "router_replica_requests",
            "Requests that run or wait at a replica, as this router estimates",
            "replica",
        )
        self._replica_pending = self._gauge(
            "router_replica_pending_tokens",
            "Prompt tokens that a replica has yet to compute, as this router estimates",
            "replica",
        )

    def _declare_images(self) -> None:
        self._image_memory = self._gauge(
            "router_image_memory_bytes", "Memory of the images of requests that are being served"
        )
        self._image_refusals = self._counter(
            "router_image_memory_refusals_total", "Requests refused because images took too much memory"
        )
        self._images = self._counter(
            "router_images_total",
            "Images of prompts by how they got to the replica: sent, shared (another prompt was sending it), "
            "known (it was there) or failed",
            "way",
        )
        self._image_failures = self._counter(
            "router_image_failures_total", "Images that a replica did not take, by its reason", "reason"
        )
        self._image_bytes = self._counter(
            "router_image_bytes_total", "Bytes of the images that were sent to replicas"
        )
        self._images_again = self._counter(
            "router_images_sent_again_total",
            "Images that were sent again because the replica missed one of their prompt",
        )
        self._image_seconds = Distributions(
            "router_image_upload_seconds", "Time to send an image to a replica that took it", UPLOAD_BOUNDS
        )
        self.families.append(self._image_seconds)

    def _declare_history(self) -> None:
        self._explain_bytes = self._gauge(
            "router_explain_bytes", "Memory of what is kept of requests to explain their cache misses"
        )
        self._explain_prompts = self._gauge(
            "router_explain_prompts", "Prompts that can be explained and compared with"
        )
        self._explain_forgotten = self._counter(
            "router_explain_forgotten_total",
            "Prompts that made room for others and can be explained no more",
        )
        self._explain_asked = self._counter(
            "router_explain_questions_total",
            "Explanations that were asked of other routers: answered, unanswered, or not_asked as too many "
            "waited; told to other routers; messages between them that were wrong, and Redis that failed",
            "outcome",
        )
        self._explain_places = self._counter(
            "router_explain_places_total",
            "Prompts that leave an earlier one, by whether the place was looked for in the client's body: "
            "looked_for or left_out (too large, or no time)",
            "result",
        )
        self._history_bytes = self._gauge(
            "router_history_bytes", "Memory of the tokens of answered conversations"
        )
        self._history_conversations = self._gauge(
            "router_history_conversations", "Beginnings of conversations whose tokens are remembered"
        )
        self._history_evicted = self._counter(
            "router_history_evicted_total", "Beginnings of conversations that made room for others"
        )
        self._history_prompts = self._counter(
            "router_history_prompts_total",
            "Prompts of conversations with an earlier answer, by how they go on from its tokens: exact (the "
            "template would have written the same), drifted (it would have written others), unknown (the "
            "answer is not remembered), retold (it came with other reasoning than was generated), refused "
            "(what follows it cannot be told, or leaves no room)",
            "outcome",
        )
        self._declare_history_exchange()

    def _declare_history_exchange(self) -> None:
        self._history_lookups = self._counter(
            "router_history_lookups_total",
            "Looks in Redis for answers of a conversation that this router does not know: heard, missing, "
            "late (the request went on without), failed; resting (not asked, since Redis was late or has "
            "failed), known_missing (not asked, since it was missing a moment ago)",
            "outcome",
        )
        self._history_told = self._counter(
            "router_history_told_total",
            "Answers of which Redis was to have the tokens, for other routers: told, dropped (too many were "
            "waiting), too_large, failed (Redis did not take them)",
            "outcome",
        )
        self._history_untold = self._gauge(
            "router_history_untold", "Answers whose tokens have yet to be written to Redis"
        )
        self._history_resting = self._gauge(
            "router_history_resting",
            "1 while no request asks Redis for answers of other routers, since it has not answered in time",
        )
        self._history_wrong = self._counter(
            "router_history_wrong_total",
            "Answers in Redis that were not believed: not sealed by this cluster's routers, or not those of "
            "the conversation that they were found for",
        )
        self._history_let_go = self._counter(
            "router_history_let_go_total",
            "Answers whose tokens this router has removed from Redis, where they had too little room",
        )
        self._history_redis_bytes = self._gauge(
            "router_history_redis_bytes",
            "Room that the answers of all routers take in Redis, as this router has seen it last, and what "
            "it has written since",
        )

    def _declare_models(self) -> None:
        self._cache_bytes = self._gauge(
            "router_token_cache_bytes", "Memory of the cache of encoded text", "model"
        )
        self._cache_hits = self._counter(
            "router_token_cache_hits_total", "Text segments found in the cache of encoded text", "model"
        )
        self._cache_misses = self._counter(
            "router_token_cache_misses_total", "Text segments that had to be encoded", "model"
        )
        self._entries = self._gauge(
            "router_index_entries", "Entries in the index: pairs of replica and block hash", "model"
        )
        self._departures = self._gauge(
            "router_index_departures", "Block hashes of which it is known which replica they left", "model"
        )
        self._predictions = self._gauge(
            "router_index_predictions",
            "Requests whose blocks are expected at a replica before its events report them",
            "model",
        )
        self._changes = self._counter("router_index_changes_total", "Index changes applied", "model")
        self._resyncs = self._counter(
            "router_index_resyncs_total", "Times that a replica's whole block set was read again", "model"
        )
        self._malformed = self._counter(
            "router_index_malformed_total", "Index changes that could not be read", "model"
        )
        self._index_lag = self._gauge(
            "router_index_lag_seconds", "How far this router's copy of the index is behind Redis", "model"
        )
        self._index_connected = self._gauge(
            "router_index_connected", "1 while this router's copy of the index follows Redis, else 0", "model"
        )

    def read_in_flight(self, num_in_flight: int) -> None:
        self._in_flight.of().value = num_in_flight

    def read_admission(self, statistics: AdmissionStatistics) -> None:
        self._admitted_sequences.of().value = statistics.num_sequences
        self._admitted_tokens.of().value = statistics.num_tokens
        self._admission_refusals.of().value = statistics.num_refused

    def read_rate_exchange(self, statistics: ExchangeStatistics) -> None:
        self._rate_routers.of().value = statistics.num_routers
        self._rate_news.of("told").value = statistics.num_told
        self._rate_news.of("heard").value = statistics.num_heard
        self._rate_news.of("failed").value = statistics.num_failed
        self._rate_news.of("wrong").value = statistics.num_wrong

    def read_image_memory(self, statistics: BodyStatistics) -> None:
        self._image_memory.of().value = statistics.num_bytes
        self._image_refusals.of().value = statistics.num_refused

    def read_story_exchange(self, statistics: StoryExchangeStatistics) -> None:
        self._explain_asked.of("answered").value = statistics.num_answered
        self._explain_asked.of("unanswered").value = statistics.num_unanswered
        self._explain_asked.of("not_asked").value = statistics.num_not_asked
        self._explain_asked.of("told").value = statistics.num_told
        self._explain_asked.of("wrong").value = statistics.num_wrong
        self._explain_asked.of("failed").value = statistics.num_failed

    def read_connections(self, statistics: ConnectionStatistics) -> None:
        self._connections.of().value = statistics.num_open
        self._max_connections.of().value = statistics.max_open
        for reason, number in statistics.num_ended.items():
            self._ended_connections.of(reason).value = number

    def read_offload(self, statistics: OffloadStatistics) -> None:
        self._large_working.of().value = statistics.num_working
        self._large_waiting.of().value = statistics.num_waiting
        for outcome, number in (
            ("done", statistics.num_done),
            ("ended", statistics.num_ended),
            ("refused", statistics.num_refused),
        ):
            self._large.of(outcome).value = number

    def read_rates(self, statistics: RateStatistics) -> None:
        self._rate_accounts.of().value = statistics.num_accounts
        self._rate_sequences.of().value = statistics.num_sequences
        for limit, num_refused in statistics.num_refused.items():
            self._rate_refusals.of(limit).value = num_refused

    def read_bodies(self, statistics: BodyStatistics) -> None:
        self._body_bytes.of().value = statistics.num_bytes
        self._max_body_bytes.of().value = statistics.max_bytes
        self._refused_bodies.of().value = statistics.num_refused

    def read_keys(self, statistics: KeyStatistics) -> None:
        self._keys.of().value = statistics.num_keys
        self._key_tenants.of().value = statistics.num_tenants
        self._keys_age.of().value = statistics.age_seconds
        self._keys_refused.of().value = int(statistics.is_newest_refused)
        self._key_changes.of().value = statistics.num_changes

    def read_caches(self, statistics: CacheStatistics) -> None:
        self._caches_created.of().value = statistics.num_created
        for source, number in statistics.num_uses.items():
            self._cache_uses.of(source).value = number
        for reason, number in statistics.num_refused.items():
            self._cache_refusals.of(reason).value = number
        self._caches_not_ours.of().value = statistics.num_not_ours
        self._caches_remembered.of().value = statistics.num_remembered
        self._cache_memory.of().value = statistics.num_bytes

    def read_responses(self, statistics: ResponseStatistics) -> None:
        self._responses_kept.of().value = statistics.num_kept
        for source, number in statistics.num_found.items():
            self._response_uses.of(source).value = number
        self._response_refusals.of("not_found").value = statistics.num_missing
        self._response_refusals.of("unavailable").value = statistics.num_unavailable
        self._responses_failed.of().value = statistics.num_failed
        self._responses_dropped.of().value = statistics.num_dropped
        self._responses_not_ours.of().value = statistics.num_not_ours
        self._responses_remembered.of().value = statistics.num_remembered
        self._response_memory.of().value = statistics.num_bytes

    def read_usage(self, statistics: UsageStatistics) -> None:
        self._usage_entries.of().value = statistics.num_entries
        self._usage_unwritten.of().value = statistics.num_unwritten
        self._usage_failed.of().value = statistics.num_failed
        self._usage_emptied.of().value = statistics.num_emptied
        self._usage_lumped.of().value = statistics.num_lumped
        self._usage_dropped.of().value = statistics.num_dropped
        self._usage_not_ours.of().value = statistics.num_not_ours

    def read_lag(self, seconds: float) -> None:
        self._lag.of().value = seconds

    def read_dropped_spans(self, count: int) -> None:
        self._dropped_spans.of().value = count

    def read_recorded_bodies(self, bodies: RecordedBodies) -> None:
        self._recorded_bodies.of("written").value = bodies.num_written
        self._recorded_bodies.of("left_out").value = bodies.num_left_out

    def read_dispatch(self, statistics: DispatchStatistics) -> None:
        self._retries.of().value = statistics.num_retries
        self._resumes.of().value = statistics.num_resumes
        self._lost_attempts.of().value = statistics.num_lost
        self._overdue_attempts.of().value = statistics.num_overdue
        self._late_requests.of().value = statistics.num_late
        self._runs.of().value = statistics.num_running
        self._retry_budget.of().value = statistics.retries_left
        self._retries_refused.of().value = statistics.num_retries_refused
        self._suspects.of().value = statistics.suspects.num_remembered
        self._condemned.of().value = statistics.suspects.num_condemned
        self._waiting.of().value = statistics.room.num_waiting
        self._waiting_bytes.of().value = statistics.room.num_bytes
        self._waiting_oldest.of().value = statistics.room.oldest_seconds
        self._waiting_refusals.of().value = statistics.room.num_refused
        self.read_queue(statistics.holding)

    def read_queue(self, statistics: HoldingStatistics) -> None:
        queue, counts = statistics
        self._held.of().value = queue.num_waiting
        self._held_bytes.of().value = queue.num_bytes
        self._held_oldest.of().value = queue.oldest_seconds
        self._held_tenants.of().value = queue.num_active_tenants
        self._counter_spread.of().value = queue.spread
        self._held_requests.of().value = counts.num_held
        self._held_seconds.of().value = counts.held_seconds
        self._queue_refusals.of("too_long").value = counts.num_refused_at_once
        self._queue_refusals.of("too_late").value = counts.num_refused_late
        self._queue_refusals.of("full").value = counts.num_refused_full

    def read_membership(self, statistics: MembershipStatistics) -> None:
        self._replicas_known.of().value = statistics.num_known
        self._replicas.of().value = statistics.num_routed
        self._lost_streams.of().value = statistics.num_lost_streams
        self._refused.of().value = statistics.num_refused
        self._frames.of().value = statistics.num_frames
        self._submits.of().value = statistics.num_submits
        self._aborts.of().value = statistics.num_aborts
        self._malformed_words.of().value = statistics.num_malformed
        for reason, count in statistics.num_refused_records.items():
            self._refused_records.of(reason).value = count
        self.read_images(statistics.images)

    def read_images(self, traffic: ImageTraffic) -> None:
        self._images.of("sent").value = traffic.num_sent
        self._images.of("shared").value = traffic.num_shared
        self._images.of("known").value = traffic.num_known
        self._images.of("failed").value = traffic.num_failed.total()
        for code, count in traffic.num_failed.items():
            self._image_failures.of(code.value).value = count
        self._image_bytes.of().value = traffic.num_bytes
        self._images_again.of().value = traffic.num_again
        series = self._image_seconds.of()
        series.counts, series.total = traffic.counts.copy(), traffic.seconds

    def read_tls(self, ends: Mapping[str, float]) -> None:
        for file, seconds in ends.items():
            self._tls_expiry.of(file).value = seconds

    def read_loads(self, num_reserved: int, loads: Mapping[ReplicaId, ReplicaLoad]) -> None:
        self._reservations.of().value = num_reserved
        self._replica_requests.clear()
        self._replica_pending.clear()
        for replica_id, load in loads.items():
            self._replica_requests.of(replica_id).value = load.num_requests
            self._replica_pending.of(replica_id).value = load.num_pending_tokens

    def read_token_caches(self, catalog: ModelCatalog) -> None:
        for name in catalog.names():
            statistics = catalog.get(name).tokenizer.cache.statistics()
            self._cache_bytes.of(name).value = statistics.num_bytes
            self._cache_hits.of(name).value = statistics.num_hits
            self._cache_misses.of(name).value = statistics.num_misses

    def read_history(self, num_prompts: Mapping[str, int], statistics: HistoryStatistics) -> None:
        self._history_bytes.of().value = statistics.num_bytes
        self._history_conversations.of().value = statistics.num_records
        self._history_evicted.of().value = statistics.num_evicted
        for outcome, count in num_prompts.items():
            self._history_prompts.of(outcome).value = count

    def read_history_exchange(self, statistics: HistoryExchangeStatistics) -> None:
        for outcome, count in statistics.num_looks.items():
            self._history_lookups.of(outcome).value = count
        for outcome, count in statistics.num_told.items():
            self._history_told.of(outcome).value = count
        self._history_untold.of().value = statistics.num_untold
        self._history_resting.of().value = statistics.is_resting
        self._history_wrong.of().value = statistics.num_wrong
        self._history_let_go.of().value = statistics.num_let_go
        self._history_redis_bytes.of().value = statistics.num_bytes

    def read_stories(self, statistics: StoryStatistics) -> None:
        self._explain_bytes.of().value = statistics.num_bytes
        self._explain_prompts.of().value = statistics.num_prompts
        self._explain_forgotten.of().value = statistics.num_forgotten
        self._explain_places.of("looked_for").value = statistics.num_places
        self._explain_places.of("left_out").value = statistics.num_places_left_out

    def read_chains(self, statistics: ChainStatistics) -> None:
        self._hash_bytes.of().value = statistics.num_bytes
        self._hash_hits.of().value = statistics.num_hits
        self._hash_misses.of().value = statistics.num_misses

    def read_index(self, mirrors: Mapping[str, MirrorStatistics]) -> None:
        for name, statistics in mirrors.items():
            self._entries.of(name).value = statistics.num_entries
            self._departures.of(name).value = statistics.num_departures
            self._predictions.of(name).value = statistics.num_predictions
            self._changes.of(name).value = statistics.num_changes
            self._resyncs.of(name).value = statistics.num_resyncs
            self._malformed.of(name).value = statistics.num_malformed
            self._index_lag.of(name).value = statistics.lag_seconds
            self._index_connected.of(name).value = int(statistics.is_connected)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Numbers:
        return self._add(Numbers("gauge", name, help_text, labels))

    def _counter(self, name: str, help_text: str, *labels: str) -> Numbers:
        return self._add(Numbers("counter", name, help_text, labels))

    def _add(self, family: Numbers) -> Numbers:
        self.families.append(family)
        return family
