"""Parses paths of Gemini's API: which model, and which method.

Owns the methods' names, which requests speak this dialect, and how the path's words enter a body.
"""

import re
from typing import NamedTuple

from starlette.types import Scope

from router.api.json_body import encode_json
from router.edge.http import header

GENERATE = "generateContent"
STREAM = "streamGenerateContent"
COUNT = "countTokens"
VERSIONS = ("/v1beta", "/v1")
GENERATING_PATHS = tuple(
    f"{version}/models/{{model}}:{method}" for version in VERSIONS for method in (GENERATE, STREAM)
)

GENERATE_CONTENT = f"/v1beta/models/{{model:path}}:{GENERATE}"
"""The route that generates, as features name it."""
_METHOD = re.compile(rf"/v1(?:beta)?/models/(.+):({GENERATE}|{STREAM}|{COUNT})", re.DOTALL)
MODELS_PATHS = ("/v1/models/", "/v1beta/models/")
_SHARED = "/v1/models"
_PREFIXES = ("/v1beta/", "/v1/models", "/v1/cachedContents")
_CACHES = re.compile(r"/v1(?:beta)?/cachedContents(?:/|$)")


class ModelMethod(NamedTuple):
    model: str
    method: str


def model_method(path: str) -> ModelMethod | None:
    """Parse the end of a path, after any prefix. A model's name may have slashes and colons."""
    if ":" not in path:
        return None
    found = _METHOD.search(path)
    return None if found is None or found.end() != len(path) else ModelMethod(found.group(1), found.group(2))


def speaks_gemini(scope: Scope) -> bool:
    """Told from the path, and where other dialects share it, from the header that has Gemini's key."""
    path: str = scope["path"]
    if ":" not in path and not path.startswith(_PREFIXES):
        return False
    if path.startswith("/v1beta/") or _CACHES.match(path) or model_method(path) is not None:
        return True
    return path.startswith(_SHARED) and header(scope, b"x-goog-api-key") is not None


def with_path_fields(body: bytes, asked: ModelMethod) -> bytes:
    """Return the body with `model` and `stream` at its end, where they count whatever it says itself. What is
    no object stays as it is: reading it says what is wrong."""
    stripped = body.strip()
    if stripped[:1] != b"{" or stripped[-1:] != b"}":
        return body
    fields = encode_json({"model": asked.model, "stream": asked.method == STREAM})[1:]
    may_be_empty = stripped[1:2] == b"}" or stripped[1:2].isspace()  # large bodies are copied once
    if may_be_empty and not stripped[1:-1].strip():
        return b"{" + fields
    return b"".join((memoryview(stripped)[:-1], b",", fields))
