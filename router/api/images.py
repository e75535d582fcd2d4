"""Images in bodies, whatever their dialect: from what a client sends to bytes with a size.

Owns the bounds on their number and bytes, and every sentence about one that is not taken; in a tool's result
and an earlier answer the model is told instead. Pure: it also runs in the process that prepares large bodies.
An image comes inside its body: nothing is fetched from anywhere.
"""

import binascii
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from replicas.protocol.images import ImageError, media_digest, read_size
from replicas.protocol.media import MAX_IMAGES, MAX_MEDIA_BYTES
from router.api.json_body import read_text, unsupported
from router.errors import InvalidRequest
from router.prompt.images import SentImage
from router.prompt.unread import unread

Piece = TypeVar("Piece")

TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
"""Media types that a client may claim. The bytes decide."""

_SHOWN_CHARACTERS = 40
_SPACES = b" \t\n\f\r"
_LINES_SHARE = 1.05
"""Growth of base64 in lines of 76 characters."""


class Images:
    """Images of one body, in the order of its prompt."""

    def __init__(self) -> None:
        self.images: list[SentImage] = []

    def add_url(self, path: str, url: Any) -> dict[str, Any]:
        """Return a part of a message for the chat template, of a `data:` URL. Raises InvalidRequest."""
        url = read_text(path, url)
        kind, comma, data = url.partition(",")
        if not kind[:5].lower() == "data:" or not comma:
            raise unsupported(
                path,
                "Images are read from 'data:' URLs only: nothing is fetched from other addresses, and there"
                f" are no files here. '{path}' begins with '{url[:_SHOWN_CHARACTERS]}'.",
            )
        media_type, *options = kind[5:].split(";")
        if not options or options[-1].strip().lower() != "base64":
            raise unsupported(path, f"The 'data:' URL of '{path}' has to be in base64.")
        return self.add_base64(path, media_type, data)

    def add_base64(self, path: str, media_type: Any, data: Any) -> dict[str, Any]:
        """Return the same, of base64 (RFC 4648). Raises InvalidRequest."""
        if not isinstance(media_type, str) or media_type.strip().lower() not in TYPES:
            raise unsupported(path, f"'{path}' has to be one of {', '.join(TYPES)}.")
        data = read_text(path, data)
        if len(self.images) >= MAX_IMAGES:
            raise InvalidRequest(f"A request has at most {MAX_IMAGES} images.", parameter=path)
        if len(data) // 4 * 3 > MAX_MEDIA_BYTES * _LINES_SHARE:
            raise InvalidRequest(
                f"An image has at most {MAX_MEDIA_BYTES:,} bytes; '{path}' has more.", parameter=path
            )
        try:
            content = _decoded(data)
        except ValueError as error:
            raise InvalidRequest(f"'{path}' is no valid base64.", parameter=path) from error
        if len(content) > MAX_MEDIA_BYTES:
            raise InvalidRequest(
                f"An image has at most {MAX_MEDIA_BYTES:,} bytes; '{path}' has more.", parameter=path
            )
        try:
            size = read_size(content)
        except ImageError as error:
            raise InvalidRequest(f"Invalid '{path}': {error}.", parameter=path) from error
        digest = media_digest(content)
        self.images.append(SentImage(content, digest, size.format, size.width, size.height, path))
        # By the digest, conversations and outlines tell images apart; no template writes it.
        return {"type": "image", "digest": digest.hex()}


def _decoded(data: str) -> bytes:
    """Raises ValueError. Many programs break base64 into lines, and some leave out what fills it up: that is
    taken as it is in URLs (WHATWG, Infra Standard, forgiving-base64)."""
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except ValueError:
        joined = data.encode().translate(None, _SPACES)
        padding = b"=" * (-len(joined) % 4) if b"=" not in joined[-2:] else b""
        if len(joined) == len(data) and not padding:
            raise
        return binascii.a2b_base64(joined + padding, strict_mode=True)


TEXT_KINDS = ("text", "input_text", "output_text", "refusal")


def read_or_unread(path: str, block: Any, read: Callable[[str, Any], Piece]) -> Piece | str:
    """Read a block of a tool's result or of an earlier answer; one that cannot be read is told to the model.
    Raises InvalidRequest for what is no block, or a text without its text."""
    try:
        return read(path, block)
    except InvalidRequest:
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str) or kind in TEXT_KINDS:
            raise
        return unread(block)


def content_of(pieces: list[str | dict[str, Any]], between: str = "\n") -> str | list[dict[str, Any]]:
    """Return a message's content: a text where there is nothing else, else parts. Texts that follow each
    other are one, with `between`."""
    parts: list[dict[str, Any]] = []
    for is_text, group in itertools.groupby(pieces, lambda piece: isinstance(piece, str)):
        if is_text:
            parts.append({"type": "text", "text": between.join(map(str, group))})
        else:
            parts += [piece for piece in group if not isinstance(piece, str)]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and isinstance(pieces[0], str) else parts
