"""POST, GET, PATCH and DELETE /v1/caches: named beginnings of prompts, whose KV is asked to be kept.

Owns the routes, the shape of a cache in answers, and how a replica is made to compute what a cache stands
for: by a request of one token, whose answer is dropped. A replica that cannot keep it says so in the answer;
the cache is a name for a beginning all the same.
"""

import asyncio
import contextlib
import secrets
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from replicas.protocol.frames import PromptUsage
from router.api.api_request import ApiRequest, Prompt
from router.api.asked import Asked
from router.api.cache_body import CacheChange, cache_change, new_cache, warming_body
from router.api.cached_requests import TENANT, keep_beginning, open_caches
from router.api.context import ApiContext
from router.api.json_body import encode_json
from router.api.openai_chat import prepare_chat
from router.api.openai_completions import prepare_completion
from router.caches.bounds import DEFAULT_PAGE, MAX_PAGE
from router.caches.record import ID_PREFIX, CacheContent, CacheKind, CacheRecord, LeaseOutcome, moment
from router.errors import CacheGone, CachesUnavailable, InvalidRequest, RouterError, about_model
from router.keeping import kept_of
from router.limits.connections import address_of
from router.observation.served import ServedPrompt, ServedRequest
from router.observation.trace_points import GenerationTrace

WARM_SECONDS = 120.0
NOT_WARMED = "not_warmed"
"""The word for a beginning that no replica has computed: none was ready, or it took too long."""


