"""RouterMetrics: a router's metrics on served requests, for Prometheus.

Owns names, labels and buckets. Label values come from closed sets (served models, our own routes, status
codes, reasons, kinds of errors, a bounded number of tenants), never from a client's text. The router's parts
declare their own instruments; `add` exports them.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from replicas.protocol.events import Tier
from replicas.protocol.prefix_leases import LeaseBreak, LeaseRefusal
from router.caller import DEFAULT_TENANT
from router.errors import ErrorKind, HeadFault, KeyFault
from router.keeping import GRANTED, NO_ANSWER, kept_of
from router.misses import OF_NO_SPAN, Cause
from router.served import GAP_BOUNDS, ServedPrompt, ServedRequest
from router.shared.instruments import Distributions, HistogramSeries, Instrument, Number, Numbers

LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)

OWN_WORK_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""For the router's own work on a request."""

DECISION_BUCKETS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01)

TENANT_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

TOKEN_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

UNKNOWN_MODEL = "unknown"

MOST_TENANTS = 100
"""With series of their own, the default tenant among them."""
OTHER_TENANTS = "other"

ALARMING_CODES = ("429", "500", "503")
"""Status codes that alerts and dashboards count."""

DIALECTS = ("chat", "completion", "gemini", "messages", "responses")
"""The kinds of bodies that a prompt is made of."""

RANKS = ("0", "1", "2", "3+")
"""Places in a bucket's affinity order, as labels."""


