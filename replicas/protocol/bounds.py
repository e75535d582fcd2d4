"""Bounds on numbers and names from other processes.

Owns the limits and the checks. Every check returns its argument, or raises ValueError with a sentence that
may be logged. Types such as `Uint32` are checked at decoding. The limits are far beyond any honest value;
they keep one wrong number from spoiling a sum, a median or a scrape.
"""

import re
from collections.abc import Iterable
from itertools import islice
from typing import Annotated

from msgspec import Meta

MAX_REQUESTS = 1 << 20
MAX_TOKENS = 1 << 40
MAX_BLOCKS = 1 << 32
MAX_BYTES = 1 << 53
MAX_SECONDS = 3600.0
MAX_NUMBER = (1 << 63) - 1
"""Bound on changes, heartbeats and registrations: Redis' largest integer."""

MAX_ID_CHARACTERS = 253
MAX_NAME_CHARACTERS = 512
MAX_CARD_NAMES = 4096
"""Bound on the adapters of one model, and on its other names."""
MAX_MESSAGE_CHARACTERS = 2000
MAX_SHOWN_CHARACTERS = 320

Uint32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Uint64 = Annotated[int, Meta(ge=0)]  # msgpack has no larger numbers
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]

_ID = re.compile(r"[A-Za-z0-9._-]+")
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_DIGITS = re.compile(rb"[0-9]{1,19}")


def checked_id(text: str) -> str:
    """Return a replica's id or epoch: letters, digits, '.', '_' and '-'."""
    if len(text) > MAX_ID_CHARACTERS or not _ID.fullmatch(text):
        raise ValueError(f"{shown(text)} is not an id: letters, digits, '.', '_' and '-'")
    return text


def checked_name(text: str) -> str:
    """Check a name of a model, an adapter or an engine: nothing that would garble a log."""
    if not is_name(text):
        raise ValueError(f"{shown(text)} is no name")
    return text


def is_name(text: str) -> bool:
    return 0 < len(text) <= MAX_NAME_CHARACTERS and text.isprintable()


def checked_address(text: str) -> str:
    """host:port, and no other kind of address that gRPC would know."""
    match = _ADDRESS.fullmatch(text)
    if len(text) > MAX_NAME_CHARACTERS or match is None or not 0 < int(match[1]) < 2**16:
        raise ValueError(f"{shown(text)} is not an address of the form host:port")
    return text


def checked_count(value: int, most: int, what: str) -> int:
    if not 0 <= value <= most:
        raise ValueError(f"{what} is {shown(value)}, not between 0 and {most}")
    return value


def parsed_number(text: bytes) -> int:
    """Parse decimal digits and nothing else."""
    if not _DIGITS.fullmatch(text):
        raise ValueError(f"{shown(text)} is not a number")
    return checked_count(int(text), MAX_NUMBER, "a number")


def shown(value: object) -> str:
    """Shorten foreign text to one line, for messages."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"


def few(names: Iterable[str]) -> str:
    """Join names for a message, as many as fit."""
    text = ", ".join(islice(names, MAX_SHOWN_CHARACTERS))
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"
