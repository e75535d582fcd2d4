"""From what a client saw of a request to its record: for Locust's users and for the replay alike.

Owns what the server says in usage and headers. Timing is the clients'.
"""

from collections.abc import Mapping

import msgspec

from loadtests.reports.report import RequestRecord
from loadtests.workloads import TraceRequest

REFUSALS = (429, 503)


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None
    cross_user_cached_tokens: int | None = None
    host_cached_tokens: int | None = None
    disk_cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The API's own object."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


def answered(
    request: TraceRequest,
    usage: Usage,
    headers: Mapping[str, str],
    *,
    arrival_seconds: float,
    lateness_seconds: float,
    ttft_seconds: float | None,
    e2e_seconds: float,
    itl_seconds: tuple[float, ...],
    error: str | None,
    request_id: str | None = None,
    tenant: str | None = None,
) -> RequestRecord:
    """Return the record of an answer, whole or cut short. `request_id` counts where the server names none."""
    details = usage.prompt_tokens_details
    predicted = headers.get("x-kvasir-overlap-tokens")
    return RequestRecord(
        arrival_seconds=arrival_seconds,
        num_input_tokens=request.num_input_tokens if usage.prompt_tokens is None else usage.prompt_tokens,
        num_output_tokens=usage.completion_tokens or 0,
        ttft_seconds=ttft_seconds,
        e2e_seconds=e2e_seconds,
        num_cached_tokens=None if details is None else details.cached_tokens,
        num_cross_user_tokens=None if details is None else details.cross_user_cached_tokens,
        num_host_tokens=None if details is None else details.host_cached_tokens,
        num_disk_tokens=None if details is None else details.disk_cached_tokens,
        predicted_tokens=None if predicted is None else int(predicted),
        replica=headers.get("x-kvasir-replica"),
        error=error,
        lateness_seconds=lateness_seconds,
        user=request.user,
        tenant=tenant,
        session=request.session,
        reason=headers.get("x-kvasir-reason"),
        itl_seconds=itl_seconds,
        request_id=headers.get("x-request-id") or request_id,
        num_images=len(request.images),
        num_image_tokens=request.num_image_tokens,
    )


def unanswered(
    request: TraceRequest,
    error: str,
    *,
    arrival_seconds: float,
    waited_seconds: float,
    lateness_seconds: float = 0.0,
    tenant: str | None = None,
) -> RequestRecord:
    """Return the record of a request to which no answer came."""
    return RequestRecord(
        arrival_seconds=arrival_seconds,
        num_input_tokens=request.num_input_tokens,
        e2e_seconds=max(0.0, waited_seconds),
        error=error,
        lateness_seconds=lateness_seconds,
        user=request.user,
        tenant=tenant,
        session=request.session,
    )


def refusal(status: int) -> str | None:
    """Name the error of an answer's status, in a word or two; None for success."""
    if status in REFUSALS:
        return f"refused ({status})"
    return None if status == 200 else f"status {status}"
