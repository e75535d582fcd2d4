"""A client's body on its way to a server, and the server's answer on its way back.

Pure. Owns what is changed in a body and what is read of an answer: its end, its usage, and the number of its
tokens. All else passes as it is.
"""

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from replicas.protocol.frames import BodyForm, FinishReason
from replicas.protocol.used_tokens import Usage, UsedTokens, believed

PATHS = {
    BodyForm.CHAT: "/v1/chat/completions",
    BodyForm.COMPLETION: "/v1/completions",
    BodyForm.MESSAGES: "/v1/messages",
}

MOST_ANSWER_BYTES = 32 * 2**20
"""Longest answer that does not stream."""
MOST_STREAM_BYTES = 2**30
MOST_EVENT_BYTES = 8 * 2**20
MOST_PROMPT_MS = 86_400_000.0
"""Longer is not believed."""

DONE = b"[DONE]"
"""OpenAI's last event."""


@dataclass(frozen=True, slots=True)
class SentBody:
    """`hides_usage`: the client has not asked for the event that only tells the usage."""

    path: str
    content: bytes
    streams: bool
    hides_usage: bool = False


def body_to_send(form: BodyForm, body: bytes, served_name: str) -> SentBody:
    """Name the model as its server does, and ask for the usage of a stream. Raises ValueError."""
    try:
        fields = json.loads(body)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(fields, dict):
        raise ValueError("a body is an object")
    streams, hides_usage = fields.get("stream") is True, False
    is_changed = fields.get("model") != served_name
    fields["model"] = served_name
    if streams and form is not BodyForm.MESSAGES:
        options = fields.get("stream_options") or {}
        if not isinstance(options, dict):
            raise ValueError("stream_options is an object")
        hides_usage = not options.get("include_usage")
        if hides_usage:
            fields["stream_options"] = {**options, "include_usage": True}
            is_changed = True
    content = json.dumps(fields, separators=(",", ":")).encode() if is_changed else body
    return SentBody(PATHS[form], content, streams, hides_usage)


@dataclass(slots=True)
class Read(UsedTokens):
    """The facts that an answer has told so far. Tokens are the server's. `prompt_seconds` is how long it has
    computed the prompt."""

    finish: FinishReason | None = None
    problem: str | None = None
    prompt_seconds: float | None = None

    @property
    def complaint(self) -> str | None:
        """Why it is no whole answer."""
        if self.problem is not None:
            return f"the server fails: {self.problem}"
        return "the server's answer has no end" if self.finish is None else None


class _Timings(msgspec.Struct):
    """llama.cpp's: `cache_n` tokens of the prompt were cached, and `prompt_n` computed in `prompt_ms`."""

    cache_n: int | None = None
    prompt_n: int | None = None
    prompt_ms: float | None = None


class _Choice(msgspec.Struct):
    """`delta` is a chat's, and `text` a completion's."""

    finish_reason: str | None = None
    delta: dict[str, Any] | None = None
    text: Any = None

    @property
    def says_something(self) -> bool:
        return bool(self.text) or any(key != "role" and said for key, said in (self.delta or {}).items())


class _Begun(msgspec.Struct):
    usage: Usage | None = None


class _Problem(msgspec.Struct):
    message: str = "no reason is given"


class _Said(msgspec.Struct):
    """An answer, or an event of one, in each form."""

    type: str = ""
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    timings: _Timings | None = None
    error: _Problem | str | None = None
    stop_reason: str | None = None
    delta: dict[str, Any] | None = None
    message: _Begun | None = None

    @property
    def num_tokens(self) -> int:
        """One for each choice of which an event says more. Roles and ends are no tokens."""
        if self.type:
            return int(self.type == "content_block_delta")
        return sum(choice.says_something for choice in self.choices or ())

    @property
    def is_last(self) -> bool:
        """Whether it is Anthropic's last event."""
        return self.type == "message_stop"

    @property
    def is_only_usage(self) -> bool:
        return self.usage is not None and self.choices == []


_said = msgspec.json.Decoder(_Said)

_LENGTHS = ("length", "max_tokens")


class AnswerReader:
    """Feed it the data of each event, or a whole answer. Raises ValueError for what is no JSON object."""

    def __init__(self) -> None:
        self.read = Read()

    def take(self, data: bytes) -> "_Said":
        said, read = _said.decode(data), self.read
        if said.error is not None:
            read.problem = said.error if isinstance(said.error, str) else said.error.message
        for choice in said.choices or ():
            if choice.finish_reason is not None:
                self._end(choice.finish_reason)
        reason = said.stop_reason or (said.delta or {}).get("stop_reason")
        if reason:
            self._end(reason)
        for usage in (None if said.message is None else said.message.usage, said.usage):
            if usage is not None:
                read.take(usage)
        timings = said.timings
        if timings is not None:
            cached, computed = believed(timings.cache_n), believed(timings.prompt_n)
            if cached is not None and computed is not None:
                read.num_cached_tokens, read.num_prompt_tokens = cached, cached + computed
            if timings.prompt_ms is not None and 0.0 < timings.prompt_ms < MOST_PROMPT_MS:
                read.prompt_seconds = timings.prompt_ms / 1000
        return said

    def _end(self, reason: str) -> None:
        self.read.finish = FinishReason.LENGTH if reason in _LENGTHS else FinishReason.STOP


_END = re.compile(rb"\r?\n\r?\n")


class EventSplitter:
    """Splits a stream into whole events, as they are. Raises ValueError for one that is too long."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def add(self, piece: bytes) -> list[bytes]:
        rest = self._rest
        looked_at = max(0, len(rest) - 3)  # an end may have begun there
        rest += piece
        ends = [end.end() for end in _END.finditer(rest, looked_at)]
        events = [bytes(rest[start:end]) for start, end in pairwise([0, *ends])]
        del rest[: ends[-1] if ends else 0]
        if len(rest) > MOST_EVENT_BYTES:
            raise ValueError(f"an event of more than {MOST_EVENT_BYTES} bytes")
        return events

    @property
    def has_rest(self) -> bool:
        return bool(self._rest.strip())


def data_of(event: bytes) -> bytes | None:
    """Return what an event says; None for a comment."""
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
