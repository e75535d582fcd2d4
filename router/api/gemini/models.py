"""Gemini's routes that generate nothing: its models, and countTokens.

Owns the shape of a model in Gemini's words. `/v1/models` is also other dialects'; what stands there for each
of them stands in one answer.
"""

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.context import ApiContext
from router.api.gemini.body import MODELS
from router.api.gemini.count import count_tokens
from router.api.gemini.paths import COUNT, GENERATE, STREAM, VERSIONS, model_method, with_path_fields
from router.api.routes import json_response
from router.api.written_answers import written_answer
from router.prompt.catalog import ServedModel
from router.shared.answer_types import Count


class GeminiModel(Struct, rename="camel"):
    name: str
    base_model_id: str
    version: str
    display_name: str
    input_token_limit: Count
    output_token_limit: Count
    supported_generation_methods: list[str]
    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    top_k: float | UnsetType = UNSET


class GeminiModels(Struct):
    models: list[GeminiModel]


def gemini_model(name: str, model: ServedModel) -> GeminiModel:
    card = model.card
    lengths = card.told_context_length, card.told_context_length
    methods = [GENERATE, STREAM, COUNT]
    given = model.sampling_defaults
    defaults = [given.get(each, UNSET) for each in ("temperature", "top_p", "top_k")]
    version = card.fingerprint[:12]
    return GeminiModel(MODELS + name, card.name, version, name, *lengths, methods, *defaults)


class GeminiRoutes:
    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[Route]:
        """Return the routes of methods before those of names, which may contain anything."""
        counts = [
            Route(f"{version}/models/{{model:path}}:{COUNT}", self.count, methods=["POST"])
            for version in VERSIONS
        ]
        return [
            *counts,
            Route("/v1beta/models", self.models, methods=["GET"]),
            Route("/v1beta/models/{name:path}", self.model, methods=["GET"]),
        ]

    async def models(self, request: Request) -> Response:
        catalog = self._context.catalog
        models = [gemini_model(name, catalog.get(name)) for name in catalog.all_names()]
        return json_response(GeminiModels(models))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        return json_response(gemini_model(name, self._context.catalog.get(name)))

    async def count(self, request: Request) -> Response:
        asked = model_method(request.scope["path"])
        assert asked is not None
        async with self._context.body(request.scope, request.receive) as sent:
            body = with_path_fields(sent, asked)
            written = await written_answer(self._context, request, "gemini_count", body, count_tokens)
        return Response(written, media_type="application/json")
