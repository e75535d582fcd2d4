"""From what a client saw of a request to its record: for Locust's users and for the replay alike.

Owns what the server says in usage and headers. Timing is the clients'.
"""

import time

from loadtests.load.streaming import Answer
from loadtests.reports.report import RequestRecord
from loadtests.workloads import TraceRequest


def record_of(
    request: TraceRequest,
    answer: Answer | None,
    error: str | None,
    *,
    began: float,
    due: float,
    request_id: str | None = None,
    tenant: str | None = None,
) -> RequestRecord:
    """Return the record of an answer: whole, cut short, or none.

    `request_id` counts where the server names none.
    """
    if answer is None:
        return unanswered(
            request,
            error or "no answer",
            waited_seconds=time.perf_counter() - began,
            lateness_seconds=began - due,
            tenant=tenant,
        )
    usage, headers, details = answer.usage, answer.headers, answer.usage.prompt_tokens_details
    predicted = headers.get("x-kvasir-overlap-tokens")
    return RequestRecord(
        arrival_seconds=request.arrival_seconds,
        num_input_tokens=request.num_input_tokens if usage.prompt_tokens is None else usage.prompt_tokens,
        num_output_tokens=usage.completion_tokens or 0,
        ttft_seconds=answer.ttft if error is None else None,
        e2e_seconds=answer.e2e,
        num_cached_tokens=None if details is None else details.cached_tokens,
        num_cross_user_tokens=None if details is None else details.cross_user_cached_tokens,
        num_host_tokens=None if details is None else details.host_cached_tokens,
        num_disk_tokens=None if details is None else details.disk_cached_tokens,
        predicted_tokens=None if predicted is None else int(predicted),
        replica=headers.get("x-kvasir-replica"),
        error=error,
        lateness_seconds=answer.sent_seconds - due,
        user=request.user,
        tenant=tenant,
        session=request.session,
        reason=headers.get("x-kvasir-reason"),
        itl_seconds=answer.itl_seconds if error is None else (),
        request_id=headers.get("x-request-id") or answer.response_id or request_id,
        num_images=len(request.images),
        num_image_tokens=request.num_image_tokens,
    )


def unanswered(
    request: TraceRequest,
    error: str,
    *,
    waited_seconds: float = 0.0,
    lateness_seconds: float = 0.0,
    tenant: str | None = None,
) -> RequestRecord:
    """Return the record of a request to which no answer came."""
    return RequestRecord(
        arrival_seconds=request.arrival_seconds,
        num_input_tokens=request.num_input_tokens,
        e2e_seconds=max(0.0, waited_seconds),
        error=error,
        lateness_seconds=lateness_seconds,
        user=request.user,
        tenant=tenant,
        session=request.session,
    )
