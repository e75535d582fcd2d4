"""The routes that generate nothing: models, health, metrics, tokenize and detokenize.

Owns their shapes (OpenAI's for models, unless a client of another vendor's asks; vLLM's for tokens). Speed
does not matter here.
"""

import importlib.metadata
from collections.abc import Mapping
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.anthropic.models import model_object, model_page
from router.api.context import ApiContext
from router.api.dialects import ANTHROPIC, vendor_of
from router.api.gemini.models import GeminiModel, gemini_model
from router.api.json_body import encode_json
from router.api.openai.token_counts import detokenize, tokenize
from router.api.routes import json_response
from router.api.written_answers import WriteAnswer, written_answer
from router.errors import UnknownModel
from router.prompt.catalog import ServedModel
from router.shared.answer_types import Count


def _version() -> str:
    try:
        return importlib.metadata.version("kvasir")
    except importlib.metadata.PackageNotFoundError:  # as in images, which have the files and no package
        return "unknown"


VERSION = _version()
"""Read once: it is on disk."""


class Model(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: Count
    owned_by: str = "kvasir"
    root: str
    parent: str | None
    max_model_len: Count
    block_size: Count | UnsetType = UNSET
    sampling_defaults: Mapping[str, float] | UnsetType = UNSET


class Models(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]
    models: list[GeminiModel]


class Health(Struct):
    status: str


class Readiness(Struct):
    status: str
    num_replicas: Count
    models: dict[str, Count]


class Version(Struct):
    version: str


class ControlRoutes:
    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    def index_routes(self) -> list[Route]:
        """`/` where there is no page."""
        return [Route("/", self.index, methods=["GET"])]

    def health_routes(self) -> list[Route]:
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
        ]

    def metrics_routes(self) -> list[Route]:
        return [
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/load", self.load, methods=["GET"]),
        ]

    async def index(self, request: Request) -> Response:
        """Answer a program at `/`."""
        return json_response({"name": "kvasir", "models": self._context.catalog.all_names()})

    async def models(self, request: Request) -> Response:
        """In OpenAI's words and in Gemini's, whose clients read different fields; Anthropic's clients read
        some of OpenAI's otherwise, and are known by a header."""
        catalog = self._context.catalog
        models = {name: catalog.get(name) for name in catalog.all_names()}
        if vendor_of(request.scope) is ANTHROPIC:
            return json_response(model_page(models, request.query_params))
        return json_response(
            Models(
                data=[_model_object(*each) for each in models.items()],
                models=[gemini_model(*each) for each in models.items()],
            )
        )

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        model = self._context.catalog.get(name)
        if vendor_of(request.scope) is ANTHROPIC:
            return json_response(model_object(name, model))
        both = (
            encode_json(_model_object(name, model))[:-1] + b"," + encode_json(gemini_model(name, model))[1:]
        )
        return Response(both, media_type="application/json")

    async def health(self, request: Request) -> Response:
        """The process is up; whether it can serve is `ready`'s answer."""
        return json_response(Health("ok"))

    async def ready(self, request: Request) -> Response:
        num_replicas = {name: self._num_replicas(name) for name in self._context.catalog.names()}
        total = sum(num_replicas.values())
        is_ready = total > 0 or self._context.may_wait
        status = 200 if is_ready else 503
        said = "ready" if is_ready else "no replica is ready"
        return json_response(Readiness(said, total, num_replicas), status)

    async def version(self, request: Request) -> Response:
        return json_response(Version(VERSION))

    async def load(self, request: Request) -> Response:
        """How many requests this router serves."""
        return json_response({"server_load": self._context.in_flight.num})

    async def metrics(self, request: Request) -> Response:
        content = await self._context.metrics.scrape()
        return Response(content, media_type=CONTENT_TYPE_LATEST)

    async def tokenize(self, request: Request) -> Response:
        return await self._answer(request, "tokenize", tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._answer(request, "detokenize", detokenize)

    async def _answer(self, request: Request, kind: str, write: WriteAnswer) -> Response:
        async with self._context.body(request.scope, request.receive) as body:
            written = await written_answer(self._context, request, kind, body, write)
        return Response(written, media_type="application/json")

    def _num_replicas(self, name: str) -> int:
        try:
            return self._context.num_replicas(name)
        except UnknownModel:
            return 0


def _model_object(name: str, model: ServedModel) -> Model:
    return Model(
        id=name,
        created=model.created,
        root=model.card.name,
        parent=None if model.adapter is None else model.card.name,
        max_model_len=model.card.told_context_length,
        block_size=model.card.block_size if model.card.unit == "tokens" else UNSET,
        sampling_defaults=model.sampling_defaults or UNSET,
    )
