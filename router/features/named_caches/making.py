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

from replicas.protocol.frames import PromptUsage, TokenDelta
from router.api.api_request import ApiRequest, Prompt
from router.api.asked import Asked, Prepare
from router.api.context import ApiContext, Runs
from router.api.gemini.answers import prepare_gemini
from router.api.openai.chat import prepare_chat
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
from router.served import ServedPrompt, ServedRequest

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
    def __init__(self, context: ApiContext, caches: NamedCaches | None) -> None:
        self._context = context
        self._caches = caches

    async def create(self, wish: CacheWish, content: CacheContent, asked: Asked) -> CacheRecord:
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

    async def change(self, cache_id: str, ttl: int | None, name: str | None, asked: Asked) -> CacheRecord:
        """Raises CacheGone or CachesUnavailable."""
        caches = opened(self._caches)
        record = await caches.extend(cache_id, asked.caller.tenant.name, ttl=ttl, name=name)
        if ttl is not None:
            _, content = await caches.use(cache_id, record.tenant)
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
        usage = await self._run(request, prompt)
        lease = CacheLease(refused=NOT_WARMED)
        if usage is not None:
            kept = kept_of(prompt.generation.submit.leases, usage)[-1]
            lease = CacheLease(kept.seconds, kept.num_tokens, kept.refused)
        try:
            return await opened(self._caches).note_lease(record.cache_id, record.tenant, lease)
        except (CacheGone, CachesUnavailable):
            return msgspec.structs.replace(record, lease=lease)

    async def _run(self, request: ApiRequest, prompt: Prompt) -> PromptUsage | None:
        """None: no replica has computed the whole of it. What came of it is told to those who watch, whatever
        that is: what a replica has computed counts as its tenant's."""
        context = self._context
        warming = _Warming(prompt, context.wall_clock(), context.clock())
        request.prepared_at = warming.arrived_at
        trace = Trace(context.new_id("req_"), None)
        try:
            async with asyncio.timeout(WARM_SECONDS):
                await self._compute(request, warming, trace)
        except RouterError as error:
            warming.end_with(type(error).__name__, error.kind, http_error(error).status)
        except TimeoutError as error:
            warming.end_with(type(error).__name__, ErrorKind.FAILED, 504)
        except BaseException as error:
            warming.end_with(type(error).__name__, ErrorKind.CUT_OFF, 503)
            raise
        finally:
            served = warming.served(trace.request_id, request.model.name, context.clock())
            for hook in context.hooks.ended:
                hook(request, served)
            for observe in context.observers:
                observe(served)
        return prompt.usage if warming.error is None else None

    async def _compute(self, request: ApiRequest, warming: "_Warming", trace: Trace) -> None:
        context = self._context
        generation = replace(warming.prompt.generation, is_awaited=False)
        rates = context.rates.hold(generation.caller, [generation], warming.num_used_tokens)
        with rates, context.hold([generation]):
            async with context.dispatcher.run(generation, trace) as run:
                try:
                    async for batch in run:
                        for delta in batch:
                            is_first = delta.usage is not None and warming.prompt.usage is None
                            warming.take(delta, run)
                            for hook in context.hooks.started if is_first else ():
                                hook(request, warming.prompt)
                finally:
                    warming.take_decision(run)


@dataclass(slots=True)
class _Warming:
    """Progress of warming. `arrived_at` is in seconds since 1970, `started` the clock's."""

    prompt: Prompt
    arrived_at: float
    started: float
    num_tokens: int = 0
    error: str | None = None
    error_kind: ErrorKind | None = None
    status: int = 200

    def take(self, delta: TokenDelta, run: Runs) -> None:
        if self.prompt.usage is None and delta.usage is not None:
            self.take_decision(run)
            self.prompt.usage = delta.usage
        self.num_tokens += len(delta.token_ids)

    def take_decision(self, run: Runs) -> None:
        """It is that of the replica that answered, or of the last attempt."""
        prompt = self.prompt
        if prompt.usage is None:
            prompt.decision, prompt.decision_seconds = run.decision, run.decision_seconds

    def num_used_tokens(self) -> int | None:
        return None if self.prompt.usage is None else self.num_tokens

    def end_with(self, error: str, kind: ErrorKind, status: int) -> None:
        self.error, self.error_kind, self.status = error, kind, status

    def served(self, request_id: str, model: str, now: float) -> ServedRequest:
        prompt = ServedPrompt(
            self.prompt.generation,
            self.prompt.decision,
            self.prompt.usage,
            self.num_tokens,
            self.prompt.decision_seconds,
            num_silent_tokens=self.num_tokens,
            num_own_leases=self.prompt.num_own_leases,
            misses=self.prompt.misses,
        )
        return ServedRequest(
            request_id=request_id,
            route="caches",
            model=model,
            status=self.status,
            error=self.error,
            error_kind=self.error_kind,
            arrived_at=self.arrived_at,
            prepared_seconds=None,
            first_token_seconds=None,
            ended_seconds=now - self.started,
            is_stream=False,
            caller=self.prompt.generation.caller,
            prompts=(prompt,),
        )
