"""Computes the figures that routers are compared by, from the records of requests. Pure.

Owns the meaning of each figure; real and simulated requests are alike here.

- TTFT: first token seen − request sent. TPOT: (E2E − TTFT) / (output tokens − 1). E2E: last byte − sent. Over
  requests answered whole.
- Token hit rate: cached tokens / prompt tokens, over requests with known usage. Cross-user hit rate: the part
  in cached blocks that another user's request computed, if reported.
- Origins: cached tokens by who computed them; they add up to all. Tokens that no request of the tenant can
  have left count as another tenant's, whatever the server calls them.
- ITL: gaps between an answer's events with tokens, over all gaps of whole answers.
- Good: answered whole and within every limit of the SLO. Every failure (refused, timed out, cut short) is a
  miss. Goodput: good requests per second of the run, from its first arrival to its last answer.
- Imbalance over replicas: max / mean and the coefficient of variation.
"""

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtests.figures import percentiles


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The outcome of one request. Times are in seconds; `arrival_seconds` is the scheduled one."""

    arrival_seconds: float
    num_input_tokens: int
    num_output_tokens: int = 0
    """Received tokens."""
    ttft_seconds: float | None = None
    e2e_seconds: float | None = None
    """Seconds until the end, good or bad."""
    num_cached_tokens: int | None = None
    """None if no usage came."""
    num_cross_user_tokens: int | None = None
    """Cached tokens that another user computed; None if the server does not say."""
    predicted_tokens: int | None = None
    """Cached tokens that the router expected."""
    replica: str | None = None
    error: str | None = None
    """The error, in a word or two; None if the answer came whole."""
    lateness_seconds: float = 0.0
    """Seconds by which the client sent it late."""
    user: str | None = None
    tenant: str | None = None
    session: str | None = None
    reason: str | None = None
    """The router's reason for that replica."""
    num_own_tokens: int | None = None
    """Cached tokens that the same user computed."""
    num_other_tenant_tokens: int | None = None
    """Cached tokens that no earlier request of this tenant can have left; must be 0."""
    num_host_tokens: int | None = None
    """Cached tokens read from host memory; None if the server does not say."""
    num_disk_tokens: int | None = None
    """Cached tokens read from disk; None if the server does not say."""
    itl_seconds: tuple[float, ...] = ()
    """Gaps between the answer's events with tokens."""
    request_id: str | None = None
    num_images: int = 0
    """Images in the prompt of an answered request."""
    num_image_tokens: int = 0
    """Tokens that stand for images, to the client's knowledge."""
    num_retries: int = 0
    """Refusals before this answer; the times count from the first of them."""

    @property
    def tpot_seconds(self) -> float | None:
        if self.ttft_seconds is None or self.e2e_seconds is None or self.num_output_tokens < 2:
            return None
        return (self.e2e_seconds - self.ttft_seconds) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds; None is no limit."""

    ttft: float | None = 2.0
    tpot: float | None = None
    e2e: float | None = None

    def is_met(self, record: RequestRecord) -> bool:
        if record.error is not None or record.ttft_seconds is None:
            return False
        return (
            _within(record.ttft_seconds, self.ttft)
            and _within(record.tpot_seconds, self.tpot)
            and _within(record.e2e_seconds, self.e2e)
        )


@dataclass(frozen=True, slots=True)
class Distribution:
    mean: float
    p50: float
    p90: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class Imbalance:
    max_over_mean: float
    variation: float
    """Standard deviation / mean."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The router's expectation and the cached tokens, per request."""

    mean_absolute_error: float
    mean_error: float
    """Positive if more was expected than cached."""
    share_exact: float


@dataclass(frozen=True, slots=True)
class Origins:
    """Prompt tokens with known usage; the cached ones by who computed them, and those below the device by
    tier."""

    num_prompt_tokens: int = 0
    num_own_tokens: int = 0
    num_cross_user_tokens: int = 0
    num_other_tenant_tokens: int = 0
    num_unattributed_tokens: int = 0
    num_host_tokens: int = 0
    num_disk_tokens: int = 0

    @property
    def num_device_tokens(self) -> int:
        return self.num_cached_tokens - self.num_host_tokens - self.num_disk_tokens

    @property
    def num_cached_tokens(self) -> int:
        return (
            self.num_own_tokens
            + self.num_cross_user_tokens
            + self.num_other_tenant_tokens
            + self.num_unattributed_tokens
        )

    def share(self, num_tokens: int) -> float | None:
        """Return the share of the prompt tokens."""
        return num_tokens / self.num_prompt_tokens if self.num_prompt_tokens else None

    def __add__(self, other: "Origins") -> "Origins":
        return Origins(
            self.num_prompt_tokens + other.num_prompt_tokens,
            self.num_own_tokens + other.num_own_tokens,
            self.num_cross_user_tokens + other.num_cross_user_tokens,
            self.num_other_tenant_tokens + other.num_other_tenant_tokens,
            self.num_unattributed_tokens + other.num_unattributed_tokens,
            self.num_host_tokens + other.num_host_tokens,
            self.num_disk_tokens + other.num_disk_tokens,
        )


