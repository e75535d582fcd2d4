"""JSON schemas of the clients' routes' answers, by name.

Plain data. An object may have more fields than listed: Kvasir's own and vendors' additions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
ANYTHING: Schema = {}
OBJECT: Schema = {"type": "object"}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def a_list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def an_object(_optional: Sequence[str] = (), /, **fields: Schema) -> Schema:
    """All of the fields are there but the optional ones."""
    required = [name for name in fields if name not in _optional]
    return {"type": "object", "properties": fields, "required": required}


_CONTROL = {
    "CacheExplanation": an_object(
        object=one_of("cache.explanation"),
        request_id=TEXT,
        answer_id=maybe(TEXT),
        created_at={"type": "number"},
        model=maybe(TEXT),
        route=TEXT,
        error=maybe(TEXT),
        prompts=a_list(ref("PromptExplanation")),
    ),
    "PromptExplanation": an_object(
        outcome=one_of("hit", "partial", "miss"),
        cause=TEXT,
        replica=maybe(TEXT),
        prompt_tokens=COUNT,
        cached_tokens=COUNT,
        cached_tokens_by_tier=an_object(device=COUNT, host=COUNT, disk=COUNT),
        lost_tokens=COUNT,
        lost_ms=maybe({"type": "number"}),
        spans=a_list(
            an_object(cause=TEXT, start=COUNT, end=COUNT, replica=maybe(TEXT), at=maybe({"type": "number"}))
        ),
        nearest=maybe(
            an_object(
                request_id=maybe(TEXT),
                answer_id=maybe(TEXT),
                seconds_before={"type": "number"},
                prompt_tokens=COUNT,
                common_tokens=maybe(COUNT),
                diverges_at=maybe(COUNT),
                changed=a_list(TEXT),
            )
        ),
        place=maybe(
            an_object(path=maybe(TEXT), kind=TEXT, is_certain={"type": "boolean"}, sentence=maybe(TEXT))
        ),
    ),
}

ANSWERS: Mapping[str, Any] = _CONTROL
