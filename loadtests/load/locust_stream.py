"""A client for streamed chats under gevent.

Owns its connections and their sockets: nothing is waited for but the socket, so an event's time is that of
its arrival. (Locust's own clients wait for 1,024 bytes, and time the headers of a stream.) Does not know
workloads or Locust. Connections are made before the clock of a request starts.
"""

import ssl
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

import gevent
import gevent.socket
from geventhttpclient.response import HTTPParseError, HTTPSocketResponse

from loadtests.load.streaming import MOST_IDLE_SECONDS, Answer, Reading

CONNECT_SECONDS = 10.0


class StreamClient:
    """A client with one connection to a server per request in flight."""

    def __init__(self, base_url: str) -> None:
        """Raises ValueError for what is no URL."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"a URL looks like http://host:port, not {base_url}")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._head = (
            f"POST {path} HTTP/1.1\r\nhost: {parts.netloc.rpartition('@')[2]}\r\n"
            "content-type: application/json\r\naccept: text/event-stream\r\n"
        )
        self._idle: list[tuple[gevent.socket.socket, float]] = []

    def post(
        self, body: bytes, timeout_seconds: float, headers: Mapping[str, str]
    ) -> tuple[Answer | None, str | None]:
        """Return what came of an answer, and the error, if it is not whole."""
        try:
            with gevent.Timeout(timeout_seconds):
                answer = self._exchange(body, headers)
            return answer, answer.error
        except gevent.Timeout:
            return None, "timed out"
        except ConnectionRefusedError:
            return None, "connection refused"
        except (HTTPParseError, OSError):
            return None, "connection lost"
        except ValueError:
            return None, "unreadable answer"

    def _exchange(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        sock = self._take()
        is_reusable = False
        try:
            extra = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            head = f"{self._head}{extra}content-length: {len(body)}\r\n\r\n"
            sent = time.perf_counter()
            sock.sendall(head.encode("latin-1") + body)
            response = HTTPSocketResponse(sock, method="POST")
            received = {name.lower(): value for name, value in response.items()}
            reading = Reading(response.status_code, received, sent)
            try:
                while line := response.readline(b"\n"):
                    reading.feed(line, time.perf_counter())
            except (HTTPParseError, OSError):
                return reading.answer()
            is_reusable = response.message_complete and not response.should_close()
            return reading.answer()
        finally:
            if is_reusable:
                self._idle.append((sock, time.perf_counter()))
            else:
                sock.close()

    def _take(self) -> gevent.socket.socket:
        while self._idle:
            sock, since = self._idle.pop()
            if time.perf_counter() - since < MOST_IDLE_SECONDS:
                return sock
            sock.close()
        sock = gevent.socket.create_connection((self._host, self._port), timeout=CONNECT_SECONDS)
        sock.settimeout(None)
        sock.setsockopt(gevent.socket.IPPROTO_TCP, gevent.socket.TCP_NODELAY, 1)
        return sock if self._tls is None else self._tls.wrap_socket(sock, server_hostname=self._host)

    def close(self) -> None:
        for sock, _ in self._idle:
            sock.close()
        self._idle.clear()
