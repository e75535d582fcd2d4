"""Types of parameters: what stands behind references and combinations counts, and costs a bounded time."""

import time
from typing import Any

import pytest

from router.answers.parameter_kinds import Kinds, kinds_of, parameter_kinds

DEFINITIONS: dict[str, Any] = {
    "Name": {"type": "string"},
    "Colour": {"enum": ["red", "12345"], "title": "Colour", "type": "string"},
    "Size": {"enum": [1, 2]},
    "Point": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "Alias": {"$ref": "#/$defs/Colour"},
    "a/b~c d": {"type": "boolean"},
    "Tree": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/Tree"}}]},
    "Circle": {"$ref": "#/$defs/Circle"},
    "Knot": {"anyOf": [{"$ref": "#/$defs/Knot"}, {"$ref": "#/$defs/Name"}]},
    "Arguments": {"type": "object", "properties": {"code": {"$ref": "#/$defs/Name"}}},
}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"$ref": "#/$defs/Colour"}, {"string"}),
        ({"$ref": "#/$defs/Alias", "default": "red", "description": "A colour."}, {"string"}),
        ({"allOf": [{"$ref": "#/$defs/Colour"}], "default": "red"}, {"string"}),
        ({"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}], "default": None}, {"string", "null"}),
        ({"oneOf": [{"$ref": "#/$defs/Name"}, {"$ref": "#/$defs/Point"}]}, {"string", "object"}),
        ({"$ref": "#/$defs/Size"}, {"integer"}),
        ({"$ref": "#/$defs/Point"}, {"object"}),
        ({"$ref": "#/$defs/a~1b~0c%20d"}, {"boolean"}),
        ({"$ref": "#/$defs/Tree"}, {"string", "array"}),
        ({"$ref": "#/$defs/Tree/anyOf/0"}, {"string"}),
        ({"$ref": "#"}, {"object"}),
        ({"allOf": [{"type": "number"}, {"enum": [1, 2]}]}, {"integer"}),
        ({"allOf": [{"type": ["string", "null"]}, {"anyOf": [{"type": "string"}]}]}, {"string"}),
        ({"allOf": [{"minLength": 3}, {"$ref": "#/$defs/Name"}]}, {"string"}),
        # Nothing is known of these.
        ({"$ref": "#/$defs/Nowhere"}, None),
        ({"$ref": "https://example.com/schema.json"}, None),
        ({"$ref": 7}, None),
        ({"$ref": "#/$defs/Circle"}, None),
        ({"$ref": "#/$defs/Knot"}, None),
        ({"allOf": "no list"}, None),
        ({"anyOf": [{"$ref": "#/$defs/Name"}, {}]}, None),
    ],
)
def test_references_and_combinations_are_followed(schema: Any, kinds: Any) -> None:
    root = {"type": "object", "$defs": DEFINITIONS, "properties": {"p": schema}}
    expected = None if kinds is None else frozenset(kinds)
    assert kinds_of(schema, root) == expected
    assert parameter_kinds(root, "p") == expected


@pytest.mark.parametrize(
    "arguments",
    [
        {"$ref": "#/$defs/Arguments"},
        {"allOf": [{"$ref": "#/$defs/Arguments"}, {"properties": {"other": {"type": "integer"}}}]},
        {"type": "object", "anyOf": [{"properties": {}}, {"$ref": "#/$defs/Arguments"}]},
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/Name"}},
    ],
)
def test_parameters_are_found_wherever_they_are_described(arguments: dict[str, Any]) -> None:
    assert parameter_kinds({**arguments, "$defs": DEFINITIONS}, "code") == frozenset({"string"})


def _fanning() -> dict[str, Any]:
    names = [f"d{number}" for number in range(60)]
    return {
        name: {"anyOf": [{"$ref": f"#/$defs/{after}"} for after in names[number + 1 :]] * 20 or [{}]}
        for number, name in enumerate(names)
    }


@pytest.mark.parametrize(
    "definitions",
    [
        _fanning(),
        {"d0": {"allOf": [{"$ref": "#/$defs/d0"}] * 50_000}},
        {"d0": {"properties": {}, "anyOf": [{"$ref": "#/$defs/d0"}] * 50_000}},
    ],
)
def test_references_that_fan_out_or_lead_in_circles_cost_little(definitions: dict[str, Any]) -> None:
    root = {"$defs": definitions, "$ref": "#/$defs/d0", "properties": {"p": {"$ref": "#/$defs/d0"}}}
    begun = time.thread_time()
    kinds: list[Kinds] = [kinds_of({"$ref": "#/$defs/d0"}, root), parameter_kinds(root, "q")]
    assert kinds == [None, None]
    assert time.thread_time() - begun < 0.5
