"""How bodies of Gemini's API are read, whose fields have two spellings.

Google's parser takes each field as `lowerCamelCase` and as `snake_case`, in one body too. Owns which names
are fields: what stands in a schema, in a call's arguments or in its result stays as it is.
"""

import re
import typing
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from router.api.json_body import decode_body, encode_json

Body = TypeVar("Body", bound=Struct)


class _Named(NamedTuple):
    """A field's name in JSON, and the Struct in it, if there is one."""

    name: str
    kind: type[Struct] | None


class FieldsReader(Generic[Body]):
    """Reads bodies of one kind in either spelling, or in both. Most are in the first, and read at once."""

    def __init__(self, kind: type[Body]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._kind = kind
        self._names: dict[type[Struct], dict[str, _Named]] = {}
        self._collect(kind)
        spellings = {snake for names in self._names.values() for snake in names if "_" in snake}
        ends = {snake.rpartition("_")[2] for snake in spellings}
        # Fields' names end so, and hardly anything else does; their beginnings would stop at each quote.
        self._snake = re.compile(rb'_(?:%b)"' % "|".join(sorted(ends)).encode())

    def read(self, body: bytes) -> Body:
        """Raises InvalidRequest that names the field in the first spelling."""
        return decode_body(self._decoder, self.respelt(body))

    def respelt(self, body: bytes) -> bytes:
        """Return the body with its fields in the first spelling. Raises InvalidRequest."""
        if self._snake.search(body) is not None:
            return encode_json(self._renamed(decode_body(_any_decoder, body), self._kind))
        return body

    def _collect(self, kind: type[Struct]) -> None:
        if kind in self._names:
            return
        names = self._names[kind] = {}
        for field in msgspec.structs.fields(kind):
            inner = _struct_in(field.type)
            names[field.name] = names[field.encode_name] = _Named(field.encode_name, inner)
            if inner is not None:
                self._collect(inner)

    def _renamed(self, value: Any, kind: type[Struct]) -> Any:
        """Rename the fields of a Struct; other keys stay."""
        if isinstance(value, list):
            return [self._renamed(each, kind) if isinstance(each, dict) else each for each in value]
        if not isinstance(value, dict):
            return value
        names = self._names[kind]
        renamed: dict[str, Any] = {}
        for name, inner in value.items():
            known = names.get(name)
            if known is None:
                renamed[name] = inner
            else:
                renamed[known.name] = inner if known.kind is None else self._renamed(inner, known.kind)
        return renamed


_any_decoder: "msgspec.json.Decoder[Any]" = msgspec.json.Decoder(Any)


def _struct_in(annotation: Any) -> type[Struct] | None:
    if isinstance(annotation, type) and issubclass(annotation, Struct):
        return annotation
    return next(filter(None, map(_struct_in, typing.get_args(annotation))), None)
