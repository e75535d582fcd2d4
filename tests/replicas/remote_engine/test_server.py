"""HTTP with one server: keys stay out of errors, cookies out of requests."""

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from replicas.errors import StartupError
from replicas.remote_engine.facts import CacheSizes, ServerModel
from replicas.remote_engine.server import Ended, Sent, Server, Unreachable
from replicas.remote_engine.vllm_dialect import VllmDialect

KEY = "a-key-of-the-server"
DIALECT = VllmDialect(ServerModel("served", "/models/toy", 512, ()), CacheSizes(16, 24, 16), None, 0)


class RawServer:
    """Answers every request on a connection with these bytes, and keeps what was asked."""

    def __init__(self, answer: bytes) -> None:
        self.asked: list[bytes] = []
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while asked := connection.recv(2**16):
                self.asked.append(asked)
                connection.sendall(self._answer)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def news() -> queue.Queue[Any]:
    return queue.Queue()


@contextmanager
def served(answer: bytes, news: queue.Queue[Any]) -> Iterator[tuple[RawServer, Server]]:
    raw = RawServer(answer)
    server = Server(raw.url, key=KEY, rank=None, tell=news.put)
    server.speak(DIALECT)
    server.start()
    yield raw, server
    server.close()
    raw.close()


def next_of(kind: type, news: queue.Queue[Any]) -> Any:
    while not isinstance(found := news.get(timeout=10), kind):
        pass
    return found


def test_an_answer_that_is_no_http_is_told_without_the_key(news: queue.Queue[Any]) -> None:
    with served(b"neither HTTP nor anything else\r\n\r\n", news) as (raw, server):
        looked: Unreachable = next_of(Unreachable, news)
        server.submit("a", Sent({"prompt": [1]}, lambda event: None, 100, 100))  # type: ignore[arg-type, return-value]
        ended: Ended = next_of(Ended, news)
        assert ended.refusal is not None and "breaks off" in ended.refusal.message
        assert KEY.encode() in raw.asked[0]
        assert KEY not in looked.reason + ended.refusal.message
        assert not looked.is_refused


@pytest.mark.parametrize(
    "said",
    [
        *(f'{{"error": {{"message": "no {KEY}"}}}}', f"<html>Bearer {KEY}", '{"error": {"message": "\xff"}}'),
        *("x" * 190 + KEY, "x" * 170 + KEY[:-2]),
    ],
)
def test_a_server_that_says_with_which_key_it_was_asked_is_told_without_it(
    said: str, news: queue.Queue[Any]
) -> None:
    body = said.encode("latin-1")
    answer = b"HTTP/1.1 401 No\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    with served(answer, news) as (raw, server):
        server.submit("a", Sent({"prompt": [1]}, lambda event: None, 100, 100))  # type: ignore[arg-type, return-value]
        ended: Ended = next_of(Ended, news)
        assert ended.refusal is not None and ended.refusal.error is not None
        assert ended.refusal.error.status == 401
        asking = Server(raw.url, key=KEY, rank=None, tell=news.put)
        with pytest.raises(StartupError, match="answers 401") as refused:
            asking.ask("/v1/models")
        asking.close()
        assert KEY[:6] not in f"{ended.refusal.message}{refused.value}"


def test_a_head_that_quotes_the_key_is_told_without_it(news: queue.Queue[Any]) -> None:
    with served(f"HTTP/1.1 200 OK\r\nbad {KEY}: \x01\r\n\r\n".encode(), news) as (_, server):
        server.submit("a", Sent({"prompt": [1]}, lambda event: None, 100, 100))  # type: ignore[arg-type, return-value]
        ended: Ended = next_of(Ended, news)
        assert ended.refusal is not None and "***" in ended.refusal.message
        assert KEY not in ended.refusal.message + next_of(Unreachable, news).reason
        assert ended.refusal.message.isprintable()


def test_cookies_are_not_sent_back(news: queue.Queue[Any]) -> None:
    answer = b"HTTP/1.1 200 OK\r\nset-cookie: who=me\r\ncontent-length: 0\r\n\r\n"
    with served(answer, news) as (raw, _):
        next_of(Unreachable, news)
        next_of(Unreachable, news)
        assert len(raw.asked) == 2 and not [each for each in raw.asked if b"cookie" in each.lower()]
