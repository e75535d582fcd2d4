"""UsageStore: the usage that all routers of a cluster have counted.

Owns when this router's totals go to Redis, and the answer to a question for usage. Totals are written in the
background, and those that are not written yet are read from memory. A router that is killed loses what it has
counted since its last write; one that shuts down in order loses nothing.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from redis.exceptions import RedisError

from replicas.protocol.cluster_secret import ClusterSecret
from router.api.api_request import ApiRequest
from router.errors import UsageUnavailable
from router.feature import Feature
from router.features.usage.amounts import Amounts
from router.features.usage.ledger import HOUR_SECONDS, Ledger
from router.features.usage.ratios import CostRatios, RatioTable
from router.features.usage.redis_usage import RedisUsage
from router.features.usage.sums import Group, TooManyGroups, UsageQuery, UsageSums
from router.served import ServedRequest
from router.shared.instruments import Instrument, counter, gauge
from router.shared.redis_health import REDIS_FAILURES, RedisHealth

logger = logging.getLogger(__name__)

WRITE_SECONDS = 1.0
"""Between two writes. A killed router loses this much, and the time of a write."""
REDIS_SECONDS = 2.0
"""For one write of some rows, and for one read of some hashes."""
FAREWELL_SECONDS = 2.0
ROWS_PER_WRITE = 200
"""Encoding these takes a few milliseconds of the event loop."""
HASHES_PER_READ = 100
MAX_HASHES = 100_000
"""Bound on hours times tenants in one question."""


Tell = Callable[[ServedRequest, Amounts, CostRatios], None]


class UsageStore(Feature):
    """For one event loop. Feed `observe`, have `run()` run, and `close()` when no request is left."""

    def __init__(
        self,
        redis_url: str,
        num_hours: int,
        ratios: RatioTable | None = None,
        *,
        secret: ClusterSecret | None = None,
        ledger: Ledger | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.num_hours = num_hours
        self.ratios = ratios or RatioTable()
        self.ledger = ledger or Ledger()
        self._redis = RedisUsage(redis_url, secrets.token_urlsafe(6), (num_hours + 1) * HOUR_SECONDS, secret)
        self.listeners: list[Tell] = []
        """Told of each request and what it used."""
        self._wall_clock = wall_clock
        self._reading = asyncio.Lock()
        self._health = RedisHealth(
            logger,
            "Redis cannot be reached for what is used, which stays in memory",
            "Redis has what is used again",
        )
        self.num_failed = self.num_emptied = 0

    def ended(self, request: ApiRequest, served: ServedRequest) -> None:
        self.observe(served)

    def observe(self, served: ServedRequest) -> None:
        amounts = self.ledger.observe(served)
        for tell in self.listeners:
            tell(served, amounts, self.ratios.of(served.caller.tenant.name))

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await self.write()

    async def close(self) -> None:
        """Close; what cannot be written soon is lost."""
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self.write()
        except TimeoutError:
            pass
        lost = self.ledger.num_unwritten
        if lost:
            logger.warning("Redis has not taken the last of what was used entries=%d", lost)
        await self._redis.close()

    async def write(self) -> None:
        """Write all that has changed, or as much as Redis takes now."""
        for _ in range(1 + self.ledger.num_unwritten // ROWS_PER_WRITE):
            if not self.ledger.num_unwritten or not await self._write_some():
                break
        self.ledger.let_go(int(self._wall_clock() // HOUR_SECONDS), self.num_hours)

    async def _write_some(self) -> bool:
        """False if Redis has not taken it."""
        rows = self.ledger.take_unwritten(ROWS_PER_WRITE)
        unwritten = rows
        try:
            async with self._health.deadline(REDIS_SECONDS):
                written = await self._redis.write(rows)
                unwritten = written.refused
                if not written.is_intact:
                    self.num_emptied += 1
                    self.ledger.unwrite_all()
                    logger.warning("Redis has lost what was used: of earlier hours it is gone")
                if unwritten:
                    raise RedisError(f"{len(unwritten)} entries are not taken")
        except REDIS_FAILURES:
            self.num_failed += 1
            return False
        finally:
            self.ledger.put_back(unwritten)
        return True

    async def read(self, query: UsageQuery) -> Mapping[Group, Amounts]:
        """Raises UsageUnavailable and TooManyGroups."""
        async with self._reading:  # one at a time: an answer may take much memory
            sums = UsageSums(query, self._redis.writer)
            held = self.ledger.held(query.first_hour, query.end_hour, query.tenant)
            await asyncio.to_thread(sums.add_held, held)
            try:
                places = await self._places(query)
                for first in range(0, len(places), HASHES_PER_READ):
                    await self._add_stored(sums, places[first : first + HASHES_PER_READ])
            except REDIS_FAILURES as error:
                self._health.failed(error)
                raise UsageUnavailable("What was used cannot be read at the moment.") from error
            return await asyncio.to_thread(sums.groups)

    async def _places(self, query: UsageQuery) -> list[tuple[int, str]]:
        if query.tenant is not None:
            return [(hour, query.tenant) for hour in query.hours]
        places: list[tuple[int, str]] = []
        for first in range(0, len(query.hours), HASHES_PER_READ):
            async with asyncio.timeout(REDIS_SECONDS):
                places += await self._redis.tenants(query.hours[first : first + HASHES_PER_READ])
            if len(places) > MAX_HASHES:
                raise TooManyGroups
        return places

    async def _add_stored(self, sums: UsageSums, places: Sequence[tuple[int, str]]) -> None:
        async with asyncio.timeout(REDIS_SECONDS):
            hashes = await self._redis.hashes(places)

        def add() -> None:
            for (hour, tenant), stored in zip(places, hashes, strict=True):
                sums.add_stored(hour, tenant, self._redis.entries(stored))

        await asyncio.to_thread(add)

    def instruments(self) -> Iterator[Instrument]:
        ledger = self.ledger
        yield gauge(
            "router_usage_entries",
            "Numbers of what was used that are in memory, by tenant, key, model, hour",
            lambda: ledger.num_entries,
        )
        yield gauge(
            "router_usage_unwritten",
            "Numbers of what was used that have changed since they were written",
            lambda: ledger.num_unwritten,
        )
        yield counter(
            "router_usage_write_failures_total",
            "Writes of what was used that Redis did not take",
            lambda: self.num_failed,
        )
        yield counter(
            "router_usage_emptied_total",
            "Times that Redis had lost what was used",
            lambda: self.num_emptied,
        )
        yield counter(
            "router_usage_lumped_total",
            "Requests that were counted under a shared name, because there were too many tenants or keys",
            lambda: ledger.num_lumped,
        )
        yield counter(
            "router_usage_dropped_total",
            "Requests whose use was never written: Redis was away for longer than usage is kept",
            lambda: ledger.num_dropped,
        )
        yield counter(
            "router_usage_unreadable_total",
            "Numbers of what was used that could not be read",
            lambda: self._redis.num_not_ours,
        )
