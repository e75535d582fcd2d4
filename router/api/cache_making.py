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

from replicas.protocol.frames import PromptUsage
from router.api.api_request import ApiRequest, Prompt
from router.api.asked import Asked, Prepare
from router.api.cache_body import warming_body
from router.api.cached_requests import TENANT, keep_beginning, open_caches
from router.api.context import ApiContext
from router.api.gemini.answers import prepare_gemini
from router.api.gemini.cache_body import gemini_warming_body
from router.api.openai.chat import prepare_chat
from router.api.openai.completions import prepare_completion
from router.caches.record import ID_PREFIX, CacheContent, CacheKind, CacheRecord, LeaseOutcome
from router.errors import CacheGone, CachesUnavailable, RouterError, about_model
from router.keeping import kept_of
from router.observation.served import ServedPrompt, ServedRequest
from router.observation.trace_points import GenerationTrace

WARM_SECONDS = 120.0
NOT_WARMED = "not_warmed"
"""The word for a beginning that no replica has computed: none was ready, or it took too long."""

_WARMINGS: Mapping[CacheKind, tuple[Prepare, Callable[[CacheRecord, CacheContent], bytes]]] = {
    CacheKind.CHAT: (prepare_chat, warming_body),
    CacheKind.COMPLETION: (prepare_completion, warming_body),
    CacheKind.GEMINI: (prepare_gemini, gemini_warming_body),
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
    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def create(self, wish: CacheWish, content: CacheContent, asked: Asked) -> CacheRecord:
        """Raises what preparing its beginning does, CachesFull and CachesUnavailable."""
        caches, now = open_caches(self._context), self._context.wall_clock()
        record = CacheRecord(
            cache_id=ID_PREFIX + secrets.token_hex(16),
            tenant=TENANT,
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
        await caches.create(record, content)
        return await self._warm(record, warming)

    async def change(self, cache_id: str, ttl: int | None, name: str | None, asked: Asked) -> CacheRecord:
        """Raises CacheGone or CachesUnavailable."""
        caches = open_caches(self._context)
        record = await caches.extend(cache_id, TENANT, ttl=ttl, name=name)
        if ttl is not None:
            _, content = await caches.use(cache_id, TENANT)
            with contextlib.suppress(RouterError):  # whatever is with the model: it was extended
                record = await self._warm(record, await self._prepare(record, content, asked))
        return record

    async def _prepare(self, record: CacheRecord, content: CacheContent, asked: Asked) -> ApiRequest:
        """`asked` is what brings this about."""
        prepare, body_of = _WARMINGS[record.kind]
        return await prepare(self._context, replace(asked, body=body_of(record, content)))

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
