"""Spans of a router: a request, its preparation, its routing, and every attempt.

Owns which spans exist and their content: numbers, ids, our names and reasons; never the client's words,
except the trace state that it wrote for collectors. Imported only if tracing is on.
"""

import os
import socket
import time
from collections.abc import Callable

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from replicas.process.otlp import SpanExport, child_context, parent_context, trace_parent_of
from replicas.process.trace_parent import TraceParent
from replicas.protocol.frames import num_cached_of
from router.observation.trace_points import Trace, Tracing
from router.routing.decision import Decision
from router.served import ServedRequest

Attributes = dict[str, str | int | float | bool]

METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}

ERROR = Status(StatusCode.ERROR)


class SpanTracing(Tracing):
    def __init__(self, endpoint: str, sample_ratio: float) -> None:
        instance = f"{socket.gethostname()}:{os.getpid()}"
        self._export = SpanExport(endpoint, sample_ratio, service="kvasir-router", instance=instance)

    def request(self, method: str, path: str, request_id: str, parent: TraceParent | None) -> Trace:
        known_method = method if method in METHODS else "_OTHER"
        span = self._export.tracer.start_span(
            f"{known_method} {path}",
            parent_context(parent),
            SpanKind.SERVER,
            {
                "http.request.method": known_method,
                "http.route": path,
                "gen_ai.operation.name": OPERATIONS[path],
                "gen_ai.provider.name": "kvasir",
                "kvasir.request_id": request_id,
            },
        )
        if span.is_recording():
            return _RequestSpans(request_id, self._export.tracer, span)
        return Trace(request_id, trace_parent_of(span))

    @property
    def num_dropped(self) -> int:
        return self._export.num_dropped

    def close(self, timeout_seconds: float) -> None:
        self._export.close(timeout_seconds)


class _RequestSpans(Trace):
    __slots__ = ("_span", "_tracer")

    def __init__(self, request_id: str, tracer: Tracer, span: Span) -> None:
        super().__init__(request_id, trace_parent_of(span))
        self._tracer = tracer
        self._span = span

    def generation(self) -> Trace:
        return _GenerationSpans(self.request_id, self._tracer, self._span)

    def served(self, served: ServedRequest) -> None:
        span = self._span
        ended_at = time.time_ns()

        def moment(seconds: float) -> int:
            """Convert to nanoseconds since 1970, counted back from the end: parts ended before."""
            return ended_at - int((served.ended_seconds - seconds) * 1e9)

        self._tell_preparation(served, moment)
        if served.first_token_seconds is not None:
            span.add_event("first token", timestamp=moment(served.first_token_seconds))
        span.set_attributes(_outcome(served))
        if served.status >= 500:
            span.set_status(ERROR)
        span.end(ended_at)

    def _tell_preparation(self, served: ServedRequest, moment: Callable[[float], int]) -> None:
        if served.read_seconds is None:
            return
        span = self._tracer.start_span(
            "prepare", child_context(self._span), start_time=moment(served.read_seconds)
        )
        if served.prepared_seconds is None:
            span.set_status(ERROR)
            span.end(moment(served.ended_seconds))
        else:
            span.end(moment(served.prepared_seconds))


def _outcome(served: ServedRequest) -> Attributes:
    attributes: Attributes = {
        "http.response.status_code": served.status,
        "gen_ai.request.stream": served.is_stream,
    }
    if served.error is not None:
        attributes["error.type"] = served.error
    if served.model is not None:
        attributes["gen_ai.request.model"] = served.model
    if served.prompts:
        attributes["kvasir.tenant"] = served.prompts[0].generation.tenant
        attributes["gen_ai.usage.output_tokens"] = sum(prompt.num_output_tokens for prompt in served.prompts)
    usages = [prompt.usage for prompt in served.prompts if prompt.usage is not None]
    if usages:
        attributes["gen_ai.usage.input_tokens"] = sum(usage.num_prompt_tokens for usage in usages)
    num_cached = num_cached_of(usages)
    if usages and num_cached is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = num_cached
        attributes["gen_ai.usage.cache_creation.input_tokens"] = sum(
            usage.num_written_tokens for usage in usages
        )
        attributes["kvasir.cross_user_tokens"] = sum(usage.num_cross_user_tokens for usage in usages)
        attributes["kvasir.host_tokens"] = sum(usage.num_host_tokens for usage in usages)
        attributes["kvasir.disk_tokens"] = sum(usage.num_disk_tokens for usage in usages)
    return attributes


class _GenerationSpans(Trace):
    __slots__ = ("_num_attempts", "_span", "_tracer")

    def __init__(self, request_id: str, tracer: Tracer, parent: Span) -> None:
        super().__init__(request_id, None)
        self._tracer = tracer
        self._span = tracer.start_span("route", child_context(parent))
        self._num_attempts = 0

    def attempt(self, decision: Decision, *, is_resumed: bool) -> Trace:
        attributes: Attributes = {
            "kvasir.replica": decision.replica_id,
            "kvasir.reason": decision.reason.value,
            "kvasir.rank": decision.rank,
            "kvasir.overlap_tokens": decision.overlap_tokens,
        }
        self._span.set_attributes(attributes)
        if self._num_attempts:
            self._span.add_event("resume" if is_resumed else "retry", {"kvasir.replica": decision.replica_id})
        self._num_attempts += 1
        attributes["kvasir.attempt"] = self._num_attempts
        span = self._tracer.start_span("attempt", child_context(self._span), SpanKind.CLIENT, attributes)
        return _AttemptSpan(self.request_id, span)

    def prefill(self, decision: Decision) -> Trace:
        attributes: Attributes = {
            "kvasir.replica": decision.replica_id,
            "kvasir.overlap_tokens": decision.overlap_tokens,
        }
        span = self._tracer.start_span("prefill", child_context(self._span), SpanKind.CLIENT, attributes)
        return _AttemptSpan(self.request_id, span)

    def waits(self, seconds: float) -> None:
        self._span.add_event("wait", {"kvasir.seconds": seconds})

    def end(self) -> None:
        self._span.end()


class _AttemptSpan(Trace):
    __slots__ = ("_span",)

    def __init__(self, request_id: str, span: Span) -> None:
        super().__init__(request_id, trace_parent_of(span))
        self._span = span

    def first_token(self) -> None:
        self._span.add_event("first token")

    def failed(self, reason: str) -> None:
        self._span.set_attribute("error.type", reason)
        self._span.set_status(ERROR)

    def end(self) -> None:
        self._span.end()
