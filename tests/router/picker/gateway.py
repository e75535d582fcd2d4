"""A gateway of our own in front of a picker: speaks Envoy's side of external processing over gRPC."""

import asyncio
import dataclasses
import json
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from router.picker import ext_proc_pb2 as pb
from router.picker.messages import DESTINATION, METHOD, SERVICE, SUBSET, SUBSET_NAMESPACE, BodyMode

END = b""


def head_of(headers: Mapping[str, str], *, is_last: bool = False) -> pb.Headers:
    listed = pb.HeaderMap()
    for name, value in headers.items():
        listed.headers.add(key=name.encode(), raw_value=value.encode())
    return pb.Headers(headers=listed.SerializeToString(), end_of_stream=is_last)


def subset_of(endpoints: Sequence[str]) -> bytes:
    metadata = pb.Metadata()
    value = metadata.filter_metadata[SUBSET_NAMESPACE].fields[SUBSET]
    value.list_value.SetInParent()
    for each in endpoints:
        value.list_value.values.add(string_value=each)
    encoded: bytes = metadata.SerializeToString()
    return encoded


def field(number: int, value: bytes) -> bytes:
    """Encode a field of bytes by hand, also in an order or number that no library makes."""
    size = len(value)
    length = bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return b"%c%b%c%b" % (number << 3 | 2, length, size, value)


def _set_headers(mutation: pb.HeaderMutation) -> dict[str, str]:
    """Those that are removed have no value."""
    found = {each.header.key.decode(): each.header.raw_value.decode() for each in mutation.set_headers}
    return found | {name.decode(): "" for name in mutation.remove_headers}


@dataclass
class Told:
    """What the gateway was told of one request. `status` is that of an answer in the place of a server's."""

    headers: dict[str, str] = dataclasses.field(default_factory=dict)
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

    def say(self, **parts: Any) -> None:
        self.send(pb.Request(**parts).SerializeToString())

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
        response = pb.Response.FromString(message)
        for namespace, value in response.dynamic_metadata.fields.items():
            assert namespace == "envoy.lb" and list(value.struct_value.fields) == [DESTINATION]
            told.metadata = value.struct_value.fields[DESTINATION].string_value
        name = response.WhichOneof("response")
        answer = getattr(response, name)
        if name == "immediate_response":
            told.status, told.body = answer.status.code, answer.body
            told.headers |= _set_headers(answer.headers)
            return True
        self.num_answer_heads += name == "response_headers"
        told.headers |= _set_headers(answer.response.header_mutation)
        mutation, streamed = answer.response.body_mutation, answer.response.body_mutation.streamed_response
        if name == "response_body":
            self.answer += streamed.body
        elif answer.response.HasField("body_mutation"):
            is_streamed = mutation.HasField("streamed_response")
            told.body += streamed.body if is_streamed else mutation.body
            told.has_whole_body = streamed.end_of_stream or not is_streamed
        elif name == "request_body":
            self.num_empty_replies += not answer.HasField("response")
        return True

    async def until_decided(self) -> Told:
        while not self.told.has_whole_body and self.told.status is None and await self.read():
            pass
        return self.told

    async def answers(self, headers: Mapping[str, str], *pieces: bytes) -> bytes:
        """Have a server answer; returns what went to the client."""
        self.say(response_headers=head_of(headers))
        for number, piece in enumerate(pieces):
            self.say(response_body=pb.Body(body=piece, end_of_stream=number == len(pieces) - 1))
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
        asked.say(
            request_headers=head_of(sent, is_last=body is None),
            protocol_config=pb.Modes(request_body_mode=request_mode, response_body_mode=response_mode),
            metadata_context=b"" if subset is None else subset_of(subset),
        )
        if body is not None:
            text = body if isinstance(body, bytes) else json.dumps(body).encode()
            size = len(text) if request_mode is BodyMode.BUFFERED else piece_bytes
            for start in range(0, len(text), size):
                is_last = is_whole and start + size >= len(text)
                asked.say(request_body=pb.Body(body=text[start : start + size], end_of_stream=is_last))
        return asked

    async def decide(self, path: str, body: Mapping[str, Any] | bytes | None, **options: Any) -> Told:
        """What it is told of a request, whose client then leaves."""
        async with self.ask(path, body, **options) as asked:
            return await asked.until_decided()
