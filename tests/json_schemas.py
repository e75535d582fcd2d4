"""Random JSON schemas whose values are short, for holding answers to them."""

import random
from typing import Any

MAX_DEPTH = 3


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """An object at the top, as most clients ask for."""
    if depth == 0:
        return _object(rng, 1)
    makers = [_number, _text, _chosen]
    if depth < MAX_DEPTH:
        makers += [_array, _object, _any_of]
    return rng.choice(makers)(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(
        ["name", "größe", "is it?", 'a"b', "x_1", "$ref", "type", "items"], rng.randrange(1, 5)
    )
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(3)
    schema = {
        "type": "array",
        "items": random_schema(rng, depth + 1),
        "minItems": least,
        "maxItems": least + 2,
    }
    if rng.random() < 0.3:
        schema["prefixItems"] = [random_schema(rng, depth + 1)]
    return schema


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1), {"type": "null"}, random_schema(rng, depth + 1)]}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(-1000, 1000)
    schema: dict[str, Any] = {
        "type": "integer",
        "minimum": least,
        "exclusiveMaximum": least + rng.randrange(1, 500),
    }
    if rng.random() < 0.3:
        return {"type": "integer", "minimum": 0, "maximum": 10_000, "multipleOf": rng.choice([2, 5, 7])}
    return schema


def _text(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice(
        [
            {"type": "string", "minLength": rng.randrange(3), "maxLength": 3 + rng.randrange(9)},
            {"type": "string", "pattern": "^[a-f]{2,5}(-[0-9]{1,3})?$"},
            {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])},
        ]
    )


def _chosen(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice(
        [
            {"enum": ["red", "grün", 'a "quoted" one', 3, None, {"a": [1]}]},
            {"const": rng.choice(["fixed", 7, True, [1, 2]])},
            {"type": "boolean"},
            {"type": ["boolean", "null"]},
        ]
    )
