"""Answers put together for tests: said to a parser in pieces, and their parts with neighbours joined."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from router.answers.formats import AnswerFormat
from router.answers.parser import AnswerParser
from router.answers.parts import CallArguments, CallEnd, CallStart, Part, Reasoning, Text

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "list": {"type": "array"},
                    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "flag": {"type": "boolean"},
                },
            },
        },
    }
    for name in ("f", "look_up")
]


def joined(parts: Iterable[Part]) -> list[Part]:
    """Neighbours of a kind are one part; empty ones are none."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        if isinstance(part, Text) and isinstance(last, Text):
            whole[-1] = Text(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            whole[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments):
            assert part.position == last.position
            whole[-1] = CallArguments(part.position, last.text + part.text)
        else:
            whole.append(part)
    return whole


def parts_of(
    answer_format: AnswerFormat,
    pieces: Sequence[str],
    *,
    wants_calls: bool = True,
    starts_in_reasoning: bool = False,
    tools: Sequence[Mapping[str, Any]] = TOOLS,
    is_whole: bool = True,
) -> list[Part]:
    parser = AnswerParser(
        answer_format, wants_calls=wants_calls, starts_in_reasoning=starts_in_reasoning, tools=tools
    )
    parts = [part for piece in pieces for part in parser.feed(piece)]
    parts += parser.finish(is_whole=is_whole)
    check_order(parts, parser.num_calls)
    return joined(parts)


def check_order(parts: Iterable[Part], num_calls: int) -> None:
    """Calls are counted from 0, each begins, goes on and ends once, and nothing comes in between."""
    num_begun = 0
    is_open = False
    for part in parts:
        if isinstance(part, CallStart):
            assert not is_open and part.position == num_begun and part.name
            num_begun += 1
            is_open = True
        elif isinstance(part, CallArguments | CallEnd):
            assert is_open and part.position == num_begun - 1
            is_open = isinstance(part, CallArguments)
        else:
            assert not is_open and part.text
    assert not is_open and num_begun == num_calls


def cut(text: str, sizes: Iterable[int]) -> list[str]:
    pieces: list[str] = []
    start = 0
    for size in sizes:
        pieces.append(text[start : start + size])
        start += size
    return [*pieces, text[start:]]


def call(position: int, name: str, arguments: str) -> list[Part]:
    return [CallStart(position, name), CallArguments(position, arguments), CallEnd(position)]


def broken(position: int, name: str, arguments: str) -> list[Part]:
    return [CallStart(position, name), CallArguments(position, arguments), CallEnd(position, is_whole=False)]
