"""OpenAI's fields for how long a prompt stays cached: read, checked, and answered.

Owns these fields' values. A time to live is the least that a prompt is kept after each use; of several the
longest holds. OpenAI's chats and completions do not echo these fields; what became of them stands in `usage`
and in a header of our own.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from replicas.protocol.frames import PromptUsage
from replicas.protocol.prefix_leases import PrefixLease
from router.errors import InvalidRequest
from router.keeping import Kept, kept_of

RETENTION_SECONDS = {"in_memory": 300, "in-memory": 300, "24h": 86_400}
"""`in_memory` promises what OpenAI names as the shortest time; `in-memory` is how older clients spell it."""

TTL_SECONDS = {"5m": 300, "30m": 1800, "1h": 3600, "12h": 43_200, "24h": 86_400}
"""OpenAI's own are 30m and 12h; the others are those of other vendors that took the field over."""

MODES = ("implicit", "explicit")


class PromptCacheOptions(msgspec.Struct):
    """`mode` is checked and changes nothing: what is kept reaches to the end of the prompt."""

    mode: str | None = None
    ttl: str | None = None


def check_caching(retention: str | None, options: PromptCacheOptions | None) -> None:
    """Raises InvalidRequest for a value that OpenAI does not know either."""
    _check("prompt_cache_retention", retention, ["in_memory", "24h"], RETENTION_SECONDS)
    if options is not None:
        _check("prompt_cache_options.ttl", options.ttl, TTL_SECONDS, TTL_SECONDS)
        _check("prompt_cache_options.mode", options.mode, MODES, MODES)


def keep_seconds(retention: str | None, options: PromptCacheOptions | None) -> list[int]:
    """For how long the whole prompt is to be kept: nothing, or one number. The fields have been checked."""
    seconds = [] if retention is None else [RETENTION_SECONDS[retention]]
    if options is not None and options.ttl is not None:
        seconds.append(TTL_SECONDS[options.ttl])
    return [max(seconds)] if seconds else []


def lease_details(asked: Sequence[tuple[Sequence[PrefixLease], PromptUsage]]) -> dict[str, Any]:
    """What `usage.prompt_tokens_details` says beside OpenAI's own fields, for the prompts of one request."""
    details: dict[str, Any] = {}
    leases = [_lease(kept) for wishes, usage in asked for kept in kept_of(wishes, usage)]
    if leases:
        details["cache_leases"] = leases
    num_early = sum(usage.num_evicted_early_tokens for _, usage in asked)
    if num_early:
        causes = [usage.broken_by for _, usage in asked if usage.broken_by is not None]
        details["evicted_early_tokens"] = num_early
        details["evicted_early_cause"] = causes[0].value if causes else None
    return details


def lease_headers(leases: Sequence[PrefixLease], usage: PromptUsage) -> list[tuple[bytes, bytes]]:
    """Of the first prompt."""
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


def _lease(kept: Kept) -> dict[str, Any]:
    if kept.refused is not None:
        return {"status": "refused", "reason": kept.refused}
    return {"status": "granted", "seconds": kept.seconds, "tokens": kept.num_tokens}


def _check(parameter: str, value: str | None, named: Any, known: Any) -> None:
    if value is not None and value not in known:
        words = [f"'{each}'" for each in named]
        raise InvalidRequest(
            f"Invalid value: '{value[:40]}'. Supported values are: {', '.join(words[:-1])} and {words[-1]}.",
            parameter=parameter,
        )
