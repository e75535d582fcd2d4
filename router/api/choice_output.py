"""ChoiceOutput: one choice of an answer as it grows: its tokens in, its parts out.

Owns the choice's state: what has been said so far, and why it has ended. Knows no dialect.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from replicas.protocol.frames import FinishReason, TokenDelta, TokenLogprobs
from router.answers.parser import AnswerParser
from router.answers.parts import CallArguments, CallEnd, CallStart, Part, Reasoning, Text
from router.answers.stop_strings import StopStrings
from router.prompt.detokenizer import Detokenizer

TOOL_CALLS = "tool_calls"
"""Why a choice has ended that calls tools; the other words are those of FinishReason."""

MOST_HELD = 256
"""Tokens decoded together; few, so that no client waits for them."""


class ToolCall(NamedTuple):
    name: str
    arguments: str


Said = Text | Reasoning | ToolCall


@dataclass(slots=True)
class _PartRun:
    """An uninterrupted piece so far; `name` is a tool's."""

    kind: type[Said]
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def whole(self) -> Said:
        if self.kind is ToolCall:
            return ToolCall(self.name, self.text)
        return Text(self.text) if self.kind is Text else Reasoning(self.text)


class ChoiceOutput:
    """Feed it the choice's deltas. Without a parser all of the text is the answer's. `stops` count in the
    answer, from its first character on, and never in reasoning. With `one_call` it ends before what would
    follow its first tool call, and with `is_silent` it says nothing at all: only the prompt matters. The
    token that ends it stands for nothing, unless it `shows_stop`. If it is kept, `said` (of which `text`,
    `reasoning` and `calls` are parts) and `token_ids` have all of it in the end; else they stay empty.
    """

    __slots__ = (
        "_detokenizer",
        "_has_broken_call",
        "_has_called",
        "_held",
        "_is_kept",
        "_is_plain",
        "_is_silent",
        "_num_calls",
        "_one_call",
        "_parser",
        "_runs",
        "_shows_stop",
        "_silent_token_ids",
        "_stopped",
        "_stops",
        "finish_reason",
        "logprobs",
        "num_reasoning_tokens",
        "num_tokens",
        "stop_token_id",
        "token_ids",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        silent_token_ids: frozenset[int],
        parser: AnswerParser | None = None,
        stops: StopStrings | None = None,
        *,
        one_call: bool = False,
        is_silent: bool = False,
        is_kept: bool = True,
        shows_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._silent_token_ids = silent_token_ids
        self._parser = parser
        self._stops = stops
        self._one_call = one_call
        self._is_silent = is_silent
        self._is_kept = is_kept
        self._is_plain = parser is None and stops is None and not is_silent
        self._shows_stop = shows_stop
        self._held: list[int] = []
        self._runs: list[_PartRun] = []
        self._has_called = False
        self._has_broken_call = False
        self._num_calls = 0
        self._stopped = False
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.stop_token_id: int | None = None
        """The token that ended it, if one did."""

    @property
    def said(self) -> list[Said]:
        """In the order in which the model said it, in whole pieces."""
        return [run.whole() for run in self._runs]

    @property
    def text(self) -> str:
        return "".join([run.text for run in self._runs if run.kind is Text])

    @property
    def reasoning(self) -> str:
        return "".join([run.text for run in self._runs if run.kind is Reasoning])

    @property
    def calls(self) -> list[ToolCall]:
        return [ToolCall(run.name, run.text) for run in self._runs if run.kind is ToolCall]

    def has_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def was_stopped(self) -> bool:
        """The router ended this choice, so that the engine has yet to be told."""
        return self._stopped

    @property
    def stop_string(self) -> str | None:
        """The one that ended it, if one did."""
        return None if self._stops is None else self._stops.found

    @property
    def may_stop_early(self) -> bool:
        """Its text may end it before the engine does."""
        return self._stops is not None or self._one_call

    @property
    def num_said_tokens(self) -> int:
        """Count the tokens that the client is charged for."""
        return 0 if self._is_silent else self.num_tokens

    def said_logprobs(self, delta: TokenDelta) -> Sequence[TokenLogprobs]:
        """Return log-probabilities of an added delta, without the token that stands for nothing."""
        logprobs = delta.logprobs
        if not logprobs or self._is_silent:
            return ()
        if self.stop_token_id is not None and not self._shows_stop and delta.finish_reason is not None:
            return logprobs[:-1]
        return logprobs

    def hold(self, delta: TokenDelta) -> None:
        """A delta in the middle of an answer of which no text is wanted yet: it comes with a later one."""
        token_ids = delta.token_ids
        self.num_tokens += len(token_ids)
        if self._is_kept:
            self.token_ids += token_ids
        self._held += token_ids
        if len(self._held) >= MOST_HELD:
            held, self._held = self._held, []
            self._took(self._parts_of(held))

    def add(self, delta: TokenDelta) -> Sequence[Part]:
        """Return the new parts. Sets `finish_reason` with the last of them."""
        token_ids: Sequence[int] = delta.token_ids
        finish = delta.finish_reason
        self.num_tokens += len(token_ids)
        if self._is_kept:
            self.token_ids += token_ids
        if self._is_plain and finish is None and not self._held:  # nearly all of them
            text = self._detokenizer.add(token_ids)
            if not text:
                return ()
            if self._is_kept:
                if not self._runs:
                    self._runs.append(_PartRun(Text))
                self._runs[-1].pieces.append(text)
            return (Text(text),)
        if finish is FinishReason.STOP and token_ids and token_ids[-1] in self._silent_token_ids:
            self.stop_token_id = token_ids[-1]
            if not self._shows_stop:
                token_ids = token_ids[:-1]
        if self._held:
            token_ids = (*self._held, *token_ids)
            self._held.clear()
        parts = self._parts_of(token_ids)
        if finish is not None and not self._stopped:
            parts = [*parts, *self._last_parts(finish)]
            self.finish_reason = finish.value
        if self.stop_string is not None and not self._stopped:
            self._stopped = True
            if finish is None and self._parser is not None:
                parts = [*parts, *self._parser.finish(is_whole=False)]
        if self._stopped:
            self.finish_reason = FinishReason.STOP.value
        if self._is_silent and self.finish_reason is not None:
            self.finish_reason = FinishReason.LENGTH.value
        parts = self._took(parts)
        if self.finish_reason == FinishReason.STOP.value and self._num_calls and not self._has_broken_call:
            self.finish_reason = TOOL_CALLS
        return parts

    def _parts_of(self, token_ids: Sequence[int]) -> Sequence[Part]:
        parser, stops, add = self._parser, self._stops, self._detokenizer.add
        if parser is None:
            return _said(
                add(token_ids) if stops is None else "".join([stops.add(add((i,))) for i in token_ids])
            )
        parts: list[Part] = []
        for token_id in token_ids:  # one by one, since those of reasoning are counted
            was_reasoning = parser.is_reasoning
            answer = parser.reason(add((token_id,)), parts)
            parts += self._parsed(answer if stops is None else stops.add(answer))
            self.num_reasoning_tokens += was_reasoning or parser.is_reasoning
        return parts

    def _parsed(self, answer: str) -> Sequence[Part]:
        assert self._parser is not None
        if not answer or self._stopped:
            return ()
        return self._through_one_call(self._parser.feed(answer))

    def _through_one_call(self, parts: list[Part]) -> list[Part]:
        """All parts, unless the answer is to end with its first call."""
        if self._one_call:
            for number, part in enumerate(parts):
                if self._has_called:
                    self._stopped = True
                    return parts[:number]
                self._has_called = type(part) is CallEnd
        return parts

    def _last_parts(self, finish: FinishReason) -> Sequence[Part]:
        parts: list[Part] = []
        text = self._detokenizer.finish()
        if self._parser is not None:
            text = self._parser.reason(text, parts, is_last=True)
        if self._stops is not None:
            text = self._stops.add(text) + self._stops.finish()
        if self._parser is None:
            return _said(text)
        parts += self._parsed(text)
        if not self._stopped:
            is_whole = finish is FinishReason.STOP and self.stop_string is None
            parts += self._through_one_call(self._parser.finish(is_whole=is_whole))
        return parts

    def _took(self, parts: Sequence[Part]) -> Sequence[Part]:
        if self._is_silent:
            return ()
        if self._parser is not None:
            self._num_calls += sum(type(part) is CallStart for part in parts)
            self._has_broken_call |= any(type(part) is CallEnd and not part.is_whole for part in parts)
        if self._is_kept:
            for part in parts:
                self._keep(part)
        return parts

    def _keep(self, part: Part) -> None:
        runs = self._runs
        if type(part) is Text or type(part) is Reasoning:
            if not runs or runs[-1].kind is not type(part):
                runs.append(_PartRun(type(part)))
            runs[-1].pieces.append(part.text)
        elif type(part) is CallStart:
            runs.append(_PartRun(ToolCall, part.name))
        elif type(part) is CallArguments:
            runs[-1].pieces.append(part.text)


def _said(text: str) -> tuple[Text, ...]:
    return (Text(text),) if text else ()
