"""Parses the form of an answer's text from the fields of OpenAI, vLLM and SGLang.

Owns these fields and their forms. Whether a schema or a grammar can be followed is checked later. Pure.
"""

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from router.answers.wishes import FormatKind, OutputFormat
from router.api.json_body import invalid, missing, read_object, unsupported, wrong_type
from router.api.peer_fields import PeerFields
from router.errors import InvalidRequest

MAX_CHOICES = 1024

Request = TypeVar("Request", bound=PeerFields)

_Read = Callable[[str, Any], OutputFormat]


def output_format_of(request: PeerFields, response_format: Any = None) -> OutputFormat | None:
    """Raises InvalidRequest, also for two of these fields at once."""
    if response_format is None and _sent(request) == _NOTHING:  # nearly always
        return None
    found = list(_formats(request, response_format))
    if len(found) > 1:
        raise InvalidRequest(
            f"Only one of '{found[0].parameter}' and '{found[1].parameter}' is allowed.",
            parameter=found[1].parameter,
        )
    return found[0] if found else None


def without_formats(request: Request) -> Request:
    """Once they have become a grammar they need not travel any further."""
    empty = dict.fromkeys(("structured_outputs", "response_format", *_FIELDS))
    return msgspec.structs.replace(request, **empty)


def _formats(request: PeerFields, response_format: Any) -> Iterator[OutputFormat]:
    if response_format is not None:
        wished = _response_format(response_format)
        if wished is not None:
            yield wished
    if request.structured_outputs is not None:
        wished = _structured_outputs(request.structured_outputs)
        if wished is not None:
            yield wished
    for parameter, read in _FIELDS.items():
        value = getattr(request, parameter)
        if value is not None:
            yield read(parameter, value)


def _response_format(asked: Any) -> OutputFormat | None:
    match asked:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return OutputFormat(FormatKind.JSON_OBJECT)
        case {"type": "json_schema", "json_schema": {"schema": dict() | bool() as schema}}:
            return OutputFormat(FormatKind.JSON_SCHEMA, schema)
        case {"type": "json_schema", "json_schema": {"schema": given}} if given is not None:
            raise wrong_type("response_format.json_schema.schema", "an object")
        case {"type": "json_schema", "json_schema": dict()}:
            raise missing("response_format.json_schema.schema")
        case {"type": "json_schema"}:
            raise missing("response_format.json_schema")
        case dict() if asked.get("type") is None:
            raise missing("response_format.type")
        case dict():
            raise unsupported(
                "response_format",
                "Response formats that are supported: 'text', 'json_object' and 'json_schema'.",
            )
    raise wrong_type("response_format", "an object")


def _structured_outputs(asked: Any) -> OutputFormat | None:
    asked = read_object("structured_outputs", asked)
    given = {key: value for key, value in asked.items() if value is not None and value is not False}
    found: list[OutputFormat] = []
    for key, value in given.items():
        parameter = f"structured_outputs.{key}"
        if key == "json_object":
            found.append(OutputFormat(FormatKind.JSON_OBJECT, parameter=parameter))
        elif key in _STRUCTURED:
            found.append(_STRUCTURED[key](parameter, value))
        else:
            raise unsupported(parameter[:64], f"'{parameter[:64]}' is not supported.")
    if len(found) > 1:
        raise InvalidRequest("Only one kind of structured output is allowed.", parameter="structured_outputs")
    return found[0] if found else None


def _json(parameter: str, value: Any) -> OutputFormat:
    """Return a schema, or one written out as text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError) as error:
            raise invalid(parameter, "it is not JSON.") from error
    if not isinstance(value, dict | bool):
        raise wrong_type(parameter, "an object")
    return OutputFormat(FormatKind.JSON_SCHEMA, value, parameter=parameter)


def _regex(parameter: str, value: Any) -> OutputFormat:
    return OutputFormat(FormatKind.REGEX, text=_text(parameter, value), parameter=parameter)


def _grammar(parameter: str, value: Any) -> OutputFormat:
    return OutputFormat(FormatKind.GRAMMAR, text=_text(parameter, value), parameter=parameter)


def _choice(parameter: str, value: Any) -> OutputFormat:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise wrong_type(parameter, "a list of texts")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidRequest(
            f"Invalid '{parameter}': 1 to {MAX_CHOICES} texts are allowed.", parameter=parameter
        )
    return OutputFormat(FormatKind.CHOICE, choices=tuple(value), parameter=parameter)


def _text(parameter: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong_type(parameter, "text")
    if not value:
        raise InvalidRequest(f"Invalid '{parameter}': it is empty.", parameter=parameter)
    return value


_STRUCTURED: Mapping[str, _Read] = {"json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar}

_FIELDS: Mapping[str, _Read] = {
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _json,
    "regex": _regex,
    "ebnf": _grammar,
}

_sent = attrgetter("structured_outputs", *_FIELDS)
_NOTHING = (None,) * (1 + len(_FIELDS))
