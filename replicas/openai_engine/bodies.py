"""A client's body on its way to a server, and the server's answer on its way back.

Pure. Owns what is added to a body and what is read of an answer: its end, its usage, its id, and the number
of its tokens. All else passes as it is, and what cannot be read is unknown.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from replicas.protocol.bounds import MAX_NAME_CHARACTERS
from replicas.protocol.frames import MAX_ERROR_BYTES, BodyForm, FinishReason, Refusal, RefusalCode
from replicas.protocol.passed_routes import SERVERS_OWN
from replicas.protocol.used_tokens import UsedTokens, believed
from replicas.remote_engine.refusals import parsed, problem_in, refusal_of

PATHS = {
    BodyForm.CHAT: "/v1/chat/completions",
    BodyForm.COMPLETION: "/v1/completions",
    BodyForm.MESSAGES: "/v1/messages",
}

MOST_ANSWER_BYTES = 31 * 2**20
"""Longest answer that does not stream, or that is passed on: routers hold as much for a client."""
MOST_STREAM_BYTES = 2**30
MOST_EVENT_BYTES = 8 * 2**20
PASSED_SECONDS = 600.0
"""Longest time of an answer that is passed on."""
MOST_PROMPT_MS = 86_400_000.0
"""Longer is not believed."""

MOST_HIDDEN_TOKENS = 2**17
"""More are not believed of an answer without a bound."""

MOST_CHOICES = 1024
"""More are not told apart."""

DONE = b"[DONE]"
"""OpenAI's last event."""
_BOM = b"\xef\xbb\xbf"
_LENGTHS = ("length", "max_tokens")

_FIELD_LENGTHS = ("max_tokens", "max_completion_tokens")
"""Names of a chat's length. Some servers know the first alone, some refuse it."""

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class SentBody:
    """`hides_usage`: the client has not asked for the event that only tells the usage. A server may refuse
    the fields that were `added`, and has refused those that were `left_out`. Each of `num_choices` has up to
    `max_tokens` tokens; None is no bound."""

    form: BodyForm
    content: bytes
    streams: bool
    hides_usage: bool = False
    added: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    max_tokens: int | None = None
    num_choices: int = 1

    @property
    def path(self) -> str:
        return PATHS[self.form]

    def refused_in(self, words: str) -> str | None:
        """Return the first added field that the words of a refusal name. Those that name `max_tokens` alone
        may be about its value."""
        named = {name for name in self.added if re.search(rf"\b{name}\b", words)}
        if "max_completion_tokens" not in named:
            named.discard("max_tokens")
        return next((name for name in self.added if name in named), None)

    def without(self, name: str) -> "SentBody":
        """Leave out an added field; a length keeps its other name."""
        fields = _decoder.decode(self.content)
        raw = fields.pop(name)
        if name == "stream_options":
            options = {key: value for key, value in _decoder.decode(raw).items() if key != "include_usage"}
            if options:
                fields[name] = msgspec.Raw(_encode(options))
        gone = _FIELD_LENGTHS if name in _FIELD_LENGTHS else (name,)
        added = tuple(each for each in self.added if each not in gone)
        return replace(self, content=_encode(fields), added=added, left_out=(*self.left_out, name))


def body_to_send(
    form: BodyForm, body: bytes, served_name: str, *, salt: str | None = None, refused: Collection[str] = ()
) -> SentBody:
    """Name the model as its server does, ask for the usage of a stream, salt the cache, and give a chat's
    length both its names. Fields that the server has `refused` are left out, and those of servers alone.
    Raises ValueError."""
    try:
        fields: dict[str, Any] = _decoder.decode(body)
    except (RecursionError, msgspec.MsgspecError) as error:
        raise ValueError(f"it is no object of JSON: {error}") from error
    for name in SERVERS_OWN & fields.keys():
        del fields[name]
    fields["model"] = served_name
    added: list[str] = []
    streams, hides_usage = _value(fields, "stream") is True, False
    if streams and form is not BodyForm.MESSAGES:
        options = _value(fields, "stream_options") or {}
        if not isinstance(options, dict):
            raise ValueError("stream_options is an object")
        hides_usage = not options.get("include_usage")
        if hides_usage and "stream_options" not in refused:
            fields["stream_options"] = {**options, "include_usage": True}
            added.append("stream_options")
    if salt is not None:
        fields["cache_salt"] = salt
    if form is BodyForm.CHAT and "max_completion_tokens" in fields and "max_tokens" not in refused:
        fields["max_tokens"] = fields["max_completion_tokens"]
        if "max_completion_tokens" in refused:
            del fields["max_completion_tokens"]
        else:
            added += _FIELD_LENGTHS
    lengths = [_count(fields, name) for name in _FIELD_LENGTHS]
    return SentBody(
        form,
        _encode(fields),
        streams,
        hides_usage,
        tuple(added),
        max_tokens=lengths[0] or lengths[1],
        num_choices=_count(fields, "n") or 1,
    )


