"""What OpenAI's endpoints have in common: the error shape, reading a request, usage, ids.

Owns the mapping from the router's errors to status codes and OpenAI's words for them.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from replicas.protocol.frames import PromptUsage
from router.errors import (
    BodiesFull,
    BodyTooLarge,
    CacheGone,
    CachesFull,
    CachesUnavailable,
    GenerationFailed,
    InvalidRequest,
    NoReplicaAvailable,
    Overloaded,
    RouterBusy,
    RouterError,
    UnknownModel,
    UploadTooSlow,
)

Request = TypeVar("Request")


class _Asked(msgspec.Struct):
    """A body of which only this is of use."""

    model: str


_asked_decoder = msgspec.json.Decoder(_Asked)

encode_json = msgspec.json.Encoder().encode

MAX_SALT_CHARACTERS = 128
_FORBIDDEN_IN_SALT = frozenset("@/\\\0")

_MISSING_FIELD = re.compile(r"missing required field `([^`]+)`")
_JSON_PATH = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error in OpenAI's shape, and how to send it."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_seconds: float | None = None

    def body(self) -> bytes:
        return encode_json(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_seconds is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_seconds))))
        if (
            self.status in (408, 413) or self.code == "bodies_full"
        ):  # the rest of the body would be taken for the next request
            headers.append((b"connection", b"close"))
        return headers


def http_error(error: RouterError) -> HttpError:
    match error:
        case InvalidRequest():
            return HttpError(
                400, error.message, "invalid_request_error", error.parameter, error.code or "invalid_value"
            )
        case UnknownModel():
            return HttpError(404, error.message, "invalid_request_error", "model", "model_not_found")
        case CacheGone():
            return HttpError(404, error.message, "invalid_request_error", "cache", error.code)
        case CachesFull():
            return HttpError(429, error.message, "requests", None, "caches_full", error.retry_after_seconds)
        case CachesUnavailable():
            return HttpError(
                503, error.message, "server_error", None, "caches_unavailable", error.retry_after_seconds
            )
        case BodyTooLarge():
            return HttpError(413, error.message, "invalid_request_error", None, "request_too_large")
        case BodiesFull():
            return HttpError(
                503, error.message, "server_error", None, "bodies_full", error.retry_after_seconds
            )
        case UploadTooSlow():
            return HttpError(408, error.message, "invalid_request_error", None, "request_timeout")
        case Overloaded():
            return HttpError(
                429, error.message, "requests", None, "rate_limit_exceeded", error.retry_after_seconds
            )
        case RouterBusy():
            return HttpError(
                503, error.message, "server_error", None, "router_busy", error.retry_after_seconds
            )
        case NoReplicaAvailable():
            return HttpError(
                503, error.message, "server_error", None, "no_replica_available", error.retry_after_seconds
            )
        case GenerationFailed():
            return HttpError(500, error.message, "server_error", None, "generation_failed")
        case _:
            return HttpError(500, error.message, "server_error")


INTERNAL_ERROR = HttpError(500, "The server had an error while processing your request.", "server_error")


def method_not_allowed(method: str, path: str) -> HttpError:
    return HttpError(
        405, f"Not allowed: {method} {path}.", "invalid_request_error", None, "method_not_supported"
    )


def unknown_route(method: str, path: str) -> HttpError:
    return HttpError(
        404, f"Unknown request URL: {method} {path}.", "invalid_request_error", None, "unknown_url"
    )


def decode_body(decoder: "msgspec.json.Decoder[Request]", body: bytes) -> Request:
    """The body as its Struct. Raises InvalidRequest that names the field."""
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
    missing = _MISSING_FIELD.search(text)
    if missing:
        parameter = f"{parameter}.{missing.group(1)}" if parameter else missing.group(1)
        return InvalidRequest(
            f"Missing required parameter: '{parameter}'.",
            parameter=parameter,
            code="missing_required_parameter",
        )
    text = text.replace("`", "").replace(" | null", "")
    where = f" for '{parameter}'" if parameter else " for the request body"
    return InvalidRequest(f"Invalid type{where}: {text}.", parameter=parameter, code="invalid_type")


def unsupported(parameter: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, parameter=parameter, code="unsupported_value")


def check_range(parameter: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidRequest(
            f"Invalid value for '{parameter}': {value!s:.40} is not between {low:.10g} and {high:.10g}.",
            parameter=parameter,
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


def usage_of(
    prompts: Iterable[PromptUsage], num_output_tokens: int, details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """OpenAI's `usage`; the cache's share of it is always there, and exact. `details` are more of it."""
    num_prompt_tokens = num_cached_tokens = num_written_tokens = num_cross_user_tokens = 0
    num_host_tokens = num_disk_tokens = num_pulled_tokens = 0
    for prompt in prompts:
        num_prompt_tokens += prompt.num_prompt_tokens
        num_cached_tokens += prompt.num_cached_tokens
        num_written_tokens += prompt.num_written_tokens
        num_cross_user_tokens += prompt.num_cross_user_tokens
        num_host_tokens += prompt.num_host_tokens
        num_disk_tokens += prompt.num_disk_tokens
        num_pulled_tokens += prompt.num_pulled_tokens
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": num_cached_tokens,
            "cache_write_tokens": num_written_tokens,
            "cross_user_cached_tokens": num_cross_user_tokens,
            "device_cached_tokens": num_cached_tokens - num_host_tokens - num_disk_tokens,
            "host_cached_tokens": num_host_tokens,
            "disk_cached_tokens": num_disk_tokens,
            "pulled_cached_tokens": num_pulled_tokens,
            **(details or {}),
        },
    }
