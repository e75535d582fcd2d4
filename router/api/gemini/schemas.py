"""Gemini's dialect of schemas → JSON Schema.

Owns the differences: types in capitals, `nullable`, numbers as text, an order of properties, and fields in
either spelling. What is a JSON schema already comes out as it is.
"""

from collections.abc import Mapping
from typing import Any

from router.api.json_body import invalid

_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_UNSPECIFIED = "type_unspecified"
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_RENAMED = {
    "any_of": "anyOf",
    "min_items": "minItems",
    "max_items": "maxItems",
    "min_length": "minLength",
    "max_length": "maxLength",
    "min_properties": "minProperties",
    "max_properties": "maxProperties",
    "property_ordering": "propertyOrdering",
    "additional_properties": "additionalProperties",
    "defs": "$defs",
    "ref": "$ref",
}
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "$defs", "definitions")


def json_schema(schema: Mapping[str, Any], parameter: str) -> dict[str, Any]:
    """`parameter` is where it stands. Raises InvalidRequest, and RecursionError for one too deep."""
    made: dict[str, Any] = {_RENAMED.get(name, name): value for name, value in schema.items()}
    order = made.pop("propertyOrdering", None)
    for name, value in list(made.items()):
        path = f"{parameter}.{name}"
        if name in _SCHEMA_MAPS and isinstance(value, dict):
            made[name] = {each: _inner(inner, f"{path}.{each}") for each, inner in value.items()}
        elif name in _SCHEMA_LISTS and isinstance(value, list):
            made[name] = [_inner(inner, f"{path}[{number}]") for number, inner in enumerate(value)]
        elif name in ("items", "additionalProperties"):
            made[name] = _inner(value, path)
        elif name in _COUNTS and isinstance(value, str):
            made[name] = _count(value, path)
    _set_type(made, parameter)
    if made.get("format") == "enum":
        del made["format"]
    if isinstance(order, list) and isinstance(made.get("properties"), dict):
        made["properties"] = _ordered(made["properties"], order)
    return made


def _inner(value: Any, parameter: str) -> Any:
    return json_schema(value, parameter) if isinstance(value, dict) else value


def _set_type(made: dict[str, Any], parameter: str) -> None:
    is_nullable = made.pop("nullable", None) is True
    kind = made.get("type")
    if isinstance(kind, list):
        made["type"] = [each.lower() if isinstance(each, str) else each for each in kind]
    elif isinstance(kind, str):
        kind = kind.lower()
        if kind == _UNSPECIFIED:
            del made["type"]
        elif kind not in _TYPES:
            raise invalid(f"{parameter}.type", f"'{kind[:40]}' is no type of a schema.")
        else:
            made["type"] = [kind, "null"] if is_nullable and kind != "null" else kind
    if is_nullable:
        if isinstance(made.get("enum"), list) and None not in made["enum"]:
            made["enum"] = [*made["enum"], None]
        if isinstance(made.get("anyOf"), list):
            made["anyOf"] = [*made["anyOf"], {"type": "null"}]


def _count(value: str, parameter: str) -> int:
    """Google's JSON has integers of 64 bits as text."""
    if not (value.isascii() and value.isdigit() and len(value) <= 18):
        raise invalid(parameter, f"'{value[:40]}' is no count.")
    return int(value)


def _ordered(properties: dict[str, Any], order: list[Any]) -> dict[str, Any]:
    first = {name: properties[name] for name in order if isinstance(name, str) and name in properties}
    return {**first, **properties}
