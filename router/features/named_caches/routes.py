"""POST, GET, PATCH and DELETE /v1/caches: named beginnings of prompts, whose KV is asked to be kept.

Owns the routes, and the shape of a cache in answers.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.asked import Asked
from router.api.context import ApiContext
from router.api.paging import page_limit
from router.api.routes import by_method, json_response
from router.caller import tenant_of
from router.edge.connections import address_of
from router.features.named_caches.body import CacheChange, cache_change, new_cache
from router.features.named_caches.making import CacheMaker, CacheWish
from router.features.named_caches.named_caches import NamedCaches
from router.features.named_caches.record import CacheLease, CacheRecord, moment
from router.features.named_caches.requests import opened


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

    def _object(self, record: CacheRecord) -> dict[str, Any]:
        return {
            "id": record.cache_id,
            "object": "cache",
            "name": record.name,
            "model": record.model,
            "kind": record.kind.value,
            "tokens": record.num_tokens,
            "bytes": record.num_bytes,
            "created_at": int(record.created),
            "expires_at": int(record.expires),
            "expires": moment(record.expires),
            "ttl": record.ttl,
            "lease": _lease(record.lease),
        }

    async def _create(self, request: Request) -> Response:
        context = self._context
        async with context.body(request.scope, request.receive) as body:
            new, kind, content = new_cache(body, opened(self._caches).bounds.bytes_per_cache)
            asked = Asked(body, address_of(request.scope.get("client")), request.scope)
            wish = CacheWish(new.model, kind, new.ttl, new.name, new.cache_salt)
            record = await self._maker.create(wish, content, asked)
        return json_response(self._object(record), 201)

    async def _list(self, request: Request) -> Response:
        query = request.query_params
        with self._context.hold_place(request.scope):
            page = await opened(self._caches).page(
                tenant_of(request.scope), page_limit(query.get("limit")), query.get("after")
            )
        data = [self._object(record) for record in page.records]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return json_response(
            {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": page.has_more}
        )

    async def _change(self, request: Request) -> Response:
        context, cache_id = self._context, request.path_params["cache_id"]
        async with context.body(request.scope, request.receive) as body:
            change: CacheChange = cache_change(body)
            asked = Asked(body, address_of(request.scope.get("client")), request.scope)
            record = await self._maker.change(cache_id, change.ttl, change.name, asked)
        return json_response(self._object(record))

    async def _delete(self, request: Request) -> Response:
        with self._context.hold_place(request.scope):
            cache_id = request.path_params["cache_id"]
            record = await opened(self._caches).delete(cache_id, tenant_of(request.scope))
        lease = record.lease
        kept = lease is not None and lease.refused is None
        return json_response(
            {
                "id": record.cache_id,
                "object": "cache.deleted",
                "deleted": True,
                "lease": "ends_by_itself" if kept else "none",
            }
        )


def _lease(lease: CacheLease | None) -> dict[str, Any] | None:
    """Format a lease as in `usage`."""
    if lease is None:
        return None
    if lease.refused is not None:
        return {"status": "refused", "reason": lease.refused}
    return {"status": "granted", "seconds": lease.seconds, "tokens": lease.num_tokens}
