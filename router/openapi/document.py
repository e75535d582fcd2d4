"""The OpenAPI document of the clients' routes.

Owns which route takes which body and gives which answer. Bodies are described by the very Structs that decode
them, answers by `answers.py`.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from router.api.anthropic.body import MessagesBody
from router.api.gemini.fields import CachedContentChange, CountTokens, GenerateContent, NewCachedContent
from router.api.json_body import encode_json
from router.api.openai.chat_body import ChatBody, TokenizedChat
from router.api.openai.completion_prompt import CompletionRequest
from router.api.responses.body import ResponsesBody
from router.api.token_counts import DetokenizedTokens, TokenizedText
from router.features.named_caches.body import CacheChange, NewCache
from router.features.published.feature import NewPrefix
from router.openapi.answers import ANSWERS, Schema, ref

OPENAI, ANTHROPIC, GEMINI, CACHES, CONTROL = "OpenAI", "Anthropic", "Gemini", "Named caches", "Control"

_ERRORS = {ANTHROPIC: "AnthropicError", GEMINI: "GeminiError"}
_OPENAI_ERROR = "OpenAiError"

_SAID = {
    400: "The request is wrong; the message names the field.",
    403: "A page of another origin, or a name that the router does not answer to.",
    404: "There is no such model, cache or route.",
    405: "Not this method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON, or encoded by other means than gzip.",
    429: "Too much to do; `retry-after` says when to try again.",
    500: "The router or a replica failed.",
    503: "No replica is ready, or the router is busy; `retry-after` says when to try again.",
    529: "No replica is ready, or the router is busy; `retry-after` says when to try again.",
}
_OF_BODIES = (408, 413, 415)
_SET_BY_PATH = ("model", "stream", "addGenerationPrompt")
"""Fields of Gemini's bodies that no client sends."""


@dataclass(frozen=True, slots=True)
class Operation:
    """`answer` is the name of a schema, or empty for what is always refused. `bodies` are Structs of which a
    body is one; `query` are parameters that may be there. Refusals are in the words of its group and of those
    that it `also_speaks`; `refusals` are statuses with the answer's own.
    """

    method: str
    path: str
    group: str
    summary: str
    answer: str
    bodies: tuple[type[msgspec.Struct], ...] = ()
    status: int = 200
    query: tuple[str, ...] = ()
    streams: bool = False
    media_type: str = "application/json"
    also_speaks: tuple[str, ...] = ()
    refusals: tuple[int, ...] = ()


def _responses_kept() -> list[Operation]:
    one = "/v1/responses/{response_id}"

    def operation(method: str, path: str, summary: str, answer: str, **more: Any) -> Operation:
        return Operation(method, path, OPENAI, summary, answer, **more)

    return [
        operation("get", one, "A stored response", "Response"),
        operation("delete", one, "Delete a stored response", "DeletedResponse"),
        operation(
            "get",
            f"{one}/input_items",
            "What a stored response was asked",
            "ResponseItems",
            query=("limit", "order", "after"),
        ),
        operation("post", f"{one}/cancel", "Refused: there are no responses in the background", ""),
        operation("post", "/v1/responses/compact", "Refused: responses are not compacted", ""),
        operation(
            "post",
            "/v1/responses/input_tokens",
            "Count tokens",
            "ResponseTokens",
            bodies=(ResponsesBody,),
        ),
    ]


def _gemini(version: str) -> list[Operation]:
    caches, one = f"{version}/cachedContents", f"{version}/cachedContents/{{cache_id}}"
    model = f"{version}/models/{{model}}"

    def operation(method: str, path: str, summary: str, answer: str, **more: Any) -> Operation:
        return Operation(method, path, GEMINI, summary, answer, **more)

    return [
        operation(
            "post",
            f"{model}:generateContent",
            "Continue a conversation",
            "GeneratedContent",
            bodies=(GenerateContent,),
        ),
        operation(
            "post",
            f"{model}:streamGenerateContent",
            "Continue a conversation, as a stream of events",
            "GeneratedContent",
            bodies=(GenerateContent,),
            query=("alt",),
            media_type="text/event-stream",
        ),
        operation("post", f"{model}:countTokens", "Count tokens", "CountedTokens", bodies=(CountTokens,)),
        operation("post", caches, "Create a cache", "CachedContent", bodies=(NewCachedContent,)),
        operation("get", caches, "List caches", "CachedContents", query=("pageSize", "pageToken")),
        operation("get", one, "One cache", "CachedContent"),
        operation("patch", one, "Extend a cache", "CachedContent", bodies=(CachedContentChange,)),
        operation("delete", one, "Delete a cache", "Nothing"),
    ]


