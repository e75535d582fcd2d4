"""The wire format of protocol buffers: numbered fields of a message, in both directions.

Pure. Owns the encoding of varints and lengths. Knows no message.
"""

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_FIXED = {FIXED64: 8, FIXED32: 4}
_MOST_SHIFT = 63
MOST_FIELDS = 64
"""Fields of one message, unless it is a list."""
_ONE_BYTE = [bytes((value,)) for value in range(128)]


def fields(message: bytes, most: int = MOST_FIELDS) -> Iterator[tuple[int, int | bytes]]:
    """Yield each field's number and value; fixed-size values are left out. Raises ValueError, also at the
    first of more than `most` fields."""
    at, end, num = 0, len(message), 0
    while at < end:
        num += 1
        if num > most:
            raise ValueError(f"a message has more than {most} fields")
        tag, at = _varint(message, at)
        kind, number = tag & 7, tag >> 3
        if kind == BYTES:
            size, at = _varint(message, at)
            if at + size > end:
                raise ValueError("a field is longer than its message")
            yield number, message[at : at + size]
            at += size
        elif kind == VARINT:
            value, at = _varint(message, at)
            yield number, value
        elif kind in _FIXED:
            at += _FIXED[kind]
            if at > end:
                raise ValueError("a field is longer than its message")
        else:
            raise ValueError(f"a field is of kind {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > _MOST_SHIFT:
            raise ValueError("a number does not end")
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def varint(value: int) -> bytes:
    if value < 128:
        return _ONE_BYTE[value]
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def field(number: int, value: bytes | str | int) -> bytes:
    """Encode one field: bytes, text, a message that is encoded already, or a whole number."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, str):
        value = value.encode()
    return b"%b%b%b" % (varint(number << 3 | BYTES), varint(len(value)), value)


def text(value: int | bytes) -> str:
    """Raises ValueError for what is no text."""
    return content(value).decode()


def content(value: int | bytes) -> bytes:
    """Raises ValueError for a number."""
    if isinstance(value, int):
        raise ValueError("a number stands where bytes are expected")
    return value
