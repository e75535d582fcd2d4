"""GET /v1/usage: what the caller's tenant has used, by hour or day, and what it has come to.

Owns the query and the shape of the answer. A caller sees its own tenant; who may see all, all of them.
"""

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from replicas.process.settings import SettingsError
from replicas.protocol.cluster_secret import ClusterSecret
from router.api.context import ApiContext
from router.api.json_body import encode_json, invalid
from router.caller import Caller, Right, caller_of
from router.errors import InvalidRequest
from router.feature import Feature
from router.features.usage.amounts import (
    ALL_READ,
    ALL_WRITTEN,
    Amount,
    Amounts,
    add,
    nothing,
    num_prompt_tokens,
)
from router.features.usage.ledger import HOUR_SECONDS
from router.features.usage.metrics import UsageMetrics
from router.features.usage.ratios import NO_COST, Cost, RatioTable, cost_of
from router.features.usage.store import UsageStore
from router.features.usage.sums import BUCKET_SECONDS, Bucket, Group, TooManyGroups, UsageQuery
from router.shared.answer_types import Count, TierTokens
from router.shared.instruments import Instrument

DEFAULT_HOURS = 24
GROUPS = ("key", "model")
BUCKETS: Mapping[str, Bucket] = {"hour": "hour", "day": "day"}
MAX_NAME = 256
MAX_MOMENT = 10**11
"""Seconds since 1970."""


class TtlTokens(msgspec.Struct, rename=lambda name: name.removeprefix("for_")):
    none: Count
    for_5m: Count
    for_30m: Count
    for_1h: Count
    for_12h: Count
    for_24h: Count


class UsageCounts(msgspec.Struct):
    requests: Count
    errors: Count
    aborted: Count
    prompt_tokens: Count
    unreported_tokens: Count
    """Prompt tokens of which the engine did not say how many were cached."""
    uncached_tokens: Count
    cached_tokens: Count
    cached_tokens_by_tier: TierTokens
    cross_user_cached_tokens: Count
    written_tokens: Count
    written_tokens_by_ttl: TtlTokens
    output_tokens: Count
    reasoning_tokens: Count
    cost: float
    cost_without_cache: float
    saved: float


UsageBucket: Any = msgspec.defstruct(
    "UsageBucket",
    [
        ("start", Count),
        ("end", Count),
        ("tenant", str),
        ("key_id", str | None),
        ("model", str | None),
        *((field.name, field.type) for field in msgspec.structs.fields(UsageCounts)),
    ],
)
"""The use of one group: its names, then its counts."""


class UsageAnswer(msgspec.Struct, kw_only=True):
    object: Literal["usage"] = "usage"
    start: Count
    end: Count
    bucket: Bucket
    tenant: str | None
    ratios: dict[str, float] | None
    data: list[UsageBucket]
    total: UsageCounts


class Usage(Feature):
    """`store` is None where nothing is counted."""

    store: UsageStore | None

    def __init__(self, context: ApiContext, store: UsageStore | None) -> None:
        self._context = context
        self.store = store
        self._metrics = UsageMetrics(context.metrics.tenant_label)
        if store is not None:
            store.listeners.append(self._metrics.count)

    @classmethod
    def open(cls, context: ApiContext, secret: ClusterSecret | None) -> "Usage":
        """Raises SettingsError."""
        config = context.config
        try:
            ratios = RatioTable(config.usage_ratios)
        except ValueError as error:
            raise SettingsError(f"setting usage_ratios: {error}") from error
        if not config.usage_hours:
            return cls(context, None)
        return cls(context, UsageStore(config.redis_url, config.usage_hours, ratios, secret=secret))

    def instruments(self) -> Iterable[Instrument]:
        return self._metrics.instruments()

    def client_routes(self) -> Sequence[Route]:
        return [Route("/v1/usage", self.usage, methods=["GET"])]

    async def usage(self, request: Request) -> Response:
        context, store = self._context, self.store
        if store is None:  # nothing is counted
            raise HTTPException(404)
        with context.hold_place(request.scope):
            caller, now = caller_of(request.scope), context.wall_clock()
            query = usage_query(request.query_params, caller, now, store.num_hours)
            try:
                groups = await store.read(query)
            except TooManyGroups:
                raise InvalidRequest(
                    "That is more than one answer holds: ask for fewer hours, for days instead of hours, or "
                    "for one tenant.",
                    parameter="start",
                ) from None
            written = await asyncio.to_thread(_written, query, groups, store.ratios)
        return Response(written, media_type="application/json")


