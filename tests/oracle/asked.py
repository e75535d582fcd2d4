"""Dialect: the bodies of one dialect, made of `asked.yaml`: questions, options, conversations and mistakes.

Owns what the words with a $ in that file stand for, and how a body is made of its parts.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from replicas.media.probes import probe_png

Body = dict[str, Any]

LONG = "The handbook says that every door is closed at night and opened in the morning. " * 40
_TEXTS = {
    "$LONG": LONG,
    "$TOO_LONG": "word " * 140_000,
    "$PICTURE": base64.b64encode(probe_png(84, 56, b"\xff\0\0")).decode(),
    "$OTHER_PICTURE": base64.b64encode(probe_png(112, 56, b"\0\0\xff")).decode(),
}
_VALUES = {
    "$CITY": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "$AUTHOR": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "$DEEP": json.loads("[" * 500 + "]" * 500),
}
_QUESTION, _WITHOUT = "$QUESTION", "$WITHOUT"
_OF_ANY_TYPE: tuple[Any, ...] = (-1, 1e9, [], [{"x": 1}], {"a": 1}, True, None, "")


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _filled(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_filled(each) for each in value]
    if not isinstance(value, str):
        return value
    for word, text in _TEXTS.items():
        value = value.replace(word, text)
    return _VALUES.get(value, value)


_content = _filled(yaml.safe_load(Path(__file__).with_name("asked.yaml").read_text("utf-8")))
RULES: Mapping[str, str] = _content["rules"]


class Asked(NamedTuple):
    label: str
    path: str
    body: Body


class Dialect:
    """`options`, `conversations` and `wrong` have what differs from a plain question."""

    def __init__(self, name: str, found: Mapping[str, Any]) -> None:
        self.name, self.path = name, str(found["path"])
        self.stream_path: str | None = found.get("stream_path")
        self._base: Body = found["base"]
        self.options: Mapping[str, Body] = {**found["options"], **found.get("common", {})}
        self.conversations = {label: self._changed(more) for label, more in found["conversations"].items()}
        self.wrong = {label: self._changed(more) for label, more in found["wrong"].items()}

    def body(self, question: object, **more: Any) -> Body:
        whole: Body = _asking(self._base, question)
        for name, value in more.items():
            both = isinstance(value, dict) and isinstance(whole.get(name), dict)
            whole[name] = {**whole[name], **value} if both else value
        return whole

    def _changed(self, more: Body) -> Body:
        left_out = more.get(_WITHOUT, ())
        whole = {**self._base, **more}
        return {name: value for name, value in whole.items() if name not in (*left_out, _WITHOUT)}

    def asked(self) -> Iterator[Asked]:
        for question in [*RULES, "Anything else?"]:
            for label, more in {"plain": {}, "tools": self.options["tools"]}.items():
                yield from self._both_ways(f"question/{question}/{label}", self.body(question, **more))
        for label, more in self.options.items():
            yield from self._both_ways(f"option/{label}", self.body("Count to nine.", **more))
            yield from self._both_ways(f"arbitrary/{label}", self.body("Anything else?", **more))
        for label, body in self.conversations.items():
            yield from self._both_ways(f"conversation/{label}", body)
        for label, body in self.wrong.items():
            yield Asked(f"wrong/{label}", self.path, body)
        for field in _content["fields"].split():
            yield Asked(f"field/{field}", self.path, {**self.body("Say hello."), field: "x"})
        for field in _content["wrong_values"].split():
            for value in _OF_ANY_TYPE:
                body = {**self.body("Say hello."), field: value}
                yield Asked(f"value/{field}/{value!r}", self.path, body)

    def _both_ways(self, label: str, body: Body) -> Iterator[Asked]:
        yield Asked(f"{label}/whole", self.path, body)
        streamed = {**body, "stream": True} if self.stream_path is None else body
        yield Asked(f"{label}/stream", self.stream_path or self.path, streamed)


def _asking(value: Any, question: object) -> Any:
    if isinstance(value, dict):
        return {name: _asking(each, question) for name, each in value.items()}
    if isinstance(value, list):
        return [_asking(each, question) for each in value]
    return question if value == _QUESTION else value


DIALECTS = tuple(Dialect(name, found) for name, found in _content["dialects"].items())
