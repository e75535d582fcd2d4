"""CacheMaker: named caches that come to be or live longer, with what a replica computes of them.

Owns how a replica is made to compute what a cache stands for: by a request of one token, whose answer is
dropped. A replica that cannot keep it says so; the cache is a name for a beginning all the same. Knows no
route: those of every dialect use this.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from router.api.api_request import ApiRequest, Prepare, Prompt
from router.api.chats import prepare_chats
from router.api.context import ApiContext
from router.api.openai.completions import prepare_completion
from router.edge.http_error import http_error
from router.errors import CacheGone, CachesUnavailable, ErrorKind, RouterError, about_model
from router.features.named_caches.body import warming_body
from router.features.named_caches.gemini_body import gemini_warming_body
from router.features.named_caches.named_caches import NamedCaches
from router.features.named_caches.record import ID_PREFIX, CacheContent, CacheKind, CacheLease, CacheRecord
from router.features.named_caches.requests import keep_beginning, opened
from router.keeping import kept_of
from router.observation.trace_points import Trace

WARM_SECONDS = 120.0
NOT_WARMED = "not_warmed"
"""The word for a beginning that no replica has computed: none was ready, or it took too long."""

_WARMINGS: Mapping[CacheKind, tuple[Prepare, Callable[[CacheRecord, CacheContent], bytes]]] = {
    CacheKind.CHAT: (prepare_chats("chat"), warming_body),
    CacheKind.COMPLETION: (prepare_completion, warming_body),
    CacheKind.GEMINI: (prepare_chats("gemini"), gemini_warming_body),
}


@dataclass(frozen=True, slots=True)
class CacheWish:
    """`ttl` is in seconds."""

    model: str
    kind: CacheKind
    ttl: int
    name: str | None
    salt: str | None


class CacheMaker:
    def __init__(self, context: ApiContext, caches: NamedCaches | None) -> None:
        self._context = context
        self._caches = caches

    async def create(self, wish: CacheWish, content: CacheContent, asked: ApiRequest) -> CacheRecord:
        """Raises what preparing its beginning does, CachesFull and CachesUnavailable."""
        caches, now = opened(self._caches), self._context.wall_clock()
        record = CacheRecord(
            cache_id=ID_PREFIX + secrets.token_hex(16),
            tenant=asked.caller.tenant.name,
            model=wish.model,
            kind=wish.kind,
            created=now,
            expires=now + wish.ttl,
            ttl=wish.ttl,
            num_bytes=content.num_bytes,
            num_tokens=0,
            name=wish.name,
            salt=wish.salt,
        )
        with about_model(wish.model):
            warming = await self._prepare(record, content, asked)
        num_tokens = len(warming.prompts[0].generation.token_ids)
        record = msgspec.structs.replace(record, num_tokens=num_tokens)
        await caches.create(record, content, asked.caller.lease_share or 1.0)
        return await self._warm(record, warming)

    async def change(
        self, cache_id: str, ttl: int | None, name: str | None, asked: ApiRequest
    ) -> CacheRecord:
        """Raises CacheGone or CachesUnavailable."""
        caches = opened(self._caches)
        record = await caches.extend(cache_id, asked.caller.tenant.name, ttl=ttl, name=name)
        if ttl is not None:
            _, content = await caches.use(cache_id, record.tenant)
            with contextlib.suppress(RouterError):  # whatever is with the model: it was extended
                record = await self._warm(record, await self._prepare(record, content, asked))
        return record

    async def _prepare(self, record: CacheRecord, content: CacheContent, asked: ApiRequest) -> ApiRequest:
        """`asked` is what brings this about."""
        prepare, body_of = _WARMINGS[record.kind]
        warming = ApiRequest(asked.scope, body_of(record, content), route="caches")
        await prepare(self._context, warming)
        return warming

    async def _warm(self, record: CacheRecord, request: ApiRequest) -> CacheRecord:
        """Have a replica compute and keep it, and note what it says. Never raises a RouterError."""
        (prompt,) = request.prompts
        keep_beginning(request, record, self._context.wall_clock())
        prompt.generation = replace(prompt.generation, is_awaited=False)
        await self._run(request, prompt)
        lease = CacheLease(refused=NOT_WARMED)
        if prompt.usage is not None and request.error is None:
            kept = kept_of(prompt.generation.submit.leases, prompt.usage)[-1]
            lease = CacheLease(kept.seconds, kept.num_tokens, kept.refused)
        try:
            return await opened(self._caches).note_lease(record.cache_id, record.tenant, lease)
        except (CacheGone, CachesUnavailable):
            return msgspec.structs.replace(record, lease=lease)

    async def _run(self, request: ApiRequest, prompt: Prompt) -> None:
        """Have a replica compute it, and end the request. Tokens that were computed count as the tenant's,
        whatever the result."""
        context = self._context
        request.request_id, request.model_name = context.new_id("req_"), request.model.name
        request.arrived_at, started = context.wall_clock(), context.clock()
        try:
            async with asyncio.timeout(WARM_SECONDS):
                await self._compute(request, prompt)
        except RouterError as error:
            request.end_with(type(error).__name__, error.kind)
            request.status = http_error(error).status
        except TimeoutError as error:
            request.end_with(type(error).__name__, ErrorKind.FAILED)
            request.status = 504
        except BaseException as error:
            request.end_with(type(error).__name__, ErrorKind.CUT_OFF)
            request.status = 503
            raise
        finally:
            context.has_ended(request, request.served(context.clock() - started))

    async def _compute(self, request: ApiRequest, prompt: Prompt) -> None:
        context, trace = self._context, Trace(request.request_id, None)
        with context.admit(request):
            async with context.dispatcher.run(prompt.generation, trace) as run:
                try:
                    async for batch in run:
                        for delta in batch:
                            if prompt.usage is None and delta.usage is not None:
                                prompt.usage = delta.usage
                                prompt.decided(run)
                                for hook in context.hooks.started:
                                    hook(request, prompt)
                            prompt.outputs[0].add(delta)
                finally:
                    if prompt.usage is None:
                        prompt.decided(run)
