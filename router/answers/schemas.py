"""Converts clients' JSON schemas for llguidance.

Owns the bounds on schemas, the spacing of JSON, and which keywords are dropped because they do not affect
validity here.

llguidance bounds most costs of a schema itself. Exceptions are the number of entries of an array, whose rules
it writes out, and the length of chains of references, which it follows on the machine's stack.

JSON has no spaces except one after a comma or colon, so an answer cannot continue in spaces forever. Chat
templates write a call's arguments with that space, so generated arguments have it too.
"""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from router.errors import InvalidRequest

MAX_SCHEMA_CHARACTERS = 128 * 1024
MAX_SCHEMA_DEPTH = 100
"""Objects and lists within one another; llguidance reads somewhat more."""
MAX_FOLLOWED_DEPTH = 1_000
"""Total depth of the schema and all that it refers to; llguidance bears twice as much."""
MAX_ARRAY_ENTRIES = 2_000
"""A larger `maxItems` is taken for this many."""
MAX_COUNTED_ENTRIES = 10_000
"""All `minItems` and `maxItems` together."""
MAX_LEAST_CHARACTERS = 5_000
"""For a string's `minLength`: llguidance does not count strings much further."""

_ENFORCED_FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
_REMARKS = frozenset(("$comment", "description", "title"))
_VALUES = frozenset(("const", "default", "enum", "example", "examples"))
"""Keywords whose contents are JSON, and no schemas."""

ANSWER_SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
ARGUMENT_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def answer_schema(schema: Any, parameter: str) -> dict[str, Any]:
    """For JSON that is an answer's text. Raises InvalidRequest."""
    return {**_checked(schema, parameter), "x-guidance": ANSWER_SPACING}


def arguments_schema(schema: Any, parameter: str, *, strict: bool) -> dict[str, Any]:
    """For the arguments of a tool, which are an object. Of a tool that is not strict, keywords that
    llguidance does not know are passed over. Raises InvalidRequest.
    """
    checked = {"type": "object", **_checked({} if schema is None else schema, parameter)}
    return {**checked, "x-guidance": {**ARGUMENT_SPACING, "lenient": not strict}}


def argument_schema(schema: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Extract one argument's schema from a result of `arguments_schema`, with its references."""
    shared = {name: arguments[name] for name in ("$defs", "definitions", "x-guidance") if name in arguments}
    return {**(schema if isinstance(schema, dict) else {}), **shared}


def _checked(schema: Any, parameter: str) -> dict[str, Any]:
    """Return the schema as an object with enforced keywords only. Raises InvalidRequest."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise InvalidRequest("a JSON schema is an object", parameter=parameter)
    reader = _SchemaReader(parameter)
    checked = reader.schema(schema, depth=1)
    reader.check_followed_depth(checked)
    num_characters = len(json.dumps(checked, ensure_ascii=False))
    if num_characters > MAX_SCHEMA_CHARACTERS:
        raise reader.too_much(f"has {num_characters} characters, and may have {MAX_SCHEMA_CHARACTERS}")
    return checked


class _SchemaReader:
    """Copies one schema, counting its costly parts."""

    def __init__(self, parameter: str) -> None:
        self._parameter = parameter
        self._num_entries = 0
        self._references: set[str] = set()

    def too_much(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"the JSON schema {what}", parameter=self._parameter)

    def schema(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        """Convert a schema. Mappings of names to schemas are treated alike, which keeps their names, since a
        value under a name such as `format` is a schema there."""
        copied: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in ("minItems", "maxItems"):
                value = self._entries(keyword, value)
            elif keyword == "minLength" and isinstance(value, int | float) and value > MAX_LEAST_CHARACTERS:
                raise self.too_much(
                    f"asks for {value} characters of a string; at most are {MAX_LEAST_CHARACTERS}"
                )
            elif keyword == "$ref" and isinstance(value, str):
                self._references.add(value)
            if _counts(keyword, value):
                copied[keyword] = self._copy(value, depth, is_value=keyword in _VALUES)
        return copied

    def _copy(self, value: Any, depth: int, *, is_value: bool) -> Any:
        if depth > MAX_SCHEMA_DEPTH:
            raise self.too_much(f"is more than {MAX_SCHEMA_DEPTH} levels deep")
        if isinstance(value, list):
            return [self._copy(entry, depth + 1, is_value=is_value) for entry in value]
        if not isinstance(value, dict):
            return value
        if not is_value:
            return self.schema(value, depth + 1)
        return {name: self._copy(entry, depth + 1, is_value=True) for name, entry in value.items()}

    def _entries(self, keyword: str, value: Any) -> Any:
        if not isinstance(value, int | float):
            return value
        if value > MAX_ARRAY_ENTRIES:
            if keyword == "minItems":
                raise self.too_much(f"asks for {value} entries of an array; at most are {MAX_ARRAY_ENTRIES}")
            value = MAX_ARRAY_ENTRIES
        self._num_entries += max(0, int(value))
        if self._num_entries > MAX_COUNTED_ENTRIES:
            raise self.too_much(f"counts more than {MAX_COUNTED_ENTRIES} entries of arrays")
        return value

    def check_followed_depth(self, schema: dict[str, Any]) -> None:
        """Raises InvalidRequest."""
        depth = _depth(schema) + sum(_depth(_referred(schema, name)) for name in self._references)
        if depth > MAX_FOLLOWED_DEPTH:
            raise self.too_much(
                f"is {depth} levels deep with what it refers to, and may be {MAX_FOLLOWED_DEPTH}"
            )


def _referred(schema: dict[str, Any], reference: str) -> Any:
    """Resolve a reference within the schema; one that is not understood means the whole."""
    if not reference.startswith("#/"):
        return schema
    found: Any = schema
    for step in unquote(reference[2:]).split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return schema
    return found


def _depth(value: Any) -> int:
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if entries is None else 1 + max(map(_depth, entries), default=0)


def _counts(keyword: str, value: Any) -> bool:
    """Whether a keyword affects validity. `x-guidance` is llguidance's own, not a client's."""
    if isinstance(value, str):
        return keyword not in _REMARKS and (keyword != "format" or value in _ENFORCED_FORMATS)
    return keyword != "x-guidance"
