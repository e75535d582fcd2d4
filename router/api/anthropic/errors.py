"""Anthropic's shape of errors.

Owns their types, which go by the status, their sentences, which begin with the path of the field, and the
code that these clients act on. What is busy or has no replica is overloaded to these clients, who know 529
for it and try again.
"""

import re

from msgspec import UNSET, Struct, UnsetType

from router.api.json_body import encode_json
from router.edge.http_error import HttpError

OVERLOADED = 529

NO_THREADS = "thread_unsupported_request"
"""The code by which Anthropic's runners of tools know that they have to send whole conversations."""

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}

_INDEX = re.compile(r"\[(\d+)\]")


class ErrorDetails(Struct):
    error_code: str


class AnthropicErrorWords(Struct):
    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET


class AnthropicError(Struct, tag="error"):
    error: AnthropicErrorWords
    request_id: str | None


class AnthropicErrors:
    request_id_headers = (b"request-id", b"x-request-id")

    def status(self, error: HttpError) -> int:
        return OVERLOADED if error.status == 503 and not error.theirs else error.status

    def body(self, error: HttpError, request_id: str | None) -> bytes:
        if error.theirs:
            return error.theirs
        status = self.status(error)
        kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        details = ErrorDetails(NO_THREADS) if error.code == NO_THREADS else UNSET
        return encode_json(AnthropicError(AnthropicErrorWords(kind, _message(error), details), request_id))

    def event(self, error: HttpError, request_id: str | None) -> bytes:
        return b"event: error\ndata: " + self.body(error, request_id) + b"\n\n"


ANTHROPIC_ERRORS = AnthropicErrors()


def _message(error: HttpError) -> str:
    if error.excess is not None:  # coding agents know this sentence, and compact the conversation
        num_tokens, context_length = error.excess
        return f"prompt is too long: {num_tokens} tokens > {context_length} maximum"
    if error.param is None:
        return error.message
    message = "Field required" if error.code == "missing_required_parameter" else error.message
    return _INDEX.sub(r".\1", error.param) + ": " + message
