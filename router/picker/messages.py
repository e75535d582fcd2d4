"""Messages of `envoy.service.ext_proc.v3.ExternalProcessor`: what a gateway says, and what it is told.

Pure. Owns the names that the endpoint-picker protocol of the Gateway API Inference Extension gives to headers
and metadata. `ext_proc.proto` has the fields that are used; others are skipped.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from google.protobuf.message import DecodeError

from router.picker import ext_proc_pb2 as pb

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD = "Process"

DESTINATION = "x-gateway-destination-endpoint"
DESTINATION_NAMESPACE = "envoy.lb"
SUBSET = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"

_OVERWRITE = 2
"""Envoy's number for setting a header, whether it was there or not."""

PIECE_BYTES = 62_000
"""Most bytes of a body in one message."""

FIRST_BYTES = 256 * 1024
"""Most bytes of a message without a body: headers, a subset and what is not read."""
MOST_HEAD_BYTES = 64 * 1024
"""Most bytes of its headers, as at the HTTP port. Envoy's own limit is 60 KiB."""
MOST_HEADERS = 256
"""Headers of one head. Envoy's own limit is 100."""
MOST_ENDPOINTS = 4096
"""Entries of a subset."""

Header = tuple[bytes, bytes]
Change = tuple[bytes, bytes | None]
"""A header to set, or without a value to remove."""


