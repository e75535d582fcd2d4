"""OpenAI's fields for what of a prompt stays cached, and how long: read, checked, and answered.

Owns these fields' values. A time to live is the least that a prompt is kept after each use; of several the
longest holds. OpenAI's chats and completions do not echo these fields; what became of them stands in `usage`
and in a header of our own.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from replicas.protocol.frames import PromptUsage
from replicas.protocol.prefix_leases import PrefixLease
from router.api.json_body import invalid, read_object
from router.errors import InvalidRequest
from router.keeping import LeaseResult, kept_of
from router.shared.answer_types import Count

RETENTION_SECONDS = {"in_memory": 300, "in-memory": 300, "24h": 86_400}
"""`in_memory` promises what OpenAI names as the shortest time; `in-memory` is how older clients spell it."""

TTL_SECONDS = {"5m": 300, "30m": 1800, "1h": 3600, "12h": 43_200, "24h": 86_400}
"""OpenAI's own are 30m and 12h; the others are those of other vendors that took the field over."""

BREAKPOINT_SECONDS = TTL_SECONDS["30m"]
"""For breakpoints where nothing says how long."""

MAX_TTL_SECONDS = 86_400

EXPLICIT = "explicit"
MODES = ("implicit", EXPLICIT)

MAX_BREAKPOINTS = 4
"""The latest count, one less where the end of the prompt is one as well."""

_SECONDS = re.compile("([0-9]{1,6})s")


class PromptCacheOptions(msgspec.Struct):
    """If `mode` is explicit, only breakpoints are kept; else the whole prompt is, too, if a time is given.
    `prewarm` computes and keeps the prompt without an answer. `comparison_response_id` requests a diagnosis
    against that answer's prompt."""

    mode: str | None = None
    ttl: str | None = None
    prewarm: bool | None = None
    comparison_response_id: str | None = None

    @property
    def is_explicit(self) -> bool:
        return self.mode == EXPLICIT


class LeaseOutcome(msgspec.Struct):
    status: Literal["granted", "refused"]
    reason: str | UnsetType = UNSET
    seconds: Count | UnsetType = UNSET
    tokens: Count | UnsetType = UNSET


def compared_id(options: PromptCacheOptions | None) -> str | None:
    return None if options is None else options.comparison_response_id


def check_caching(retention: str | None, options: PromptCacheOptions | None) -> None:
    """Raises InvalidRequest for a value that OpenAI does not know either."""
    if retention is not None:
        _check("prompt_cache_retention", retention, ["in_memory", "24h"], RETENTION_SECONDS)
    if options is None:
        return
    if options.ttl is not None and _ttl_seconds(options.ttl) is None:
        _check("prompt_cache_options.ttl", options.ttl, TTL_SECONDS, TTL_SECONDS)
    _check("prompt_cache_options.mode", options.mode, MODES, MODES)


def check_breakpoint(path: str, value: Any) -> None:
    if read_object(path, value).get("mode") != EXPLICIT:
        raise invalid(f"{path}.mode", f"it is '{EXPLICIT}'.")


def keep_seconds(retention: str | None, options: PromptCacheOptions | None) -> list[int]:
    """For how long the prompt is to be kept: nothing, or one number. Raises InvalidRequest."""
    check_caching(retention, options)
    seconds = [] if retention is None else [RETENTION_SECONDS[retention]]
    if options is not None and options.ttl is not None:
        seconds.append(_ttl_seconds(options.ttl) or 0)
    return [max(seconds)] if seconds else []


def keeps_of(
    retention: str | None, options: PromptCacheOptions | None, breakpoints: Sequence[int] = ()
) -> list[tuple[int, int | None]]:
    """Return the leases to request: seconds, and the last message (None is the whole prompt). `breakpoints`
    are positions of messages in order; the latest count."""
    if retention is None and options is None and not breakpoints:  # nearly always
        return []
    seconds = keep_seconds(retention, options)
    if options is not None and options.is_explicit:
        whole, most = [], MAX_BREAKPOINTS
    else:
        whole, most = [(each, None) for each in seconds], MAX_BREAKPOINTS - 1
    each = max(seconds, default=BREAKPOINT_SECONDS)
    return [*whole, *((each, position) for position in breakpoints[-most:])]


def _ttl_seconds(ttl: str) -> int | None:
    """None for what is no time to live."""
    if ttl in TTL_SECONDS:
        return TTL_SECONDS[ttl]
    found = _SECONDS.fullmatch(ttl)
    return int(found[1]) if found and 1 <= int(found[1]) <= MAX_TTL_SECONDS else None


class LeaseFields(Protocol):
    """Kvasir's own fields of a usage."""

    cache_leases: list[LeaseOutcome] | UnsetType
    evicted_early_tokens: int | UnsetType
    evicted_early_cause: str | UnsetType | None


def tell_leases(
    details: LeaseFields, leases: Sequence[Sequence[PrefixLease]], usages: Sequence[PromptUsage]
) -> None:
    """Set the fields for the prompts of one request, if there is anything to tell."""
    for wishes, usage in zip(leases, usages, strict=True):
        if wishes:
            outcomes = list(map(lease_outcome, kept_of(wishes, usage)))
            details.cache_leases = [*(details.cache_leases or ()), *outcomes]
    if num_early := sum([usage.num_evicted_early_tokens for usage in usages]):
        causes = [usage.broken_by for usage in usages if usage.broken_by is not None]
        details.evicted_early_tokens = num_early
        details.evicted_early_cause = causes[0].value if causes else None


def lease_headers(leases: Sequence[PrefixLease], usage: PromptUsage) -> list[tuple[bytes, bytes]]:
    """Return the lease header of the first prompt."""
    headers: list[tuple[bytes, bytes]] = []
    for kept in kept_of(leases, usage):
        if kept.refused is None:
            value = f"granted; seconds={kept.seconds}; tokens={kept.num_tokens}"
        else:
            value = f"refused; reason={kept.refused}"
        headers.append((b"x-kvasir-cache-lease", value.encode()))
    if usage.num_evicted_early_tokens and usage.broken_by is not None:
        value = f"{usage.num_evicted_early_tokens}; cause={usage.broken_by.value}"
        headers.append((b"x-kvasir-evicted-early-tokens", value.encode()))
    return headers


def lease_outcome(kept: LeaseResult) -> LeaseOutcome:
    if kept.refused is not None:
        return LeaseOutcome("refused", reason=kept.refused)
    return LeaseOutcome("granted", seconds=kept.seconds, tokens=kept.num_tokens)


def _check(parameter: str, value: str | None, named: Any, known: Any) -> None:
    if value is not None and value not in known:
        words = [f"'{each}'" for each in named]
        raise InvalidRequest(
            f"Invalid value: '{value[:40]}'. Supported values are: {', '.join(words[:-1])} and {words[-1]}.",
            parameter=parameter,
        )