def _value(fields: Mapping[str, Any], name: str) -> Any:
    return msgspec.json.decode(fields[name]) if name in fields else None


def _count(fields: Mapping[str, Any], name: str) -> int | None:
    return believed(_value(fields, name))


@dataclass(slots=True)
class Read(UsedTokens):
    """The facts that an answer has told so far. Tokens are the server's. `prompt_seconds` is how long it has
    computed the prompt."""

    finish: FinishReason | None = None
    prompt_seconds: float | None = None
    answer_id: str = ""


class PassedBody(NamedTuple):
    """A body that is passed on to a route of the server."""

    path: str
    content: bytes
    content_type: str


class _AnswerBody(msgspec.Struct):
    usage: Any = None


def read_passed(answer: bytes) -> Read:
    """Read what the whole answer to a passed body says of its usage."""
    read = Read(finish=FinishReason.STOP)
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        read.take(msgspec.json.decode(answer, type=_AnswerBody).usage)
    return read


class AnswerReader:
    """Feed it the events of a stream, or a whole answer. What it returns goes to the client, with the number
    of tokens that it is taken for."""

    def __init__(self, sent: SentBody) -> None:
        self.read = Read()
        self.is_over = False
        """Nothing follows for the client."""
        self._sent = sent
        self._problem = b""
        self._stray = b""
        """The beginning of what is no event."""
        self._has_begun = False
        self._begun: set[int] = set()
        self._finished: set[int] = set()
        self._num_bytes = 0
        self._num_counted = 0
        self._said: Counter[int] = Counter()
        """Tokens by choice."""
        self._last: dict[str, Any] = {}
        """The latest event with a choice, or with a piece of a message."""

    @property
    def has_begun(self) -> bool:
        """Whether the client has something of it."""
        return self._has_begun

    def whole(self, content: bytes) -> tuple[bytes, int]:
        self._num_bytes = len(content)
        said = parsed(content)
        self._take(content, said)
        is_answer = isinstance(said, dict) and isinstance(said.get("choices", said.get("content")), list)
        if self._problem or not is_answer:
            self._stray = content
            return b"", 0
        self._end()
        if _takes_out(said):
            content = _encode(said)
        return content, self.read.num_output_tokens or 0

    def event(self, event: bytes) -> tuple[bytes, int]:
        """Nothing of a comment, of an error, and of what the client has not asked for."""
        self._num_bytes += len(event)
        if not self._has_begun:
            event = event.removeprefix(_BOM)
        data = data_of(event)
        if data is None:
            if len(self._stray) < MAX_ERROR_BYTES:
                self._stray += event
            return b"", 0
        if data == DONE:
            self.is_over = True
            if not self._has_begun:
                return b"", 0
            self._end()
            return event, 0
        said = parsed(data) if data.startswith(b"{") else None
        num_tokens = self._take(data, said)
        if self._problem:
            return b"", 0
        self._has_begun = True
        if not isinstance(said, dict):
            return event, 0
        if said.get("type") == "message_stop":
            self.is_over = True
            self._end()
        if self._sent.hides_usage and said.get("usage") is not None and not said.get("choices"):
            return b"", 0
        if self._sent.max_tokens is not None:
            num_tokens = min(num_tokens, self._most_tokens({}) - self._num_counted)
        self._num_counted += num_tokens
        if _takes_out(said):
            content = _encode(said)
            event = event.replace(data, content) if data in event else b"data: %s\n\n" % content
        return event, num_tokens

    def rest(self, rest: bytes) -> tuple[bytes, int]:
        """Take what is left at the end of a stream: an event without its blank line, or a part of one."""
        event = rest.rstrip(b"\r\n") + b"\n\n"
        data = data_of(event)
        is_whole = data is None or data == DONE or isinstance(parsed(data), dict)
        return self.event(event) if is_whole else (b"", 0)

    @property
    def has_ended(self) -> bool:
        """Whether all that has begun is finished."""
        return self.read.finish is not None and self._begun <= self._finished and not self._problem

    def missing_end(self) -> bytes:
        """End a stream that has all its tokens, and whose last events are missing. Empty for others."""
        sent = self._sent
        if not sent.streams or self._problem or sent.max_tokens is None or len(self._said) < sent.num_choices:
            return b""
        if min(self._said.values()) < sent.max_tokens:
            return b""
        self.read.finish = FinishReason.LENGTH
        if sent.form is BodyForm.MESSAGES:
            stop = {"stop_reason": "max_tokens", "stop_sequence": None}
            said: list[dict[str, Any]] = [
                {"type": "content_block_stop", "index": self._last.get("index", 0)},
                {"type": "message_delta", "delta": stop, "usage": {"output_tokens": self._num_counted}},
                {"type": "message_stop"},
            ]
            return b"".join(b"event: %s\ndata: %s\n\n" % (x["type"].encode(), _encode(x)) for x in said)
        more: dict[str, Any] = {"text": ""} if sent.form is BodyForm.COMPLETION else {"delta": {}}
        ends = [
            {"index": at, **more, "finish_reason": "length"} for at in sorted(self._begun - self._finished)
        ]
        return b"data: %s\n\ndata: %s\n\n" % (_encode({**self._last, "choices": ends}), DONE)

    def refusal(self, cleaned: Callable[[bytes], bytes]) -> Refusal | None:
        """Return why it is no answer, or not a whole one, in words that are `cleaned`."""
        if self.has_ended:
            return None
        wrong = self._problem or (b"" if self._has_begun else self._stray)
        if wrong:
            return refusal_of(cleaned(wrong), 200, form=self._sent.form)
        what = "has no end" if self._has_begun else "is empty"
        return Refusal(RefusalCode.INTERNAL, f"the server's answer {what}")

    def _take(self, data: bytes, said: Any) -> int:
        """Read field by field. Returns the number of tokens: one for each choice of which an event says more,
        since roles and ends are none."""
        if problem_in(said) is not None:
            self._problem, self.is_over = data, True
            return 0
        if not isinstance(said, dict):
            return 0
        choices, message = said.get("choices"), said.get("message")
        for part in (said, message if isinstance(message, dict) else {}):
            self._take_usage(part.get("usage"))
            answer_id = part.get("id")
            if not self.read.answer_id and isinstance(answer_id, str) and answer_id.isprintable():
                self.read.answer_id = answer_id[:MAX_NAME_CHARACTERS]
        self._take_timings(said.get("timings"))
        if isinstance(choices, list):
            if choices:
                self._last = said
            return sum([self._choice(choice) for choice in choices if isinstance(choice, dict)])
        delta = said.get("delta")
        for part in (said, delta if isinstance(delta, dict) else {}):
            self._finish(part.get("stop_reason"))
        if said.get("type") != "content_block_delta":
            return 0
        self._said[0] += 1
        self._last = said
        return 1

    def _take_usage(self, usage: object) -> None:
        """No answer has more tokens than were asked for. Where the request has no bound, it has no more than
        bytes, beside what was thought out of sight."""
        if not isinstance(usage, dict):
            return
        read = self.read
        read.take(usage)
        if read.num_output_tokens is not None:
            read.num_output_tokens = min(read.num_output_tokens, self._most_tokens(usage))

    def _most_tokens(self, usage: Mapping[str, Any]) -> int:
        if self._sent.max_tokens is not None:
            return self._sent.max_tokens * self._sent.num_choices
        details = usage.get("completion_tokens_details")
        hidden = believed(details.get("reasoning_tokens")) if isinstance(details, dict) else None
        return self._num_bytes + min(hidden or 0, MOST_HIDDEN_TOKENS)

    def _choice(self, choice: Mapping[str, Any]) -> bool:
        """Whether it says something: `delta` is a chat's, and `text` a completion's."""
        index, reason, delta = choice.get("index"), choice.get("finish_reason"), choice.get("delta")
        place = index if isinstance(index, int) and 0 <= index < MOST_CHOICES else 0
        self._begun.add(place)
        if isinstance(reason, str) and reason:
            self._finished.add(place)
            self._finish(reason)
        said = delta.items() if isinstance(delta, dict) else ()
        is_more = bool(choice.get("text")) or any(key != "role" and value for key, value in said)
        self._said[place] += is_more
        return is_more

    def _finish(self, reason: object) -> None:
        """Take a word for it, if there is one."""
        if isinstance(reason, str) and reason:
            self.read.finish = FinishReason.LENGTH if reason in _LENGTHS else FinishReason.STOP

    def _end(self) -> None:
        """All is over that has begun."""
        self._finished |= self._begun
        self.read.finish = self.read.finish or FinishReason.STOP

    def _take_timings(self, timings: object) -> None:
        """Read llama.cpp's: `cache_n` tokens of the prompt were cached, and `prompt_n` computed in
        `prompt_ms`."""
        if not isinstance(timings, dict):
            return
        cached, computed = believed(timings.get("cache_n")), believed(timings.get("prompt_n"))
        if cached is not None and computed is not None:
            self.read.num_cached_tokens, self.read.num_prompt_tokens = cached, cached + computed
        prompt_ms = timings.get("prompt_ms")
        if isinstance(prompt_ms, int | float) and 0.0 < prompt_ms < MOST_PROMPT_MS:
            self.read.prompt_seconds = prompt_ms / 1000


def _takes_out(said: Any) -> bool:
    """Take what a server says to another out of an answer. Returns whether there was any."""
    message = said.get("message")
    parts = [said, message] if isinstance(message, dict) else [said]
    found = [part.pop(name) for part in parts for name in SERVERS_OWN & part.keys() if part[name] is not None]
    return bool(found)


_END = re.compile(rb"\n\r\n?|\n\n|\r\r\n?")
"""Two ends of lines, each of which is LF, CR or both."""


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
    def rest(self) -> bytes:
        return bytes(self._rest).strip()


def data_of(event: bytes) -> bytes | None:
    """Return what an event says; None for a comment."""
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
