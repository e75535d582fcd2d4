"""The OpenAPI document of the clients' routes.

Owns which route takes which body and gives which answer. Both are described by the very Structs that decode
and encode them.
"""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from replicas.protocol.passed_routes import FORM, FORM_ROUTES
from router.api.anthropic.body import MessagesBody
from router.api.anthropic.counts import MessageTokens
from router.api.anthropic.errors import AnthropicError
from router.api.anthropic.messages import Message
from router.api.anthropic.models import AnthropicModel, AnthropicModels
from router.api.completion_prompt import CompletionRequest
from router.api.control import Health, Model, Models, Readiness, Version
from router.api.gemini.answers import GeneratedContent
from router.api.gemini.count import CountedTokens
from router.api.gemini.errors import GeminiError
from router.api.gemini.fields import CachedContentChange, CountTokens, GenerateContent, NewCachedContent
from router.api.gemini.models import GeminiModel, GeminiModels
from router.api.json_body import encode_json
from router.api.openai.chat import ChatCompletion
from router.api.openai.chat_body import ChatBody, TokenizedChat
from router.api.openai.completions import Completion
from router.api.openai.token_counts import DetokenizedTokens, PlainText, TokenizedText, Tokens
from router.api.responses.answers import Response
from router.api.responses.body import Repeated, ResponsesBody
from router.edge.http_error import OpenAiError
from router.features.explanations.answer import CacheExplanation
from router.features.named_caches.body import CacheChange, NewCache
from router.features.named_caches.gemini_routes import CachedContent, CachedContents, Nothing
from router.features.named_caches.routes import Cache, Caches, DeletedCache
from router.features.published.feature import DeletedPublished, NewPrefix, PublishedList, PublishedObject
from router.features.responses.feature import DeletedResponse, ResponseItems, ResponseTokens
from router.features.usage.feature import UsageAnswer

OPENAI, ANTHROPIC, GEMINI, CACHES, CONTROL = "OpenAI", "Anthropic", "Gemini", "Named caches", "Control"
PASSED = "Passed on"

Schema = Mapping[str, Any]
Kind = Any
"""A Struct; one of those in a list; those in a tuple, together in one object."""

_ERRORS: Mapping[str, Kind] = {ANTHROPIC: AnthropicError, GEMINI: GeminiError}


class Event(msgspec.Struct):
    data: Annotated[str, msgspec.Meta(description="Between events may be comments and empty lines.")]
    event: str | msgspec.UnsetType = msgspec.UNSET


class OpenApi(msgspec.Struct):
    openapi: str
    info: dict[str, Any]
    tags: list[dict[str, str]]
    paths: dict[str, dict[str, Any]]
    components: dict[str, Any]


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
    """An operation that is always refused has no answer. `query` are optional parameters. Refusals are in the
    words of its group and of those that it `also_speaks`; `refusals` are statuses with the answer's own.
    """

    asked: str
    summary: str
    answer: Kind = None
    body: Kind = None
    query: tuple[str, ...] = ()
    status: int = 200
    streams: bool = False
    also_speaks: tuple[str, ...] = ()
    refusals: tuple[int, ...] = ()


def _gemini(version: str) -> list[Operation]:
    caches, one = f"{version}/cachedContents", f"{version}/cachedContents/{{cache_id}}"
    model, chat = f"{version}/models/{{model}}", "Continue a conversation"
    return [
        Operation(f"post {model}:generateContent", chat, GeneratedContent, GenerateContent),
        Operation(
            f"post {model}:streamGenerateContent",
            f"{chat}, as a stream of events",
            Event,
            GenerateContent,
            query=("alt",),
        ),
        Operation(f"post {model}:countTokens", "Count tokens", CountedTokens, CountTokens),
        Operation(f"post {caches}", "Create a cache", CachedContent, NewCachedContent),
        Operation(f"get {caches}", "List caches", CachedContents, query=("pageSize", "pageToken")),
        Operation(f"get {one}", "One cache", CachedContent),
        Operation(f"patch {one}", "Extend a cache", CachedContent, CachedContentChange),
        Operation(f"delete {one}", "Delete a cache", Nothing),
    ]


