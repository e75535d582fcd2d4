"""Spans of a replica: each request with its prefill and its decoding, made from frames.

Owns which spans exist and their content: numbers, ids and reasons, never a token. They are made where frames
arrive, so they are alike for all engines. Imported only if tracing is on.
"""

import time

from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from replicas.observation.trace_points import NO_TRACE, SubmitTrace, Tracing
from replicas.process.otlp import SpanExport, child_context, parent_context
from replicas.process.trace_parent import parse_trace_parent
from replicas.protocol.frames import FinishReason, PromptUsage, Submit, TokenDelta

Attributes = dict[str, str | int | float | bool]


class SpanTracing(Tracing):
    def __init__(
        self, endpoint: str, sample_ratio: float, *, replica_id: str, epoch: str, model: str
    ) -> None:
        instance = f"{replica_id}:{epoch}"
        self._export = SpanExport(endpoint, sample_ratio, service="kvasir-replica", instance=instance)
        self._attributes: Attributes = {"kvasir.replica": replica_id, "gen_ai.request.model": model}

    def taken(self, submit: Submit, step: int) -> SubmitTrace:
        span = self._start(submit)
        if not span.is_recording():
            return NO_TRACE
        span.set_attribute("kvasir.step.taken", step)
        return _SubmitSpans(self._export, span, submit.num_choices)

    def refused(self, submit: Submit, reason: str) -> None:
        span = self._start(submit)
        span.set_attribute("error.type", reason)
        span.set_status(Status(StatusCode.ERROR))
        span.end()

    @property
    def num_dropped(self) -> int:
        return self._export.num_dropped

    def close(self, timeout_seconds: float) -> None:
        self._export.close(timeout_seconds)

    def _start(self, submit: Submit) -> Span:
        return self._export.tracer.start_span(
            "replica request",
            parent_context(parse_trace_parent(submit.trace_parent, submit.trace_state)),
            SpanKind.SERVER,
            {
                **self._attributes,
                "kvasir.request_id": submit.request_id,
                "gen_ai.request.choice.count": submit.num_choices,
                "gen_ai.request.max_tokens": submit.sampling.max_tokens,
                "kvasir.resumed_tokens": submit.num_output_tokens,
            },
        )


class _SubmitSpans(SubmitTrace):
    """`queue` lasts until the first step that computed anything, if the engine reports it; `prefill` from
    there to the first token of any choice; `decode` from there to the last."""

    __slots__ = (
        "_export",
        "_last_step",
        "_num_open",
        "_num_steps",
        "_num_tokens",
        "_span",
        "_started_at",
        "_taken_at",
        "_tokens_at",
    )

    def __init__(self, export: SpanExport, span: Span, num_choices: int) -> None:
        self._export = export
        self._span = span
        self._num_open = num_choices
        self._num_tokens = 0
        self._num_steps = 0
        self._last_step = -1
        self._taken_at = time.time_ns()
        self._started_at: int | None = None
        self._tokens_at: int | None = None

    def started(self, step: int, step_seconds: float) -> None:
        if self._started_at is None:
            self._started_at = max(self._taken_at, time.time_ns() - int(step_seconds * 1e9))
            self._span.set_attribute("kvasir.step.started", step)

    def delta(self, delta: TokenDelta, step: int) -> None:
        if step != self._last_step:
            self._last_step = step
            self._num_steps += 1
        if delta.num_tokens and self._tokens_at is None:
            self._tokens_at = time.time_ns()
            self._span.add_event("first token", timestamp=self._tokens_at)
            self._span.set_attribute("kvasir.step.first_token", step)
        self._num_tokens += delta.num_tokens
        if delta.usage is not None and delta.key.choice == 0:
            self._tell_usage(delta.usage)
        if delta.finish_reason is not None:
            self._num_open -= 1
            reason = delta.finish_reason.value
            if delta.finish_reason is FinishReason.ERROR:
                reason = "error" if delta.refusal is None else delta.refusal.code.value
                self._fail(reason)
            self._span.add_event("choice ended", {"kvasir.choice": delta.key.choice, "kvasir.reason": reason})

    def end(self, step: int) -> None:
        if self._num_open:
            self._fail("aborted")
        now = time.time_ns()
        self._tell_phases(now)
        self._span.set_attributes(
            {
                "gen_ai.usage.output_tokens": self._num_tokens,
                "kvasir.step.end": step,
                "kvasir.num_steps": self._num_steps,
            }
        )
        self._span.end(now)

    def _tell_phases(self, now: int) -> None:
        until = self._tokens_at or now
        if self._started_at is not None:
            self._child("queue", self._taken_at, self._started_at)
        self._child("prefill", self._started_at or self._taken_at, until)
        if self._tokens_at is not None:
            self._child("decode", self._tokens_at, now)

    def _child(self, name: str, start: int, end: int) -> None:
        self._export.tracer.start_span(name, child_context(self._span), start_time=start).end(end)

    def _tell_usage(self, usage: PromptUsage) -> None:
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
                "gen_ai.usage.cache_creation.input_tokens": usage.num_written_tokens,
                "kvasir.cross_user_tokens": usage.num_cross_user_tokens,
                "kvasir.host_tokens": usage.num_host_tokens,
                "kvasir.disk_tokens": usage.num_disk_tokens,
            }
        )
        if usage.num_cached_tokens is not None:
            self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.num_cached_tokens)

    def _fail(self, reason: str) -> None:
        self._span.set_attribute("error.type", reason)
        self._span.set_status(Status(StatusCode.ERROR))
