"""HttpError: what went wrong with a request, as every dialect's shape of it needs to know.

Owns the mapping from the router's errors to status codes, and the words for them, which are OpenAI's. How an
error is written is the dialect's: `error_shapes.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from replicas.protocol.passed_routes import ROUTES
from router.errors import (
    BodiesFull,
    BodyTooLarge,
    CacheGone,
    CachesFull,
    CachesUnavailable,
    ContextLengthExceeded,
    ErrorKind,
    Excess,
    ExplanationGone,
    GenerationFailed,
    InvalidRequest,
    LimitReached,
    NoReplicaAvailable,
    NotAllowed,
    Overloaded,
    PrefixGone,
    ResponseGone,
    ResponsesUnavailable,
    RouterBusy,
    RouterError,
    ServerRefused,
    TooLate,
    UnknownModel,
    UploadTooSlow,
    UsageUnavailable,
)

_encode = msgspec.json.Encoder().encode


class ErrorWords(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAiError(msgspec.Struct):
    error: ErrorWords


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
    is_final: bool = False
    """To ask again does not help, whatever clients make of the status."""
    theirs: bytes = b""
    """The body of the server that is asked, if that has the client's API."""

    def body(self) -> bytes:
        return self.theirs or _encode(OpenAiError(ErrorWords(self.message, self.type, self.param, self.code)))

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_seconds is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_seconds))))
            headers.append((b"retry-after-ms", b"%d" % max(1, math.ceil(self.retry_after_seconds * 1000))))
            headers.append((b"x-should-retry", b"true"))
        elif self.is_final:
            headers.append((b"x-should-retry", b"false"))
        if (
            self.status in (408, 413) or self.code == "bodies_full"
        ):  # the rest of the body would be taken for the next request
            headers.append((b"connection", b"close"))
        return headers


_INVALID, _SERVER = "invalid_request_error", "server_error"

_WORDS: Mapping[type[RouterError], tuple[int, str, str | None, str]] = {
    UnknownModel: (404, _INVALID, "model", "model_not_found"),
    CachesFull: (429, "requests", None, "caches_full"),
    CachesUnavailable: (503, _SERVER, None, "caches_unavailable"),
    NotAllowed: (403, "permission_error", None, "insufficient_permissions"),
    PrefixGone: (404, _INVALID, None, "prefix_not_found"),
    ResponseGone: (404, _INVALID, None, "response_not_found"),
    ExplanationGone: (404, _INVALID, None, "explanation_not_found"),
    ResponsesUnavailable: (503, _SERVER, None, "responses_unavailable"),
    UsageUnavailable: (503, _SERVER, None, "usage_unavailable"),
    BodyTooLarge: (413, _INVALID, None, "request_too_large"),
    BodiesFull: (503, _SERVER, None, "bodies_full"),
    UploadTooSlow: (408, _INVALID, None, "request_timeout"),
    Overloaded: (429, "requests", None, "rate_limit_exceeded"),
    RouterBusy: (503, _SERVER, None, "router_busy"),
    TooLate: (503, _SERVER, None, "too_late"),
    NoReplicaAvailable: (503, _SERVER, None, "no_replica_available"),
}
"""Status, type, field and code of errors that say nothing more than when to come back, if that."""


def http_error(error: RouterError) -> HttpError:
    words = _WORDS.get(type(error))
    if words is not None:
        return HttpError(words[0], error.message, *words[1:], getattr(error, "retry_after_seconds", None))
    match error:
        case ContextLengthExceeded():
            return HttpError(400, error.message, _INVALID, error.parameter, error.code, excess=error.excess)
        case InvalidRequest():
            return HttpError(400, error.message, _INVALID, error.parameter, error.code or "invalid_value")
        case CacheGone():
            return HttpError(404, error.message, _INVALID, error.parameter, error.code)
        case LimitReached():
            return _limit_reached(error)
        case ServerRefused(error=theirs):
            return HttpError(
                theirs.status,
                error.message,
                theirs.type or (_SERVER if theirs.status >= 500 else _INVALID),
                theirs.param,
                theirs.code,
                error.retry_after_seconds,
                is_final=error.kind is ErrorKind.FAILED,
                theirs=theirs.body,
            )
        case GenerationFailed():
            # it was tried again here
            return HttpError(500, error.message, _SERVER, None, "generation_failed", is_final=True)
        case _:
            return HttpError(500, error.message, _SERVER)


def _limit_reached(error: LimitReached) -> HttpError:
    kind = "tokens" if error.what == "tokens" else "requests"
    wait_seconds = error.retry_after_seconds
    return HttpError(
        *(429, error.message, kind, None, "rate_limit_exceeded", wait_seconds),
        is_final=wait_seconds is None,
    )


INTERNAL_ERROR = HttpError(500, "The server had an error while processing your request.", "server_error")


def method_not_allowed(method: str, path: str) -> HttpError:
    return HttpError(
        405, f"Not allowed: {method} {path}.", "invalid_request_error", None, "method_not_supported"
    )


NOT_SERVED = (
    "/v1/audio",
    "/v1/images",
    "/v1/moderations",
    "/tokenizer_info",
)
"""Routes of other servers, or what their paths begin with."""

NOT_KEPT = (
    *("/v1/batches", "/v1/files", "/v1/uploads", "/v1/fine_tuning", "/v1/assistants", "/v1/threads"),
    *("/v1/vector_stores", "/v1/messages/batches"),
)
"""Likewise, of what a vendor keeps or does later."""


def unknown_route(method: str, path: str) -> HttpError:
    message = f"Unknown request URL: {method} {path}."

    def begins_with(known: Sequence[str]) -> bool:
        return any(path == each or path.startswith(each + "/") for each in known)

    if path in ROUTES:
        message += (
            " No server here has this route: a pool of engine openai whose servers do names it in its setting"
            " routes."
        )
    elif begins_with(NOT_SERVED):
        message += " The models that are served here generate text, and do nothing else."
    elif begins_with(NOT_KEPT):
        message += " There are no batches, files, fine-tuning or assistants: send each request by itself."
    return HttpError(404, message, "invalid_request_error", None, "unknown_url")
