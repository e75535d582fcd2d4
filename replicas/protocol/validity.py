"""From when until when certificates are valid, read from their PEM text.

Owns the reading of those two dates (X.509, RFC 5280). Knows no file, and believes what stands there: whether
a certificate is signed, and by whom, is OpenSSL's matter.
"""

import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

SEQUENCE = 0x30
VERSION = 0xA0
UTC_TIME = 0x17
GENERALIZED_TIME = 0x18

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Validity:
    """Seconds since 1970."""

    begins: float
    ends: float


def validities(pem: bytes) -> list[Validity]:
    """One for each certificate, in order; at least one. Raises ValueError."""
    found = [_of(ssl.PEM_cert_to_DER_cert(text)) for text in _CERTIFICATE.findall(pem.decode("ascii"))]
    if not found:
        raise ValueError("no certificate")
    return found


def _of(certificate: bytes) -> Validity:
    try:
        _, signed = next(_elements(certificate))
        _, content = next(_elements(signed))
        fields = [element for element in _elements(content) if element[0] != VERSION]
        tag, dates = fields[3]  # after the serial number, the kind of signature, and the issuer
        (begin, end) = _elements(dates)
        if tag != SEQUENCE:
            raise ValueError("no dates where they should be")
        return Validity(_seconds(*begin), _seconds(*end))
    except (StopIteration, IndexError) as error:
        raise ValueError("a certificate that ends too soon") from error


def _elements(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each element of DER that stands in there."""
    at = 0
    while at < len(content):
        tag, length = content[at], content[at + 1]
        at += 2
        if length & 0x80:
            num_bytes = length & 0x7F
            length = int.from_bytes(content[at : at + num_bytes], "big")
            at += num_bytes
        if at + length > len(content):
            raise ValueError("an element is longer than what it stands in")
        yield tag, content[at : at + length]
        at += length


def _seconds(tag: int, content: bytes) -> float:
    text = content.decode("ascii")
    if tag == UTC_TIME:  # two digits are a year from 1950 to 2049
        text = ("20" if text < "50" else "19") + text
    elif tag != GENERALIZED_TIME:
        raise ValueError("no date where one should be")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
