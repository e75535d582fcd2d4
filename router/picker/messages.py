"""Messages of `envoy.service.ext_proc.v3.ExternalProcessor`: what a gateway says, and what it is told.

Pure. Owns the numbers of the fields that are used here, and the names that the endpoint-picker protocol of
the Gateway API Inference Extension gives to headers and metadata. Fields that are not used are skipped.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from router.picker.protobuf import content, field, fields, text

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
_FEW = 4
"""Fields of a header, or of an entry of a map."""

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


def decode(encoded: bytes) -> Message:
    """Costs milliseconds at most, whatever the bytes are. Raises ValueError."""
    part: Head | Body | Trailers | None = None
    is_response = False
    subset: frozenset[str] | None = None
    modes = BodyMode.FULL_DUPLEX, BodyMode.FULL_DUPLEX
    for number, value in fields(encoded):
        if number in _PARTS:
            if part is not None:
                raise ValueError("a message has two parts")
            kind, is_response = _PARTS[number]
            if kind is Body:
                part = _body(content(value))
            elif len(encoded) > FIRST_BYTES:
                raise ValueError(f"a message without a body has more than {FIRST_BYTES} bytes")
            else:
                part = _head(content(value)) if kind is Head else Trailers()
        elif number == 8 and subset is None and len(encoded) <= FIRST_BYTES:
            subset = _subset(content(value))
        elif number == 11:
            modes = _modes(content(value))
    if part is None:
        raise ValueError("a message has neither headers nor a body nor trailers")
    return Message(part, is_response, subset, *modes)


def _head(encoded: bytes) -> Head:
    headers: list[Header] | None = None
    is_last = False
    for number, value in fields(encoded):
        if number == 1:
            if headers is not None:
                raise ValueError("a head has two lists of headers")
            listed = content(value)
            if len(listed) > MOST_HEAD_BYTES:
                raise ValueError(f"the headers have more than {MOST_HEAD_BYTES} bytes")
            headers = [_header(content(each)) for at, each in fields(listed, MOST_HEADERS) if at == 1]
        elif number == 3:
            is_last = bool(value)
    return Head(headers or [], is_last)


def _header(encoded: bytes) -> Header:
    """A value is in the field for text or in that for bytes."""
    name = value = b""
    for number, found in fields(encoded, _FEW):
        if number == 1:
            name = content(found).lower()
        elif number in (2, 3):
            value = content(found) or value
    return name, value


def _body(encoded: bytes) -> Body:
    body, is_last = b"", False
    for number, value in fields(encoded):
        if number == 1:
            body = content(value)
        elif number in (2, 3):
            is_last = is_last or bool(value)
    return Body(body, is_last)


def _modes(encoded: bytes) -> tuple[BodyMode, BodyMode]:
    found = {number: value for number, value in fields(encoded) if isinstance(value, int)}
    return BodyMode(found.get(1, 0)), BodyMode(found.get(2, 0))


def _subset(metadata: bytes) -> frozenset[str] | None:
    for number, entry in fields(metadata):
        if number == 1:
            name, struct = _entry(content(entry))
            if name == SUBSET_NAMESPACE:
                for key, value in _struct(struct):
                    if key == SUBSET:
                        return frozenset(_endpoints(value))
    return None


def _struct(encoded: bytes) -> Iterator[tuple[str, bytes]]:
    for number, entry in fields(encoded):
        if number == 1:
            yield _entry(content(entry))


def _entry(encoded: bytes) -> tuple[str, bytes]:
    """Decode an entry of a map."""
    key, value = "", b""
    for number, found in fields(encoded, _FEW):
        if number == 1:
            key = text(found)
        elif number == 2:
            value = content(found)
    return key, value


def _endpoints(value: bytes) -> Iterator[str]:
    """Decode a `google.protobuf.Value`, which has one field: endpoints with commas between, or a list of
    these."""
    for number, found in fields(value, 1):
        if number == 3:
            yield from _listed(text(found))
        elif number == 6:
            for at, item in fields(content(found), MOST_ENDPOINTS):
                if at == 1:
                    for kind, each in fields(content(item), 1):
                        if kind == 3:
                            yield from _listed(text(each))


def _listed(endpoints: str) -> Iterator[str]:
    if endpoints.count(",") >= MOST_ENDPOINTS:
        raise ValueError(f"a subset has more than {MOST_ENDPOINTS} endpoints")
    return (each for part in endpoints.split(",") if (each := part.strip()))


# What the gateway is told.


def go_on(message: Message) -> bytes:
    """Answer headers, a body that is not streamed, or trailers: as they are."""
    return field(_answer_number(message), b"")


def same_piece(message: Message) -> bytes:
    """Answer a piece of a full-duplex body with the same piece."""
    assert isinstance(message.part, Body)
    return _piece(_answer_number(message), message.part.content, is_last=message.part.is_last)


_ANSWERS = {Head: (1, 2), Body: (3, 4), Trailers: (5, 6)}


def _answer_number(message: Message) -> int:
    return _ANSWERS[type(message.part)][message.is_response]


def _piece(number: int, body: bytes, *, is_last: bool) -> bytes:
    streamed = field(1, body) + field(2, is_last)
    return field(number, field(1, field(3, field(3, streamed))))


def destined(endpoint: str, headers: Sequence[Change], body: bytes, *, ends: bool) -> Iterator[bytes]:
    """Send a full-duplex request to an endpoint, with headers set and this body. Without `ends`, trailers
    follow."""
    yield field(1, field(1, _changes(endpoint, headers))) + _metadata(endpoint)
    for start in range(0, max(1, len(body)), PIECE_BYTES):
        is_last = ends and start + PIECE_BYTES >= len(body)
        yield _piece(3, body[start : start + PIECE_BYTES], is_last=is_last)


def destined_buffered(endpoint: str, headers: Sequence[Change], body: bytes) -> bytes:
    """The same for a request whose headers wait for its whole body."""
    changed = _changes(endpoint, headers, field(3, field(1, body)))
    return field(3, field(1, changed)) + _metadata(endpoint)


def _changes(endpoint: str, headers: Sequence[Change], body: bytes = b"") -> bytes:
    """Encode a CommonResponse that sets headers, has the route chosen anew, and changes the body as given."""
    destination = (DESTINATION.encode(), endpoint.encode())
    return field(2, _header_mutation([destination, *headers])) + body + field(5, True)


def _header_mutation(headers: Iterable[Change]) -> bytes:
    """Set headers in the place of any of these names, or remove those."""
    return b"".join(
        [
            field(2, name)
            if value is None
            else field(1, field(1, field(1, name) + field(3, value)) + field(3, _OVERWRITE))
            for name, value in headers
        ]
    )


def _metadata(endpoint: str) -> bytes:
    inner = field(1, field(1, DESTINATION) + field(2, field(3, endpoint)))
    return field(8, field(1, field(1, DESTINATION_NAMESPACE) + field(2, field(5, inner))))


def immediate(status: int, headers: Iterable[Header], body: bytes) -> bytes:
    """Answer the client at once, without asking a server."""
    answer = field(1, field(1, status)) + field(2, _header_mutation(headers)) + field(3, body)
    return field(7, answer)