class CacheRoutes:
    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[Route]:
        return [
            Route("/v1/caches", self._all, methods=["GET", "POST"]),
            Route("/v1/caches/{cache_id}", self._one, methods=["GET", "PATCH", "DELETE"]),
        ]

    async def _all(self, request: Request) -> Response:
        return await (self._create(request) if request.method == "POST" else self._list(request))

    async def _one(self, request: Request) -> Response:
        cache_id = request.path_params["cache_id"]
        match request.method:
            case "PATCH":
                return await self._change(request, cache_id)
            case "DELETE":
                return await self._delete(request, cache_id)
        with self._in_flight(request):
            return _json(_object(await open_caches(self._context).look(cache_id, TENANT)))

    async def _create(self, request: Request) -> Response:
        context, address = self._context, address_of(request.scope.get("client"))
        caches = open_caches(context)
        async with context.body(request.scope, request.receive) as body:
            new, kind, content = new_cache(body, caches.bounds.bytes_per_cache)
            now = context.wall_clock()
            record = CacheRecord(
                cache_id=ID_PREFIX + secrets.token_hex(16),
                tenant=TENANT,
                model=new.model,
                kind=kind,
                created=now,
                expires=now + new.ttl,
                ttl=new.ttl,
                num_bytes=content.num_bytes,
                num_tokens=0,
                name=new.name,
                salt=new.cache_salt,
            )
            with about_model(new.model):
                warming = await self._prepare(record, content, Asked(body, address, request.scope))
            num_tokens = len(warming.prompts[0].generation.token_ids)
            record = msgspec.structs.replace(record, num_tokens=num_tokens)
            await caches.create(record, content)
            record = await self._warm(record, warming)
        return _json(_object(record), 201)

    async def _list(self, request: Request) -> Response:
        query = request.query_params
        with self._in_flight(request):
            page = await open_caches(self._context).page(
                TENANT, _limit(query.get("limit")), query.get("after")
            )
        data = [_object(record) for record in page.records]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return _json(
            {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": page.has_more}
        )

    async def _change(self, request: Request, cache_id: str) -> Response:
        context, address = self._context, address_of(request.scope.get("client"))
        caches = open_caches(context)
        async with context.body(request.scope, request.receive) as body:
            change: CacheChange = cache_change(body)
            record = await caches.extend(cache_id, TENANT, ttl=change.ttl, name=change.name)
            if change.ttl is not None:
                _, content = await caches.use(cache_id, TENANT)
                with contextlib.suppress(RouterError):  # whatever is with the model: it was extended
                    asked = Asked(body, address, request.scope)
                    record = await self._warm(record, await self._prepare(record, content, asked))
        return _json(_object(record))

    async def _delete(self, request: Request, cache_id: str) -> Response:
        with self._in_flight(request):
            record = await open_caches(self._context).delete(cache_id, TENANT)
        lease = record.lease
        kept = lease is not None and lease.refused is None
        return _json(
            {
                "id": record.cache_id,
                "object": "cache.deleted",
                "deleted": True,
                "lease": "ends_by_itself" if kept else "none",
            }
        )

    async def _prepare(self, record: CacheRecord, content: CacheContent, asked: Asked) -> ApiRequest:
        """`asked` is what brings this about."""
        prepare = prepare_chat if record.kind is CacheKind.CHAT else prepare_completion
        return await prepare(self._context, replace(asked, body=warming_body(record, content)))

    async def _warm(self, record: CacheRecord, request: ApiRequest) -> CacheRecord:
        """Have a replica compute and keep it, and note what it says. Never raises a RouterError."""
        (prompt,) = request.prompts
        keep_beginning(request, record, self._context.wall_clock())
        usage: PromptUsage | None = None
        with contextlib.suppress(RouterError, TimeoutError):
            async with asyncio.timeout(WARM_SECONDS):
                usage = await self._run(request, prompt)
        lease = LeaseOutcome(refused=NOT_WARMED)
        if usage is not None:
            kept = kept_of(prompt.generation.submit.leases, usage)[-1]
            lease = LeaseOutcome(kept.seconds, kept.num_tokens, kept.refused)
        try:
            return await open_caches(self._context).note_lease(record.cache_id, record.tenant, lease)
        except (CacheGone, CachesUnavailable):
            return msgspec.structs.replace(record, lease=lease)

    async def _run(self, request: ApiRequest, prompt: Prompt) -> PromptUsage | None:
        context, started, num_tokens = self._context, self._context.clock(), 0
        trace = GenerationTrace(context.new_id("req_"), None)
        usage: PromptUsage | None = None
        with context.hold([prompt.generation]):
            async with context.dispatcher.run(prompt.generation, trace) as run:
                async for batch in run:
                    for delta in batch:
                        usage = usage or delta.usage
                        num_tokens += len(delta.token_ids)
                decision, decision_seconds = run.decision, run.decision_seconds
        served = ServedRequest(
            request_id=trace.request_id,
            route="caches",
            model=request.model.name,
            status=200,
            error=None,
            arrived_at=context.wall_clock(),
            prepared_seconds=None,
            first_token_seconds=None,
            ended_seconds=context.clock() - started,
            is_stream=False,
            prompts=(ServedPrompt(prompt.generation, decision, usage, num_tokens, decision_seconds),),
        )
        for observe in context.observers:
            observe(served)
        return usage

    def _in_flight(self, request: Request) -> contextlib.AbstractContextManager[Any]:
        return self._context.in_flight.hold(address_of(request.scope.get("client")))


def _object(record: CacheRecord) -> dict[str, Any]:
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


def _lease(lease: LeaseOutcome | None) -> dict[str, Any] | None:
    """As `usage` says it."""
    if lease is None:
        return None
    if lease.refused is not None:
        return {"status": "refused", "reason": lease.refused}
    return {"status": "granted", "seconds": lease.seconds, "tokens": lease.num_tokens}


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_PAGE
    if not (text.isascii() and text.isdigit() and len(text) <= 3 and 1 <= int(text) <= MAX_PAGE):
        raise InvalidRequest(
            f"Invalid value for 'limit': '{text[:20]}' is no number from 1 to {MAX_PAGE}.", parameter="limit"
        )
    return int(text)


def _json(content: Any, status: int = 200) -> Response:
    return Response(encode_json(content), status, media_type="application/json")