_RESPONSE, _ONE = (Response, Repeated), "/v1/responses/{response_id}"
_ALSO = (ANTHROPIC, GEMINI)
OPERATIONS: Mapping[str, Sequence[Operation]] = {
    OPENAI: [
        Operation("post /v1/chat/completions", "Chat", ChatCompletion, ChatBody, streams=True),
        Operation("post /v1/completions", "Continue a text", Completion, CompletionRequest, streams=True),
        Operation("post /v1/responses", "Responses", _RESPONSE, ResponsesBody, streams=True),
        Operation(f"get {_ONE}", "A stored response", _RESPONSE),
        Operation(f"delete {_ONE}", "Delete a stored response", DeletedResponse),
        Operation(
            f"get {_ONE}/input_items",
            "What a stored response was asked",
            ResponseItems,
            query=("limit", "order", "after"),
        ),
        Operation(f"post {_ONE}/cancel", "Refused: there are no responses in the background"),
        Operation("post /v1/responses/compact", "Refused: responses are not compacted"),
        Operation("post /v1/responses/input_tokens", "Count tokens", ResponseTokens, ResponsesBody),
        Operation(
            "get /v1/models",
            "All models, in every vendor's words",
            [Models, AnthropicModels],
            query=("limit", "after_id", "before_id"),
            also_speaks=_ALSO,
        ),
        Operation(
            "get /v1/models/{name}", "One model", [AnthropicModel, (Model, GeminiModel)], also_speaks=_ALSO
        ),
    ],
    ANTHROPIC: [
        Operation("post /v1/messages", "Messages", Message, MessagesBody, streams=True),
        Operation("post /v1/messages/count_tokens", "Count tokens", MessageTokens, MessagesBody),
    ],
    GEMINI: [
        *_gemini("/v1beta"),
        Operation("get /v1beta/models", "All models", GeminiModels),
        Operation("get /v1beta/models/{name}", "One model", GeminiModel),
        *_gemini("/v1"),
    ],
    CACHES: [
        Operation("post /v1/caches", "Create a cache", Cache, NewCache, status=201),
        Operation("get /v1/caches", "List caches", Caches, query=("limit", "after")),
        Operation("get /v1/caches/{cache_id}", "One cache", Cache),
        Operation("patch /v1/caches/{cache_id}", "Extend or rename a cache", Cache, CacheChange),
        Operation("delete /v1/caches/{cache_id}", "Delete a cache", DeletedCache),
        Operation(
            "post /v1/published",
            "Publish a beginning for every tenant",
            PublishedObject,
            NewPrefix,
            status=201,
        ),
        Operation("get /v1/published", "List published beginnings", PublishedList),
        Operation("delete /v1/published/{prefix_id}", "Publish a beginning no more", DeletedPublished),
    ],
    CONTROL: [
        Operation("post /tokenize", "Text to tokens", Tokens, [TokenizedText, TokenizedChat]),
        Operation("post /detokenize", "Tokens to text", PlainText, DetokenizedTokens),
        Operation(
            "get /v1/usage",
            "What the caller's tenant has used, by hour or day",
            UsageAnswer,
            query=("start", "end", "bucket", "group_by", "key_id", "tenant"),
        ),
        Operation(
            "get /v1/cache/explain/{id}",
            "Why the prompt of a request was, or was not, read from cache",
            CacheExplanation,
        ),
        Operation("get /health", "Whether the process lives", Health),
        Operation("get /ready", "Whether there is a replica to send requests to", Readiness, refusals=(503,)),
        Operation("get /version", "The version that runs", Version),
        Operation("get /openapi.json", "This document", OpenApi),
    ],
}


@functools.lru_cache(maxsize=16)
def openapi_document(passed: tuple[str, ...] = ()) -> bytes:
    """Return the document as JSON, equal for every router of this version that passes on these routes."""
    return encode_json(_document(passed))


