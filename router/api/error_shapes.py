"""ErrorShape: how an API writes an error, as an answer and in the middle of a stream; OpenAI's."""

from typing import Protocol

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
