"""POST, GET, PATCH and DELETE /v1/caches: named beginnings of prompts, whose KV is asked to be kept.

Owns the routes, and the shape of a cache in answers.
"""

from typing import Literal

from msgspec import Struct
from msgspec.structs import astuple
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.api_request import ApiRequest
from router.api.caching import LeaseOutcome, lease_outcome
from router.api.context import ApiContext
from router.api.paging import Page, new_page, page_limit
from router.api.routes import by_method, json_response
from router.caller import tenant_of
from router.features.named_caches.body import CacheChange, cache_change, new_cache
from router.features.named_caches.making import CacheMaker, CacheWish
from router.features.named_caches.named_caches import NamedCaches
from router.features.named_caches.record import CacheKind, CacheRecord, moment
from router.features.named_caches.requests import opened
from router.keeping import LeaseResult
from router.shared.answer_types import Count


class Cache(Struct, kw_only=True):
    id: str
    object: Literal["cache"] = "cache"
    name: str | None
    model: str
    kind: CacheKind
    tokens: Count
    bytes: Count
    created_at: Count
    expires_at: Count
    expires: str
    ttl: Count
    lease: LeaseOutcome | None


class Caches(Page, kw_only=True):
    data: list[Cache]


class DeletedCache(Struct, kw_only=True):
    id: str
    object: Literal["cache.deleted"] = "cache.deleted"
    deleted: bool = True
    lease: Literal["ends_by_itself", "none"]


class CacheRoutes:
    """The routes in Kvasir's own words; other dialects override what they say otherwise."""

    def __init__(self, context: ApiContext, caches: NamedCaches | None) -> None:
        self._context = context
        self._caches = caches
        self._maker = CacheMaker(context, caches)

    def routes(self, path: str) -> list[Route]:
        return [
            by_method(path, GET=self._list, POST=self._create),
            by_method(path + "/{cache_id}", GET=self._get, PATCH=self._change, DELETE=self._delete),
        ]

    async def _get(self, request: Request) -> Response:
        with self._context.hold_place(request.scope):
            return json_response(self._object(await self._find(request)))

    async def _find(self, request: Request) -> CacheRecord:
        """Raises CacheGone and CachesUnavailable."""
        return await opened(self._caches).look(request.path_params["cache_id"], tenant_of(request.scope))

    def _object(self, record: CacheRecord) -> Struct:
        return _cache(record)

    async def _create(self, request: Request) -> Response:
        context = self._context
        async with context.body(request.scope, request.receive) as body:
            new, kind, content = new_cache(body, opened(self._caches).bounds.bytes_per_cache)
            asked = ApiRequest(request.scope, body)
            wish = CacheWish(new.model, kind, new.ttl, new.name, new.cache_salt)
            record = await self._maker.create(wish, content, asked)
        return json_response(self._object(record), 201)

    async def _list(self, request: Request) -> Response:
        query = request.query_params
        with self._context.hold_place(request.scope):
            page = await opened(self._caches).page(
                tenant_of(request.scope), page_limit(query.get("limit")), query.get("after")
            )
        data = [_cache(record) for record in page.records]
        return json_response(new_page(Caches, data, [cache.id for cache in data], page.has_more))

    async def _change(self, request: Request) -> Response:
        context, cache_id = self._context, request.path_params["cache_id"]
        async with context.body(request.scope, request.receive) as body:
            change: CacheChange = cache_change(body)
            asked = ApiRequest(request.scope, body)
            record = await self._maker.change(cache_id, change.ttl, change.name, asked)
        return json_response(self._object(record))

    async def _delete(self, request: Request) -> Response:
        with self._context.hold_place(request.scope):
            cache_id = request.path_params["cache_id"]
            record = await opened(self._caches).delete(cache_id, tenant_of(request.scope))
        lease = record.lease
        kept = lease is not None and lease.refused is None
        return json_response(DeletedCache(id=record.cache_id, lease="ends_by_itself" if kept else "none"))


def _cache(record: CacheRecord) -> Cache:
    lease = record.lease
    return Cache(
        id=record.cache_id,
        name=record.name,
        model=record.model,
        kind=record.kind,
        tokens=record.num_tokens,
        bytes=record.num_bytes,
        created_at=int(record.created),
        expires_at=int(record.expires),
        expires=moment(record.expires),
        ttl=record.ttl,
        lease=None if lease is None else lease_outcome(LeaseResult(*astuple(lease))),
    )
