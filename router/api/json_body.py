"""Reading a JSON body, and the checks of its fields that all dialects have in common.

Owns the sentences about what is no JSON, of the wrong type or out of range. Every error names its field.
"""

import json
import math
import re
from typing import Any, TypeVar

import msgspec

from router.errors import InvalidRequest

Request = TypeVar("Request")


class _AskedFields(msgspec.Struct):
    """A body of which only this is of use."""

    model: str


_asked_decoder = msgspec.json.Decoder(_AskedFields)

encode_json = msgspec.json.Encoder().encode

MAX_SALT_CHARACTERS = 128
_FORBIDDEN_IN_SALT = frozenset("@/\\\0")

_MISSING_FIELD = re.compile(r"missing required field `([^`]+)`")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `([^`]+)`")
_JSON_PATH = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")

MAX_TIMEOUT_SECONDS = 86_400.0


def decode_body(decoder: "msgspec.json.Decoder[Request]", body: bytes) -> Request:
    """Return the body as its Struct. Raises InvalidRequest that names the field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        refusal = _wrong_field(str(error))
        refusal.model = _asked_model(body)
        raise refusal from error
    except UnicodeDecodeError as error:
        raise InvalidRequest("The request body is not valid UTF-8.", code="invalid_json") from error
    except ValueError as error:
        what = "The request body is empty." if not body.strip() else f"The request body is not JSON: {error}."
        raise InvalidRequest(what, code="invalid_json") from error
    except RecursionError as error:
        raise InvalidRequest("The request body is nested too deeply.", code="invalid_json") from error


def _asked_model(body: bytes) -> str | None:
    try:
        return _asked_decoder.decode(body).model
    except (ValueError, RecursionError):
        return None


def _wrong_field(message: str) -> InvalidRequest:
    path = _JSON_PATH.search(message)
    parameter = path.group(1) or None if path else None
    text = message[: path.start()] if path else message
    absent = _MISSING_FIELD.search(text)
    if absent:
        parameter = f"{parameter}.{absent.group(1)}" if parameter else absent.group(1)
        return missing(parameter)
    unknown = _UNKNOWN_FIELD.search(text)
    if unknown:
        parameter = f"{parameter}.{unknown.group(1)}" if parameter else unknown.group(1)
        return unsupported(parameter, f"'{parameter[:200]}' is not supported.")
    text = text.replace("`", "").replace(" | null", "")
    where = f" for '{parameter}'" if parameter else " for the request body"
    return InvalidRequest(f"Invalid type{where}: {text}.", parameter=parameter, code="invalid_type")


def both_lists(first: bytes, then: bytes) -> bytes:
    """Two lists in JSON as one."""
    parts = [part for part in (first[1:-1].strip(), then[1:-1].strip()) if part]
    return b"[" + b",".join(parts) + b"]"


def unsupported(parameter: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, parameter=parameter, code="unsupported_value")


def invalid(parameter: str, words: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid value for '{parameter}': {words}", parameter=parameter)


def missing(parameter: str) -> InvalidRequest:
    return InvalidRequest(
        f"Missing required parameter: '{parameter}'.",
        parameter=parameter,
        code="missing_required_parameter",
    )


def wrong_type(parameter: str, expected: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid type for '{parameter}': expected {expected}.", parameter=parameter, code="invalid_type"
    )


def read_object(path: str, value: Any) -> dict[str, Any]:
    """Raises InvalidRequest."""
    if not isinstance(value, dict):
        raise wrong_type(path, "an object")
    return value


def read_text(path: str, value: Any) -> str:
    """Raises InvalidRequest, also for a value that is missing."""
    if value is None:
        raise missing(path)
    if not isinstance(value, str):
        raise wrong_type(path, "text")
    return value


def read_arguments(arguments: Any) -> dict[str, Any] | str | None:
    """Parse a call's arguments: an object, or the text if it is no object, since the model said it and the
    client sends it back. None for what no model says."""
    if arguments is None:
        return {}
    if isinstance(arguments, dict):
        return arguments
    if isinstance(arguments, list):
        return json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        return None
    try:
        read: Any = json.loads(arguments or "null")
    except (ValueError, RecursionError):
        return arguments
    if read is None:
        return {}
    return read if isinstance(read, dict) else arguments


def check_range(parameter: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise invalid(parameter, f"{value!s:.40} is not between {low:.10g} and {high:.10g}.")


def check_timeout(seconds: float | None, parameter: str = "timeout") -> None:
    """Raises InvalidRequest."""
    if seconds is not None and not (math.isfinite(seconds) and 0 < seconds <= MAX_TIMEOUT_SECONDS):
        raise invalid(
            parameter,
            f"{seconds!s:.40} is not a number of seconds above 0 and up to {MAX_TIMEOUT_SECONDS:.10g}.",
        )


def check_salt(salt: str | None) -> str | None:
    if salt is not None and (
        not 1 <= len(salt) <= MAX_SALT_CHARACTERS or not _FORBIDDEN_IN_SALT.isdisjoint(salt)
    ):
        raise InvalidRequest(
            f"Invalid 'cache_salt': 1 to {MAX_SALT_CHARACTERS} characters, but no '@', '/', '\\' or NUL.",
            parameter="cache_salt",
        )
    return salt


def check_together(num_bytes: int, max_bytes: int, parameter: str) -> None:
    """Check the size of the request and its kept beginning together. Raises InvalidRequest."""
    if num_bytes > max_bytes:
        raise InvalidRequest(
            f"The request and what it begins with may have {max_bytes} bytes together, and have {num_bytes}.",
            parameter=parameter,
        )


def with_fields(body: bytes, fields: bytes) -> bytes:
    """Append fields; of two fields with one name the later counts."""
    return body.rstrip()[:-1] + b"," + fields + b"}"