class RouterMetrics(Collector):
    """One per router, for one thread. Series are kept by their labels: to look them up costs more than to
    count."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._families: list[Numbers | Distributions] = []
        self._declare_requests()
        self._declare_tokens()
        self._declare_tenants()
        self._added: list[Instrument] = []
        self._tenant_labels = {DEFAULT_TENANT: DEFAULT_TENANT}
        self._of_model: dict[str, _ModelSeries] = {}
        self._of_tenant: dict[str, _TenantSeries] = {}
        self._of_outcome: dict[tuple[str, str, int], Number] = {}
        self._of_decision: dict[tuple[str, str, int], Number] = {}
        registry.register(self)

    def observe(self, served: ServedRequest) -> None:
        """Take in one request, at its end."""
        name = served.model or UNKNOWN_MODEL
        model = None
        if served.model is not None:
            model = self._of_model.get(name) or self._add_model(name)
        key = (name, served.route, served.status)
        (self._of_outcome.get(key) or self._add_outcome(*key)).value += 1
        if served.error_kind is not None:
            self._errors.of(name, served.error_kind).value += 1
        if model is None or not served.prompts:
            return
        label = self.tenant_label(served.prompts[0].generation.tenant)
        tenant = self._of_tenant.get(label) or self._add_tenant(label)
        tenant.requests.value += 1
        self._observe_times(served, model, tenant)
        for prompt in served.prompts:
            self._observe_prompt(prompt, name, model, tenant)

    def _observe_times(self, served: ServedRequest, model: "_ModelSeries", tenant: "_TenantSeries") -> None:
        if served.prepared_seconds is not None and served.read_seconds is not None:
            model.prepare.observe(served.prepared_seconds - served.read_seconds)
        if served.first_token_seconds is not None:
            model.ttft.observe(served.first_token_seconds)
            tenant.ttft.observe(served.first_token_seconds)
        if served.error is None:
            model.e2e.observe(served.ended_seconds)
        gaps = served.token_gaps
        if gaps is not None:
            model.itl.add(gaps.counts, gaps.total_seconds)
            num_later_tokens = served.prompts[0].num_output_tokens - gaps.num_first_tokens
            if num_later_tokens > 0:  # of the first ones, some may have lain behind a stop string
                model.tpot.observe(gaps.total_seconds / num_later_tokens)

    def _observe_prompt(
        self, prompt: ServedPrompt, name: str, model: "_ModelSeries", tenant: "_TenantSeries"
    ) -> None:
        decision = prompt.decision
        if decision is not None:
            key = (name, decision.reason, min(decision.rank, len(RANKS) - 1))
            (self._of_decision.get(key) or self._add_decision(*key)).value += 1
        if prompt.decision_seconds is not None:
            self._decision_seconds.observe(prompt.decision_seconds)
        model.output_tokens.value += prompt.num_output_tokens
        tenant.output_tokens.value += prompt.num_output_tokens
        usage = prompt.usage
        if usage is None:
            return
        for kept in kept_of(prompt.generation.submit.leases, usage):
            self._leases.of(name, kept.refused or GRANTED).value += 1
        if usage.broken_by is not None:
            self._evicted_early.of(name, usage.broken_by.value).value += usage.num_evicted_early_tokens
        num_cached = usage.num_cached_tokens
        if num_cached is None:
            model.unreported_tokens.value += usage.num_prompt_tokens
            return
        own, cross_user = usage.num_own_tokens, usage.num_cross_user_tokens
        for series in (model, tenant):
            series.prompt_tokens.value += usage.num_prompt_tokens
            series.cached_tokens.value += num_cached
            series.cross_user_tokens.value += cross_user
        model.computed_tokens.value += usage.num_prompt_tokens - num_cached
        model.own_tokens.value += own
        model.cross_user_origin.value += cross_user
        model.unattributed_tokens.value += num_cached - own - cross_user
        model.device_tokens.value += usage.num_device_tokens
        model.host_tokens.value += usage.num_host_tokens
        model.disk_tokens.value += usage.num_disk_tokens
        for span in () if prompt.misses is None else prompt.misses.spans:
            model.missed[span.cause].value += span.num_tokens
        if decision is not None:
            model.overlap_tokens.value += decision.overlap_tokens
            model.overlap_error.observe(abs(decision.overlap_tokens - num_cached))

    def tenant_label(self, tenant: str) -> str:
        """Return the label of a tenant's series, which reveals nothing about a salt. Later tenants share one,
        and no label is ever given to another tenant: a counter that ends looks like an outage."""
        label = self._tenant_labels.get(tenant)
        if label is None:
            if len(self._tenant_labels) >= MOST_TENANTS:
                return OTHER_TENANTS
            label = self._tenant_labels[tenant] = tenant
        return label

    def count_refusal(self, fault: HeadFault | KeyFault) -> None:
        self._refused.of(fault).value += 1

    def count_unknown_fields(self, dialect: str, number: int) -> None:
        self._unknown_fields.of(dialect).value += number

    def add(self, instruments: Iterable[Instrument]) -> None:
        """Export a part's own instruments, read at each scrape on the event loop."""
        self._added += instruments

    def render(self) -> bytes:
        """Prometheus text as of now."""
        return "".join(family.text() for family in self.families()).encode()

    async def scrape(self) -> bytes:
        """Prometheus text, made one metric at a time, so that no client's stream waits for all."""
        texts: list[str] = []
        for family in self.families():
            texts.append(family.text())
            await asyncio.sleep(0)
        return "".join(texts).encode()

    def collect(self) -> Iterable[Metric]:
        """For readers of a registry; a scrape has no need of it."""
        yield from text_string_to_metric_families(self.render().decode())

    def families(self) -> Iterator[Instrument]:
        """Every metric, with all its series."""
        yield from self._families
        yield from self._added

    def _numbers(self, kind: str, name: str, help_text: str, *labels: str) -> Numbers:
        family = Numbers(kind, name, help_text, labels)
        self._families.append(family)
        return family

    def _distributions(
        self, name: str, help_text: str, bounds: tuple[float, ...], *labels: str
    ) -> Distributions:
        family = Distributions(name, help_text, bounds, labels)
        self._families.append(family)
        return family

    def _declare_requests(self) -> None:
        number, spread = self._numbers, self._distributions
        self._requests = number(
            "counter", "router_requests_total", "Requests answered", "model", "route", "code"
        )
        self._errors = number(
            "counter",
            "router_request_errors_total",
            "Requests that did not get their whole answer, by cause",
            *("model", "kind"),
        )
        self._refused = number(
            "counter",
            "router_refused_requests_total",
            "Requests refused for their headers: host, origin, content type or encoding, one that comes "
            "twice, or the API key",
            "fault",
        )
        for fault in (*HeadFault, *KeyFault):
            self._refused.of(fault)
        self._unknown_fields = number(
            "counter",
            "router_unknown_fields_total",
            "Fields and kinds of tools in requests that were passed over without being known; the log has "
            "the first names",
            "dialect",
        )
        for dialect in DIALECTS:
            self._unknown_fields.of(dialect)
        self._decision_seconds = spread(
            "router_decision_seconds",
            "Time of one routing decision: overlaps, costs, reservation and prediction",
            DECISION_BUCKETS,
        ).of()
        self._decisions = number(
            "counter",
            "router_decisions_total",
            "Routing decisions by their reason and the replica's place in the affinity order",
            *("model", "reason", "rank"),
        )
        self._declare_times()

    def _declare_times(self) -> None:
        spread = self._distributions
        self._ttft = spread(
            "router_ttft_seconds",
            "Time from a request's arrival to its first token",
            LATENCY_BUCKETS,
            "model",
        )
        self._e2e = spread(
            "router_e2e_seconds",
            "Time from a request's arrival to the end of its answer",
            LATENCY_BUCKETS,
            "model",
        )
        self._tpot = spread(
            "router_tpot_seconds",
            "Mean time per token after the first, for requests with one choice",
            GAP_BOUNDS,
            "model",
        )
        self._itl = spread(
            "router_itl_seconds",
            "Time between two arrivals of tokens of a request, for requests with one choice",
            GAP_BOUNDS,
            "model",
        )
        self._prepare = spread(
            "router_prepare_seconds",
            "Time to check, render, tokenise and hash a prompt, after the request's last byte",
            OWN_WORK_BUCKETS,
            "model",
        )

    def _declare_tokens(self) -> None:
        def number(name: str, help_text: str, *labels: str) -> Numbers:
            return self._numbers("counter", name, help_text, "model", *labels)

        self._prompt_tokens = number(
            "router_prompt_tokens_total", "Prompt tokens of which the engine said how many were cached"
        )
        self._unreported_tokens = number(
            "router_unreported_prompt_tokens_total",
            "Prompt tokens of which the engine did not say how many were cached: neither hits nor misses",
        )
        self._by_origin = number(
            "router_prompt_tokens_by_origin_total",
            "Prompt tokens by the origin of their KV: computed now, cached from the same user "
            "(own), from another user, or from an unknown one (unattributed)",
            "origin",
        )
        self._cached_tokens = number(
            "router_cached_tokens_total", "Prompt tokens that were read from a replica's cache"
        )
        self._cross_user_tokens = number(
            "router_cross_user_cached_tokens_total",
            "Cached prompt tokens that another user's request had computed",
        )
        self._by_tier = number(
            "router_cached_tokens_by_tier_total",
            "Prompt tokens that were read from a replica's cache, by the tier that they came from",
            "tier",
        )
        self._leases = number(
            "router_prefix_leases_total",
            "Leases that clients asked for on the KV of their prompts: granted, or why refused",
            "outcome",
        )
        self._evicted_early = number(
            "router_evicted_early_tokens_total",
            "Prompt tokens that had to be computed because leased KV went before its time, by cause",
            "cause",
        )
        self._missed = number(
            "router_missed_tokens_total",
            "Prompt tokens that were not read from a cache, by cause; never_cached and below_a_block "
            "are no loss",
            "cause",
        )
        self._output_tokens = number("router_output_tokens_total", "Tokens generated")
        self._overlap_tokens = number(
            "router_overlap_tokens_total", "Cached tokens that the router expected at the chosen replica"
        )
        self._overlap_error = self._distributions(
            "router_overlap_error_tokens",
            "Difference between expected overlap and cached tokens, per request",
            TOKEN_BUCKETS,
            "model",
        )

    def _declare_tenants(self) -> None:
        def number(name: str, help_text: str) -> Numbers:
            return self._numbers("counter", name, help_text, "tenant")

        self._tenant_requests = number("router_tenant_requests_total", "Requests for a known model")
        self._tenant_prompt_tokens = number(
            "router_tenant_prompt_tokens_total", "Prompt tokens of which the engine said how many were cached"
        )
        self._tenant_cached_tokens = number(
            "router_tenant_cached_tokens_total", "Prompt tokens that were read from a replica's cache"
        )
        self._tenant_cross_user_tokens = number(
            "router_tenant_cross_user_cached_tokens_total",
            "Cached prompt tokens that another user's request had computed",
        )
        self._tenant_output_tokens = number("router_tenant_output_tokens_total", "Tokens generated")
        self._tenant_ttft = self._distributions(
            "router_tenant_ttft_seconds",
            "Time from a request's arrival to its first token",
            TENANT_BUCKETS,
            "tenant",
        )

    def _add_model(self, name: str) -> "_ModelSeries":
        """Return the series of a served model or adapter; never call it with a name that is not served."""
        for kind in ErrorKind:  # from zero on: a counter that begins with its first burst has had no increase
            self._errors.of(name, kind)
        for outcome in (GRANTED, NO_ANSWER, *(reason.value for reason in LeaseRefusal)):
            self._leases.of(name, outcome)
        for cause in LeaseBreak:
            self._evicted_early.of(name, cause.value)
        missed: dict[Cause, Number] = {
            cause: self._missed.of(name, cause.value) for cause in Cause if cause not in OF_NO_SPAN
        }
        series = self._of_model[name] = _ModelSeries(
            ttft=self._ttft.of(name),
            e2e=self._e2e.of(name),
            tpot=self._tpot.of(name),
            itl=self._itl.of(name),
            prepare=self._prepare.of(name),
            prompt_tokens=self._prompt_tokens.of(name),
            unreported_tokens=self._unreported_tokens.of(name),
            computed_tokens=self._by_origin.of(name, "computed"),
            own_tokens=self._by_origin.of(name, "own"),
            cross_user_origin=self._by_origin.of(name, "cross_user"),
            unattributed_tokens=self._by_origin.of(name, "unattributed"),
            cached_tokens=self._cached_tokens.of(name),
            cross_user_tokens=self._cross_user_tokens.of(name),
            device_tokens=self._by_tier.of(name, Tier.DEVICE.value),
            host_tokens=self._by_tier.of(name, Tier.HOST.value),
            disk_tokens=self._by_tier.of(name, Tier.DISK.value),
            missed=missed,
            output_tokens=self._output_tokens.of(name),
            overlap_tokens=self._overlap_tokens.of(name),
            overlap_error=self._overlap_error.of(name),
        )
        return series

    def _add_tenant(self, label: str) -> "_TenantSeries":
        series = self._of_tenant[label] = _TenantSeries(
            requests=self._tenant_requests.of(label),
            prompt_tokens=self._tenant_prompt_tokens.of(label),
            cached_tokens=self._tenant_cached_tokens.of(label),
            cross_user_tokens=self._tenant_cross_user_tokens.of(label),
            output_tokens=self._tenant_output_tokens.of(label),
            ttft=self._tenant_ttft.of(label),
        )
        return series

    def _add_outcome(self, model: str, route: str, code: int) -> Number:
        number = self._of_outcome[model, route, code] = self._requests.of(model, route, str(code))
        for alarming in ALARMING_CODES:  # from zero on, as errors are
            self._requests.of(model, route, alarming)
        return number

    def _add_decision(self, model: str, reason: str, rank: int) -> Number:
        number = self._of_decision[model, reason, rank] = self._decisions.of(model, reason, RANKS[rank])
        return number


@dataclass(slots=True, kw_only=True)
class _ModelSeries:
    ttft: HistogramSeries
    e2e: HistogramSeries
    tpot: HistogramSeries
    itl: HistogramSeries
    prepare: HistogramSeries
    prompt_tokens: Number
    unreported_tokens: Number
    computed_tokens: Number
    own_tokens: Number
    cross_user_origin: Number
    unattributed_tokens: Number
    cached_tokens: Number
    cross_user_tokens: Number
    device_tokens: Number
    host_tokens: Number
    disk_tokens: Number
    missed: Mapping[Cause, Number]
    output_tokens: Number
    overlap_tokens: Number
    overlap_error: HistogramSeries


@dataclass(slots=True, kw_only=True)
class _TenantSeries:
    requests: Number
    prompt_tokens: Number
    cached_tokens: Number
    cross_user_tokens: Number
    output_tokens: Number
    ttft: HistogramSeries
