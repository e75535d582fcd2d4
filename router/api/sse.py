"""Server-sent events: headers of all streams, and the chunks of OpenAI's.

Owns the frames. Everything but the text is the same in each chunk of a stream, so it is encoded once.
Does not know where the text comes from.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from router.api.json_body import encode_json

EVENT_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

COMMENT = b": still working\n\n"
"""Readers skip it; what lies between sees that the stream lives."""

DONE = b"data: [DONE]\n\n"


class ChunkWriter:
    """The chunks of one stream. `text_open` is what stands before the text in a choice: the only thing
    in which chat's chunks and those of plain completions differ."""

    __slots__ = ("_after_text", "_closing", "_head", "_text_close", "_text_open", "_with_usage")

    def __init__(
        self, head: dict[str, Any], *, text_open: bytes, text_close: bytes, with_usage: bool
    ) -> None:
        self._head = b"data: " + encode_json(head)[:-1] + b',"choices":['
        self._text_open = text_open
        self._text_close = text_close
        self._with_usage = with_usage
        self._closing = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        self._after_text = text_close + b',"logprobs":null,"finish_reason":null}' + self._closing

    def prefix(self, choice: int) -> bytes:
        """All that comes before the text of a choice; make it once per choice."""
        return b'%s{"index":%d,%s' % (self._head, choice, self._text_open)

    def closing(self, more: dict[str, Any] | None = None, usage: Struct | None = None) -> bytes:
        """Return the end of a chunk that says more than others do."""
        fields: dict[str, Any] = {**(more or {})}
        if usage is not None or self._with_usage:
            fields["usage"] = usage
        return b"]}\n\n" if not fields else b"]," + encode_json(fields)[1:] + b"\n\n"

    def plain(self, prefix: bytes, text: str) -> bytes:
        """Write a chunk like `text` with nothing else in it: nearly all chunks."""
        return prefix + encode_json(text) + self._after_text

    def text(
        self,
        prefix: bytes,
        text: str,
        logprobs: Struct | None = None,
        *,
        token_ids: Sequence[int] | UnsetType = UNSET,
        closing: bytes | None = None,
    ) -> bytes:
        encoded = b"null" if logprobs is None else encode_json(logprobs)
        return (
            prefix
            + encode_json(text)
            + self._text_close
            + b',"logprobs":'
            + encoded
            + (b"" if token_ids is UNSET else b',"token_ids":' + encode_json(token_ids))
            + b',"finish_reason":null}'
            + (closing or self._closing)
        )

    def choice(self, choice: dict[str, Any] | Struct, *, closing: bytes | None = None) -> bytes:
        """Return a chunk that happens once per choice: its role, its end."""
        return self._head + encode_json(choice) + (closing or self._closing)

    def usage(self, usage: Struct, more: dict[str, Any] | None = None) -> bytes:
        """Return the extra chunk of a stream that was asked for usage; nothing otherwise."""
        return self._head + self.closing(more, usage) if self._with_usage else b""
