"""Spans of a router, by themselves: how their times fit together."""

import time

import pytest

from router.observation.tracing import SpanTracing
from router.served import ServedRequest
from tests.otlp_collector import collector

pytestmark = pytest.mark.timeout(60)

PATH = "/v1/completions"


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
            ServedRequest(
                request_id="one",
                route=PATH,
                model=None,
                status=200,
                error=None,
                arrived_at=0.0,
                read_seconds=read,
                prepared_seconds=read,
                first_token_seconds=None,
                ended_seconds=ended,
                is_stream=False,
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