OPERATIONS: Sequence[Operation] = (
    Operation(
        "post", "/v1/chat/completions", OPENAI, "Chat", "ChatCompletion", bodies=(ChatBody,), streams=True
    ),
    Operation(
        "post",
        "/v1/completions",
        OPENAI,
        "Continue a text",
        "Completion",
        bodies=(CompletionRequest,),
        streams=True,
    ),
    Operation(
        "post", "/v1/responses", OPENAI, "Responses", "Response", bodies=(ResponsesBody,), streams=True
    ),
    *_responses_kept(),
    Operation(
        "get",
        "/v1/models",
        OPENAI,
        "All models, in every vendor's words",
        "AnyModels",
        query=("limit", "after_id", "before_id"),
        also_speaks=(ANTHROPIC, GEMINI),
    ),
    Operation("get", "/v1/models/{name}", OPENAI, "One model", "AnyModel", also_speaks=(ANTHROPIC, GEMINI)),
    Operation("post", "/v1/messages", ANTHROPIC, "Messages", "Message", bodies=(MessagesBody,), streams=True),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        ANTHROPIC,
        "Count tokens",
        "MessageTokens",
        bodies=(MessagesBody,),
    ),
    *_gemini("/v1beta"),
    Operation("get", "/v1beta/models", GEMINI, "All models", "GeminiModels"),
    Operation("get", "/v1beta/models/{name}", GEMINI, "One model", "GeminiModel"),
    *_gemini("/v1"),
    Operation("post", "/v1/caches", CACHES, "Create a cache", "Cache", bodies=(NewCache,), status=201),
    Operation("get", "/v1/caches", CACHES, "List caches", "Caches", query=("limit", "after")),
    Operation("get", "/v1/caches/{cache_id}", CACHES, "One cache", "Cache"),
    Operation(
        "patch", "/v1/caches/{cache_id}", CACHES, "Extend or rename a cache", "Cache", bodies=(CacheChange,)
    ),
    Operation("delete", "/v1/caches/{cache_id}", CACHES, "Delete a cache", "DeletedCache"),
    Operation(
        "post",
        "/v1/published",
        CACHES,
        "Publish a beginning for every tenant",
        "Published",
        bodies=(NewPrefix,),
        status=201,
    ),
    Operation("get", "/v1/published", CACHES, "List published beginnings", "PublishedList"),
    Operation(
        "delete",
        "/v1/published/{prefix_id}",
        CACHES,
        "Publish a beginning no more",
        "DeletedPublished",
    ),
    Operation(
        "post", "/tokenize", CONTROL, "Text to tokens", "Tokens", bodies=(TokenizedText, TokenizedChat)
    ),
    Operation("post", "/detokenize", CONTROL, "Tokens to text", "Text", bodies=(DetokenizedTokens,)),
    Operation(
        "get",
        "/v1/usage",
        CONTROL,
        "What the caller's tenant has used, by hour or day",
        "Usage",
        query=("start", "end", "bucket", "group_by", "key_id", "tenant"),
    ),
    Operation(
        "get",
        "/v1/cache/explain/{id}",
        CONTROL,
        "Why the prompt of a request was, or was not, read from cache",
        "CacheExplanation",
    ),
    Operation("get", "/health", CONTROL, "Whether the process lives", "Health"),
    Operation(
        "get",
        "/ready",
        CONTROL,
        "Whether there is a replica to send requests to",
        "Readiness",
        refusals=(503,),
    ),
    Operation("get", "/version", CONTROL, "The version that runs", "Version"),
    Operation("get", "/openapi.json", CONTROL, "This document", "OpenApi"),
)


