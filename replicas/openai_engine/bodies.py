"""A client's body on its way to a server, and the server's answer on its way back.

Pure. Owns what is changed in a body and what is read of an answer: its end, its usage, and the number of its
tokens. All else passes as it is.
"""

import json
from dataclasses import dataclass

import msgspec

from replicas.protocol.frames import BodyForm, FinishReason

PATHS = {
    BodyForm.CHAT: "/v1/chat/completions",
    BodyForm.COMPLETION: "/v1/completions",
    BodyForm.MESSAGES: "/v1/messages",
}

MOST_ANSWER_BYTES = 32 * 2**20
"""Longest answer that does not stream."""
MOST_EVENT_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class SentBody:
    """`hides_usage`: the client has not asked for the event that only tells the usage."""

    path: str
    content: bytes
    streams: bool
    hides_usage: bool = False


def body_to_send(form: BodyForm, body: bytes, served_name: str) -> SentBody:
    """Name the model as its server does, and ask for the usage of a stream. Raises ValueError."""
    fields = json.loads(body)
    if not isinstance(fields, dict):
        raise ValueError("a body is an object")
    streams, hides_usage = fields.get("stream") is True, False
    is_changed = fields.get("model") != served_name
    fields["model"] = served_name
    if streams and form is not BodyForm.MESSAGES:
        options = fields.get("stream_options") or {}
        hides_usage = not options.get("include_usage")
        if hides_usage:
            fields["stream_options"] = {**options, "include_usage": True}
            is_changed = True
    content = json.dumps(fields, separators=(",", ":")).encode() if is_changed else body
    return SentBody(PATHS[form], content, streams, hides_usage)


@dataclass(slots=True)
class Read:
    """The facts that an answer has told so far. Tokens are the server's; None is not told."""

    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    finish: FinishReason | None = None
    problem: str | None = None

    @property
    def complaint(self) -> str | None:
        """Why it is no whole answer."""
        if self.problem is not None:
            return f"the server fails: {self.problem}"
        return "the server's answer has no end" if self.finish is None else None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """OpenAI's names, then Anthropic's."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Timings(msgspec.Struct):
    """llama.cpp's: `cache_n` tokens of the prompt were cached, and `prompt_n` were not."""

    cache_n: int | None = None
    prompt_n: int | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Ended(msgspec.Struct):
    stop_reason: str | None = None


class _Begun(msgspec.Struct):
    usage: _Usage | None = None


class _Problem(msgspec.Struct):
    message: str = "no reason is given"


class _Said(msgspec.Struct):
    """An answer, or an event of one, in each form."""

    type: str = ""
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: _Problem | str | None = None
    stop_reason: str | None = None
    delta: _Ended | None = None
    message: _Begun | None = None


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
        reason = said.stop_reason or (said.delta and said.delta.stop_reason)
        if reason:
            self._end(reason)
        for usage in (None if said.message is None else said.message.usage, said.usage):
            if usage is not None:
                self._count(usage)
        timings = said.timings
        if timings is not None and timings.cache_n is not None and timings.prompt_n is not None:
            read.num_cached_tokens = timings.cache_n
            read.num_prompt_tokens = timings.cache_n + timings.prompt_n
        return said

    def _end(self, reason: str) -> None:
        self.read.finish = FinishReason.LENGTH if reason in _LENGTHS else FinishReason.STOP

    def _count(self, usage: _Usage) -> None:
        read, details = self.read, usage.prompt_tokens_details
        if usage.prompt_tokens is not None:
            read.num_prompt_tokens = usage.prompt_tokens
        if details is not None and details.cached_tokens is not None:
            read.num_cached_tokens = details.cached_tokens
        if usage.input_tokens is not None:
            cached, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
            read.num_prompt_tokens = usage.input_tokens + (cached or 0) + (written or 0)
            read.num_cached_tokens = cached
        output = usage.completion_tokens if usage.output_tokens is None else usage.output_tokens
        if output is not None:
            read.num_output_tokens = output


class EventSplitter:
    """Splits a stream into whole events, as they are. Raises ValueError for one that is too long."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, piece: bytes) -> list[bytes]:
        *events, rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        self._rest = rest
        if len(rest) > MOST_EVENT_BYTES:
            raise ValueError(f"an event of more than {MOST_EVENT_BYTES} bytes")
        return [event + b"\n\n" for event in events if event]

    @property
    def has_rest(self) -> bool:
        return bool(self._rest.strip())


def data_of(event: bytes) -> bytes | None:
    """Return an event's JSON; None for comments and for the `[DONE]` at the end."""
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            data = line[5:].strip()
            return data if data.startswith(b"{") else None
    return None


def is_only_usage(said: _Said) -> bool:
    return said.usage is not None and said.choices == []
