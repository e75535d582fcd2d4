"""HttpError: what went wrong with a request, as every dialect's shape of it needs to know.

Owns the mapping from the router's errors to status codes, and the words for them, which are OpenAI's. How an
error is written is the dialect's: `error_shapes.py`.
"""

import math
from dataclasses import dataclass

from router.api.json_body import encode_json
from router.errors import (
    BodiesFull,
    BodyTooLarge,
    CacheGone,
    CachesFull,
    CachesUnavailable,
    ContextLengthExceeded,
    Excess,
    GenerationFailed,
    InvalidRequest,
    NoReplicaAvailable,
    Overloaded,
    ResponseGone,
    ResponsesUnavailable,
    RouterBusy,
    RouterError,
    UnknownModel,
    UploadTooSlow,
)


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error in OpenAI's words. `body` is OpenAI's shape, which is also that of routes of no dialect."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_seconds: float | None = None
    excess: Excess | None = None

    def body(self) -> bytes:
        return encode_json(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_seconds is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_seconds))))
            headers.append((b"retry-after-ms", b"%d" % max(1, math.ceil(self.retry_after_seconds * 1000))))
            headers.append((b"x-should-retry", b"true"))
        elif self.code == "generation_failed":  # it was tried again here
            headers.append((b"x-should-retry", b"false"))
        if (
            self.status in (408, 413) or self.code == "bodies_full"
        ):  # the rest of the body would be taken for the next request
            headers.append((b"connection", b"close"))
        return headers


def http_error(error: RouterError) -> HttpError:
    match error:
        case ContextLengthExceeded():
            return HttpError(
                400, error.message, "invalid_request_error", error.parameter, error.code, excess=error.excess
            )
        case InvalidRequest():
            return HttpError(
                400, error.message, "invalid_request_error", error.parameter, error.code or "invalid_value"
            )
        case UnknownModel():
            return HttpError(404, error.message, "invalid_request_error", "model", "model_not_found")
        case CacheGone():
            return HttpError(404, error.message, "invalid_request_error", error.parameter, error.code)
        case CachesFull():
            return HttpError(429, error.message, "requests", None, "caches_full", error.retry_after_seconds)
        case CachesUnavailable():
            return HttpError(
                503, error.message, "server_error", None, "caches_unavailable", error.retry_after_seconds
            )
        case ResponseGone():
            return HttpError(404, error.message, "invalid_request_error", None, "response_not_found")
        case ResponsesUnavailable():
            return HttpError(
                503, error.message, "server_error", None, "responses_unavailable", error.retry_after_seconds
            )
        case BodyTooLarge():
            return HttpError(413, error.message, "invalid_request_error", None, "request_too_large")
        case BodiesFull():
            return HttpError(
                503, error.message, "server_error", None, "bodies_full", error.retry_after_seconds
            )
        case UploadTooSlow():
            return HttpError(408, error.message, "invalid_request_error", None, "request_timeout")
        case Overloaded():
            return HttpError(
                429, error.message, "requests", None, "rate_limit_exceeded", error.retry_after_seconds
            )
        case RouterBusy():
            return HttpError(
                503, error.message, "server_error", None, "router_busy", error.retry_after_seconds
            )
        case NoReplicaAvailable():
            return HttpError(
                503, error.message, "server_error", None, "no_replica_available", error.retry_after_seconds
            )
        case GenerationFailed():
            return HttpError(500, error.message, "server_error", None, "generation_failed")
        case _:
            return HttpError(500, error.message, "server_error")


INTERNAL_ERROR = HttpError(500, "The server had an error while processing your request.", "server_error")


def method_not_allowed(method: str, path: str) -> HttpError:
    return HttpError(
        405, f"Not allowed: {method} {path}.", "invalid_request_error", None, "method_not_supported"
    )


NOT_SERVED = (
    "/v1/embeddings",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/pooling",
    "/classify",
    "/v1/audio",
    "/v1/images",
    "/v1/moderations",
    "/v1/batches",
    "/v1/files",
    "/v1/fine_tuning",
    "/v1/assistants",
    "/v1/threads",
    "/v1/vector_stores",
    "/tokenizer_info",
)
"""Routes of other servers, or what their paths begin with."""


def unknown_route(method: str, path: str) -> HttpError:
    message = f"Unknown request URL: {method} {path}."
    if any(path == known or path.startswith(known + "/") for known in NOT_SERVED):
        message += " The models that are served here generate text, and do nothing else."
    return HttpError(404, message, "invalid_request_error", None, "unknown_url")
