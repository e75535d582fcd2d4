"""SpanExport: sends a process's spans to an OpenTelemetry collector.

Owns the SDK's provider and the sending thread. Spans that no collector takes are dropped and counted. It
loads the SDK, so it is imported only if tracing is on.
"""

import contextlib
import logging
import threading
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    TraceFlags,
    Tracer,
    TraceState,
    set_span_in_context,
)

from replicas.process.settings import without_password
from replicas.process.trace_parent import TraceParent

logger = logging.getLogger(__name__)

MAX_WAITING_SPANS = 4096
"""About 8 MiB. Beyond, the collector is too slow or away, and new spans are dropped."""

SPANS_PER_MESSAGE = 64
"""Few: while they are encoded, the event loop of the same process waits."""

SECONDS_PER_MESSAGE = 1.0
"""How long fewer spans wait for more."""

SEND_SECONDS = 5.0
"""The longest that one message may take, its repetitions included."""


class SpanExport:
    """Never blocks the caller that ends a span. `close` sends the rest, within its timeout."""

    def __init__(
        self,
        endpoint: str,
        sample_ratio: float,
        *,
        service: str,
        instance: str,
        send_seconds: float = SEND_SECONDS,
    ) -> None:
        self._exporter = OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=send_seconds)
        self._processor = _BoundedProcessor(self._exporter)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create({"service.name": service, "service.instance.id": instance}),
            shutdown_on_exit=False,  # it would wait for a collector that is away
        )
        self._provider.add_span_processor(self._processor)
        self.tracer: Tracer = self._provider.get_tracer("kvasir")
        # One line is enough to say that the collector is away; the exporter says it for every message. What a
        # client's trace state says is not for logs.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        logger.info("sending traces endpoint=%s sample_ratio=%g", without_password(endpoint), sample_ratio)

    @property
    def num_dropped(self) -> int:
        """Spans that no collector has seen, since the start."""
        return self._processor.num_refused + self._processor.outlet.num_lost

    def close(self, timeout_seconds: float) -> None:
        """Close; blocks for at most `timeout_seconds`, so call it in a thread. The rest is dropped."""
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(timeout_seconds)
        if closing.is_alive():
            with contextlib.suppress(Exception):  # it is on its way out, and so are we
                self._exporter.shutdown()  # type: ignore[no-untyped-call]


class _BoundedProcessor(BatchSpanProcessor):
    """Counts spans in and out, each in one thread, and so the dropped ones."""

    def __init__(self, exporter: SpanExporter) -> None:
        self.num_refused = 0
        self.outlet = _Outlet(exporter)
        self._num_taken = 0
        super().__init__(
            self.outlet,
            max_queue_size=2 * MAX_WAITING_SPANS,  # never reached
            schedule_delay_millis=SECONDS_PER_MESSAGE * 1000,
            max_export_batch_size=SPANS_PER_MESSAGE,
        )

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._num_taken - self.outlet.num_done >= MAX_WAITING_SPANS:
            self.num_refused += 1
            return
        self._num_taken += 1
        super().on_end(span)


class _Outlet(SpanExporter):
    def __init__(self, exporter: SpanExporter) -> None:
        self.num_done = 0
        self.num_lost = 0
        self._exporter = exporter
        self._is_reachable = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        is_reachable = result is SpanExportResult.SUCCESS
        if not is_reachable:
            self.num_lost += len(spans)
        self.num_done += len(spans)
        if is_reachable is not self._is_reachable:
            self._is_reachable = is_reachable
            if is_reachable:
                logger.info("the trace collector accepts spans again")
            else:
                logger.warning("the trace collector does not accept spans; they are dropped")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def traces_url(endpoint: str) -> str:
    """Return the address for spans at a collector, which is given by its base or its full address."""
    return endpoint if endpoint.endswith("/v1/traces") else endpoint.rstrip("/") + "/v1/traces"


def parent_context(parent: TraceParent | None) -> Context:
    """For the first span in this process. Without a parent it has a trace of its own.

    All below have the parent's state; one that breaks the rules is none.
    """
    if parent is None:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT)
    state = TraceState.from_header([parent.state])
    span_context = SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), True, flags, state)
    return set_span_in_context(NonRecordingSpan(span_context), Context())


def child_context(span: Span) -> Context:
    return set_span_in_context(span, Context())


def trace_parent_of(span: Span) -> TraceParent:
    """Return the parent's identity for spans in another process."""
    context = span.get_span_context()
    return TraceParent(
        f"{context.trace_id:032x}",
        f"{context.span_id:016x}",
        context.trace_flags.sampled,
        context.trace_state.to_header(),
    )
