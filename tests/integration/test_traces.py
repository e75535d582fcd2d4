"""Traces of real processes, as a collector receives them over a socket."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loadtests.stacks.local_stack import LocalStack, free_port, local_stack
from tests.integration.observe import metric, wait_until
from tests.otlp_collector import Collector, ReceivedSpan, collector

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

REPLICA = {"engine": "simulated", "model_name": "toy", "num_blocks": 4096}

CHAT = {
    "model": "toy",
    "messages": [{"role": "user", "content": "What does a span cost? " * 30}],
    "max_tokens": 12,
    "ignore_eos": True,
    "stream": True,
}


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[LocalStack, Collector]]:
    with collector() as receiver:
        settings = {"otlp_endpoint": receiver.url}
        with local_stack(
            num_replicas=2, replica_settings={**REPLICA, **settings}, router_settings=settings
        ) as stack:
            yield stack, receiver


def trace_id_of(number: int) -> str:
    return f"{number:032x}"


def traceparent(number: int, *, sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id_of(number)}-00000000000000ab-{'01' if sampled else '00'}"}


def only(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    (span,) = [span for span in spans if span.name == name]
    return span


def test_a_streamed_chat_is_one_connected_trace_from_the_client_to_the_engine(
    traced: tuple[LocalStack, Collector],
) -> None:
    stack, receiver = traced
    headers = {**traceparent(7), "x-request-id": "my-request"}
    body = {**CHAT, "stream_options": {"include_usage": True}}
    answer = httpx.post(stack.url + "/v1/chat/completions", json=body, headers=headers, timeout=60)
    usage = json.loads(answer.text.split("data: ")[-2])["usage"]
    receiver.wait(lambda: len(receiver.of_trace(trace_id_of(7))) >= 8)
    spans = receiver.of_trace(trace_id_of(7))
    http = only(spans, "POST /v1/chat/completions")
    route, attempt = only(spans, "route"), only(spans, "attempt")
    request = only(spans, "replica request")
    phases = [only(spans, name) for name in ("queue", "prefill", "decode")]
    assert len(spans) == 8
    assert http.parent_id == "00000000000000ab"
    assert only(spans, "prepare").parent_id == http.span_id
    assert (route.parent_id, attempt.parent_id) == (http.span_id, route.span_id)
    assert (request.parent_id, request.service) == (attempt.span_id, "kvasir-replica")
    assert {phase.parent_id for phase in phases} == {request.span_id}
    parents = {span.span_id: span for span in spans}
    for span in spans:
        parent = parents.get(span.parent_id, span)
        assert parent.start <= span.start <= span.end <= parent.end, span.name
    assert [phases[0].end, phases[1].end, phases[2].end] == [phases[1].start, phases[2].start, request.end]
    assert http.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvasir",
        "gen_ai.request.model": "toy",
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.cache_creation.input_tokens": usage["prompt_tokens_details"]["cache_write_tokens"],
        "kvasir.cross_user_tokens": 0,
        "kvasir.host_tokens": 0,
        "kvasir.disk_tokens": 0,
        "kvasir.request_id": "my-request",
        "kvasir.tenant": "default",
    }
    assert attempt.attributes["kvasir.replica"] == request.attributes["kvasir.replica"]
    assert attempt.attributes["kvasir.replica"] == answer.headers["x-kvasir-replica"]
    assert attempt.attributes["kvasir.reason"] == answer.headers["x-kvasir-reason"]
    assert request.attributes["kvasir.request_id"] == "my-request"
    assert request.attributes["kvasir.num_steps"] == 12
    steps = [request.attributes[f"kvasir.step.{name}"] for name in ("taken", "first_token", "end")]
    assert steps == sorted(steps)
    assert (
        "first token" in http.events and "first token" in attempt.events and "first token" in request.events
    )


def test_a_resumed_request_shows_both_attempts(traced: tuple[LocalStack, Collector]) -> None:
    stack, receiver = traced
    url = stack.url + "/v1/chat/completions"
    body = {**CHAT, "max_tokens": 300}
    with httpx.stream("POST", url, json=body, headers=traceparent(8), timeout=60) as answer:
        victim = answer.headers["x-kvasir-replica"]
        stack.kill(victim)
        assert answer.read().endswith(b"data: [DONE]\n\n")
    stack.start(victim)
    receiver.wait(lambda: any(span.name.startswith("POST") for span in receiver.of_trace(trace_id_of(8))))
    spans = receiver.of_trace(trace_id_of(8))
    first, second = sorted(
        (span for span in spans if span.name == "attempt"), key=lambda span: span.attributes["kvasir.attempt"]
    )
    assert (first.attributes["kvasir.replica"], first.attributes["error.type"]) == (victim, "replica_lost")
    assert second.attributes["kvasir.replica"] != victim
    assert (first.is_error, second.is_error) == (True, False)
    assert first.parent_id == second.parent_id == only(spans, "route").span_id
    assert only(spans, "route").events == ("resume",)
    receiver.wait(lambda: any(s.name == "replica request" for s in receiver.of_trace(trace_id_of(8))))
    assert only(receiver.of_trace(trace_id_of(8)), "replica request").parent_id == second.span_id
    stack.wait_ready(2)


def test_what_the_client_does_not_sample_is_sent_by_nobody(traced: tuple[LocalStack, Collector]) -> None:
    stack, receiver = traced
    url = stack.url + "/v1/chat/completions"
    assert httpx.post(url, json=CHAT, headers=traceparent(9, sampled=False), timeout=60).status_code == 200
    assert httpx.post(url, json=CHAT, headers=traceparent(10), timeout=60).status_code == 200
    names = {"POST /v1/chat/completions", "replica request"}
    receiver.wait(lambda: names <= {span.name for span in receiver.of_trace(trace_id_of(10))})
    assert receiver.of_trace(trace_id_of(9)) == []


def test_a_refused_request_is_traced_with_its_error(traced: tuple[LocalStack, Collector]) -> None:
    stack, receiver = traced
    url = stack.url + "/v1/chat/completions"
    assert httpx.post(url, json={"model": "toy"}, headers=traceparent(11), timeout=60).status_code == 400
    receiver.wait(lambda: len(receiver.of_trace(trace_id_of(11))) == 2)
    http = only(receiver.of_trace(trace_id_of(11)), "POST /v1/chat/completions")
    assert (http.attributes["error.type"], http.is_error) == ("InvalidRequest", False)
    assert only(receiver.of_trace(trace_id_of(11)), "prepare").is_error


def spans_of_a_chat(
    traced: tuple[LocalStack, Collector], number: int, states: list[str]
) -> list[ReceivedSpan]:
    stack, receiver = traced
    headers = [*traceparent(number).items(), *(("tracestate", state) for state in states)]
    answer = httpx.post(stack.url + "/v1/chat/completions", json=CHAT, headers=headers, timeout=60)
    assert answer.status_code == 200
    receiver.wait(lambda: len(receiver.of_trace(trace_id_of(number))) == 8)
    return receiver.of_trace(trace_id_of(number))


def test_every_span_has_the_clients_trace_state_at_the_router_and_at_the_replica(
    traced: tuple[LocalStack, Collector],
) -> None:
    states = ["vendor=a:b, other@tenant=c d", "", f"third={'e' * 256}", f"fourth={'f' * 256}"]
    spans = spans_of_a_chat(traced, 12, states)
    sent = f"vendor=a:b,other@tenant=c d,third={'e' * 256},fourth={'f' * 256}"
    assert {span.trace_state for span in spans} == {sent}
    most = [f"m{number}={number}" for number in range(32)]
    assert {span.trace_state for span in spans_of_a_chat(traced, 13, most)} == {",".join(most)}


@pytest.mark.parametrize(
    ("number", "state"),
    [
        (14, "Vendor=1"),
        (15, "twice=1,twice=2"),
        (16, ",".join(f"m{number}={number}" for number in range(33))),
        (17, f"long={'x' * 8192}"),
    ],
)
def test_a_trace_state_that_breaks_the_rules_is_ignored_and_the_parent_still_counts(
    traced: tuple[LocalStack, Collector], number: int, state: str
) -> None:
    spans = spans_of_a_chat(traced, number, [state])
    assert only(spans, "POST /v1/chat/completions").parent_id == "00000000000000ab"
    assert {span.trace_state for span in spans} == {""}


def test_a_router_that_sends_no_traces_hands_on_what_the_client_sent() -> None:
    with (
        collector() as receiver,
        local_stack(replica_settings={**REPLICA, "otlp_endpoint": receiver.url}) as stack,
    ):
        headers = {**traceparent(18), "tracestate": "vendor=a"}
        httpx.post(stack.url + "/v1/chat/completions", json=CHAT, headers=headers, timeout=60)
        assert stack.terminate("replica-0") == 0
    assert only(receiver.spans, "replica request").parent_id == "00000000000000ab"
    assert {(span.trace_id, span.trace_state) for span in receiver.spans} == {(trace_id_of(18), "vendor=a")}


def test_a_ratio_of_zero_sends_nothing_and_what_is_left_is_sent_at_the_end() -> None:
    with collector() as receiver:
        traced, untraced = {"otlp_endpoint": receiver.url}, {"trace_sample_ratio": 0.0}
        with local_stack(
            replica_settings={**REPLICA, **traced}, router_settings={**traced, **untraced}
        ) as stack:
            for _ in range(20):
                httpx.post(stack.url + "/v1/chat/completions", json=CHAT, timeout=60)
            httpx.post(stack.url + "/v1/chat/completions", json=CHAT, headers=traceparent(1), timeout=60)
            assert stack.terminate("router") == 0
            assert stack.terminate("replica-0") == 0
    assert {span.trace_id for span in receiver.spans} == {trace_id_of(1)}
    assert {span.service for span in receiver.spans} == {"kvasir-router", "kvasir-replica"}


def test_without_a_collector_requests_are_served_spans_are_counted_and_nobody_waits_at_the_end() -> None:
    settings = {"otlp_endpoint": f"http://127.0.0.1:{free_port()}"}
    with local_stack(replica_settings={**REPLICA, **settings}, router_settings=settings) as stack:
        for number in range(30):
            url = stack.url + "/v1/chat/completions"
            answer = httpx.post(url, json=CHAT, headers=traceparent(number + 1), timeout=60)
            assert answer.text.endswith("data: [DONE]\n\n")
        wait_until(lambda: metric(stack, "router_dropped_spans_total") > 0, "a dropped span")
        # Who waited for the collector would be killed after ten seconds.
        assert stack.terminate("router") == 0
        assert stack.terminate("replica-0") == 0
        log = Path(stack.run_directory / "router.log").read_text()
    assert log.count("collector") == 1
    assert "Traceback" not in log
