"""POST, GET, PATCH and DELETE …/cachedContents, and requests that begin with one.

Owns the routes and the shape of a cache in Gemini's words. `making.py` and `requests.py` are for every
dialect.
"""

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from router.api.api_request import ApiRequest, Prepare
from router.api.chats import prepare_chats
from router.api.context import ApiContext
from router.api.gemini.answers import read_path
from router.api.gemini.body import MODELS
from router.api.json_body import invalid
from router.api.paging import DEFAULT_PAGE, MAX_PAGE
from router.api.routes import json_response
from router.caller import tenant_of
from router.errors import CacheGone, about_model
from router.features.named_caches.gemini_body import (
    CACHED_CONTENTS,
    PARAMETER,
    cached_content_change,
    check_gemini_use,
    gemini_cache_use,
    new_cached_content,
    with_cached_content,
)
from router.features.named_caches.making import CacheWish
from router.features.named_caches.named_caches import NamedCaches
from router.features.named_caches.record import CacheKind, CacheRecord, gone_words, moment
from router.features.named_caches.requests import keep_beginning, opened
from router.features.named_caches.routes import CacheRoutes
from router.shared.answer_types import Count


def with_cached_contents(caches: NamedCaches | None) -> Prepare:
    """Prepare Gemini's bodies, which may name a cache."""

    async def prepare_content(context: ApiContext, request: ApiRequest) -> None:
        """For a path that names model and method, and a body that may name a cache. Raises what preparing any
        chat does, CacheGone and CachesUnavailable."""
        read_path(request)
        use = gemini_cache_use(request.body)
        if use is None:
            await prepare_chats("gemini")(context, request)
            return
        with about_model(use.model.removeprefix(MODELS)):
            assert use.cached_content is not None
            try:
                cache_id = use.cached_content.removeprefix(CACHED_CONTENTS)
                record, content = await opened(caches).use(cache_id, request.caller.tenant.name)
            except CacheGone as error:
                error.parameter = PARAMETER
                raise
            check_gemini_use(use, record)
            request.body = with_cached_content(request.body, use, content, context.config.max_body_bytes)
        await prepare_chats("gemini")(context, request)
        keep_beginning(request, record, context.wall_clock())

    return prepare_content


class CachedUsage(Struct, rename="camel"):
    total_token_count: Count


class CachedContent(Struct, rename="camel", kw_only=True):
    name: str
    model: str
    display_name: str | UnsetType = UNSET
    create_time: str
    update_time: str
    expire_time: str
    usage_metadata: CachedUsage


class CachedContents(Struct, rename="camel"):
    cached_contents: list[CachedContent]
    next_page_token: str | UnsetType = UNSET


class Nothing(Struct, forbid_unknown_fields=True):
    """The answer to a deletion."""


class GeminiCacheRoutes(CacheRoutes):
    async def _create(self, request: Request) -> Response:
        context = self._context
        async with context.body(request.scope, request.receive) as body:
            max_bytes = opened(self._caches).bounds.bytes_per_cache
            new, ttl, content = new_cached_content(body, context.wall_clock(), max_bytes)
            wish = CacheWish(
                new.model.removeprefix(MODELS), CacheKind.GEMINI, ttl, new.display_name, new.cache_salt
            )
            asked = ApiRequest(request.scope, body)
            record = await self._maker.create(wish, content, asked)
        return json_response(self._object(record))

    async def _list(self, request: Request) -> Response:
        query = request.query_params
        limit, after = _page_size(query.get("pageSize")), query.get("pageToken") or None
        with self._context.hold_place(request.scope):
            page = await opened(self._caches).page(tenant_of(request.scope), limit, after, CacheKind.GEMINI)
        token = page.records[-1].cache_id if page.has_more else UNSET
        return json_response(CachedContents(list(map(self._object, page.records)), token))

    async def _change(self, request: Request) -> Response:
        context = self._context
        async with context.body(request.scope, request.receive) as body:
            ttl = cached_content_change(body, context.wall_clock())
            cache_id = (await self._find(request)).cache_id
            asked = ApiRequest(request.scope, body)
            record = await self._maker.change(cache_id, ttl, None, asked)
        return json_response(self._object(record))

    async def _delete(self, request: Request) -> Response:
        with self._context.hold_place(request.scope):
            record = await self._find(request)
            await opened(self._caches).delete(record.cache_id, tenant_of(request.scope))
        return json_response(Nothing())

    async def _find(self, request: Request) -> CacheRecord:
        """Raises CacheGone, also for a cache in another dialect's words, and CachesUnavailable."""
        try:
            record = await super()._find(request)
            if record.kind is not CacheKind.GEMINI:
                why, words = gone_words(record.cache_id, None, self._context.wall_clock())
                raise CacheGone(words, f"cache_{why.value}")
        except CacheGone as error:
            error.parameter = "name"
            raise
        return record

    def _object(self, record: CacheRecord) -> CachedContent:
        return CachedContent(
            name=CACHED_CONTENTS + record.cache_id,
            model=MODELS + record.model,
            display_name=UNSET if record.name is None else record.name,
            create_time=moment(record.created),
            update_time=moment(record.expires - record.ttl),
            expire_time=moment(record.expires),
            usage_metadata=CachedUsage(record.num_tokens),
        )


def _page_size(text: str | None) -> int:
    """Google's services take what is too many for all that there may be."""
    if text is None:
        return DEFAULT_PAGE
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise invalid("pageSize", f"'{text[:20]}' is no number.")
    return min(int(text), MAX_PAGE) or DEFAULT_PAGE
