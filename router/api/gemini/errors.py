"""Errors as Gemini's clients read them.

Owns Google's words for what went wrong. The field that is to blame stands where Google's services name it, in
a detail of its own.
"""

from typing import Any

from router.api.json_body import encode_json
from router.edge.http_error import HttpError

_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_OTHER = "INTERNAL"


class GeminiErrors:
    request_id_headers = (b"x-request-id",)

    def status(self, error: HttpError) -> int:
        return error.status

    def body(self, error: HttpError, request_id: str | None) -> bytes:
        words: dict[str, Any] = {
            "code": error.status,
            "message": error.message,
            "status": _STATUS.get(error.status, _OTHER),
        }
        if details := _details(error):
            words["details"] = details
        return encode_json({"error": words})

    def event(self, error: HttpError, request_id: str | None) -> bytes:
        return b"data: " + self.body(error, request_id) + b"\n\n"


def _details(error: HttpError) -> list[dict[str, Any]]:
    details: list[dict[str, Any]] = []
    if error.code is not None:
        details.append(
            {
                "@type": "type.googleapis.com/google.rpc.ErrorInfo",
                "reason": error.code.upper(),
                "domain": "kvasir",
            }
        )
    if error.param is not None:
        violation = {"field": error.param, "description": error.message}
        details.append({"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]})
    if error.retry_after_seconds is not None:
        details.append(
            {
                "@type": "type.googleapis.com/google.rpc.RetryInfo",
                "retryDelay": f"{error.retry_after_seconds:g}s",
            }
        )
    return details


GEMINI_ERRORS = GeminiErrors()
