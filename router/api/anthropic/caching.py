"""Anthropic's marks of what is to stay cached, and its way to say what became of them.

Owns the rules of `cache_control`: where it may stand, how many there may be, which times to live follow each
other; and the disjoint convention of `usage`, in which input, read and written tokens add up to the prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import UNSET, Struct, UnsetType

from replicas.protocol.frames import PromptUsage
from replicas.protocol.prefix_leases import HOUR_SECONDS, PrefixLease
from router.api.caching import LeaseOutcome, tell_leases
from router.api.chat_request import KeepThrough
from router.errors import InvalidRequest
from router.shared.answer_types import Count

MAX_MARKS = 4
TTL_SECONDS = {"5m": 300, "1h": HOUR_SECONDS}

_ORDER = (
    "a ttl='1h' cache_control block must not come after a ttl='5m' cache_control block. Note that blocks are"
    " processed in the following order: `tools`, `system`, `messages`."
)


class CacheCreation(Struct):
    ephemeral_5m_input_tokens: Count
    ephemeral_1h_input_tokens: Count


class ThinkingTokens(Struct):
    thinking_tokens: Count


class MessageUsage(Struct):
    input_tokens: Count
    cache_creation_input_tokens: Count | None
    cache_read_input_tokens: Count | None
    cache_creation: CacheCreation | None
    cache_leases: list[LeaseOutcome] | UnsetType = UNSET
    evicted_early_tokens: Count | UnsetType = UNSET
    evicted_early_cause: str | UnsetType | None = UNSET
    output_tokens: Count = 0
    output_tokens_details: ThinkingTokens | UnsetType = UNSET


class MarkPosition(NamedTuple):
    """A block's end: in which message of the chat, after how many characters of its text; the end of that
    message for None. Message -1 stands for all that comes before the messages."""

    message: int
    num_characters: int | None = None


class _Mark(NamedTuple):
    seconds: int
    place: MarkPosition
    path: str


class Marks:
    """Filled block by block in the order of the prompt: tools, system, messages."""

    def __init__(self) -> None:
        self._marks: list[_Mark] = []
        self._last_block: MarkPosition | None = None
        self._last_seconds: int | None = None

    def block(self, path: str, block: Mapping[str, Any], place: MarkPosition) -> None:
        """A block that can be cached. Raises InvalidRequest."""
        seconds = mark_seconds(path, block)
        self._last_block, self._last_seconds = place, seconds
        if seconds is not None:
            self._marks.append(_Mark(seconds, place, f"{path}.cache_control"))

    def keeps(self, top: Any) -> list[KeepThrough]:
        """With what is asked for at the top level. Raises InvalidRequest for too many and a wrong order."""
        seconds = _seconds("cache_control", top)
        if seconds is not None and self._last_block is not None:
            if self._last_seconds is None:
                self._marks.append(_Mark(seconds, self._last_block, "cache_control"))
            elif self._last_seconds != seconds:
                raise InvalidRequest(
                    "The last block has a cache_control with another ttl.", parameter="cache_control"
                )
        if len(self._marks) > MAX_MARKS:
            raise InvalidRequest(
                f"A maximum of {MAX_MARKS} blocks with cache_control may be provided. Found"
                f" {len(self._marks)}.",
                parameter=self._marks[MAX_MARKS].path,
            )
        shortest = HOUR_SECONDS
        for mark in self._marks:
            if mark.seconds > shortest:
                raise InvalidRequest(_ORDER, parameter=f"{mark.path}.ttl")
            shortest = mark.seconds
        longest: dict[MarkPosition, int] = {}
        for mark in self._marks:
            longest[mark.place] = max(mark.seconds, longest.get(mark.place, 0))
        return [KeepThrough(seconds, *place) for place, seconds in longest.items()]


def mark_seconds(path: str, block: Mapping[str, Any]) -> int | None:
    """Raises InvalidRequest."""
    return _seconds(f"{path}.cache_control", block.get("cache_control"))


def _seconds(path: str, control: Any) -> int | None:
    match control:
        case None:
            return None
        case {"type": "ephemeral", **rest}:
            ttl = rest.get("ttl") or "5m"
            seconds = TTL_SECONDS.get(ttl) if isinstance(ttl, str) else None
            if seconds is None:
                raise InvalidRequest("Input should be '5m' or '1h'", parameter=f"{path}.ttl")
            return seconds
        case dict():
            raise InvalidRequest("Input should be 'ephemeral'", parameter=f"{path}.type")
    raise InvalidRequest("Input should be an object", parameter=path)


def usage_of(
    usage: PromptUsage, leases: Sequence[PrefixLease], block_size: int, num_marks: int
) -> MessageUsage:
    """All but the output's share. The first `num_marks` leases are those of the client's marks: what was
    written up to the last mark of an hour counts as that class, from there to the last mark as five minutes',
    and what lies beyond as plain input. What the engine does not say is null; then all
    is input."""
    marks, num_cached = leases[:num_marks], usage.num_cached_tokens
    if num_cached is None:
        written = MessageUsage(usage.num_prompt_tokens, None, None, None)
    else:
        num_known = num_cached + usage.num_written_tokens
        hour_end = _end(marks, block_size, num_known, HOUR_SECONDS)
        last_end = _end(marks, block_size, num_known, 0)
        num_hour = max(0, hour_end - num_cached)
        num_minutes = max(0, last_end - max(hour_end, num_cached))
        written = MessageUsage(
            usage.num_prompt_tokens - num_cached - num_hour - num_minutes,
            num_hour + num_minutes,
            num_cached,
            CacheCreation(num_minutes, num_hour),
        )
    tell_leases(written, [leases], [usage])
    return written


def _end(leases: Sequence[PrefixLease], block_size: int, num_known: int, least_seconds: int) -> int:
    """Return the end of the cached or written beginning that leases of this class cover."""
    ends = [lease.end_block * block_size for lease in leases if lease.seconds >= least_seconds]
    return min(num_known, max(ends, default=0))
