"""Errors as Gemini's clients read them.

Owns Google's words for what went wrong. The field that is to blame stands where Google's services name it, in
a detail of its own.
"""

from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

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


class FieldViolation(Struct):
    field: str
    description: str


class GeminiErrorDetail(Struct, rename="camel", kw_only=True):
    type: str = field(name="@type")
    reason: str | UnsetType = UNSET
    domain: str | UnsetType = UNSET
    field_violations: list[FieldViolation] | UnsetType = UNSET
    retry_delay: str | UnsetType = UNSET


class GeminiErrorWords(Struct):
    code: int
    message: str
    status: str
    details: list[GeminiErrorDetail] | UnsetType = UNSET


class GeminiError(Struct):
    error: GeminiErrorWords


class GeminiErrors:
    request_id_headers = (b"x-request-id",)

    def status(self, error: HttpError) -> int:
        return error.status

    def body(self, error: HttpError, request_id: str | None) -> bytes:
        status = _STATUS.get(error.status, _OTHER)
        return encode_json(
            GeminiError(GeminiErrorWords(error.status, error.message, status, _details(error) or UNSET))
        )

    def event(self, error: HttpError, request_id: str | None) -> bytes:
        return b"data: " + self.body(error, request_id) + b"\n\n"


def _details(error: HttpError) -> list[GeminiErrorDetail]:
    details: list[GeminiErrorDetail] = []
    if error.code is not None:
        details.append(_detail("ErrorInfo", reason=error.code.upper(), domain="kvasir"))
    if error.param is not None:
        violation = FieldViolation(error.param, error.message)
        details.append(_detail("BadRequest", field_violations=[violation]))
    if error.retry_after_seconds is not None:
        details.append(_detail("RetryInfo", retry_delay=f"{error.retry_after_seconds:g}s"))
    return details


def _detail(kind: str, **fields: Any) -> GeminiErrorDetail:
    return GeminiErrorDetail(type=f"type.googleapis.com/google.rpc.{kind}", **fields)


GEMINI_ERRORS = GeminiErrors()
