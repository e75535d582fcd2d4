"""Ledger: what each tenant, by each key and of each model, has used in each hour, as one router has seen it.

Owns these numbers and which of them have yet to be written down elsewhere. Each is the router's own total of
its hour, so that writing it twice changes nothing. Hours go by the clock that stamped the requests; an hour
that is opened again after it was let go begins from zero under another part. Bounded: of too many, what comes
last is counted under a name that they share, so that sums lose nothing. Knows no Redis.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from router.features.usage.amounts import Amount, Amounts, add, amounts_of, nothing
from router.served import ServedRequest

HOUR_SECONDS = 3600
OTHER = "(other)"
"""The tenant, key and model of what there was no room to tell apart."""
UNKNOWN_MODEL = "unknown"
"""For requests of unserved models."""
NO_KEY = ""
"""Key id without keys."""

MAX_ENTRIES = 200_000
"""Keys times models, over all hours that are held: a current one and the one before it, as a rule."""
MAX_TENANTS = 20_000
"""Times the hours that are held."""


class Use(NamedTuple):
    """Key and model of requests within a tenant."""

    key_id: str
    model: str


OTHER_USE = Use(OTHER, OTHER)


class Row(NamedTuple):
    """One number of the ledger, as it was when it was taken out."""

    hour: int
    part: int
    tenant: str
    use: Use
    amounts: Amounts


TenantUses = dict[Use, Amounts]


@dataclass(slots=True)
class _Hour:
    part: int
    tenants: dict[str, TenantUses] = field(default_factory=dict)
    unwritten: dict[tuple[str, Use], None] = field(default_factory=dict)

    @property
    def num_entries(self) -> int:
        return sum(len(uses) for uses in self.tenants.values())


class HeldHour(NamedTuple):
    """A view of the ledger, not a copy: read it soon."""

    part: int
    tenants: list[tuple[str, list[tuple[Use, Amounts]]]]


class Ledger:
    def __init__(self, max_entries: int = MAX_ENTRIES, max_tenants: int = MAX_TENANTS) -> None:
        self._max_entries, self._max_tenants = max_entries, max_tenants
        self._hours: dict[int, _Hour] = {}
        self._num_opened = 0
        self.num_entries = 0
        self.num_tenants = 0
        self.num_lumped = 0
        """Requests that were counted under a shared name."""
        self.num_dropped = 0
        """Requests of hours that were let go before they were written."""

    def observe(self, served: ServedRequest) -> Amounts:
        """At the request's end: it counts in the hour in which it ended. Returns what was added."""
        caller = served.caller
        use = Use(caller.key_id or NO_KEY, served.model or UNKNOWN_MODEL)
        hour = int((served.arrived_at + served.ended_seconds) // HOUR_SECONDS)
        amounts = amounts_of(served)
        if any(amounts):
            self.add(hour, caller.tenant.name, use, amounts)
        return amounts

    def add(self, hour: int, tenant: str, use: Use, amounts: Amounts) -> None:
        held = self._hours.get(hour)
        if held is None:
            self._num_opened += 1
            held = self._hours[hour] = _Hour(self._num_opened)
        uses = held.tenants.get(tenant)
        total = None if uses is None else uses.get(use)
        if total is None:
            tenant, use = self._admitted(held, tenant, use)
            uses = held.tenants.get(tenant)
            if uses is None:
                uses = held.tenants[tenant] = {}
                self.num_tenants += 1
            total = uses.get(use)
            if total is None:
                total = uses[use] = nothing()
                self.num_entries += 1
            if use == OTHER_USE:
                self.num_lumped += amounts[Amount.REQUESTS]
        add(total, amounts)
        held.unwritten[tenant, use] = None

    def _admitted(self, held: _Hour, tenant: str, use: Use) -> tuple[str, Use]:
        """Under which names new ones are counted."""
        if tenant not in held.tenants and self.num_tenants >= self._max_tenants:
            return OTHER, OTHER_USE
        if self.num_entries >= self._max_entries:
            return tenant, OTHER_USE
        return tenant, use

    @property
    def num_unwritten(self) -> int:
        return sum(len(hour.unwritten) for hour in self._hours.values())

    def take_unwritten(self, most: int) -> list[Row]:
        """Take rows; they count as written unless they are put back."""
        rows: list[Row] = []
        for number, hour in self._hours.items():
            while hour.unwritten and len(rows) < most:
                (tenant, use), _ = hour.unwritten.popitem()
                amounts = Amounts(hour.tenants[tenant][use][:])
                rows.append(Row(number, hour.part, tenant, use, amounts))
        return rows

    def put_back(self, rows: list[Row]) -> None:
        for row in rows:
            hour = self._hours.get(row.hour)
            if hour is not None and hour.part == row.part:
                hour.unwritten[row.tenant, row.use] = None

    def unwrite_all(self) -> None:
        """Mark everything as unwritten, since its store lost it."""
        for hour in self._hours.values():
            for tenant, uses in hour.tenants.items():
                for use in uses:
                    hour.unwritten[tenant, use] = None

    def let_go(self, now_hour: int, num_hours: int) -> None:
        """Forget written hours except this one and the last, and anything more than `num_hours` away."""
        for number in list(self._hours):
            hour = self._hours[number]
            is_too_old = abs(now_hour - number) > num_hours
            if is_too_old or (not hour.unwritten and number not in (now_hour, now_hour - 1)):
                for tenant, use in hour.unwritten:
                    self.num_dropped += hour.tenants[tenant][use][Amount.REQUESTS]
                self.num_entries -= hour.num_entries
                self.num_tenants -= len(hour.tenants)
                del self._hours[number]

    def held(self, first_hour: int, end_hour: int, tenant: str | None = None) -> dict[int, HeldHour]:
        """Each hour with what it has of this tenant, or of all."""
        return {
            number: HeldHour(hour.part, list(_listed(hour, tenant)))
            for number, hour in self._hours.items()
            if first_hour <= number < end_hour
        }


def _listed(hour: _Hour, tenant: str | None) -> Iterator[tuple[str, list[tuple[Use, Amounts]]]]:
    if tenant is None:
        for name, uses in hour.tenants.items():
            yield name, list(uses.items())
    elif tenant in hour.tenants:
        yield tenant, list(hour.tenants[tenant].items())
