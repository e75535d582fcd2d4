"""Responses that are stored: requests that go on from one, and GET and DELETE /v1/responses/{id}.

Owns what storing does to a request, and the routes that generate nothing. The rest of the router sees one
request like any other, with all of its input.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from replicas.protocol.cluster_secret import ClusterSecret
from router.api.api_request import ApiRequest, Prepare
from router.api.chats import prepare_chats
from router.api.context import ApiContext
from router.api.json_body import unsupported
from router.api.paging import Page, new_page, page_limit
from router.api.responses.answers import ResponseWriter
from router.api.routes import by_method, json_response
from router.caller import tenant_of
from router.errors import InvalidRequest, ResponseGone, about_model
from router.feature import Feature
from router.features.responses.record import ResponseBounds, StoredResponse
from router.features.responses.redis_responses import RedisResponses
from router.features.responses.splicing import (
    Sent,
    conversation_of,
    items_of,
    may_go_on,
    output_items,
    page_of,
    referred_items,
    request_items,
    response_of,
    sent_in,
    spliced,
    tell_sent_positions,
    with_items,
)
from router.features.responses.store import ResponseStore
from router.large_bodies.body_weight import is_light_chat
from router.shared.answer_types import Count


class ItemId(Struct):
    """Every item has both, and fields of its type."""

    id: str
    type: str


class ResponseItems(Page, kw_only=True):
    data: list[ItemId]


class ResponseTokens(Struct, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: Count


class DeletedResponse(Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


async def _add_what_came_before(
    store: ResponseStore | None, context: ApiContext, request: ApiRequest, sent: Sent
) -> None:
    items = items_of(bytes(sent.input))
    previous_id, tenant = sent.previous_response_id, request.caller.tenant.name
    if items is None:  # reading it says what is wrong
        return
    referred = referred_items(items, is_light=is_light_chat(request.body))
    if previous_id is None and (not referred or store is None):
        return
    store = _opened(store)
    before: list[bytes] = []
    if previous_id is not None:
        try:
            before.append(conversation_of(await store.find(previous_id, tenant)))
        except ResponseGone as error:
            raise InvalidRequest(
                f"Previous response with id '{previous_id[:60]}' not found.",
                parameter="previous_response_id",
                code="previous_response_not_found",
            ) from error
    found = await _find_items(store, tenant, referred)
    request.body = spliced(request.body, before, with_items(items, found), context.config.max_body_bytes)


async def _find_items(store: ResponseStore, tenant: str, referred: Mapping[int, str]) -> dict[int, bytes]:
    """Items of the outputs of stored responses, by their positions in the input. Raises InvalidRequest."""
    found: dict[int, bytes] = {}
    known: dict[str, dict[str, bytes]] = {}
    for position, item_id in referred.items():
        response_id = response_of(item_id)
        if response_id not in known:
            try:
                known[response_id] = output_items(await store.find(response_id, tenant))
            except ResponseGone:
                known[response_id] = {}
        item = known[response_id].get(item_id)
        if item is None:
            raise InvalidRequest(
                f"Item with id '{item_id[:60]}' not found: only those of stored responses can be named.",
                parameter=f"input[{position}].id",
                code="item_not_found",
            )
        found[position] = item
    return found


def _opened(store: ResponseStore | None) -> ResponseStore:
    if store is None:
        raise InvalidRequest(
            "No responses are stored here (they are off): send the whole input.",
            parameter="previous_response_id",
            code="responses_not_stored",
        )
    return store


class StoredResponses(Feature):
    """`store` is None where no responses are stored."""

    store: ResponseStore | None

    def __init__(self, context: ApiContext, store: ResponseStore | None) -> None:
        self._context = context
        self.store = store

    @classmethod
    def open(cls, context: ApiContext, secret: ClusterSecret | None) -> "StoredResponses":
        """Without a secret a router keeps its own: conversations are not written to Redis in the clear."""
        config = context.config
        if not config.max_responses:
            return cls(context, None)
        bounds = ResponseBounds(
            num_responses=config.max_responses,
            num_bytes=config.all_responses_bytes,
            memory_bytes=config.response_memory_bytes,
            seconds=config.response_seconds,
        )
        redis = None if secret is None else RedisResponses(config.redis_url, secret, bounds)
        return cls(context, ResponseStore(redis, bounds))

    def preparers(self) -> Mapping[str, Prepare]:
        return {"/v1/responses": self._prepare}

    async def _prepare(self, context: ApiContext, request: ApiRequest) -> None:
        """Raises InvalidRequest, UnknownModel, RouterBusy or ResponsesUnavailable."""
        sent: Sent | None = None
        if may_go_on(request.body):
            sent = sent_in(request.body)
            with about_model(sent.model):
                await _add_what_came_before(self.store, context, request, sent)
        try:
            await prepare_chats("responses")(context, request)
        except InvalidRequest as error:
            if sent is not None:
                tell_sent_positions(error, sent, request.body)
            raise
        writer, store = request.writer, self.store
        assert isinstance(writer, ResponseWriter)
        writer.previous_response_id = None if sent is None else sent.previous_response_id
        if store is None or not writer.wants_storing:
            return
        if len(request.body) <= store.bounds.bytes_per_response:
            request.state[self] = request.body

    def admitted(self, request: ApiRequest) -> AbstractContextManager[None] | None:
        body = request.state.get(self)
        return None if body is None else self._reserved(request, body)

    @contextlib.contextmanager
    def _reserved(self, request: ApiRequest, body: bytes) -> Iterator[None]:
        """Reserve room for the question while it is answered; storing happens afterwards, without delaying
        the answer."""
        writer, store, context = request.writer, self.store, self._context
        assert isinstance(writer, ResponseWriter) and store is not None

        def keep(response: bytes) -> None:
            tenant, now = request.caller.tenant.name, context.wall_clock()
            store.keep(StoredResponse(writer.answer_id, tenant, now, request_items(body), response))

        with store.hold(len(body)) as has_room:
            if has_room:
                writer.keep = keep
            yield

    def client_routes(self) -> Sequence[Route]:
        return [
            Route("/v1/responses/compact", self._compact, methods=["POST"]),
            Route("/v1/responses/input_tokens", self._count, methods=["POST"]),
            by_method("/v1/responses/{response_id}", GET=self._get, DELETE=self._delete),
            Route("/v1/responses/{response_id}/input_items", self._items, methods=["GET"]),
            Route("/v1/responses/{response_id}/cancel", self._cancel, methods=["POST"]),
        ]

    async def _delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        with self._context.hold_place(request.scope):
            await self._stored().delete(response_id, tenant_of(request.scope))
        return json_response(DeletedResponse(id=response_id))

    async def _get(self, request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            raise unsupported("stream", "Only responses in the background can be streamed again.")
        with self._context.hold_place(request.scope):
            response_id = request.path_params["response_id"]
            stored = await self._stored().find(response_id, tenant_of(request.scope))
        return Response(stored.response, media_type="application/json")

    async def _items(self, request: Request) -> Response:
        query = request.query_params
        limit, is_ascending = page_limit(query.get("limit")), query.get("order") == "asc"
        response_id = request.path_params["response_id"]
        with self._context.hold_place(request.scope):
            stored = await self._stored().find(response_id, tenant_of(request.scope))
        data, has_more = page_of(
            stored.items, response_id, limit=limit, is_ascending=is_ascending, after=query.get("after")
        )
        return json_response(new_page(ResponseItems, data, [str(item["id"]) for item in data], has_more))

    async def _count(self, request: Request) -> Response:
        """Count a request's input without an answer."""
        context = self._context
        async with context.body(request.scope, request.receive) as body:
            prepared = ApiRequest(request.scope, body)
            await self._prepare(context, prepared)
        (prompt,) = prepared.prompts
        num_tokens = len(prompt.generation.token_ids)
        return json_response(ResponseTokens(input_tokens=num_tokens))

    async def _cancel(self, request: Request) -> Response:
        raise InvalidRequest(
            "Cannot cancel a synchronous response. Close its connection; none runs in the background.",
            code="response_not_cancellable",
        )

    async def _compact(self, request: Request) -> Response:
        raise InvalidRequest(
            "Responses are not compacted here: ask the model for a summary instead.",
            code="compaction_not_supported",
        )

    def _stored(self) -> ResponseStore:
        if self.store is None:
            raise ResponseGone("No responses are stored here (they are off).")
        return self.store
