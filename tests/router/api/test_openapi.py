"""The OpenAPI document: all routes stand in it, and what a router answers is what it says.

schemathesis makes requests of it, and judges the answers. A longer run, of more than ten thousand requests
(those that have but one form are not made twice)::

    KVASIR_OPENAPI_REQUESTS=12500 python -m pytest -s tests/router/api/test_openapi.py -k everything
"""

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema import Draft202012Validator
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from router.api.control import ControlRoutes
from router.api.gemini.paths import GENERATING_PATHS
from router.app import PREPARES, client_routes
from router.features.named_caches.bounds import CacheBounds
from router.features.named_caches.named_caches import NamedCaches
from router.features.usage.store import UsageStore
from router.openapi.document import openapi_document
from tests.router.features.named_caches.test_routes import SECRET
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import says
from tests.router.thinking_model import MODEL, catalog, token_ids

NUM_REQUESTS = int(os.environ.get("KVASIR_OPENAPI_REQUESTS", "150"))
ANSWER = '<think>\nHm.\n</think>\n\nYes.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
TEXT = {"type": "string"}
MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["user", "system", "assistant"]}, "content": TEXT},
    "required": ["role", "content"],
}
CONTENT = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "model"]},
        "parts": {
            "type": "array",
            "items": {"type": "object", "properties": {"text": TEXT}, "required": ["text"]},
        },
    },
    "required": ["parts"],
}
WELL_FORMED: Mapping[str, Any] = {
    "model": {"const": MODEL},
    "messages": {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 3},
    "contents": {"type": "array", "items": CONTENT, "minItems": 1, "maxItems": 3},
    "max_tokens": {"enum": [None, 0, 1, 20]},
    "n": {"enum": [None, 1, 2]},
    "temperature": {"enum": [None, 0, 1.5]},
}
"""So that some requests get past the first field that is checked."""


def document() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(openapi_document())
    return made


@pytest.fixture
async def server(redis_url: str) -> AsyncIterator[HttpServer]:
    caches = NamedCaches(redis_url, SECRET, CacheBounds())
    usage = UsageStore(redis_url, 744)
    async with http_server(caches=caches, usage=usage, catalog=catalog()) as running:
        running.dispatcher.script = says(token_ids(ANSWER), num_cached_tokens=16)
        yield running
    await usage.close()
    await caches.close()


async def test_every_route_of_clients_stands_in_the_document(server: HttpServer) -> None:
    there = {("POST", path) for path in (*(path for path in PREPARES if "{" not in path), *GENERATING_PATHS)}
    health = ControlRoutes(server.context).health_routes()
    for route in [*client_routes(server.context), *health]:
        if not route.path.startswith("/docs"):
            path = route.path.replace(":path}", "}")
            there |= {(method, path) for method in route.methods or () if method != "HEAD"}
    described = {(method.upper(), path) for path, item in document()["paths"].items() for method in item}
    assert described == there


async def test_the_document_and_its_page_are_served(server: HttpServer, http: httpx.AsyncClient) -> None:
    answer = await http.get("/openapi.json")
    assert answer.json() == document()
    assert answer.json()["openapi"] == "3.1.0"
    for name, media_type in (("", "text/html"), ("/docs.js", "text/javascript"), ("/docs.css", "text/css")):
        file = await http.get("/docs" + name)
        assert file.status_code == 200 and file.headers["content-type"].startswith(media_type)
        assert "default-src 'self'" in file.headers["content-security-policy"]
        assert "http://" not in file.text and "https://" not in file.text


def test_all_schemas_are_schemas_and_all_references_lead_somewhere() -> None:
    made = document()
    schemas = made["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    assert referred(made) == set(schemas)
    ids = [operation["operationId"] for item in made["paths"].values() for operation in item.values()]
    assert len(set(ids)) == len(ids)


def referred(schema: Any) -> set[str]:
    """Names of the schemas that one refers to."""
    return {part.split('"')[0] for part in json.dumps(schema).split("#/components/schemas/")[1:]}


def sent_kinds(made: dict[str, Any]) -> set[str]:
    """Names of the schemas that bodies are made of."""
    operations = [operation for item in made["paths"].values() for operation in item.values()]
    found = referred([operation.get("requestBody") for operation in operations])
    while more := referred([made["components"]["schemas"][kind] for kind in found]) - found:
        found |= more
    return found


def reachable(made: dict[str, Any], cache_ids: Sequence[str], *, narrowed: bool) -> dict[str, Any]:
    """The document with the models and caches that there are, or with fields that are well formed as well."""
    schemas = made["components"]["schemas"]
    for kind in sent_kinds(made) if narrowed else ():
        properties = schemas[kind]["properties"]
        properties.update({name: WELL_FORMED[name] for name in properties.keys() & WELL_FORMED.keys()})
    for item in made["paths"].values():
        for operation in item.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] in ("model", "name"):
                    parameter["schema"] = {"enum": [MODEL, "org/☂:7b"]}
                if parameter["name"] == "cache_id":
                    parameter["schema"] = {"anyOf": [{"enum": list(cache_ids)}, parameter["schema"]]}
    return made


def ask_for_everything(url: str, cache_ids: Sequence[str], num_requests: int) -> Counter[int]:
    """Every operation as often, with bodies that are well formed, and if there is time for many requests with
    any others as well. Raises what schemathesis finds wrong."""
    statuses: Counter[int] = Counter()
    found: list[Exception] = []
    schemas = [
        schemathesis.openapi.from_dict(reachable(document(), cache_ids, narrowed=narrowed))
        for narrowed in ((True,) if num_requests < 1000 else (True, False))
    ]
    operations = [operation.ok() for schema in schemas for operation in schema.get_all_operations()]
    each = -(-num_requests // len(operations))
    for operation in operations:

        @settings(
            max_examples=each,
            deadline=None,
            database=None,
            derandomize=num_requests < 1000,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def ask(case: schemathesis.Case) -> None:
            response = case.call(base_url=url)
            statuses[response.status_code] += 1
            case.validate_response(response, checks=CHECKS)

        try:
            ask()
        except Exception as error:
            found.append(error)
    if found:
        raise ExceptionGroup("what schemathesis found", found)
    return statuses


async def test_everything_that_is_asked_for_is_answered_as_described(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    cache_ids = []
    for _ in range(3):
        begun = {"model": MODEL, "messages": [{"role": "user", "content": "Once"}]}
        cache_ids.append((await http.post("/v1/caches", json=begun)).json()["id"])
        begun = {"model": MODEL, "contents": [{"parts": [{"text": "Once"}]}]}
        name = (await http.post("/v1/cachedContents", json=begun)).json()["name"]
        cache_ids.append(name.removeprefix("cachedContents/"))
    statuses = await asyncio.to_thread(ask_for_everything, server.url, cache_ids, NUM_REQUESTS)
    sys.stdout.write(f"{statuses.total()} requests by status: {dict(sorted(statuses.items()))}\n")
    assert statuses[200] > NUM_REQUESTS // 20
    assert server.is_idle