@functools.cache
def openapi_document() -> bytes:
    """Return the document as JSON, equal for every router of this version."""
    return encode_json(_document())


def _document() -> dict[str, Any]:
    kinds = list(dict.fromkeys(kind for operation in OPERATIONS for kind in operation.bodies))
    bodies, components = msgspec.json.schema_components(
        map(_of_objects, kinds), ref_template="#/components/schemas/{name}"
    )
    of_kind = dict(zip(kinds, bodies, strict=True))
    components = {name: _as_sent(name, schema) for name, schema in components.items()}
    assert not components.keys() & ANSWERS.keys()
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        written = _operation(operation, of_kind)
        paths.setdefault(operation.path, {})[operation.method] = written
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Kvasir",
            "version": "1",
            "description": "What clients ask of a router, in the words of OpenAI, Anthropic and Gemini."
            " Fields that are not named here are ignored.",
        },
        "tags": [{"name": name} for name in (OPENAI, ANTHROPIC, GEMINI, CACHES, CONTROL)],
        "paths": paths,
        "components": {"schemas": {**components, **ANSWERS}},
    }


def _of_objects(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Replace raw JSON fields, which may be anything, for which schemas have no word."""
    fields = msgspec.structs.fields(kind)
    if not any(field.type is msgspec.Raw for field in fields):
        return kind
    made = [
        (field.encode_name, Any, None)
        if field.type is msgspec.Raw
        else (field.encode_name, field.type, field.default)
        for field in fields
    ]
    return msgspec.defstruct(kind.__name__, made, kw_only=True)


def _as_sent(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The docstrings of Structs are for those who read the code."""
    kept = {key: value for key, value in schema.items() if key != "description"}
    if name in (GenerateContent.__name__, CountTokens.__name__):
        properties = {key: value for key, value in kept["properties"].items() if key not in _SET_BY_PATH}
        kept["properties"] = properties
    return kept


def _operation(operation: Operation, of_kind: Mapping[type[msgspec.Struct], Schema]) -> dict[str, Any]:
    written: dict[str, Any] = {
        "tags": [operation.group],
        "summary": operation.summary,
        "operationId": _operation_id(operation),
        "responses": _responses(operation),
    }
    in_path = [part.partition("}")[0] for part in operation.path.split("{")[1:]]
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in in_path
    ]
    parameters += [
        {"name": name, "in": "query", "required": name == "alt", "schema": _query_schema(name)}
        for name in operation.query
    ]
    if parameters:
        written["parameters"] = parameters
    if operation.bodies:
        schemas = [of_kind[kind] for kind in operation.bodies]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        written["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return written


def _responses(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media_type: {"schema": ref(operation.answer)}}
    if operation.media_type != "application/json":
        content = {operation.media_type: {"schema": ref("Event")}}
    elif operation.streams:
        content["text/event-stream"] = {"schema": ref("Event")}
    responses: dict[str, Any] = {}
    if operation.answer:
        responses[str(operation.status)] = {"description": "The answer.", "content": content}
    groups = (operation.group, *operation.also_speaks)
    names = list(dict.fromkeys(_ERRORS.get(group, _OPENAI_ERROR) for group in groups))
    schemas = [ref(name) for name in names]
    error = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    for status, said in _SAID.items():
        if (status in _OF_BODIES and not operation.bodies) or (status == 529 and ANTHROPIC not in groups):
            continue
        schema = ref(operation.answer) if status in operation.refusals else error
        responses[str(status)] = {"description": said, "content": {"application/json": {"schema": schema}}}
    return responses


def _query_schema(name: str) -> Schema:
    match name:
        case "alt":
            return {"enum": ["sse"]}
        case "order":
            return {"enum": ["asc", "desc"]}
        case "bucket":
            return {"enum": ["hour", "day"]}
        case "limit" | "pageSize":
            return {"type": "integer", "minimum": 1, "maximum": 100}
    return {"type": "string"}


def _operation_id(operation: Operation) -> str:
    words = operation.path.replace("{", "").replace("}", "").replace(":", "/").replace(".", "/").split("/")
    return "_".join([operation.method, *filter(None, words)])
