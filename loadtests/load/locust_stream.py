"""A client for streamed chats under gevent, which times them.

Owns the connections and the timing of one answer: nothing is waited for but the socket, so an event's time is
that of its arrival. (Locust's own clients wait for 1,024 bytes, and time the headers of a stream.) Does
not know workloads or Locust.

Times are of this process's clock, in seconds. Connections are made before the clock of a request starts.
"""

import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import gevent
import gevent.socket
import msgspec
from geventhttpclient.response import HTTPConnectionClosed, HTTPParseError, HTTPSocketResponse

from loadtests.load.records import Usage, refusal

MOST_IDLE_SECONDS = 1.0
"""Servers close idle connections; one that is younger than this is certainly still there."""
CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One answer, good or bad. What never came is None."""

    sent_seconds: float
    token_seconds: tuple[float, ...]
    """Times of the events with tokens."""
    done_seconds: float
    error: str | None
    """The error, in a word or two."""
    headers: dict[str, str]
    response_id: str | None
    usage: Usage


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None

    def carries_tokens(self) -> bool:
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class _Event(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class StreamClient:
    """A client with one connection to a server per request in flight."""

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        """Raises ValueError for what is no URL."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"a URL looks like http://host:port, not {base_url}")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        own = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._head = (
            f"POST {path} HTTP/1.1\r\nhost: {parts.netloc.rpartition('@')[2]}\r\n"
            f"content-type: application/json\r\naccept: text/event-stream\r\n{own}"
        )
        self._idle: list[tuple[gevent.socket.socket, float]] = []

    def send(self, body: bytes, timeout_seconds: float, extra_headers: Mapping[str, str]) -> ChatAnswer:
        """Whatever goes wrong is in the answer, not raised."""
        reading = _Reading()
        try:
            with gevent.Timeout(timeout_seconds):
                self._exchange(body, extra_headers, reading)
        except gevent.Timeout:
            reading.error = "timed out"
        except ConnectionRefusedError:
            reading.error = "connection refused"
        except (HTTPParseError, HTTPConnectionClosed, OSError):
            reading.error = "truncated" if reading.status is not None else "connection lost"
        except (ValueError, msgspec.MsgspecError):
            reading.error = "unreadable answer"
        return reading.answer()

    def _exchange(self, body: bytes, extra_headers: Mapping[str, str], reading: "_Reading") -> None:
        sock = self._take()
        is_reusable = False
        try:
            extra = "".join(f"{name}: {value}\r\n" for name, value in extra_headers.items())
            head = f"{self._head}{extra}content-length: {len(body)}\r\n\r\n"
            reading.sent_seconds = time.perf_counter()
            sock.sendall(head.encode("latin-1") + body)
            response = HTTPSocketResponse(sock, method="POST")
            reading.read(response)
            is_reusable = response.message_complete and not response.should_close()
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


class _Reading:
    """One answer so far."""

    def __init__(self) -> None:
        self.sent_seconds = time.perf_counter()
        self.status: int | None = None
        self.error: str | None = None
        self._headers: dict[str, str] = {}
        self._token_seconds: list[float] = []
        self._response_id: str | None = None
        self._usage: Usage | None = None

    def read(self, response: HTTPSocketResponse) -> None:
        """To its end. Sets `error` where the server says so, or leaves out the end."""
        self.status = response.status_code
        self._headers = {name.lower(): value for name, value in response.items()}
        if self.status != 200:
            self.error = refusal(self.status)
            response.read()
            return
        is_whole = False
        while line := response.readline(b"\n"):
            if not line.startswith(b"data:"):
                continue
            now = time.perf_counter()
            data = bytes(line[5:]).strip()
            if data == b"[DONE]":
                is_whole = True
            else:
                self._take_event(_decode(data), now)
        if self.error is None and not is_whole:
            self.error = "truncated"

    def _take_event(self, event: _Event, now: float) -> None:
        if any(choice.carries_tokens() for choice in event.choices):
            self._token_seconds.append(now)
        if event.usage is not None:
            self._usage = event.usage
        if event.error is not None:
            self.error = "failed"
        if self._response_id is None:
            self._response_id = event.id

    def answer(self) -> ChatAnswer:
        return ChatAnswer(
            sent_seconds=self.sent_seconds,
            token_seconds=tuple(self._token_seconds),
            done_seconds=time.perf_counter(),
            error=self.error,
            headers=self._headers,
            response_id=self._response_id,
            usage=self._usage or Usage(),
        )