class BodyMode(enum.IntEnum):
    """How the gateway sends a body, in Envoy's numbers."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX = 4
    GRPC = 5


class Head(msgspec.Struct, frozen=True):
    """Headers of the request or of its response. Pseudo headers begin with a colon. `is_last`: no body
    follows."""

    headers: Sequence[Header]
    is_last: bool

    def value(self, name: bytes) -> bytes | None:
        return next((value for each, value in self.headers if each == name), None)


class Body(msgspec.Struct, frozen=True):
    content: bytes
    is_last: bool


class Trailers(msgspec.Struct, frozen=True):
    """The end of a body."""


class Message(msgspec.Struct, frozen=True):
    """One message of the gateway. `subset` are the only endpoints that may be chosen; None: all may. The
    modes come with the first message, from gateways that send them."""

    part: Head | Body | Trailers
    is_response: bool
    subset: frozenset[str] | None = None
    request_mode: BodyMode = BodyMode.FULL_DUPLEX
    response_mode: BodyMode = BodyMode.FULL_DUPLEX


_PARTS: Mapping[int, tuple[type[Head | Body | Trailers], bool]] = {
    2: (Head, False),
    3: (Head, True),
    4: (Body, False),
    5: (Body, True),
    6: (Trailers, False),
    7: (Trailers, True),
}
_METADATA, _MODES = 8, 11


def decode(encoded: bytes) -> Message:
    """Decode a message in time and memory that grow with its bytes alone. Raises ValueError."""
    try:
        return _decoded(encoded)
    except DecodeError as error:
        raise ValueError("a message is not of this protocol") from error


def _decoded(encoded: bytes) -> Message:
    part: Head | Body | Trailers | None = None
    is_response = False
    subset: frozenset[str] | None = None
    modes = BodyMode.FULL_DUPLEX, BodyMode.FULL_DUPLEX
    for descriptor, value in pb.Request.FromString(encoded).ListFields():
        number = descriptor.number
        if number in _PARTS:
            if part is not None:
                raise ValueError("a message has two parts")
            kind, is_response = _PARTS[number]
            if kind is Body:
                part = Body(value.body, value.end_of_stream or value.end_of_stream_without_message)
            elif len(encoded) > FIRST_BYTES:
                raise ValueError(f"a message without a body has more than {FIRST_BYTES} bytes")
            else:
                part = _head(value) if kind is Head else Trailers()
        elif number == _METADATA and len(encoded) <= FIRST_BYTES:
            subset = _subset(value)
        elif number == _MODES:
            modes = BodyMode(value.request_body_mode), BodyMode(value.response_body_mode)
    if part is None:
        raise ValueError("a message has neither headers nor a body nor trailers")
    return Message(part, is_response, subset, *modes)


def _head(head: pb.Headers) -> Head:
    """Decode headers. A value is in the field for text or in that for bytes."""
    if len(head.headers) > MOST_HEAD_BYTES:
        raise ValueError(f"the headers have more than {MOST_HEAD_BYTES} bytes")
    headers = pb.HeaderMap.FromString(head.headers).headers
    if len(headers) > MOST_HEADERS:
        raise ValueError(f"a head has more than {MOST_HEADERS} headers")
    return Head([(each.key.lower(), each.raw_value or each.value) for each in headers], head.end_of_stream)


def _subset(metadata: bytes) -> frozenset[str] | None:
    """Decode endpoints with commas between, or a list of these."""
    namespaces = pb.Metadata.FromString(metadata).filter_metadata
    if SUBSET_NAMESPACE not in namespaces or SUBSET not in namespaces[SUBSET_NAMESPACE].fields:
        return None
    value = namespaces[SUBSET_NAMESPACE].fields[SUBSET]
    texts = [value.string_value, *(each.string_value for each in value.list_value.values)]
    if len(texts) + sum(text.count(",") for text in texts) > MOST_ENDPOINTS:
        raise ValueError(f"a subset has more than {MOST_ENDPOINTS} endpoints")
    return frozenset(each for text in texts for part in text.split(",") if (each := part.strip()))


# What the gateway is told.

_ANSWERS = {
    Head: ("request_headers", "response_headers"),
    Body: ("request_body", "response_body"),
    Trailers: ("request_trailers", "response_trailers"),
}


def go_on(message: Message) -> bytes:
    """Answer headers, a body that is not streamed, or trailers: as they are."""
    return _encoded(pb.Response(**{_answer(message): {}}))


def same_piece(message: Message) -> bytes:
    """Answer a piece of a full-duplex body with the same piece."""
    assert isinstance(message.part, Body)
    return _piece(_answer(message), message.part.content, is_last=message.part.is_last)


def _answer(message: Message) -> str:
    return _ANSWERS[type(message.part)][message.is_response]


def _encoded(response: pb.Response) -> bytes:
    encoded: bytes = response.SerializeToString()
    return encoded


def _piece(name: str, body: bytes, *, is_last: bool) -> bytes:
    response = pb.Response()
    streamed = getattr(response, name).response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = body, is_last
    return _encoded(response)


def destined(endpoint: str, headers: Sequence[Change], body: bytes, *, ends: bool) -> Iterator[bytes]:
    """Send a full-duplex request to an endpoint, with headers set and this body. Without `ends`, trailers
    follow."""
    response = pb.Response()
    _send_to(response, response.request_headers.response, endpoint, headers)
    yield _encoded(response)
    for start in range(0, max(1, len(body)), PIECE_BYTES):
        is_last = ends and start + PIECE_BYTES >= len(body)
        yield _piece("request_body", body[start : start + PIECE_BYTES], is_last=is_last)


def destined_buffered(endpoint: str, headers: Sequence[Change], body: bytes) -> bytes:
    """Return the same for a request whose headers wait for its whole body."""
    response = pb.Response()
    common = response.request_body.response
    _send_to(response, common, endpoint, headers)
    common.body_mutation.body = body
    return _encoded(response)


def _send_to(response: pb.Response, common: pb.Common, endpoint: str, headers: Sequence[Change]) -> None:
    """Set headers and have the route chosen anew. The destination is in a header and in the metadata."""
    _change(common.header_mutation, [(DESTINATION.encode(), endpoint.encode()), *headers])
    common.clear_route_cache = True
    inner = response.dynamic_metadata.fields[DESTINATION_NAMESPACE].struct_value
    inner.fields[DESTINATION].string_value = endpoint


def _change(mutation: pb.HeaderMutation, headers: Iterable[Change]) -> None:
    """Set headers in the place of any of these names, or remove those."""
    for name, value in headers:
        if value is None:
            mutation.remove_headers.append(name)
        else:
            option = mutation.set_headers.add(append_action=_OVERWRITE)
            option.header.key, option.header.raw_value = name, value


def immediate(status: int, headers: Iterable[Header], body: bytes) -> bytes:
    """Answer the client at once, without asking a server."""
    response = pb.Response()
    answer = response.immediate_response
    answer.status.code, answer.body = status, body
    _change(answer.headers, headers)
    return _encoded(response)
