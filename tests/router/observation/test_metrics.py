"""A router's metrics: few labels, text that Prometheus reads; and how the times of its spans fit."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from replicas.protocol.frames import PromptUsage
from replicas.protocol.status import ReplicaId
from router.caller import DEFAULT_TENANT
from router.errors import ErrorKind
from router.generation import Generation
from router.misses import OF_NO_SPAN, Cause, MissedSpan, Misses
from router.observation.metrics import MOST_TENANTS, OTHER_TENANTS, RouterMetrics
from router.observation.tracing import SpanTracing
from router.routing.decision import Decision, DecisionReason
from router.served import ServedPrompt, ServedRequest, TokenGaps
from router.shared.instruments import Distributions, Numbers, counter, gauge
from tests.otlp_collector import collector
from tests.router.scripted_replica import asking

USAGE = PromptUsage(100, 64, 32, 16, num_own_tokens=32, num_slower_tier_tokens=48, num_disk_tokens=20)


def served(
    *,
    tenant: str = DEFAULT_TENANT,
    usage: PromptUsage | None = USAGE,
    rank: int = 0,
    num_output_tokens: int = 5,
    **fields: Any,
) -> ServedRequest:
    generation = Generation("m", [1] * 100, asking([1] * 100, max_tokens=9), [], b"bucket", tenant=tenant)
    decision = Decision(ReplicaId("r-0"), 80, DecisionReason.OVERLAP, rank, ())
    settings: dict[str, Any] = {
        "request_id": "q",
        "route": "completions",
        "model": "m",
        "status": 200,
        "error": None,
        "arrived_at": 0.0,
        "read_seconds": 0.5,
        "prepared_seconds": 0.75,
        "first_token_seconds": 1.0,
        "ended_seconds": 3.0,
        "is_stream": True,
        "prompts": (ServedPrompt(generation, decision, usage, num_output_tokens, 0.25),),
    }
    return ServedRequest(**{**settings, **fields})


class Scraped:
    def __init__(self, metrics: RouterMetrics) -> None:
        self.text = metrics.render().decode()
        self.samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(self.text)
            for sample in family.samples
        }

    def __getitem__(self, key: str | tuple[str, ...]) -> float:
        return self.samples[(key,) if isinstance(key, str) else key]

    def labels_of(self, name: str) -> Iterator[str]:
        return (labels[0] for found, *labels in self.samples if found == name)


@pytest.fixture
def metrics() -> RouterMetrics:
    return RouterMetrics(CollectorRegistry())


def test_origins_add_up_to_the_prompt_and_the_rest_of_a_request_is_counted(metrics: RouterMetrics) -> None:
    metrics.observe(served())
    metrics.observe(served(usage=PromptUsage(50, 10, 0)))
    found = Scraped(metrics)
    by_origin = {
        origin: found["router_prompt_tokens_by_origin_total", "m", origin]
        for origin in ("computed", "own", "cross_user", "unattributed")
    }
    assert by_origin == {"computed": 76, "own": 32, "cross_user": 16, "unattributed": 26}
    assert sum(by_origin.values()) == found["router_prompt_tokens_total", "m"] == 150
    assert found["router_cached_tokens_total", "m"] == 74
    assert found["router_cross_user_cached_tokens_total", "m"] == 16
    by_tier = {
        tier: found["router_cached_tokens_by_tier_total", "m", tier] for tier in ("device", "host", "disk")
    }
    assert by_tier == {"device": 26, "host": 28, "disk": 20}
    assert found["router_overlap_tokens_total", "m"] == 160
    assert found["router_overlap_error_tokens_sum", "m"] == 16 + 70
    assert found["router_prepare_seconds_sum", "m"] == 0.5
    assert found["router_decision_seconds_sum"] == 0.5
    assert found["router_ttft_seconds_count", "m"] == found["router_e2e_seconds_count", "m"] == 2
    assert found["router_tenant_requests_total", "default"] == 2
    assert found["router_tenant_prompt_tokens_total", "default"] == 150
    assert found["router_tenant_cached_tokens_total", "default"] == 74
    assert found["router_tenant_cross_user_cached_tokens_total", "default"] == 16
    assert found["router_tenant_output_tokens_total", "default"] == 10
    assert found["router_tenant_ttft_seconds_count", "default"] == 2


def test_missed_tokens_are_counted_by_their_causes(metrics: RouterMetrics) -> None:
    spans = (
        MissedSpan(Cause.EVICTED, 32, 64, ReplicaId("r-1")),
        MissedSpan(Cause.NEVER_CACHED, 64, 96),
        MissedSpan(Cause.BELOW_A_BLOCK, 96, 100),
    )
    (prompt,) = served().prompts
    for found in (Misses(Cause.EVICTED, spans), Misses(Cause.EVICTED, spans[:1]), None):
        metrics.observe(served(prompts=(msgspec.structs.replace(prompt, misses=found),)))
    scraped = Scraped(metrics)
    by_cause = {cause: scraped["router_missed_tokens_total", "m", cause] for cause in set(Cause) - OF_NO_SPAN}
    assert {cause.value: num for cause, num in by_cause.items() if num} == {
        "evicted": 64,
        "never_cached": 32,
        "below_a_block": 4,
    }


def test_what_the_engine_does_not_say_is_counted_apart(metrics: RouterMetrics) -> None:
    metrics.observe(served())
    metrics.observe(served(usage=PromptUsage(50, None, 0)))
    found = Scraped(metrics)
    assert found["router_unreported_prompt_tokens_total", "m"] == 50
    assert found["router_prompt_tokens_total", "m"] == 100
    assert found["router_tenant_prompt_tokens_total", "default"] == 100
    assert found["router_overlap_tokens_total", "m"] == 80
    assert found["router_output_tokens_total", "m"] == 10


def test_times_between_tokens_are_gaps_and_their_mean_per_request(metrics: RouterMetrics) -> None:
    gaps = TokenGaps(10.0, 1)
    for now in (10.5, 10.5004, 10.75):
        gaps.arrived(now)
    metrics.observe(served(token_gaps=gaps, num_output_tokens=6))
    metrics.observe(served(token_gaps=TokenGaps(10.0, 1), num_output_tokens=1))  # there is no gap
    found = Scraped(metrics)
    assert found["router_itl_seconds_count", "m"] == 3
    assert found["router_itl_seconds_sum", "m"] == pytest.approx(0.75)
    assert found["router_itl_seconds_bucket", "m", "0.001"] == 1
    assert found["router_itl_seconds_bucket", "m", "0.25"] == 2
    assert found["router_tpot_seconds_count", "m"] == 1
    assert found["router_tpot_seconds_sum", "m"] == pytest.approx(0.75 / 5)


def test_tokens_behind_a_stop_string_are_no_later_tokens(metrics: RouterMetrics) -> None:
    metrics.observe(served(token_gaps=TokenGaps(10.0, 3), num_output_tokens=1))
    assert Scraped(metrics)["router_tpot_seconds_count", "m"] == 0


def test_what_alerts_count_stands_at_zero_before_it_happens(metrics: RouterMetrics) -> None:
    """Prometheus sees no increase in a counter that is not there before."""
    metrics.observe(served())
    found = Scraped(metrics)
    assert {found["router_request_errors_total", "m", kind] for kind in ErrorKind} == {0}
    codes = {code: found["router_requests_total", "m", "completions", code] for code in ("200", "500", "503")}
    assert codes == {"200": 1, "500": 0, "503": 0}


@pytest.mark.parametrize(("rank", "label"), [(0, "0"), (2, "2"), (3, "3+"), (60, "3+")])
def test_decisions_are_counted_by_reason_and_a_few_ranks(
    metrics: RouterMetrics, rank: int, label: str
) -> None:
    metrics.observe(served(rank=rank))
    assert Scraped(metrics)["router_decisions_total", "m", "overlap", label] == 1


def test_an_error_has_its_kind_and_no_time_of_a_whole_answer(metrics: RouterMetrics) -> None:
    metrics.observe(
        served(status=499, error="ClientGone", error_kind=ErrorKind.CLIENT_GONE, first_token_seconds=None)
    )
    metrics.observe(
        served(model=None, status=404, error="UnknownModel", error_kind=ErrorKind.UNKNOWN_MODEL, prompts=())
    )
    found = Scraped(metrics)
    assert found["router_request_errors_total", "m", "client_gone"] == 1
    assert found["router_request_errors_total", "unknown", "unknown_model"] == 1
    assert found["router_e2e_seconds_count", "m"] == 0
    assert found["router_ttft_seconds_count", "m"] == 0
    assert ("router_e2e_seconds_count", "unknown") not in found.samples


def test_tenants_beyond_the_bound_share_one_label_and_nobody_loses_his(metrics: RouterMetrics) -> None:
    for _ in range(2):
        for number in range(MOST_TENANTS + 50):
            metrics.observe(served(tenant=f"salt-{number}"))
    metrics.observe(served())
    found = Scraped(metrics)
    labels = set(found.labels_of("router_tenant_requests_total"))
    assert len(labels) == MOST_TENANTS + 1
    assert {DEFAULT_TENANT, OTHER_TENANTS, "salt-0"} <= labels
    assert found["router_tenant_requests_total", "salt-0"] == 2
    assert found["router_tenant_requests_total", OTHER_TENANTS] == 2 * 51
    assert found["router_tenant_requests_total", DEFAULT_TENANT] == 1


def test_what_a_part_counts_is_read_at_each_scrape(metrics: RouterMetrics) -> None:
    counted = {"r-0": 1, 'r"1': 2}
    metrics.add(
        [
            gauge("load", "Load", lambda: counted, "replica"),
            counter("n_total", "N", lambda: sum(counted.values())),
        ]
    )
    found = Scraped(metrics)
    assert (found["load", 'r"1'], found["n_total"]) == (2, 3)
    del counted["r-0"]
    found = Scraped(metrics)
    assert list(found.labels_of("load")) == ['r"1'] and found["n_total"] == 2


async def test_a_scrape_gives_way_between_metrics_and_says_what_a_rendering_says(
    metrics: RouterMetrics,
) -> None:
    metrics.observe(served())
    num_turns = 0

    async def others() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    text = await metrics.scrape()
    other.cancel()
    assert text == metrics.render()
    assert num_turns >= text.count(b"# TYPE") - 1


@given(st.lists(st.tuples(st.text(max_size=8), st.floats(0, 100)), max_size=30), st.text(max_size=8))
def test_the_text_means_what_was_counted_whatever_the_labels_are(
    observed: list[tuple[str, float]], label: str
) -> None:
    spread = Distributions("h", "Help", (0, 1, 10), ("a",))
    number = Numbers("gauge", "g", "Help", ("a", "b"))
    for name, value in observed:
        spread.of(name).observe(value)
        number.of(name, label).value += value
    text = spread.text() + number.text()
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for name in {name for name, _ in observed}:
        values = [value for other, value in observed if other == name]
        for bound in ("0.0", "1.0", "10.0", "+Inf"):
            assert samples["h_bucket", name, bound] == sum(value <= float(bound) for value in values)
        assert samples["h_count", name] == len(values)
        assert samples["h_sum", name] == sum(values)
        assert samples["g", name, label] == sum(values)


PATH = "/v1/completions"


@pytest.mark.timeout(60)
def test_a_request_ends_after_its_parts_though_it_was_counted_from_later_than_its_span() -> None:
    with collector() as receiver:
        tracing = SpanTracing(receiver.url, 1.0)
        request = tracing.request("POST", PATH, "one", None)
        time.sleep(0.05)  # the process waits for a core before the durations begin to count
        arrived = time.perf_counter()
        generation = request.generation()
        read = time.perf_counter() - arrived
        generation.end()
        ended = time.perf_counter() - arrived
        request.served(
            served(
                request_id="one",
                route=PATH,
                model=None,
                read_seconds=read,
                prepared_seconds=read,
                first_token_seconds=None,
                ended_seconds=ended,
                prompts=(),
            )
        )
        tracing.close(30.0)
        receiver.wait(lambda: len(receiver.spans) == 3)
        spans = {span.name: span for span in receiver.spans}
    whole = spans.pop(f"POST {PATH}")
    assert set(spans) == {"route", "prepare"}
    for span in spans.values():
        assert whole.start <= span.start <= span.end <= whole.end, span.name
