"""AnswerReader: what a server's answer says of itself, read as it passes: its id, and what it has used.

Pure. Knows the fields of every dialect, in JSON and in server-sent events. What is unreadable or too long
says nothing.
"""

from typing import NamedTuple

import msgspec

from replicas.protocol.used_tokens import UsedTokens

MOST_JSON_BYTES = 8 * 2**20
MOST_LINE_BYTES = 2**20

_USAGE = b'"usage"'
_DATA = b"data:"


class _Inner(msgspec.Struct):
    """The answer inside an event of Anthropic's or of Responses."""

    id: str | None = None
    usage: object = None


class _AnswerFacts(_Inner):
    message: _Inner | None = None
    response: _Inner | None = None


_decoder = msgspec.json.Decoder(_AnswerFacts)


class AnswerFacts(NamedTuple):
    """None: the answer does not say. Without a usage, each event of a stream counts as an output token."""

    answer_id: str | None
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_output_tokens: int


class AnswerReader:
    """Feed it the body's pieces."""

    def __init__(self, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._rest = bytearray()
        self._is_lost = False
        """A line or a body is too long to be kept."""
        self._num_events = 0
        self._answer_id: str | None = None
        self._used = UsedTokens()

    def feed(self, piece: bytes) -> None:
        most = MOST_LINE_BYTES if self._is_stream else MOST_JSON_BYTES
        if not self._is_stream:
            if not self._is_lost:
                self._rest += piece
        else:
            *lines, rest = piece.split(b"\n")
            if lines:
                first, self._rest = bytes(self._rest) + lines[0], bytearray(rest)
                if not self._is_lost:
                    self._line(first)
                self._is_lost = False
                for line in lines[1:]:
                    self._line(line)
            else:
                self._rest += rest
        if len(self._rest) > most:
            self._rest.clear()
            self._is_lost = True

    def facts(self) -> AnswerFacts:
        """Return what is known, after the last piece."""
        if not self._is_stream and self._rest:
            self._read(bytes(self._rest))
            self._rest.clear()
        used = self._used
        num_output = self._num_events if used.num_output_tokens is None else used.num_output_tokens
        return AnswerFacts(self._answer_id, used.num_prompt_tokens, used.num_cached_tokens, num_output)

    def _line(self, line: bytes) -> None:
        if not line.startswith(_DATA):
            return
        data = line[len(_DATA) :].strip()
        if not data.startswith(b"{"):
            return
        self._num_events += 1
        if self._answer_id is None or _USAGE in data:
            self._read(data)

    def _read(self, data: bytes) -> None:
        try:
            answer = _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        for each in (answer.message, answer.response, answer):
            if each is None:
                continue
            if self._answer_id is None:
                self._answer_id = each.id
            self._used.take(each.usage)
