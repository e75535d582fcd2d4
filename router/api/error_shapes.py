"""ErrorShape: how each dialect writes an error, as an answer and in the middle of a stream.

Owns which requests speak which dialect, told from their path and headers.
"""

from collections.abc import Callable
from typing import Protocol

from starlette.types import Message, Scope, Send

from router.api.anthropic.errors import ANTHROPIC_ERRORS
from router.api.gemini.errors import GEMINI_ERRORS
from router.api.gemini.paths import speaks_gemini
from router.edge.http import client_request_id
from router.edge.http_error import HttpError


class ErrorShape(Protocol):
    @property
    def request_id_headers(self) -> tuple[bytes, ...]: ...

    def status(self, error: HttpError) -> int: ...

    def body(self, error: HttpError, request_id: str | None) -> bytes: ...

    def event(self, error: HttpError, request_id: str | None) -> bytes:
        """Write the end of a failed stream."""
        ...


class OpenAiErrors:
    """Chats, plain completions, and every route that is no dialect's. No [DONE] follows an error."""

    request_id_headers = (b"x-request-id",)

    def status(self, error: HttpError) -> int:
        return error.status

    def body(self, error: HttpError, request_id: str | None) -> bytes:
        return error.body()

    def event(self, error: HttpError, request_id: str | None) -> bytes:
        return b"data: " + error.body() + b"\n\n"


OPENAI_ERRORS = OpenAiErrors()


REQUEST_ID = "kvasir.request_id"
"""Scope key of the request id, on routes that generate nothing."""

_MESSAGES = "/v1/messages"
_MODELS = "/v1/models"


def error_shape(scope: Scope) -> ErrorShape:
    path: str = scope["path"]
    if path == _MESSAGES or path.startswith(_MESSAGES + "/"):
        return ANTHROPIC_ERRORS
    if path.startswith(_MODELS) and is_for_anthropic(scope):
        return ANTHROPIC_ERRORS
    return GEMINI_ERRORS if speaks_gemini(scope) else OPENAI_ERRORS


def with_request_id(scope: Scope, send: Send, new_id: Callable[[str], str]) -> Send:
    """Sends an answer with the request's id, as those have it that generate. The scope has it, too."""
    if scope["type"] != "http":
        return send
    request_id = client_request_id(scope) or new_id("req_")
    scope[REQUEST_ID] = request_id
    headers = [(name, request_id.encode()) for name in error_shape(scope).request_id_headers]

    async def send_named(message: Message) -> None:
        if message["type"] == "http.response.start":
            have = {name.lower() for name, _ in message["headers"]}
            missing = [header for header in headers if header[0] not in have]
            message = {**message, "headers": [*message["headers"], *missing]}
        await send(message)

    return send_named


def is_for_anthropic(scope: Scope) -> bool:
    """Whether an Anthropic client asks a route that several vendors share."""
    return any(name == b"anthropic-version" for name, _ in scope["headers"])
