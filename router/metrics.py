"""RouterMetrics: what a router counts, for Prometheus.

Owns names, labels and buckets. Label values come from closed sets (served models, our own routes, status
codes, reasons), never from a client's text. Knows nothing of where the numbers arise.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.dispatch import DispatchStatistics
from router.index_mirror import MirrorStatistics
from router.membership import MembershipStatistics
from router.prompt.catalog import ModelCatalog
from router.served import ServedRequest

LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)

TOKEN_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

UNKNOWN_MODEL = "unknown"


class RouterMetrics:
    """One per router. Children are kept by their labels: looking them up again costs more than counting."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._requests = Counter(
            "router_requests", "Requests answered", ["model", "route", "code"], registry=registry
        )
        self._ttft = Histogram(
            "router_ttft_seconds",
            "From a request's arrival to its first token",
            ["model"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._e2e = Histogram(
            "router_e2e_seconds",
            "From a request's arrival to the end of its answer",
            ["model"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._prompt_tokens = Counter("router_prompt_tokens", "Prompt tokens", ["model"], registry=registry)
        self._cached_tokens = Counter(
            "router_cached_tokens", "Prompt tokens that a replica had cached", ["model"], registry=registry
        )
        self._cross_user_tokens = Counter(
            "router_cross_user_cached_tokens",
            "Cached prompt tokens that another user's request had computed",
            ["model"],
            registry=registry,
        )
        self._output_tokens = Counter(
            "router_output_tokens", "Tokens generated", ["model"], registry=registry
        )
        self._decisions = Counter(
            "router_decisions", "Routing decisions by reason", ["reason"], registry=registry
        )
        self._overlap_error = Histogram(
            "router_overlap_error_tokens",
            "Distance between the overlap that was expected and the tokens that were cached",
            ["model"],
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self.in_flight = Gauge("router_in_flight", "Requests being served", registry=registry)
        self._watched = _Watched()
        registry.register(self._watched)
        self._of_model: dict[str, _ModelMetrics] = {}
        self._of_outcome: dict[tuple[str, str, int], Counter] = {}
        self._of_reason: dict[str, Counter] = {}

    def _model(self, name: str) -> "_ModelMetrics":
        """The metrics of a served model or adapter; never call it with a name that is not served."""
        known = self._of_model.get(name)
        if known is None:
            known = self._of_model[name] = _ModelMetrics(
                ttft=self._ttft.labels(name),
                e2e=self._e2e.labels(name),
                prompt_tokens=self._prompt_tokens.labels(name),
                cached_tokens=self._cached_tokens.labels(name),
                cross_user_tokens=self._cross_user_tokens.labels(name),
                output_tokens=self._output_tokens.labels(name),
                overlap_error=self._overlap_error.labels(name),
            )
        return known

    def observe(self, served: ServedRequest) -> None:
        self._count_request(served.model, served.route, served.status)
        if served.model is None:
            return
        metrics = self._model(served.model)
        if served.first_token_seconds is not None:
            metrics.ttft.observe(served.first_token_seconds)
        if served.error is None:
            metrics.e2e.observe(served.ended_seconds)
        for prompt in served.prompts:
            if prompt.decision is not None:
                self._count_decision(prompt.decision.reason)
            metrics.output_tokens.inc(prompt.num_output_tokens)
            usage = prompt.usage
            if usage is None:
                continue
            metrics.prompt_tokens.inc(usage.num_prompt_tokens)
            metrics.cached_tokens.inc(usage.num_cached_tokens)
            metrics.cross_user_tokens.inc(usage.num_cross_user_tokens)
            if prompt.decision is not None:
                metrics.overlap_error.observe(abs(prompt.decision.overlap_tokens - usage.num_cached_tokens))

    def _count_request(self, model: str | None, route: str, code: int) -> None:
        key = (model or UNKNOWN_MODEL, route, code)
        known = self._of_outcome.get(key)
        if known is None:
            known = self._of_outcome[key] = self._requests.labels(*key)
        known.inc()

    def _count_decision(self, reason: str) -> None:
        known = self._of_reason.get(reason)
        if known is None:
            known = self._of_reason[reason] = self._decisions.labels(reason)
        known.inc()

    def watch(self, families: Callable[[], Iterable[Metric]]) -> None:
        """Have numbers that others count anyway read at each scrape, by `refresh`."""
        self._watched.sources.append(families)

    def refresh(self) -> None:
        """Read what is watched. Call it where that lives (the event loop), before each `render`."""
        self._watched.refresh()

    def render(self) -> bytes:
        """Prometheus text. Takes milliseconds: call it in a thread."""
        return generate_latest(self.registry)


class _ModelMetrics:
    __slots__ = (
        "cached_tokens",
        "cross_user_tokens",
        "e2e",
        "output_tokens",
        "overlap_error",
        "prompt_tokens",
        "ttft",
    )

    def __init__(
        self,
        *,
        ttft: Histogram,
        e2e: Histogram,
        prompt_tokens: Counter,
        cached_tokens: Counter,
        cross_user_tokens: Counter,
        output_tokens: Counter,
        overlap_error: Histogram,
    ) -> None:
        self.ttft = ttft
        self.e2e = e2e
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.cross_user_tokens = cross_user_tokens
        self.output_tokens = output_tokens
        self.overlap_error = overlap_error


class _Watched(Collector):
    def __init__(self) -> None:
        self.sources: list[Callable[[], Iterable[Metric]]] = []
        self._families: list[Metric] = []

    def refresh(self) -> None:
        self._families = [family for source in self.sources for family in source()]

    def collect(self) -> Iterable[Metric]:
        return self._families


def dispatch_families(statistics: DispatchStatistics) -> Iterable[Metric]:
    yield CounterMetricFamily(
        "router_retries", "Submissions repeated before the first token", value=statistics.num_retries
    )
    yield CounterMetricFamily(
        "router_resumes", "Submissions that continued elsewhere", value=statistics.num_resumes
    )
    yield CounterMetricFamily("router_lost_attempts", "Submissions lost", value=statistics.num_lost)
    yield GaugeMetricFamily("router_runs", "Generations in dispatch", value=statistics.num_running)


def token_cache_families(catalog: ModelCatalog) -> Iterable[Metric]:
    cache_bytes = GaugeMetricFamily(
        "router_token_cache_bytes", "Memory of encoded text segments", labels=["model"]
    )
    hits = CounterMetricFamily("router_token_cache_hits", "Text segments found encoded", labels=["model"])
    misses = CounterMetricFamily("router_token_cache_misses", "Text segments encoded", labels=["model"])
    for name in catalog.names():
        statistics = catalog.get(name).tokenizer.cache.statistics()
        cache_bytes.add_metric([name], statistics.num_bytes)
        hits.add_metric([name], statistics.num_hits)
        misses.add_metric([name], statistics.num_misses)
    return (cache_bytes, hits, misses)


def membership_families(statistics: MembershipStatistics) -> Iterable[Metric]:
    yield GaugeMetricFamily("router_replicas_known", "Replicas with a lease", value=statistics.num_known)
    yield GaugeMetricFamily("router_replicas", "Replicas that are routed to", value=statistics.num_routed)
    yield CounterMetricFamily("router_lost_streams", "Streams lost", value=statistics.num_lost_streams)
    yield CounterMetricFamily("router_refused_replicas", "Replicas refused", value=statistics.num_refused)


def index_families(mirrors: Mapping[str, MirrorStatistics]) -> Iterable[Metric]:
    entries = GaugeMetricFamily("router_index_entries", "Pairs of replica and block hash", labels=["model"])
    predictions = GaugeMetricFamily(
        "router_index_predictions", "Requests whose blocks are sent or announced", labels=["model"]
    )
    changes = CounterMetricFamily("router_index_changes", "Index changes applied", labels=["model"])
    resyncs = CounterMetricFamily("router_index_resyncs", "Block sets read again", labels=["model"])
    malformed = CounterMetricFamily(
        "router_index_malformed", "Changes that were unreadable", labels=["model"]
    )
    lag = GaugeMetricFamily("router_index_lag_seconds", "How far the mirror lies behind", labels=["model"])
    for name, statistics in mirrors.items():
        entries.add_metric([name], statistics.num_entries)
        predictions.add_metric([name], statistics.num_predictions)
        changes.add_metric([name], statistics.num_changes)
        resyncs.add_metric([name], statistics.num_resyncs)
        malformed.add_metric([name], statistics.num_malformed)
        lag.add_metric([name], statistics.lag_seconds)
    return (entries, predictions, changes, resyncs, malformed, lag)
