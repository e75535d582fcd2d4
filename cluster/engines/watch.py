"""ServerWatch: looks for the servers of a fleet's pools, a task for each pool that finds its servers.

Owns the tasks. A look that fails in whatever way is told and followed by the next.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from cluster.config import FoundServer, PoolSpec
from cluster.engines.addresses import SourceFailed
from cluster.engines.asking import Asker
from cluster.engines.belief import Belief, Failed, believed
from cluster.engines.finders import LOOK_SECONDS, finder_of

logger = logging.getLogger(__name__)

OnFound = Callable[[str, Sequence[FoundServer]], Awaitable[None]]
"""Takes a pool's name and its servers, whenever they differ from before."""

Complain = Callable[[str, str | None], Awaitable[None]]
"""Takes what a complaint is about, and the complaint; None once there is none."""


class ServerWatch:
    def __init__(self, on_found: OnFound, complain: Complain) -> None:
        self._on_found = on_found
        self._complain = complain
        self._tasks: dict[str, tuple[PoolSpec, asyncio.Task[None]]] = {}

    def follow(self, pools: Sequence[PoolSpec], found: Mapping[str, Sequence[FoundServer]]) -> None:
        """Look for the servers of these pools and no others; `found` is what is known already."""
        wanted = {pool.name: pool for pool in pools if pool.engines is not None}
        for name, (pool, task) in list(self._tasks.items()):
            if name not in wanted or _sought(pool) != _sought(wanted[name]):
                task.cancel()
                del self._tasks[name]
        for name, pool in wanted.items():
            if name not in self._tasks:
                task = asyncio.get_running_loop().create_task(
                    self._keep_looking(pool, list(found.get(name, ())))
                )
                self._tasks[name] = (pool, task)

    async def close(self) -> None:
        tasks = [task for _, task in self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_looking(self, pool: PoolSpec, known: Sequence[FoundServer]) -> None:
        what = f"servers of pool {pool.name}"
        search = _Search(pool, known)
        try:
            while True:
                try:
                    servers, complaint = await search.look()
                    if servers != known:
                        await self._on_found(pool.name, servers)
                        known = servers
                except Exception as error:  # of any kind: the next look may succeed
                    logger.exception("the look for %s failed", what)
                    complaint = f"the look for {what} failed: {error!r}"
                await self._complain(what, complaint)
                await search.wait()
        finally:
            await search.close()


class _Search:
    """The looks for one pool's servers, of which some may be known."""

    def __init__(self, pool: PoolSpec, known: Sequence[FoundServer]) -> None:
        assert pool.engines is not None
        self._at_most = pool.engines.at_most
        self._finder = finder_of(pool.engines)
        self._asker = Asker(pool.replica.engine_key_file, takes_bodies=pool.replica.engine == "openai")
        self._asker.know(known)
        self._belief = Belief(dict.fromkeys((server.url for server in known), time.monotonic()))

    async def look(self) -> tuple[list[FoundServer], str | None]:
        """Return the servers that count as there, and why others may be."""
        self._belief = believed(
            self._belief,
            await self._answer(),
            time.monotonic(),
            linger_seconds=self._finder.linger_seconds,
            at_most=self._at_most,
        )
        servers = await self._asker.ask(list(self._belief.named_at))
        complaints = [each for each in (self._belief.complaint, self._asker.complaint) if each is not None]
        return servers, "; ".join(complaints) or None

    async def _answer(self) -> set[str] | Failed:
        try:
            return await self._finder.look()
        except SourceFailed as error:
            return Failed(str(error))

    async def wait(self) -> None:
        """Wait until the next look is due."""
        try:
            await self._finder.changed()
        except Exception:  # of any kind: the next look will tell
            logger.exception("the wait for other servers failed")
            await asyncio.sleep(LOOK_SECONDS)

    async def close(self) -> None:
        await self._finder.close()
        await self._asker.close()


def _sought(pool: PoolSpec) -> tuple[object, ...]:
    return (pool.engines, pool.replica.engine, pool.replica.engine_key_file)