@dataclass(frozen=True, slots=True)
class Images:
    """The outcome of images in prompts, warm-up included, like the replicas' own counters."""

    num_in_prompts: int
    num_taken: int
    """Received by replicas, counting each image once for as long as a replica keeps it."""
    num_taken_bytes: int
    num_tokens: int
    num_encoded_tokens: int

    @property
    def taken_share(self) -> float:
        return self.num_taken / self.num_in_prompts

    @property
    def cached_share(self) -> float:
        """Share of images' tokens that were not encoded for their prompt."""
        return max(0.0, 1 - self.num_encoded_tokens / self.num_tokens) if self.num_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """Rates are shares from 0 to 1; None if a figure has no data."""

    num_requests: int
    num_answered: int
    duration_seconds: float
    errors: dict[str, int]
    num_input_tokens: int
    num_output_tokens: int
    token_hit_rate: float | None
    cross_user_hit_rate: float | None
    origins: Origins
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    slo: Slo
    good_share: float
    goodput: float
    requests_per_replica: dict[str, int]
    imbalance_requests: Imbalance | None
    imbalance_computed_tokens: Imbalance | None
    imbalance_in_flight: Imbalance | None
    """Imbalance of the time-averaged number of requests in flight."""
    prediction: Prediction | None
    lateness: Distribution | None
    images: Images | None = None
    """None without images, or if the replicas do not report them."""

    def as_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)


def make_report(
    records: Sequence[RequestRecord], slo: Slo | None = None, *, num_replicas: int | None = None
) -> Report:
    """Compute a run's figures. `num_replicas` includes idle ones; None counts only those that answered."""
    slo = slo or Slo()
    whole = [record for record in records if record.error is None]
    measured = [record for record in records if record.num_cached_tokens is not None]
    num_measured_tokens = sum(record.num_input_tokens for record in measured)
    num_cached = sum(record.num_cached_tokens or 0 for record in measured)
    cross_user = [record for record in measured if record.num_cross_user_tokens is not None]
    num_cross_user_of = sum(record.num_input_tokens for record in cross_user)
    num_cross_user = sum(record.num_cross_user_tokens or 0 for record in cross_user)
    num_good = sum(slo.is_met(record) for record in records)
    duration = _duration(records)
    return Report(
        num_requests=len(records),
        num_answered=len(whole),
        duration_seconds=duration,
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        num_input_tokens=sum(record.num_input_tokens for record in records),
        num_output_tokens=sum(record.num_output_tokens for record in records),
        token_hit_rate=num_cached / num_measured_tokens if num_measured_tokens else None,
        cross_user_hit_rate=num_cross_user / num_cross_user_of if num_cross_user_of else None,
        origins=sum(map(origins_of, measured), Origins()),
        ttft=_distribution([record.ttft_seconds for record in whole]),
        tpot=_distribution([record.tpot_seconds for record in whole]),
        itl=_distribution([gap for record in whole for gap in record.itl_seconds]),
        e2e=_distribution([record.e2e_seconds for record in whole]),
        slo=slo,
        good_share=num_good / len(records) if records else 0.0,
        goodput=num_good / duration if duration else 0.0,
        requests_per_replica=dict(
            sorted(Counter(record.replica for record in records if record.replica is not None).items())
        ),
        imbalance_requests=_imbalance(records, num_replicas, lambda _record: 1.0),
        imbalance_computed_tokens=_imbalance(
            measured, num_replicas, lambda record: record.num_input_tokens - (record.num_cached_tokens or 0)
        ),
        imbalance_in_flight=_imbalance(records, num_replicas, lambda record: record.e2e_seconds or 0.0),
        prediction=_prediction(measured),
        lateness=_distribution([record.lateness_seconds for record in records]),
    )


def origins_of(record: RequestRecord) -> Origins:
    """Return one request's origins of cached tokens; none if its usage is unknown."""
    if record.num_cached_tokens is None:
        return Origins()
    left = record.num_cached_tokens
    other_tenant = min(record.num_other_tenant_tokens or 0, left)
    left -= other_tenant
    cross_user = record.num_cross_user_tokens
    own = record.num_own_tokens
    if own is None and cross_user is not None:
        own = record.num_cached_tokens - cross_user
    own = min(own or 0, left)
    left -= own
    cross_user = min(cross_user or 0, left)
    return Origins(
        record.num_input_tokens,
        own,
        cross_user,
        other_tenant,
        left - cross_user,
        record.num_host_tokens or 0,
        record.num_disk_tokens or 0,
    )


def _within(value: float | None, limit: float | None) -> bool:
    return value is None or limit is None or value <= limit


def _duration(records: Sequence[RequestRecord]) -> float:
    if not records:
        return 0.0
    last = max(record.arrival_seconds + (record.e2e_seconds or 0.0) for record in records)
    return last - min(record.arrival_seconds for record in records)


def _distribution(samples: Sequence[float | None]) -> Distribution | None:
    known = [sample for sample in samples if sample is not None]
    if not known:
        return None
    found = percentiles(known)
    return Distribution(statistics.fmean(known), found.p50, found.p90, found.p99, max(known))


def _imbalance(
    records: Sequence[RequestRecord], num_replicas: int | None, weigh: Callable[[RequestRecord], float]
) -> Imbalance | None:
    loads: dict[str, float] = defaultdict(float)
    for record in records:
        if record.replica is not None:
            loads[record.replica] += weigh(record)
    idle = max(0, (num_replicas or 0) - len(loads))
    values = [*loads.values(), *[0.0] * idle]
    mean = statistics.fmean(values) if values else 0.0
    if mean == 0:
        return None
    return Imbalance(max(values) / mean, statistics.pstdev(values) / mean)


def _prediction(records: Sequence[RequestRecord]) -> Prediction | None:
    errors = [
        record.predicted_tokens - record.num_cached_tokens
        for record in records
        if record.predicted_tokens is not None and record.num_cached_tokens is not None
    ]
    if not errors:
        return None
    return Prediction(
        mean_absolute_error=statistics.fmean(map(abs, errors)),
        mean_error=statistics.fmean(errors),
        share_exact=errors.count(0) / len(errors),
    )
