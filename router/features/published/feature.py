"""POST, GET and DELETE /v1/published: beginnings of prompts that an operator publishes for every tenant.

Owns the routes. A prefix is prepared as a request with the same body would be, up to its last whole block.
The first request that begins with it computes it.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from replicas.protocol.blocks import PublishedBeginning
from replicas.protocol.cluster_secret import ClusterSecret
from router.api.api_request import ApiRequest
from router.api.chats import prepare_chats
from router.api.context import ApiContext
from router.api.json_body import decode_body, unsupported
from router.api.openai.completions import prepare_completion
from router.api.routes import by_method, json_response
from router.caller import Right, caller_of
from router.errors import InvalidRequest, NotAllowed, PrefixGone
from router.feature import Feature
from router.features.published.prefixes import (
    MAX_PREFIX_TOKENS,
    MAX_PREFIXES,
    PUBLISHED_NAMESPACE,
    PublishedPrefix,
)
from router.features.published.store import PublishedStore
from router.prompt.catalog import ServedModel
from router.shared.answer_types import Count

MAX_NAME_CHARACTERS = 200


class NewPrefix(msgspec.Struct):
    """The fields that are read here; chats and completions read the rest."""

    model: str
    name: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None


class PublishedObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["published"] = "published"
    model: str
    name: str | None
    tokens: Count
    created_at: Count


class PublishedList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[PublishedObject]


class DeletedPublished(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["published.deleted"] = "published.deleted"
    deleted: bool = True


_decoder = msgspec.json.Decoder(NewPrefix)


class Published(Feature):
    """`store` is None where nothing can be published: everybody is one tenant, or there is no secret."""

    store: PublishedStore | None

    def __init__(self, context: ApiContext, store: PublishedStore | None) -> None:
        self._context = context
        self.store = store
        self.is_on = store is not None

    @classmethod
    def open(cls, context: ApiContext, secret: ClusterSecret | None) -> "Published":
        config = context.config
        if secret is None or not config.has_keys:
            return cls(context, None)
        return cls(context, PublishedStore(config.redis_url, secret))

    def beginning(self, model: ServedModel, packed_tokens: bytes) -> PublishedBeginning | None:
        assert self.store is not None
        if not model.card.takes_published:
            return None
        num_blocks = self.store.prefixes.num_blocks(model.name, packed_tokens, model.card.block_size)
        return PublishedBeginning(model.root(PUBLISHED_NAMESPACE), num_blocks) if num_blocks else None

    def client_routes(self) -> Sequence[Route]:
        return [
            by_method("/v1/published", GET=self._list, POST=self._publish),
            Route("/v1/published/{prefix_id}", self._delete, methods=["DELETE"]),
        ]

    async def _list(self, request: Request) -> Response:
        with self._context.hold_place(request.scope):
            store = self.store
            prefixes = () if store is None else store.prefixes.all()
            return json_response(PublishedList(data=list(map(_object, prefixes))))

    async def _publish(self, request: Request) -> Response:
        context, store = self._context, self._store(request)
        async with context.body(request.scope, request.receive) as body:
            prefix = await self._prefix(request, body)

        def added(prefixes: list[PublishedPrefix]) -> list[PublishedPrefix]:
            same = [each for each in prefixes if each.model == prefix.model]
            if any(each.packed_tokens == prefix.packed_tokens for each in same):
                raise InvalidRequest("This beginning is published already.", code="already_published")
            if len(prefixes) >= MAX_PREFIXES:
                raise InvalidRequest(f"There are {MAX_PREFIXES} published prefixes, and may be no more.")
            return [*prefixes, prefix]

        await store.change(added)
        return json_response(_object(prefix), 201)

    async def _prefix(self, request: Request, body: bytes) -> PublishedPrefix:
        context = self._context
        new = decode_body(_decoder, body)
        if new.name is not None and len(new.name) > MAX_NAME_CHARACTERS:
            raise InvalidRequest(f"A name has at most {MAX_NAME_CHARACTERS} characters.", parameter="name")
        prepare = prepare_chats("chat") if new.prompt is None else prepare_completion
        prepared = ApiRequest(request.scope, _without_answer(body))
        await prepare(context, prepared)
        (prompt,) = prepared.prompts
        if prompt.generation.media:
            raise unsupported("messages", "Images are known by their tenant alone: none can be published.")
        packed = prompt.generation.submit.packed_tokens
        block_size = prepared.model.card.block_size
        # What follows may be written into the last token.
        num_blocks = (len(packed) // 4 - 1) // block_size
        if not num_blocks:
            raise InvalidRequest(
                f"This beginning does not fill a block of {block_size} tokens: there is nothing to share."
            )
        if num_blocks * block_size > MAX_PREFIX_TOKENS:
            raise InvalidRequest(f"A published prefix has at most {MAX_PREFIX_TOKENS} tokens.")
        return PublishedPrefix(
            prefix_id=context.new_id("pub_"),
            model=prepared.model.name,
            packed_tokens=packed[: num_blocks * block_size * 4],
            created=context.wall_clock(),
            name=new.name,
        )

    async def _delete(self, request: Request) -> Response:
        prefix_id, store = request.path_params["prefix_id"], self._store(request)

        def removed(prefixes: list[PublishedPrefix]) -> list[PublishedPrefix]:
            rest = [prefix for prefix in prefixes if prefix.prefix_id != prefix_id]
            if len(rest) == len(prefixes):
                raise PrefixGone(f"There is no published prefix '{prefix_id[:60]}'.")
            return rest

        with self._context.hold_place(request.scope):
            await store.change(removed)
        return json_response(DeletedPublished(id=prefix_id))

    def _store(self, request: Request) -> PublishedStore:
        """Raises NotAllowed for who is no operator, and InvalidRequest where nothing can be published."""
        if not caller_of(request.scope).may(Right.ADMIN):
            raise NotAllowed("Only a key with the right 'admin' may publish prefixes.")
        if self.store is None:
            raise InvalidRequest("Nothing can be published here: that takes API keys and a cluster secret.")
        return self.store


def _without_answer(body: bytes) -> bytes:
    """Return the body with fields at its end, where they count: no turn of the model begins behind it."""
    inner = body.strip()[1:-1]
    fields = b'"add_generation_prompt":false,"max_tokens":1,"stream":false,"n":1}'
    return b"{%b,%b" % (inner, fields) if inner.strip() else body


def _object(prefix: PublishedPrefix) -> PublishedObject:
    return PublishedObject(
        id=prefix.prefix_id,
        model=prefix.model,
        name=prefix.name,
        tokens=prefix.num_tokens,
        created_at=int(prefix.created),
    )
