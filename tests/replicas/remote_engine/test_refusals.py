"""Errors of servers: what they mean, what a client gets of them, and what is logged."""

import json
import logging
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from replicas.protocol.frames import MAX_ERROR_BYTES, BodyForm, Refusal, RefusalCode, ServerError
from replicas.remote_engine.refusals import RefusalLog, refusal_of

INVALID, BUSY, BROKEN = RefusalCode.INVALID_REQUEST, RefusalCode.OVERLOADED, RefusalCode.INTERNAL


@pytest.mark.parametrize(
    ("said", "status", "code", "told", "message"),
    [
        ({"error": {"message": "no", "type": "t", "code": "c", "param": "p"}}, 400, INVALID, 400, "no"),
        ({"error": "Unauthorized"}, 401, INVALID, 401, "Unauthorized"),
        ({"detail": "Not Found"}, 404, INVALID, 404, "Not Found"),
        ({"message": {"detail": [1]}}, 422, INVALID, 422, '{"detail": [1]}'),
        ({"error": {"message": "x" * 9000}}, 413, INVALID, 413, "x" * 2000),
        ({"error": {"message": "\ud83d"}}, 400, INVALID, 400, "?"),
        ({"error": {"message": "a\nb\x1b[1m\u202ec", "type": "d\te"}}, 400, INVALID, 400, "a b [1m c"),
        ({"error": {}}, 501, INVALID, 501, '{"error": {}}'),
        ([], 505, INVALID, 505, "the server answers 505: '[]'"),
        ({"error": {"message": "later"}}, 429, BUSY, 429, "later"),
        ({"error": {"message": "later"}}, 529, BUSY, 529, "later"),
        ({"error": {"message": "bug"}}, 500, BROKEN, 500, "bug"),
        ({"error": {"message": "no", "code": "404"}}, 200, INVALID, 404, "no"),
        ({"error": {"message": "no", "code": 200, "type": "rate_limit_error"}}, 200, BUSY, 429, "no"),
        ({"error": {"message": "no", "code": [], "type": {}}}, 200, BROKEN, 500, "no"),
        ({"type": "error", "message": "no", "status": 503}, 200, BUSY, 503, "no"),
    ],
)
def test_an_error_is_read(said: object, status: int, code: RefusalCode, told: int, message: str) -> None:
    refusal = refusal_of(json.dumps(said).encode(), status)
    assert refusal.error is not None
    assert (refusal.code, refusal.error.status, refusal.message) == (code, told, message)


@pytest.mark.parametrize(("said", "status"), [({"detail": "x"}, 200), ({"error": {}}, 200), ({}, 307)])
def test_what_is_no_error_is_no_answer_either(said: object, status: int) -> None:
    refusal = refusal_of(json.dumps(said).encode(), status)
    assert refusal == Refusal(BROKEN, f"the server answers {status}, and this is no answer")


@pytest.mark.parametrize(
    ("form", "said", "passes"),
    [
        (BodyForm.CHAT, {"error": {"message": "no", "n_ctx": 5}}, True),
        (BodyForm.COMPLETION, {"type": "error", "error": {"type": "t", "message": "no"}}, True),
        (BodyForm.CHAT, {"error": "no"}, False),
        (BodyForm.CHAT, {"detail": "no"}, False),
        (BodyForm.CHAT, {"error": {"message": "no", "more": "x" * MAX_ERROR_BYTES}}, False),
        (BodyForm.MESSAGES, {"type": "error", "error": {"type": "t", "message": "no"}}, True),
        (BodyForm.MESSAGES, {"error": {"type": "t", "message": "no"}}, False),
        (None, {"error": {"message": "no"}}, False),
    ],
)
def test_an_error_in_the_clients_form_passes_whole(form: BodyForm | None, said: Any, passes: bool) -> None:
    error = refusal_of(json.dumps(said, indent=1).encode(), 400, form=form).error
    assert error is not None
    assert error.body == (json.dumps(said, separators=(",", ":")).encode() if passes else b"")


@pytest.mark.parametrize(
    ("told", "least", "most"),
    [
        ("7", 7, 7),
        ("0.5", 0.5, 0.5),
        (format_datetime(datetime.now(UTC) + timedelta(minutes=9), usegmt=True), 400, 600),
        ("Sat, 01 Jan 2000 00:00:00 GMT", 0, 0),
        *((each, None, None) for each in ("-1", "nan", "inf", "1e99", "soon", "", "99 Foo 9999")),
    ],
)
def test_the_time_to_come_back_is_read(told: str, least: float | None, most: float | None) -> None:
    error = refusal_of(b"{}", 429, told).error
    assert error is not None
    seconds = error.retry_after_seconds
    assert seconds is None if least is None or most is None else least <= (seconds or 0) <= most


def test_one_line_a_second_of_each_status_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([5.0] * 3 + [5.5] * 3 + [6.5] * 3)
    log = RefusalLog(logging.getLogger("replicas.test"), clock=lambda: next(times))
    for _ in range(3):
        for status in (400, 401):
            words = "a client's\n" if status == 400 else "a wrong key\n" + "x" * 2000
            log.say(Refusal(INVALID, words, ServerError(status, code="c\n")), "req_1")
        log.say(Refusal(BROKEN, "the server's answer breaks off"), "req_2")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 6 and lines[:3] == lines[3:]
    assert lines[0] == r"the server refuses a request status=400 code='c\n' request_id=req_1 words=None"
    assert r"words='a wrong key\nxxx" in lines[1] and len(lines[1]) < 500
    assert "req_2" in lines[2] and "breaks off" in lines[2]
