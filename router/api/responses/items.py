"""AnswerItems: the output items of one of OpenAI's Responses, and the events that tell of them.

Owns the shapes of items and of their events, and which part begins which item. Pure.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from replicas.protocol.frames import TokenLogprobs
from router.answers.parts import CallArguments, CallEnd, CallStart, Part, Reasoning, Text
from router.api.responses.input import packed_reasoning

IN_PROGRESS = "in_progress"
COMPLETED = "completed"
INCOMPLETE = "incomplete"

Event = tuple[str, dict[str, Any]]
"""Its type, and the fields besides type and number."""

WriteLogprobs = Callable[[Sequence[TokenLogprobs]], list[dict[str, Any]]]


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
    call: dict[str, str] = field(default_factory=dict)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

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
        self._waiting_logprobs: list[dict[str, Any]] = []
        self.done: list[dict[str, Any]] = []
        self.current: Item | None = None

    def take(self, part: Part, logprobs: Sequence[TokenLogprobs] = ()) -> list[Event]:
        """The events that tell of a part. Log-probabilities are the text's alone, and wait for it; those of
        what turns out to be something else are dropped."""
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

    def end(self, status: str) -> list[Event]:
        """Nothing more is said. An answer without a word is an empty message."""
        events = [] if self.done or self.current else self._begin(ItemKind.MESSAGE, {})
        return [*events, *self.leave(status)]

    def leave(self, status: str) -> list[Event]:
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
                    ("response.content_part.done", {**place, "part": _text_part(text, logprobs)}),
                ]
            case ItemKind.REASONING:
                events = [
                    ("response.reasoning_text.done", {**place, "text": text}),
                    ("response.content_part.done", {**place, "part": _reasoning_part(text)}),
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

    def _take_logprobs(self) -> list[dict[str, Any]]:
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

    def _begin(self, kind: ItemKind, call: dict[str, str]) -> list[Event]:
        index = len(self.done)
        item = self.current = Item(kind, f"{kind.value}{self._id}{index:04x}", index, call)
        added = {"output_index": index, "item": self._written(item, IN_PROGRESS)}
        events: list[Event] = [("response.output_item.added", added)]
        if kind is not ItemKind.CALL:
            part = _text_part("", []) if kind is ItemKind.MESSAGE else _reasoning_part("")
            events.append(("response.content_part.added", {**item.place, "part": part}))
        return events

    def _written(self, item: Item, status: str) -> dict[str, Any]:
        text, is_done = item.text, status != IN_PROGRESS
        match item.kind:
            case ItemKind.MESSAGE:
                content = [_text_part(text, item.logprobs)] if is_done else []
                fields: dict[str, Any] = {"type": "message", "role": "assistant", "content": content}
            case ItemKind.REASONING:
                fields = {
                    "type": "reasoning",
                    "summary": [],
                    "content": [_reasoning_part(text)] if is_done else [],
                    "encrypted_content": packed_reasoning(text)
                    if is_done and self._packs_reasoning
                    else None,
                }
            case ItemKind.CALL:
                fields = {"type": "function_call", **item.call, "arguments": text}
        return {"id": item.item_id, **fields, "status": status}


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}
