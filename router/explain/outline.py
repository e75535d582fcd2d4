"""PromptOutline: what a conversation consists of, as digests: tools, pieces of system texts, messages.

Owns what counts as a piece and how many are kept. Made where a body is prepared, and keyed where it is
remembered; by outlines two prompts are known to be of one conversation whose first tokens differ.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import msgspec

DIGEST_BYTES = 8
MAX_TOOLS = 64
MAX_PIECES = 32
"""Pieces of the system's texts: lines, or sentences of long ones."""
MAX_MESSAGES = 128

MAX_SEEN = 2**12
"""Tools and system texts whose digests are kept."""

_SEEN: dict[bytes, bytes] = {}
_SYSTEM_ROLES = ("system", "developer")
_BREAKS = re.compile(r"[\n.!?;](?:(?<=\n)\n*|(?<!\n) )")
"""The ends of lines and sentences. That it begins with a set of characters makes it quick."""
_encode = msgspec.json.Encoder(order="deterministic").encode


class PromptOutline(msgspec.Struct, frozen=True, array_like=True):
    """Each is packed digests, in the prompt's order. `tools` do not see the order of keys, `written_tools` is
    one digest of all of them that does. `messages` are those that are no system's."""

    tools: bytes = b""
    written_tools: bytes = b""
    system: bytes = b""
    messages: bytes = b""
    arguments: bytes = b""
    """The client's template arguments: effort, thinking."""
    output_format: bytes = b""

    def units(self) -> bytes:
        """All that may be the same in two prompts."""
        return self.tools + self.system + self.messages


NO_OUTLINE = PromptOutline()


def outline_of(
    tools: Sequence[Mapping[str, Any]],
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    output_format: Any,
    digests: Sequence[bytes] = (),
) -> PromptOutline:
    """`digests` are those of the messages, where somebody has made them."""
    try:
        return PromptOutline(
            *(_tools(tools) if tools else (b"", b"")),
            system=_system(messages),
            messages=b"".join(_messages(messages, digests)),
            arguments=_digest(_encode(arguments)) if arguments else b"",
            output_format=b"" if output_format is None else _digest(msgspec.json.encode(output_format)),
        )
    except (UnicodeEncodeError, OverflowError, RecursionError, TypeError):
        return NO_OUTLINE  # half a surrogate pair, an integer beyond 64 bits


def _tools(tools: Sequence[Mapping[str, Any]]) -> tuple[bytes, bytes]:
    """Return the digests of each tool and of all as they are written."""
    written = msgspec.json.encode(tools)

    def each() -> bytes:
        return b"".join(_digest(_encode(tool)) for tool in tools[:MAX_TOOLS])

    return _digested(b"tools", written, each), _digest(written)


def _system(messages: Sequence[Mapping[str, Any]]) -> bytes:
    texts = (message.get("content") for message in messages if message["role"] in _SYSTEM_ROLES)
    each = [
        _digested(b"system", text.encode(), partial(_digests, text))
        for text in texts
        if isinstance(text, str)
    ]
    return b"".join(each)[: MAX_PIECES * DIGEST_BYTES]


def _digested(kind: bytes, written: bytes, digests: Callable[[], bytes]) -> bytes:
    """Return the digests of the pieces of what is `written`: nearly all requests have tools and system texts
    that were seen before."""
    key = hashlib.blake2b(written, digest_size=16, person=kind).digest()
    found = _SEEN.get(key)
    if found is None:
        if len(_SEEN) >= MAX_SEEN:
            _SEEN.clear()
        found = _SEEN[key] = digests()
    return found


def _digests(text: str) -> bytes:
    pieces = islice(filter(None, _pieces(text)), MAX_PIECES)
    return b"".join(_digest(b"system" + piece.encode()) for piece in pieces)


def _pieces(text: str) -> Iterator[str]:
    """Its lines and sentences, without the blank behind."""
    start = 0
    for found in _BREAKS.finditer(text):
        end = found.start()
        yield text[start : end if text[end] == "\n" else end + 1]
        start = found.end()
    yield text[start:]


def _messages(messages: Sequence[Mapping[str, Any]], digests: Sequence[bytes]) -> Iterator[bytes]:
    number = 0
    for position, message in enumerate(messages):
        if message["role"] in _SYSTEM_ROLES:
            continue
        if number == MAX_MESSAGES:
            return
        number += 1
        yield digests[position][:DIGEST_BYTES] if digests else _digest(_encode(message))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
