"""Requests that begin with a named cache: prepared as if the client had sent all of it, with a lease.

Owns what a named cache does to a request. The rest of the router sees one request like any other.
"""

import dataclasses
import math

import msgspec

from replicas.protocol.prefix_leases import MAX_LEASES
from router.api.api_request import ApiRequest, Prepare
from router.api.context import ApiContext
from router.errors import InvalidRequest, about_model
from router.features.named_caches.body import check_use, named_in, spliced
from router.features.named_caches.named_caches import NamedCaches
from router.features.named_caches.record import CacheKind, CacheRecord
from router.keeping import LeaseRequest, leases_of


def with_caches(caches: NamedCaches | None, kind: CacheKind, prepare: Prepare) -> Prepare:
    """`prepare` for bodies that may name a cache."""

    async def prepare_with_cache(context: ApiContext, request: ApiRequest) -> None:
        """Raises what `prepare` does, CacheGone and CachesUnavailable."""
        use = named_in(request.body)
        if use is None:
            await prepare(context, request)
            return
        with about_model(use.model):
            assert use.cache is not None
            record, content = await opened(caches).use(use.cache, request.caller.tenant.name)
            check_use(use, kind, record, content)
            request.body = spliced(request.body, use, kind, content, context.config.max_body_bytes)
        await prepare(context, request)
        keep_beginning(request, record, context.wall_clock())

    return prepare_with_cache


def opened(caches: NamedCaches | None) -> NamedCaches:
    """Raises InvalidRequest where there are none."""
    if caches is None:
        raise InvalidRequest(
            "There are no named caches here: they need a cluster secret (secret_file), and are not off.",
            parameter="cache",
            code="caches_not_available",
        )
    return caches


def keep_beginning(request: ApiRequest, record: CacheRecord, now: float) -> None:
    """Ask for a lease on what the cache stands for, until it expires."""
    seconds = max(1, math.ceil(record.seconds_left(now)))
    for prompt in request.prompts:
        generation = prompt.generation
        keep = LeaseRequest(seconds, record.num_tokens)
        leases = (
            *generation.submit.leases,
            *leases_of([keep], len(generation.token_ids), request.model.card.block_size),
        )
        submit = msgspec.structs.replace(generation.submit, leases=leases[:MAX_LEASES])
        prompt.generation = dataclasses.replace(generation, submit=submit)
