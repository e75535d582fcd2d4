"""refusal_of(): a server's error, by its status or inside an answer, for the router and the client.

Owns the errors that are tried elsewhere, and what of them is logged.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from replicas.protocol.bounds import MAX_MESSAGE_CHARACTERS, MAX_NAME_CHARACTERS, shown
from replicas.protocol.frames import (
    MAX_ERROR_BYTES,
    MAX_RETRY_AFTER_SECONDS,
    BodyForm,
    Refusal,
    RefusalCode,
    ServerError,
)

BUSY = (429, 503, 529)
SAME_EVERYWHERE = (501, 505)
"""Statuses of a server's that are the request's doing, though they are above 499."""
QUOTING = (400, 422)
"""Statuses whose words may quote the client, so they are not logged."""

_STATUSES: Mapping[str, int] = {
    "invalid_request_error": 400,
    "context_length_exceeded": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "overloaded_error": 529,
}
"""Meaning of the types and codes of errors that come without a status."""

LOG_SECONDS = 1.0


def refusal_of(
    content: bytes, status: int, retry_after: str | None = None, form: BodyForm | None = None
) -> Refusal:
    """Read an error's body, an answer of 200 that is none, or an event that is an error. `form` is the form
    of the client's API, if it is that of the server."""
    said = parsed(content)
    error = problem_in(said)
    if not 400 <= status < 600:
        if error is None:
            return Refusal(RefusalCode.INTERNAL, f"the server answers {status}, and this is no answer")
        status = _status_in(error)
    error = error or (said if isinstance(said, dict) else {})
    words = ServerError(
        status,
        _word(error.get("type")),
        _word(error.get("param")),
        _word(error.get("code")),
        _seconds(retry_after),
        _body(said) if _is_of_form(form, said) else b"",
    )
    message = _message(error) or f"the server answers {status}: {_beginning(content)}"
    return Refusal(_code_of(status), message, words)


def words_of(content: bytes) -> str:
    """Return the words of an error, else the beginning of what came."""
    said = parsed(content)
    return _message(problem_in(said) or {}) or _beginning(content)


def parsed(content: bytes) -> Any:
    """Return what JSON says; None for what is none. Python's `NaN` and halves of characters are read too."""
    for decode in (msgspec.json.decode, json.loads):  # the second is slower, and reads more
        with suppress(msgspec.MsgspecError, ValueError, RecursionError):
            return decode(content)
    return None


def problem_in(said: Any) -> dict[str, Any] | None:
    """Return the error in a server's answer, or in an event of one. An empty error is none."""
    if not isinstance(said, dict):
        return None
    error = said.get("error")
    if isinstance(error, dict) and any(error.values()):
        return error
    if isinstance(error, str | list) and error:
        return {"message": error}
    return said if "error" in (said.get("object"), said.get("type")) else None


class RefusalLog:
    """Logs what servers refuse: at most a line each second of each status."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._said_at: dict[int, float] = {}

    def say(self, refusal: Refusal, request_id: str) -> None:
        error, now = refusal.error, self._clock()
        status = 0 if error is None else error.status
        if now - self._said_at.get(status, -LOG_SECONDS) < LOG_SECONDS:
            return
        self._said_at[status] = now
        if error is None:
            self._logger.warning(
                "the server fails a request request_id=%s reason=%s", request_id, shown(refusal.message)
            )
            return
        words = error.type if status in QUOTING else refusal.message
        self._logger.warning(
            "the server refuses a request status=%d code=%s request_id=%s words=%s",
            *(status, shown(error.code), request_id, shown(words)),
        )


def _code_of(status: int) -> RefusalCode:
    if status in BUSY:
        return RefusalCode.OVERLOADED
    is_its_fault = status >= 500 and status not in SAME_EVERYWHERE
    return RefusalCode.INTERNAL if is_its_fault else RefusalCode.INVALID_REQUEST


def _status_in(error: Mapping[str, Any]) -> int:
    """Return the status that an error names; 500 for one that names none."""
    told = [str(error.get(name)) for name in ("code", "status", "status_code", "type")]
    numbers = [int(each) for each in told if len(each) == 3 and each.isdecimal()]
    names = [_STATUSES[each] for each in told if each in _STATUSES]
    return next((each for each in (*numbers, *names) if 400 <= each < 600), 500)


def _is_of_form(form: BodyForm | None, said: Any) -> bool:
    error = said.get("error") if isinstance(said, dict) else None
    if form is None or not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return False
    has_type = said.get("type") == "error" and isinstance(error.get("type"), str)
    return has_type or form is not BodyForm.MESSAGES


def _message(error: Mapping[str, Any]) -> str:
    message = error.get("message") or error.get("detail") or error.get("msg")
    if message is None and error:
        message = error
    if message and not isinstance(message, str):
        message = json.dumps(message)
    return in_one_line(message or "")


def _beginning(content: bytes) -> str:
    return shown(content[:200].decode(errors="replace"))


def _word(value: object) -> str | None:
    return in_one_line(value)[:MAX_NAME_CHARACTERS] if isinstance(value, str) and value else None


def in_one_line(text: str) -> str:
    """Cut a server's words and replace what cannot be printed: line ends, escape codes, and halves of
    characters, which JSON can name and UTF-8 cannot."""
    text = text[:MAX_MESSAGE_CHARACTERS].encode(errors="replace").decode()
    return "".join(each if each.isprintable() else " " for each in text)


def _body(said: Any) -> bytes:
    """Write it in one line, as an event needs it; empty if it is too long."""
    body = json.dumps(said, separators=(",", ":")).encode()
    return body if len(body) <= MAX_ERROR_BYTES else b""


def _seconds(retry_after: str | None) -> float | None:
    """Read the header's seconds or its time."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
        except (ValueError, OverflowError):
            return None
    return seconds if 0.0 <= seconds <= MAX_RETRY_AFTER_SECONDS else None
