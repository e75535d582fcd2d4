"""Parameter kinds: the JSON types that a schema allows for a parameter, and bare text as one of these.

Pure functions over a schema, which may be anything that a client has sent. They follow `$ref`, `allOf`,
`anyOf` and `oneOf` within the same schema, for MAX_LOOKS at most.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any
from urllib.parse import unquote

from router.answers.json_strings import refuse_constant, with_escapes

Kinds = frozenset[str] | None
"""JSON Schema's type names; None if a schema does not say."""

STRING_ONLY = frozenset({"string"})

MAX_LOOKS = 256
"""Schemas that are looked at to type one parameter. References may lead in circles, and fan out."""


def kinds_of(schema: Any, root: Any) -> Kinds:
    """`root` is the schema that references in it are relative to."""
    try:
        return _KindFinder(root).kinds(schema)
    except _TooMuch:
        return None


def parameter_kinds(arguments: Any, name: str) -> Kinds:
    """Return one parameter's kinds by the schema of all arguments."""
    finder = _KindFinder(arguments)
    try:
        schema = finder.parameter(arguments, name)
        return finder.kinds(finder.any_other(arguments) if schema is None else schema)
    except _TooMuch:
        return None


def has_parameter(arguments: Any, name: str) -> bool:
    """Whether the schema of all arguments describes one of this name."""
    try:
        return _KindFinder(arguments).parameter(arguments, name) is not None
    except _TooMuch:
        return False


def may_have_parameter(arguments: Any, name: str) -> bool:
    """Whether the schema has a parameter of this name, or does not list its parameters."""
    finder = _KindFinder(arguments)
    try:
        is_described = finder.parameter(arguments, name) is not None
        return is_described or not (finder.has_names or finder.any_other(arguments) is False)
    except _TooMuch:
        return False


def followed(schema: Any, root: Any) -> Any:
    """Follow a schema that is only a reference within `root`."""
    try:
        return _KindFinder(root).followed(schema)
    except _TooMuch:
        return schema


def value_as_json(text: str, kinds: Kinds) -> str:
    """Return the text itself if it is JSON of an allowed kind, or if no string is allowed; else a string of
    it."""
    value = text.strip()
    if kinds is not None and "boolean" in kinds and value in ("True", "False"):
        value = value.lower()
    try:
        value = with_escapes(value)
        kind = _kind(json.loads(value, parse_constant=refuse_constant))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    is_allowed = kinds is None or kind in kinds or (kind == "integer" and "number" in kinds)
    is_kept = is_allowed or (kinds is not None and "string" not in kinds)
    return value if is_kept else json.dumps(text, ensure_ascii=False)


class _TooMuch(Exception):
    """MAX_LOOKS were not enough."""


class _KindFinder:
    """Looks through one schema, counting the looks. Raises _TooMuch."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_looks = 0
        self.has_names = False
        """Whether any parameter has been seen."""

    def kinds(self, schema: Any) -> Kinds:
        schema = self.followed(schema)
        if not isinstance(schema, Mapping):
            return None
        declared = schema.get("type")
        if isinstance(declared, str):
            return frozenset({declared})
        if isinstance(declared, list):
            return frozenset(kind for kind in declared if isinstance(kind, str))
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            return frozenset(_kind(value) for value in values)
        kinds: Kinds = None
        for part in self._parts(schema):
            kinds = _both(kinds, self.kinds(part))
        for keyword in ("anyOf", "oneOf"):
            kinds = _both(kinds, self._any_kinds(schema.get(keyword)))
        return kinds

    def parameter(self, arguments: Any, name: str) -> Any:
        """Return the parameter's schema, or None."""
        arguments = self.followed(arguments)
        if not isinstance(arguments, Mapping):
            return None
        properties = arguments.get("properties")
        self.has_names |= bool(properties)
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
        alternatives = (part for keyword in ("anyOf", "oneOf") for part in _listed(arguments.get(keyword)))
        for part in chain(self._parts(arguments), alternatives):
            found = self.parameter(part, name)
            if found is not None:
                return found
        return None

    def any_other(self, arguments: Any) -> Any:
        """Return the schema of parameters that are not described."""
        arguments = self.followed(arguments)
        return arguments.get("additionalProperties") if isinstance(arguments, Mapping) else None

    def followed(self, schema: Any) -> Any:
        self._look()
        while isinstance(schema, Mapping) and not schema.keys() & _SAYING:
            parts = list(islice(self._parts(schema), 2))
            if len(parts) != 1:
                break
            self._look()
            schema = parts[0]
        return schema

    def _parts(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        """All of them hold."""
        if "$ref" in schema:
            yield _referred(self._root, schema["$ref"])
        yield from _listed(schema.get("allOf"))

    def _any_kinds(self, alternatives: Any) -> Kinds:
        """Combine alternatives; None if one does not say, or there are none."""
        kinds: frozenset[str] = frozenset()
        for alternative in _listed(alternatives):
            its_kinds = self.kinds(alternative)
            if its_kinds is None:
                return None
            kinds |= its_kinds
        return kinds or None

    def _look(self) -> None:
        self._num_looks += 1
        if self._num_looks > MAX_LOOKS:
            raise _TooMuch


_SAYING = frozenset({"type", "const", "enum", "anyOf", "oneOf", "properties"})
"""Keywords that determine a value's kind, besides references."""


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(root: Any, reference: Any) -> Any:
    """Return the place in the schema that a JSON pointer names; None for any other reference."""
    if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
        return None
    found = root
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _both(one: Kinds, other: Kinds) -> Kinds:
    """Intersect the kinds of two schemas that both hold."""
    if one is None or other is None:
        return other if one is None else one
    wide_one, wide_other = _with_integers(one), _with_integers(other)
    return (one & wide_other) | (other & wide_one)


def _with_integers(kinds: frozenset[str]) -> frozenset[str]:
    return kinds | {"integer"} if "number" in kinds else kinds


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"
