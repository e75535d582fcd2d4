"""AnswerItems: the output items of one of OpenAI's Responses, and the events that tell of them.

Owns the shapes of items and of their events, and which part begins which item. Pure.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from replicas.protocol.frames import TokenLogprobs
from router.answers.parts import CallArguments, CallEnd, CallStart, Part, Reasoning, Text
from router.api.logprobs import TokenLogprob
from router.api.responses.input import packed_reasoning

IN_PROGRESS: Final = "in_progress"
COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"

Event = tuple[str, dict[str, Any]]
"""Its type, and the fields besides type and number."""

WriteLogprobs = Callable[[Sequence[TokenLogprobs]], list[TokenLogprob]]


Status = Literal["completed", "in_progress", "incomplete"]


class TextPart(Struct, tag="output_text", kw_only=True):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob]


class ReasoningPart(Struct, tag="reasoning_text"):
    text: str


class OutputItem(Struct, kw_only=True):
    id: str
    type: Literal["function_call", "message", "reasoning"]
    role: Literal["assistant"] | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    content: Sequence[TextPart | ReasoningPart] | UnsetType = UNSET
    encrypted_content: str | UnsetType | None = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    namespace: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    status: Status


class ItemKind(enum.StrEnum):
    """The values are what ids begin with."""

    MESSAGE = "msg_"
    REASONING = "rs_"
    CALL = "fc_"


@dataclass(slots=True)
class Item:
    """`call` has the fields of a function call that are known from its start."""

    kind: ItemKind
    item_id: str
    index: int
    call: dict[str, Any] = field(default_factory=dict)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def place(self) -> dict[str, Any]:
        """The fields by which events name it."""
        place: dict[str, Any] = {"item_id": self.item_id, "output_index": self.index}
        return place if self.kind is ItemKind.CALL else {**place, "content_index": 0}


class AnswerItems:
    """`spaces` are the namespaces of functions, as in Echo. `write_logprobs` is None if they are not
    requested."""

    def __init__(
        self,
        response_id: str,
        *,
        new_call_id: Callable[[], str],
        spaces: dict[str, tuple[str, str]],
        packs_reasoning: bool = False,
        write_logprobs: WriteLogprobs | None = None,
    ) -> None:
        self._id = response_id.partition("_")[2]
        self._new_call_id = new_call_id
        self._spaces = spaces
        self._packs_reasoning = packs_reasoning
        self._write_logprobs = write_logprobs
        self._waiting_logprobs: list[TokenLogprob] = []
        self.done: list[OutputItem] = []
        self.current: Item | None = None

    def take(self, part: Part, logprobs: Sequence[TokenLogprobs] = ()) -> list[Event]:
        """Return the events that tell of a part. Log-probabilities are the text's alone, and wait for it;
        those of what turns out to be something else are dropped."""
        if self._write_logprobs is not None:
            if type(part) is Text:
                self._waiting_logprobs += self._write_logprobs(logprobs)
            else:
                self._waiting_logprobs = []
        match part:
            case Text(text):
                return self._text(text) if text else []
            case Reasoning(text):
                events = self._enter(ItemKind.REASONING)
                return [*events, self._delta("response.reasoning_text.delta", text)]
            case CallStart(_, name):
                space, own_name = self._spaces.get(name, ("", name))
                call = {"call_id": self._new_call_id(), "name": own_name}
                if space:
                    call["namespace"] = space
                return [*self.leave(COMPLETED), *self._begin(ItemKind.CALL, call)]
            case CallArguments(_, text):
                return [self._delta("response.function_call_arguments.delta", text)]
            case CallEnd():
                return self.leave(COMPLETED if self._is_whole_call() else INCOMPLETE)

    def end(self, status: Status) -> list[Event]:
        """Nothing more is said. An answer without a word is an empty message."""
        events = [] if self.done or self.current else self._begin(ItemKind.MESSAGE, {})
        return [*events, *self.leave(status)]

    def leave(self, status: Status) -> list[Event]:
        item, self.current = self.current, None
        if item is None:
            return []
        if item.kind is ItemKind.MESSAGE:
            item.logprobs += self._take_logprobs()
        text, place = item.text, item.place
        events: list[Event]
        match item.kind:
            case ItemKind.MESSAGE:
                logprobs = item.logprobs
                events = [
                    ("response.output_text.done", {**place, "text": text, "logprobs": logprobs}),
                    ("response.content_part.done", {**place, "part": TextPart(text=text, logprobs=logprobs)}),
                ]
            case ItemKind.REASONING:
                events = [
                    ("response.reasoning_text.done", {**place, "text": text}),
                    ("response.content_part.done", {**place, "part": ReasoningPart(text)}),
                ]
            case ItemKind.CALL:
                done = {**place, "name": item.call["name"], "arguments": text}
                events = [("response.function_call_arguments.done", done)]
        written = self._written(item, status)
        self.done.append(written)
        return [*events, ("response.output_item.done", {"output_index": item.index, "item": written})]

    def _is_whole_call(self) -> bool:
        """Whether the call is whole; one that broke off has arguments that are no JSON."""
        assert self.current is not None
        try:
            msgspec.json.decode(self.current.text)
        except (ValueError, RecursionError):
            return False
        return True

    def _text(self, text: str) -> list[Event]:
        events = self._enter(ItemKind.MESSAGE)
        item = self.current
        assert item is not None
        logprobs = self._take_logprobs()
        item.logprobs += logprobs
        name, fields = self._delta("response.output_text.delta", text)
        return [*events, (name, {**fields, "logprobs": logprobs})]

    def _take_logprobs(self) -> list[TokenLogprob]:
        waiting, self._waiting_logprobs = self._waiting_logprobs, []
        return waiting

    def _delta(self, name: str, text: str) -> Event:
        assert self.current is not None
        self.current.pieces.append(text)
        return name, {**self.current.place, "delta": text}

    def _enter(self, kind: ItemKind) -> list[Event]:
        if self.current is not None and self.current.kind is kind:
            return []
        return [*self.leave(COMPLETED), *self._begin(kind, {})]

    def _begin(self, kind: ItemKind, call: dict[str, Any]) -> list[Event]:
        index = len(self.done)
        item = self.current = Item(kind, f"{kind.value}{self._id}{index:04x}", index, call)
        added = {"output_index": index, "item": self._written(item, IN_PROGRESS)}
        events: list[Event] = [("response.output_item.added", added)]
        if kind is not ItemKind.CALL:
            part = TextPart(text="", logprobs=[]) if kind is ItemKind.MESSAGE else ReasoningPart("")
            events.append(("response.content_part.added", {**item.place, "part": part}))
        return events

    def _written(self, item: Item, status: Status) -> OutputItem:
        text, is_done = item.text, status != IN_PROGRESS
        match item.kind:
            case ItemKind.MESSAGE:
                parts = [TextPart(text=text, logprobs=item.logprobs)] if is_done else []
                return OutputItem(
                    id=item.item_id, type="message", role="assistant", content=parts, status=status
                )
            case ItemKind.REASONING:
                return OutputItem(
                    id=item.item_id,
                    type="reasoning",
                    summary=[],
                    content=[ReasoningPart(text)] if is_done else [],
                    encrypted_content=packed_reasoning(text) if is_done and self._packs_reasoning else None,
                    status=status,
                )
            case ItemKind.CALL:
                return OutputItem(
                    id=item.item_id, type="function_call", **item.call, arguments=text, status=status
                )