def usage_query(params: QueryParams, caller: Caller, now: float, num_hours: int) -> UsageQuery:
    """Whole hours: the one that `start` lies in is the first, and that before `end` the last. Raises
    InvalidRequest."""
    now_hour = int(now // HOUR_SECONDS)
    end = _moment(params, "end")
    end_hour = now_hour + 1 if end is None else math.ceil(end / HOUR_SECONDS)
    start = _moment(params, "start")
    first_hour = end_hour - DEFAULT_HOURS if start is None else int(start // HOUR_SECONDS)
    if first_hour >= end_hour:
        raise invalid("start", "it must be before 'end'.")
    bucket = params.get("bucket", "hour")
    if bucket not in BUCKETS:
        raise _wrong("bucket", bucket, BUCKETS)
    groups = [group for text in params.getlist("group_by") for group in text.split(",")]
    for group in groups:
        if group not in GROUPS:
            raise _wrong("group_by", group, GROUPS)
    latest = now_hour + num_hours  # clocks may differ, and jump
    end_hour = max(now_hour - num_hours, min(end_hour, latest))
    return UsageQuery(
        first_hour=min(end_hour, max(first_hour, now_hour - num_hours)),
        end_hour=end_hour,
        tenant=_tenant(params, caller),
        key_id=_name(params, "key_id"),
        bucket=BUCKETS[bucket],
        by_key="key" in groups,
        by_model="model" in groups,
    )


def _tenant(params: QueryParams, caller: Caller) -> str | None:
    """Return the requested tenant; None for all. Other tenants' names are not revealed."""
    asked = _name(params, "tenant")
    if caller.may(Right.ADMIN):
        return asked
    if asked not in (None, caller.tenant.name):
        raise invalid("tenant", "this key sees the use of its own tenant.")
    return caller.tenant.name


def _name(params: QueryParams, parameter: str) -> str | None:
    name = params.get(parameter)
    if name is not None and not 0 < len(name) <= MAX_NAME:
        raise invalid(parameter, f"it has 1 to {MAX_NAME} characters.")
    return name


def _moment(params: QueryParams, parameter: str) -> float | None:
    """In seconds since 1970, or as ISO 8601 has it, in UTC unless it says otherwise."""
    text = params.get(parameter)
    if text is None:
        return None
    try:
        seconds = float(text) if text.isascii() and text.replace(".", "", 1).isdigit() else _iso(text)
    except (ValueError, OverflowError):
        seconds = -1.0
    if not 0 <= seconds < MAX_MOMENT:
        raise invalid(
            parameter, f"'{text[:40]}' is no time. Send seconds since 1970, or such as 2026-07-01T12:00:00Z."
        )
    return seconds


def _iso(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def _wrong(parameter: str, value: str, known: Mapping[str, Any] | Sequence[str]) -> InvalidRequest:
    words = " and ".join(f"'{each}'" for each in known)
    return invalid(parameter, f"'{value[:40]}'. Supported values are {words}.")


def _written(query: UsageQuery, groups: Mapping[Group, Amounts], ratios: RatioTable) -> bytes:
    total, total_cost = nothing(), NO_COST
    data: list[Any] = []
    for group, amounts in groups.items():
        cost = cost_of(amounts, ratios.of(group.tenant))
        add(total, amounts)
        total_cost = Cost(total_cost.cost + cost.cost, total_cost.without_cache + cost.without_cache)
        end = group.start + BUCKET_SECONDS[query.bucket]
        place = group.start, end, group.tenant, group.key_id or None, group.model
        data.append(UsageBucket(*place, *_used(amounts, cost)))
    return encode_json(
        UsageAnswer(
            start=query.first_hour * HOUR_SECONDS,
            end=query.end_hour * HOUR_SECONDS,
            bucket=query.bucket,
            tenant=query.tenant,
            ratios=None if query.tenant is None else msgspec.structs.asdict(ratios.of(query.tenant)),
            data=data,
            total=UsageCounts(*_used(total, total_cost)),
        )
    )


def _used(amounts: Amounts, cost: Cost) -> tuple[Any, ...]:
    """Return the values of UsageCounts."""
    return (
        amounts[Amount.REQUESTS],
        amounts[Amount.ERRORS],
        amounts[Amount.ABORTED],
        num_prompt_tokens(amounts),
        amounts[Amount.UNREPORTED],
        amounts[Amount.UNCACHED],
        sum(amounts[ALL_READ]),
        TierTokens(*amounts[ALL_READ]),
        amounts[Amount.CROSS_USER],
        sum(amounts[ALL_WRITTEN]),
        TtlTokens(*amounts[ALL_WRITTEN]),
        amounts[Amount.OUTPUT],
        amounts[Amount.REASONING],
        round(cost.cost, 3),
        round(cost.without_cache, 3),
        round(cost.saved, 3),
    )
