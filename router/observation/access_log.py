"""AccessLog: one line for each request to a route that generates, at its end.

Owns the line's content: ids, our own names, times and numbers; never a client's text.
"""

import logging

from replicas.protocol.frames import num_cached_of
from router.feature import Feature
from router.served import ServedRequest

logger = logging.getLogger(__name__)

LINE = (
    "request request_id=%s trace_id=%s route=%s model=%s status=%d error=%s"
    " prepared_ms=%s first_token_ms=%s ended_ms=%s"
    " prompt_tokens=%s cached_tokens=%s cross_user_tokens=%s"
    " host_tokens=%s disk_tokens=%s output_tokens=%d replica=%s reason=%s"
)


class AccessLog(Feature):
    def ended(self, request: object, served: ServedRequest) -> None:
        log_request(served)


def log_request(served: ServedRequest) -> None:
    """Log one line. Tokens are summed over prompts; replica and reason are those of the first."""
    usages = [prompt.usage for prompt in served.prompts if prompt.usage is not None]
    decision = served.prompts[0].decision if served.prompts else None
    logger.info(
        LINE,
        served.request_id,
        served.trace_id,
        served.route,
        served.model,
        served.status,
        served.error,
        _milliseconds(served.prepared_seconds),
        _milliseconds(served.first_token_seconds),
        _milliseconds(served.ended_seconds),
        sum(usage.num_prompt_tokens for usage in usages) if usages else None,
        num_cached_of(usages) if usages else None,
        sum(usage.num_cross_user_tokens for usage in usages) if usages else None,
        sum(usage.num_host_tokens for usage in usages) if usages else None,
        sum(usage.num_disk_tokens for usage in usages) if usages else None,
        sum(prompt.num_output_tokens for prompt in served.prompts),
        None if decision is None else decision.replica_id,
        None if decision is None else decision.reason.value,
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
