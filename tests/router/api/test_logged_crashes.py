"""A crash in the middle of a request is logged, without a word of the client's."""

import json
import logging
from collections.abc import Iterator

import httpx
import pytest

from replicas.process.logs import TEXT_FORMAT, JsonFormatter, TextFormatter
from router.observation.access_log import AccessLog
from router.prompt.tokenizer import Tokenizer
from tests.router.http_server import HttpServer

MARKER = "zebrafalcon"
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": MARKER}],
    "user": MARKER,
    "cache_salt": MARKER,
    "prompt_cache_key": MARKER,
}


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture(params=["text", "json"])
def log(request: pytest.FixtureRequest) -> Iterator[Log]:
    handler = Log()
    handler.setFormatter(JsonFormatter({}) if request.param == "json" else TextFormatter(TEXT_FORMAT))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    for name in ("httpx", "httpcore"):  # the test's own client, which is no part of a router
        logging.getLogger(name).setLevel(logging.WARNING)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def crash(*_: object, **__: object) -> None:
    try:
        raise KeyError(MARKER)
    except KeyError as error:
        raise RuntimeError(f"cannot make sense of {MARKER}") from error


async def test_a_crash_while_an_answer_is_made_is_logged_with_its_request_and_its_place(
    server: HttpServer, http: httpx.AsyncClient, log: Log
) -> None:
    server.context.add(AccessLog())
    server.dispatcher.script = lambda generation: [RuntimeError(MARKER)]
    answer = await http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "the-one"})
    assert answer.status_code == 500
    (crashed,) = [line for line in log.lines if "a request failed" in line]
    assert "the-one" in crashed and "RuntimeError" in crashed and "scripted_dispatch.py" in crashed
    (ended,) = [line for line in log.lines if "router.observation.access_log" in line]
    assert "the-one" in ended and "InternalError" in ended
    assert MARKER not in "\n".join(log.lines)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "tiny", "prompt": MARKER}),
        ("/tokenize", {"model": "tiny", "prompt": MARKER}),
        ("/explain/v1/chat/completions", CHAT),
    ],
)
async def test_a_crash_in_the_tokenizer_is_logged_without_the_text(
    server: HttpServer,
    http: httpx.AsyncClient,
    log: Log,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, object],
) -> None:
    for name in ("encode", "encode_segments", "encode_ordinary"):
        if hasattr(Tokenizer, name):
            monkeypatch.setattr(Tokenizer, name, crash)
    answer = await http.post(path, json=body)
    assert answer.status_code == 500
    text = "\n".join(log.lines)
    assert "RuntimeError" in text and "test_logged_crashes.py" in text
    assert MARKER not in text


async def test_the_line_of_a_request_says_what_became_of_it(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    handler = Log()
    handler.setFormatter(JsonFormatter({}))
    logger = logging.getLogger("router.observation.access_log")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    server.context.add(AccessLog())
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    await http.post("/v1/chat/completions", json={**CHAT, "model": MARKER}, headers={"traceparent": parent})
    logger.removeHandler(handler)
    entry = json.loads(handler.lines[0])
    assert entry["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert (entry["route"], entry["model"], entry["status"]) == ("chat_completions", None, 404)
    assert (entry["error"], entry["replica"], entry["output_tokens"]) == ("UnknownModel", None, 0)
    assert entry["ended_ms"] > 0
