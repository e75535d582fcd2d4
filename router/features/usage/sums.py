"""UsageSums: what a question for usage comes to, summed over routers and hours.

Owns how one router's numbers are told from another's where they lie together, what of this router's own is in
two places, and the groups of an answer. All is grouped by tenant inside, because each has ratios of its own.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from router.features.usage.amounts import Amount, Amounts, add, nothing
from router.features.usage.ledger import HOUR_SECONDS, HeldHour, Use

Bucket = Literal["hour", "day"]
BUCKET_SECONDS: Mapping[Bucket, int] = {"hour": HOUR_SECONDS, "day": 24 * HOUR_SECONDS}
MAX_GROUPS = 20_000
"""Groups in one answer."""

_NUMBERS = msgspec.msgpack.Decoder(list[int])
_encode = msgspec.msgpack.Encoder().encode


class TooManyGroups(Exception):
    """More than MAX_GROUPS."""


class UsageQuery(NamedTuple):
    """Hours since 1970, the last one not among them. `tenant` and `key_id` are None for all of them."""

    first_hour: int
    end_hour: int
    tenant: str | None
    key_id: str | None = None
    bucket: Bucket = "hour"
    by_key: bool = False
    by_model: bool = False

    @property
    def hours(self) -> range:
        return range(self.first_hour, self.end_hour)


class Group(NamedTuple):
    """`start` is the beginning of the bucket in seconds since 1970; a key or model that is not asked for is
    None."""

    start: int
    tenant: str
    key_id: str | None
    model: str | None


class StoredEntry(NamedTuple):
    """One router's total in one hour of one tenant: `writer` names the router, `part` the time in which it
    has held that hour."""

    writer: str
    part: int
    use: Use
    amounts: list[int]


def stored_field(writer: str, part: int, use: Use) -> str:
    return f"{writer}:{part}:{use.key_id}:{use.model}"


def stored_value(amounts: Amounts) -> bytes:
    return _encode(amounts.tolist())


def stored_entry(name: bytes, value: bytes) -> StoredEntry | None:
    """None for what none of ours has written. Of a later version's numbers those are taken that are known."""
    writer, _, rest = name.decode("utf-8", "replace").partition(":")
    part, _, rest = rest.partition(":")
    key_id, colon, model = rest.partition(":")
    if not (colon and part.isascii() and part.isdigit() and len(part) < 16):
        return None
    try:
        numbers = _NUMBERS.decode(value)
    except (msgspec.MsgspecError, ValueError):
        return None
    if any(not 0 <= number < 2**63 for number in numbers):
        return None
    return StoredEntry(writer, int(part), Use(key_id, model), numbers[: len(Amount)])


class UsageSums:
    """Add what this router holds first, as it was before others were read, then what is stored."""

    def __init__(self, query: UsageQuery, writer: str) -> None:
        self._query = query
        self._writer = writer
        self._held_parts: dict[int, int] = {}
        self._groups: dict[Group, Amounts] = {}

    def add_held(self, held: Mapping[int, HeldHour]) -> None:
        for hour, (part, tenants) in held.items():
            self._held_parts[hour] = part
            for tenant, uses in tenants:
                for use, amounts in uses:
                    self._add(hour, tenant, use, amounts)

    def add_stored(self, hour: int, tenant: str, entries: Iterable[StoredEntry]) -> None:
        held_part = self._held_parts.get(hour)
        for writer, part, use, amounts in entries:
            if writer != self._writer or part != held_part:
                self._add(hour, tenant, use, amounts)

    def groups(self) -> dict[Group, Amounts]:
        """By their beginning, then by their names."""
        return dict(sorted(self._groups.items(), key=lambda item: (item[0][0], *map(str, item[0][1:]))))

    def _add(self, hour: int, tenant: str, use: Use, amounts: Iterable[int]) -> None:
        query = self._query
        if query.key_id is not None and use.key_id != query.key_id:
            return
        seconds = BUCKET_SECONDS[query.bucket]
        start = hour * HOUR_SECONDS // seconds * seconds
        key_id = use.key_id if query.by_key else None
        group = Group(start, tenant, key_id, use.model if query.by_model else None)
        total = self._groups.get(group)
        if total is None:
            if len(self._groups) >= MAX_GROUPS:
                raise TooManyGroups
            total = self._groups[group] = nothing()
        add(total, amounts)
