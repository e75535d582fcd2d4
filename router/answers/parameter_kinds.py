"""Parameter kinds: the JSON types that a schema allows for a parameter, and bare text as one of these.

Pure functions over a schema, which may be anything that a client has sent.
"""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

Kinds = frozenset[str] | None
"""JSON Schema's names of types; None where a schema does not say."""

STRING_ONLY = frozenset({"string"})

MAX_DEPTH = 4
"""Of alternatives within alternatives; deeper ones are not looked at."""


def kinds_of(schema: Any, depth: int = 0) -> Kinds:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return None
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(kind for kind in declared if isinstance(kind, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_kind(value) for value in values)
    alternatives = schema.get("anyOf", schema.get("oneOf"))
    if not isinstance(alternatives, list):
        return None
    kinds: frozenset[str] = frozenset()
    for alternative in alternatives:
        its_kinds = kinds_of(alternative, depth + 1)
        if its_kinds is None:
            return None
        kinds |= its_kinds
    return kinds


def value_as_json(text: str, kinds: Kinds) -> str:
    """The text itself if it is JSON of an allowed kind, or if no string is allowed; else a string of it."""
    value = text.strip()
    if kinds is not None and "boolean" in kinds and value in ("True", "False"):
        value = value.lower()
    try:
        kind = _kind(json.loads(value, parse_constant=_refuse_constant))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    is_allowed = kinds is None or kind in kinds or (kind == "integer" and "number" in kinds)
    is_kept = is_allowed or (kinds is not None and "string" not in kinds)
    return value if is_kept else json.dumps(text, ensure_ascii=False)


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


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
