"""The routes that generate nothing: models, health, metrics, tokenize and detokenize.

Owns their shapes (OpenAI's for models, vLLM's for tokens). Speed does not matter here.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.context import ApiContext
from router.api.openai_chat import ChatPrompt, render_chat
from router.api.openai_shared import decode_body, encode_json
from router.api.sampling import check_token_ids
from router.errors import InvalidRequest, UnknownModel
from router.prompt.catalog import ServedModel


class _TokenizeText(msgspec.Struct, kw_only=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool = True


class _TokenizeOptions(msgspec.Struct, kw_only=True):
    messages: Any = None
    return_token_strs: bool | None = None


class _Detokenize(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


_text_decoder = msgspec.json.Decoder(_TokenizeText)
_chat_decoder = msgspec.json.Decoder(ChatPrompt)
_options_decoder = msgspec.json.Decoder(_TokenizeOptions)
_detokenize_decoder = msgspec.json.Decoder(_Detokenize)


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
        ]

    def metrics_routes(self) -> list[Route]:
        return [Route("/metrics", self.metrics, methods=["GET"])]

    async def index(self, request: Request) -> Response:
        """What a program gets at `/`."""
        return _json({"name": "kvasir", "models": self._names()})

    async def models(self, request: Request) -> Response:
        catalog = self._context.catalog
        return _json({"object": "list", "data": [_model_object(catalog.get(name)) for name in self._names()]})

    async def model(self, request: Request) -> Response:
        return _json(_model_object(self._context.catalog.get(request.path_params["name"])))

    async def health(self, request: Request) -> Response:
        """The process is up; whether it can serve is `ready`'s answer."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        num_replicas = {name: self._num_replicas(name) for name in self._context.catalog.names()}
        total = sum(num_replicas.values())
        status = 200 if total else 503
        content = {
            "status": "ready" if total else "no replica is ready",
            "num_replicas": total,
            "models": num_replicas,
        }
        return _json(content, status)

    async def metrics(self, request: Request) -> Response:
        content = await self._context.metrics.scrape()
        return Response(content, media_type=CONTENT_TYPE_LATEST)

    async def tokenize(self, request: Request) -> Response:
        with self._context.in_flight():
            return await self._tokenize(await self._context.read_body(request.scope, request.receive))

    async def _tokenize(self, body: bytes) -> Response:
        options = decode_body(_options_decoder, body)
        if options.messages is None:
            plain = decode_body(_text_decoder, body)
            model = self._model(plain.model)
            token_ids = await model.tokenizer.encode_async(
                plain.prompt, add_special_tokens=plain.add_special_tokens
            )
        else:
            chat = decode_body(_chat_decoder, body)
            model = self._model(chat.model)
            rendered = render_chat(model, chat)
            token_ids = await model.tokenizer.encode_async(rendered.text, is_quoted=rendered.is_quoted)
        content = {
            "count": len(token_ids),
            "max_model_len": model.card.context_length,
            "tokens": token_ids,
            "token_strs": model.tokenizer.token_strings(token_ids) if options.return_token_strs else None,
        }
        return _json(content)

    async def detokenize(self, request: Request) -> Response:
        with self._context.in_flight():
            body = await self._context.read_body(request.scope, request.receive)
            asked = decode_body(_detokenize_decoder, body)
            model = self._model(asked.model)
            token_ids = check_token_ids(asked.tokens, model, "tokens")
            return _json({"prompt": await asyncio.to_thread(model.tokenizer.decode, token_ids)})

    def _model(self, name: str | None) -> ServedModel:
        """The model that was asked for; without a name, the only one."""
        if name is not None:
            return self._context.catalog.get(name)
        names: Sequence[str] = self._context.catalog.names()
        if len(names) == 1:
            return self._context.catalog.get(names[0])
        raise InvalidRequest(
            "Missing required parameter: 'model'.", parameter="model", code="missing_required_parameter"
        )

    def _names(self) -> list[str]:
        """All that can be asked for; models first, since some clients take the first."""
        catalog = self._context.catalog
        return [*catalog.names(), *catalog.adapter_names()]

    def _num_replicas(self, name: str) -> int:
        try:
            return self._context.num_replicas(name)
        except UnknownModel:
            return 0


def _model_object(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "kvasir",
        "root": model.card.name,
        "parent": None if model.adapter is None else model.card.name,
        "max_model_len": model.card.context_length,
    }


def _json(content: Any, status: int = 200) -> Response:
    return Response(encode_json(content), status, media_type="application/json")
