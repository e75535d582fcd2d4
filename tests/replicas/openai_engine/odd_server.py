"""A server of chats, completions and messages that answers as oddly as the last word of the prompt asks."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USAGE = {"prompt_tokens": 9, "completion_tokens": 2}
DONE = b"data: [DONE]\n\n"


def chunk(text: str | None = None, finish: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": {"content": text} if text else {}, "finish_reason": finish}
    return {"id": "theirs", "choices": [choice], **more}


def events(*said: object) -> bytes:
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in said)


HELLO, YOU, STOP = chunk("Hello"), chunk(" you"), chunk(finish="stop")
WORDS = events(HELLO, YOU, STOP)
TOO_LONG = {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}

ALIKE: dict[str, bytes] = {
    "good": WORDS + events({"choices": [], "usage": USAGE}) + DONE,
    "no-finish": events(HELLO, YOU) + DONE,
    "finish-is-empty": events(chunk("Hello", ""), chunk(" you", "stop")) + DONE,
    "no-done": WORDS,
    "no-blank": WORDS + b"data: [DONE]\n",
    "no-line-end": WORDS + b"data: [DONE]",
    "last-event-without-blank": events(HELLO) + b"data: " + json.dumps(STOP).encode(),
    "after-the-end": WORDS + DONE + events(YOU) + DONE,
    "float-usage": WORDS + events({"choices": [], "usage": {"prompt_tokens": 9.0, "completion_tokens": 2.0}}),
    "text-usage": events(HELLO, {**STOP, "usage": {"prompt_tokens": "9", "prompt_tokens_details": "none"}}),
    "usage-is-text": events(HELLO, {**STOP, "usage": "none"}) + DONE,
    "usage-everywhere": events(*({**each, "usage": USAGE} for each in (HELLO, STOP))) + DONE,
    "usage-with-choice": WORDS + events({**chunk(), "usage": USAGE}) + DONE,
    "usage-without-choices": WORDS + events({"usage": USAGE}) + DONE,
    "usage-with-null-choices": WORDS + events({"choices": None, "usage": USAGE}) + DONE,
    "cost-after-usage": WORDS + events({"choices": [], "usage": USAGE}, {"choices": [], "cost": "1"}) + DONE,
    "odd-timings": events(HELLO, {**STOP, "timings": {"cache_n": 4.0, "prompt_n": "5", "prompt_ms": "3"}}),
    "stop-reason-is-a-number": events(HELLO, {**STOP, "stop_reason": 151645}) + DONE,
    "odd-fields": events(
        {**HELLO, "type": None, "message": "ok", "error": ""},
        {**YOU, "error": {}, "id": 7, "object": [], "delta": "x"},
        {**STOP, "error": None, "type": "chunk", "error_code": 0},
    ),
    "odd-choices": events(
        {"choices": [None, {"index": "0", "delta": None, "finish_reason": 0}]}, {"choices": "x"}, STOP
    ),
    "infinite-logprob": WORDS.replace(b'"stop"', b'"stop", "logprobs": -Infinity') + DONE,
    "half-a-character": events(HELLO).replace(b"Hello", b"\\ud83d") + events(STOP),
    "no-json": events(HELLO) + b"data: {no json}\n\n" + events(STOP) + DONE,
    "crlf": WORDS.replace(b"\n", b"\r\n"),
    "cr": WORDS.replace(b"\n", b"\r"),
    "no-space": WORDS.replace(b"data: ", b"data:"),
    "names-and-comments": b": hello\n\n" + WORDS.replace(b"data", b": x\nid: 1\nevent: message\ndata") + DONE,
    "two-lines": WORDS.replace(b'"choices"', b'\ndata: "choices"') + DONE,
    "byte-order-mark": b"\xef\xbb\xbf" + WORDS + DONE,
    "two-choices": events(HELLO, chunk("Hi", "stop", 1), STOP),
}
"""Streams that a client gets as they are, in whole events and without the usage that it did not ask for."""

CUT: dict[str, bytes] = {
    "cut": events(HELLO, YOU),
    "cut-in-an-event": events(HELLO) + b'data: {"choices": [{"ind',
    "cut-before-the-other-choice-ends": events(HELLO, chunk("Hi", "stop", 1)),
}
"""Streams whose words come, and then an error."""

INSIDE: dict[str, tuple[bytes, int, str]] = {
    "error-first": (events({"error": TOO_LONG}) + DONE, 400, "too long"),
    "error-by-code": (
        events({"error": {"message": "x", "code": "context_length_exceeded"}}),
        400,
        "x",
    ),
    "error-by-number": (b"event: error\n" + events({"error": {"message": "no", "code": 403}}), 403, "no"),
    "error-of-vllm": (
        events({"object": "error", "message": "boom", "type": "BadRequestError", "code": 400}),
        400,
        "boom",
    ),
    "error-is-a-list": (events({"error": ["a"]}), 500, '["a"]'),
    "error-without-words": (
        events({"error": {"code": "x"}}),
        500,
        '{"code": "x"}',
    ),
    "error-not-streamed": (json.dumps({"error": TOO_LONG}, indent=1).encode(), 400, "too long"),
    "empty": (b"", 500, "The generation failed on several replicas."),
    "only-done": (DONE, 500, "The generation failed on several replicas."),
    "markup": (b"<html>\n\n<p>a proxy\n\n</html>", 500, "The generation failed on several replicas."),
}
"""Answers of 200 that are errors: as what, and in which words."""

WHOLE: dict[str, object] = {
    "good": {"id": "theirs", "choices": [{"message": {"content": "Hello you"}, "finish_reason": "stop"}]},
    "no-finish": {"choices": [{"message": {"content": "Hello you"}}], "usage": {"prompt_tokens": 9.0}},
    "odd-fields": {
        "choices": [{"finish_reason": 1}],
        "error": "",
        "type": None,
        "message": "ok",
        "usage": [],
    },
    "no-choices": {"choices": []},
}

ERRORS: dict[str, tuple[int, object, dict[str, str], int]] = {
    "context": (400, {"error": {**TOO_LONG, "param": "messages", "n_ctx": 4096}}, {}, 1),
    "key": (401, {"error": {"message": "Incorrect \x1b[31m\nkey: KEY", "code": "invalid_api_key"}}, {}, 1),
    "funds": (402, {"error": {"message": "Insufficient balance"}}, {}, 1),
    "region": (403, {"error": {"message": "no", "code": "unsupported_region"}}, {}, 1),
    "gone": (404, {"error": {"message": "no such model", "code": "model_not_found"}}, {}, 1),
    "conflict": (409, {"error": {"message": "conflict"}}, {}, 1),
    "media": (415, {"error": {"message": "no", "type": "t"}}, {}, 1),
    "strict": (422, {"detail": [{"loc": ["body", "seed"], "msg": "no"}]}, {}, 1),
    "limit": (429, {"error": {"message": "Rate limit", "code": "rate"}}, {"retry-after": "7"}, 2),
    "images": (501, {"error": {"message": "no images"}}, {}, 1),
    "loading": (503, {"error": {"message": "Loading model"}}, {"retry-after": "9"}, 2),
    "full": (529, {"type": "error", "error": {"type": "overloaded_error", "message": "Full"}}, {}, 2),
    "bug": (500, {"error": {"message": "CUDA error"}}, {}, 4),
    "text": (502, "<html>Bad gateway", {}, 4),
}
"""Status, body, headers, and how often two replicas ask."""

KINDS = {"type-upper": "Text/Event-Stream; charset=UTF-8", "type-none": None, "type-text": "text/plain"}


class OddServer:
    """`names` are the models that it lists. `takes_options`: it does not refuse `stream_options`."""

    def __init__(self, name: str, *, key: str = "", takes_options: bool = True) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.name, self.key, self.takes_options = name, key, takes_options
        server = self

        class Handler(_Handler):
            odd = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    odd: OddServer

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        models = {"data": [{"id": self.odd.name, "max_model_len": 8192}]}
        self._say(200, models) if self.path == "/v1/models" else self._say(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt = body["messages"][-1]["content"] if body.get("messages") else body.get("prompt")
        if prompt is None:
            return self._say(400, {"error": {"message": "no prompt"}})
        self.odd.bodies.append(body)
        if "stream_options" in body and not self.odd.takes_options:
            extra = {"type": "extra_forbidden", "loc": ["body", "stream_options"]}
            return self._say(422, {"message": {"detail": [extra]}, "code": None})
        word = prompt.split()[-1]
        if word in ERRORS:
            status, said, headers, _ = ERRORS[word]
            if isinstance(said, str):
                return self._say(status, said.encode(), "text/html")
            told = json.dumps(said).replace("KEY", self.odd.key or "none")
            return self._say(status, told.encode(), "application/json", headers)
        if self.path == "/v1/messages":
            return self._message(word, streams=body.get("stream"))
        if not body.get("stream"):
            return self._say(200, WHOLE.get(word, WHOLE["good"]))
        if word == "error-later":
            stream = events(HELLO, {"error": {"message": "out of memory", "code": 500, "n": 1}}) + DONE
        else:
            known = {**ALIKE, **CUT, **{name: each[0] for name, each in INSIDE.items()}}
            stream = known.get(word, WORDS + DONE)
        if self.path == "/v1/completions":
            stream = stream.replace(b'"delta": {"content": ', b'"text": ').replace(b'"}, "fin', b'", "fin')
        self._say(200, stream, KINDS.get(word, "text/event-stream"))

    def _message(self, word: str, *, streams: bool) -> None:
        usage = {"input_tokens": "nine", "output_tokens": 2}
        whole = {
            "id": "msg_theirs",
            "type": "message",
            "content": [{"type": "text", "text": "hi"}],
            "usage": usage,
        }
        if not streams:
            return self._say(200, whole)
        said = [
            {"type": "message_start", "message": {"id": "msg_theirs", "usage": usage}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
            {"type": "message_delta", "delta": {"stop_reason": None}, "usage": None},
            {"type": "message_stop"},
            {"type": "ping"},
        ]
        if word == "error-later":
            said[2:] = [{"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}]
        self._say(200, b"".join(b"event: x\n" + events(each) for each in said), "text/event-stream")

    def _say(
        self,
        status: int,
        said: Any,
        kind: str | None = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {"content-type": kind, **(headers or {})}.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(said if isinstance(said, bytes) else json.dumps(said).encode())
