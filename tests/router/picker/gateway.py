"""A gateway of our own in front of a picker: speaks Envoy's side of external processing over gRPC."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc

from router.picker.messages import DESTINATION, METHOD, SERVICE, SUBSET, SUBSET_NAMESPACE, BodyMode
from router.picker.protobuf import content, fields
from router.picker.protobuf import field as encoded

END = b""


def known(number: int, message: bytes) -> list[bytes]:
    return [content(value) for at, value in fields(message) if at == number]


def head_of(headers: Mapping[str, str], *, is_last: bool = False) -> bytes:
    listed = [encoded(1, encoded(1, name) + encoded(3, value)) for name, value in headers.items()]
    return encoded(1, b"".join(listed)) + encoded(3, is_last)


def subset_of(endpoints: Sequence[str]) -> bytes:
    values = encoded(6, b"".join(encoded(1, encoded(3, each)) for each in endpoints))
    struct = encoded(1, encoded(1, SUBSET) + encoded(2, values))
    return encoded(8, encoded(1, encoded(1, SUBSET_NAMESPACE) + encoded(2, struct)))


def _set_headers(mutation: bytes) -> dict[str, str]:
    """Those that are removed have no value."""
    pairs = [dict(fields(known(1, option)[0])) for option in known(1, mutation)]
    found = {content(pair[1]).decode(): content(pair[3]).decode() for pair in pairs}
    return found | {name.decode(): "" for name in known(2, mutation)}


@dataclass
class Told:
    """What the gateway was told of one request. `status` is that of an answer in the place of a server's."""

    headers: dict[str, str] = field(default_factory=dict)
    metadata: str | None = None
    body: bytes = b""
    has_whole_body: bool = False
    status: int | None = None
    num_messages: int = 0

    @property
    def destination(self) -> str | None:
        return self.headers.get(DESTINATION)

    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


class Asked:
    """One request at the gateway, which sends and reads by hand."""

    def __init__(self, gateway: "Gateway") -> None:
        self.told = Told()
        self.answer = b""
        self.num_answer_heads = 0
        self.num_empty_replies = 0
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._call = gateway.process(self._messages())

    async def _messages(self) -> AsyncIterator[bytes]:
        while (message := await self._outbox.get()) != END:
            yield message

    async def __aenter__(self) -> "Asked":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def send(self, message: bytes) -> None:
        self._outbox.put_nowait(message)

    def end(self) -> None:
        self._outbox.put_nowait(END)

    def leave(self) -> None:
        self._call.cancel()

    async def read(self) -> bool:
        """Take one message; False at the end."""
        message = await self._call.read()
        if message is grpc.aio.EOF:
            return False
        told = self.told
        told.num_messages += 1
        for number, value in fields(message):
            inner = content(value)
            common = next(iter(known(1, inner)), b"") if number in (1, 3, 4) else b""
            if number == 7:
                told.status = int(dict(fields(known(1, inner)[0]))[1])
                told.headers |= _set_headers(known(2, inner)[0])
                told.body = next(iter(known(3, inner)), b"")
            elif number == 8:
                (outer,) = known(1, inner)
                assert known(1, outer) == [b"envoy.lb"]
                (struct,) = known(5, known(2, outer)[0])
                (entry,) = known(1, struct)
                assert known(1, entry) == [DESTINATION.encode()]
                told.metadata = known(3, known(2, entry)[0])[0].decode()
            elif number == 2:
                self.num_answer_heads += 1
            elif common:
                for mutation in known(2, common):
                    told.headers |= _set_headers(mutation)
                self._take_body(number, known(3, common))
            elif number == 3:
                self.num_empty_replies += 1
        return True

    def _take_body(self, number: int, mutations: list[bytes]) -> None:
        for mutation in mutations:
            for at, value in fields(mutation):
                piece = dict(fields(content(value))) if at == 3 else {1: value, 2: 1}
                if number == 4:
                    self.answer += content(piece[1])
                else:
                    self.told.body += content(piece[1])
                    self.told.has_whole_body = bool(piece[2])

    async def until_decided(self) -> Told:
        while not self.told.has_whole_body and self.told.status is None and await self.read():
            pass
        return self.told

    async def answers(self, headers: Mapping[str, str], *pieces: bytes) -> bytes:
        """Have a server answer; returns what went to the client."""
        self.send(encoded(3, head_of(headers)))
        for number, piece in enumerate(pieces):
            self.send(encoded(5, encoded(1, piece) + encoded(2, number == len(pieces) - 1)))
        for _ in range(1 + len(pieces)):
            assert await self.read()
        return self.answer


def deaf_call(path: str, message: bytes) -> bytes:
    """The bytes of an HTTP/2 connection with one call, of a peer that has no room for an answer."""
    headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
    headers["content-type"] = "application/grpc"
    block = b"".join(
        b"\x00%c%b%c%b" % (len(name), name.encode(), len(value), value.encode())
        for name, value in headers.items()
    )

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload

    settings = frame(4, 0, 0, struct.pack(">HI", 4, 0))
    data = frame(0, 0, 1, b"\x00" + struct.pack(">I", len(message)) + message)
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + frame(1, 4, 1, block) + data


class Gateway:
    def __init__(self, port: int) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.process = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self.check = self._channel.unary_unary("/grpc.health.v1.Health/Check")

    async def close(self) -> None:
        await self._channel.close()

    def ask(
        self,
        path: str,
        body: Mapping[str, Any] | bytes | None,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        subset: Sequence[str] | None = None,
        request_mode: BodyMode = BodyMode.FULL_DUPLEX,
        response_mode: BodyMode = BodyMode.FULL_DUPLEX,
        piece_bytes: int = 16_000,
        is_whole: bool = True,
    ) -> Asked:
        """Begin a request; of a body that is not whole, the last piece is not the end."""
        asked = Asked(self)
        sent = {":method": method, ":path": path, ":authority": "models.example", ":scheme": "http"}
        sent |= {"content-type": "application/json", **(headers or {})}
        first = encoded(2, head_of(sent, is_last=body is None))
        modes = encoded(11, encoded(1, request_mode) + encoded(2, response_mode))
        asked.send(first + modes + (b"" if subset is None else subset_of(subset)))
        if body is not None:
            text = body if isinstance(body, bytes) else json.dumps(body).encode()
            size = len(text) if request_mode is BodyMode.BUFFERED else piece_bytes
            for start in range(0, len(text), size):
                is_last = is_whole and start + size >= len(text)
                asked.send(encoded(4, encoded(1, text[start : start + size]) + encoded(2, is_last)))
        return asked

    async def decide(self, path: str, body: Mapping[str, Any] | bytes | None, **options: Any) -> Told:
        """What it is told of a request, whose client then leaves."""
        async with self.ask(path, body, **options) as asked:
            return await asked.until_decided()