def _document(passed: tuple[str, ...] = ()) -> OpenApi:
    operations = [(group, each) for group, those in OPERATIONS.items() for each in those]
    bodies = _components(each.body for _, each in operations)
    answers = _components([*(each.answer for _, each in operations), *_ERRORS.values(), OpenAiError])
    assert not bodies.keys() & answers.keys()
    schemas = {name: _as_sent(name, schema) for name, schema in bodies.items()}
    schemas |= {name: _as_written(schema) for name, schema in answers.items()}
    paths: dict[str, dict[str, Any]] = {}
    for group, operation in operations:
        method, path = operation.asked.split()
        paths.setdefault(path, {})[method] = _operation(group, operation, method, path)
    paths |= {path: {"post": _passed(path)} for path in passed}
    said = "What clients ask of a router, in the words of OpenAI, Anthropic and Gemini."
    said += " Fields that are not named here are ignored."
    return OpenApi(
        "3.1.0",
        {"title": "Kvasir", "version": "1", "description": said},
        [{"name": group} for group in (*OPERATIONS, *([PASSED] if passed else []))],
        paths,
        {"schemas": schemas},
    )


def _components(kinds: Iterable[Kind]) -> dict[str, Any]:
    """Return the schemas of all Structs in the kinds."""
    found = dict.fromkeys(each for kind in kinds for each in _structs(kind))
    return msgspec.json.schema_components(found, ref_template="#/components/schemas/{name}")[1]


def _structs(kind: Kind) -> list[type[msgspec.Struct]]:
    if isinstance(kind, list | tuple):
        return [each for part in kind for each in _structs(part)]
    return [] if kind is None else [kind]


def _schema(kind: Kind) -> Schema:
    if isinstance(kind, list | tuple):
        parts = [_schema(part) for part in kind]
        return {"allOf" if isinstance(kind, tuple) else "anyOf": parts}
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _as_written(schema: dict[str, Any]) -> dict[str, Any]:
    """Require all fields but those that may be UNSET."""
    kept = _without_docs(schema)
    fields = kept.get("properties", {})
    required = [name for name, field in fields.items() if "default" in field or name in kept["required"]]
    for field in fields.values():
        field.pop("default", None)
    return {**kept, "required": required} if fields else kept


def _without_docs(schema: Schema) -> dict[str, Any]:
    """The docstrings of Structs are for those who read the code."""
    return {key: value for key, value in schema.items() if key != "description"}


def _as_sent(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    kept = _without_docs(schema)
    if name in (GenerateContent.__name__, CountTokens.__name__):
        properties = {key: value for key, value in kept["properties"].items() if key not in _SET_BY_PATH}
        kept["properties"] = properties
    return kept


def _operation(group: str, operation: Operation, method: str, path: str) -> dict[str, Any]:
    words = path.replace("{", "").replace("}", "").replace(":", "/").replace(".", "/").split("/")
    written: dict[str, Any] = {
        "tags": [group],
        "summary": operation.summary,
        "operationId": "_".join([method, *filter(None, words)]),
        "responses": _responses(group, operation),
    }
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [
        {"name": name, "in": "query", "required": name == "alt", "schema": _query_schema(name)}
        for name in operation.query
    ]
    if parameters:
        written["parameters"] = parameters
    if operation.body is not None:
        written["requestBody"] = {"required": True, "content": _content("application/json", operation.body)}
    return written


def _passed(path: str) -> dict[str, Any]:
    written = _operation(PASSED, Operation(f"post {path}", "Passed on to a server"), "post", path)
    kind = FORM if path in FORM_ROUTES else "application/json"
    written["requestBody"] = {"required": True, "content": {kind: {"schema": {"type": "object"}}}}
    written["responses"]["200"] = {"description": "The server's answer.", "content": {"*/*": {}}}
    return written


def _responses(group: str, operation: Operation) -> dict[str, Any]:
    answer, groups = operation.answer, (group, *operation.also_speaks)
    responses: dict[str, Any] = {}
    if answer is not None:
        content = {} if answer is Event else _content("application/json", answer)
        if answer is Event or operation.streams:
            content |= _content("text/event-stream", Event)
        responses[str(operation.status)] = {"description": "The answer.", "content": content}
    errors = list(dict.fromkeys(_ERRORS.get(each, OpenAiError) for each in groups))
    error = errors[0] if len(errors) == 1 else errors
    for status, said in _SAID.items():
        if (status in _OF_BODIES and operation.body is None) or (status == 529 and ANTHROPIC not in groups):
            continue
        kind = answer if status in operation.refusals else error
        responses[str(status)] = {"description": said, "content": _content("application/json", kind)}
    return responses


def _content(media_type: str, kind: Kind) -> dict[str, Any]:
    return {media_type: {"schema": _schema(kind)}}


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
