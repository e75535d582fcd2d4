"""JoinedReplicas: a replica process on this machine for each server that a fleet's pools find, without Ray.

Owns the processes, their ports and their ends. A replica that ends is started again, after a while if it
keeps ending; one whose server is no longer found drains.
"""

import asyncio
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families

from cluster.config import FleetSpec, FoundServer, PoolSpec, base_name
from cluster.engines.watch import ServerWatch
from cluster.local.processes import death_with_parent
from replicas.config import ENVIRONMENT_PREFIX, ReplicaConfig
from replicas.observation.metrics import metrics_endpoint

END_SECONDS = 5.0
"""Seconds beyond its drain that a replica may take to end."""

SCRAPE_SECONDS = 2.0


def plan_slots(wanted: Collection[str], taken: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """Return which pools of one start, in the lowest free slots, and which end. `taken` has also those that
    are ending; a name is never there twice."""
    free = (slot for slot in range(len(wanted) + len(taken)) if slot not in taken.values())
    starting = {name: next(free) for name in sorted(wanted) if name not in taken}
    return starting, sorted(name for name in taken if name not in wanted)


class JoinedReplicas:
    """Replicas listen on `host`, for routers at `port` and on, for metrics at `metrics_port` + 1 and on; all
    metrics together are at `metrics_port`."""

    def __init__(
        self,
        spec: FleetSpec,
        environment: Mapping[str, str],
        say: Callable[[str], None],
        *,
        host: str,
        port: int,
        metrics_port: int,
    ) -> None:
        self._spec = spec
        self._environment = {
            name: value for name, value in environment.items() if not name.startswith(ENVIRONMENT_PREFIX)
        }
        self._say = say
        self._host, self._port, self._metrics_port = host, port, metrics_port
        self._found: dict[str, Sequence[FoundServer]] = {}
        self._slots: dict[str, int] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._complaints: dict[str, str | None] = {}
        self._is_ending = False

    async def run(self, ended: asyncio.Event) -> None:
        """Keep the replicas until `ended` is set; then let them drain."""
        registry = CollectorRegistry()
        registry.register(_ReplicasMetrics(self._metrics_addresses))
        watch = ServerWatch(self._take, self._complain)
        async with metrics_endpoint(registry, self._host, self._metrics_port):
            watch.follow(self._spec.pools, {})
            await ended.wait()
            self._is_ending = True
            await watch.close()
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, pool_name: str, servers: Sequence[FoundServer]) -> None:
        self._found[pool_name] = servers
        there = ", ".join(server.name for server in servers) or "none"
        self._say(f"servers of pool {pool_name}: {there}")
        self._reconcile()

    async def _complain(self, what: str, complaint: str | None) -> None:
        if complaint != self._complaints.get(what):
            self._say(f"{what}: {complaint or 'all is well again'}")
        self._complaints[what] = complaint

    def _reconcile(self) -> None:
        if self._is_ending:
            return
        wanted = {pool.name: pool for pool in self._spec.with_servers(self._found).pools if pool.num_replicas}
        starting, ending = plan_slots(wanted, self._slots)
        for name in ending:
            self._tasks[name].cancel()
        for name, slot in starting.items():
            self._slots[name] = slot
            task = self._tasks[name] = asyncio.create_task(self._keep(wanted[name], slot))
            task.add_done_callback(lambda _, name=name: self._forget(name))  # type: ignore[misc]

    def _forget(self, name: str) -> None:
        del self._tasks[name], self._slots[name]
        self._reconcile()

    async def _keep(self, pool: PoolSpec, slot: int) -> None:
        config = dataclasses.replace(
            pool.config_of(pool.replica_id(0)),
            host=self._host,
            port=self._port + slot,
            metrics_port=self._metrics_port + 1 + slot,
        )
        environment = self._environment | environment_of(config)
        num_early_deaths, backoff = 0, self._spec.backoff
        while True:
            since = time.monotonic()
            try:
                how = f"ended with code {await _run(environment, config.drain_seconds + END_SECONDS)}"
            except OSError as error:
                how = f"cannot be started ({error})"
            is_early = time.monotonic() - since < backoff.healthy_seconds
            num_early_deaths = num_early_deaths + 1 if is_early else 1
            delay = backoff.delay_seconds(num_early_deaths)
            self._say(f"{config.replica_id} {how}; starting it again in {delay:g} s")
            await asyncio.sleep(delay)

    def _metrics_addresses(self) -> dict[str, tuple[str, str]]:
        """Return each replica's pool and the address of its metrics; called in another thread."""
        shown = f"[{self._host}]" if ":" in self._host else self._host
        return {
            f"{name}-0": (base_name(name), f"http://{shown}:{self._metrics_port + 1 + slot}/metrics")
            for name, slot in dict(self._slots).items()
        }


async def _run(environment: Mapping[str, str], end_seconds: float) -> int:
    """Run a replica until it ends; returns its code. If cancelled, let it drain first. Raises OSError."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "replicas"),
        env=environment,
        start_new_session=True,
        preexec_fn=death_with_parent(signal.SIGKILL),
    )
    try:
        return await process.wait()
    except asyncio.CancelledError:
        await _end(process, end_seconds)
        raise


async def _end(process: asyncio.subprocess.Process, seconds: float) -> None:
    """Let it drain, and kill it after `seconds`."""
    for end in (process.terminate, process.kill):
        with suppress(ProcessLookupError):
            end()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await process.wait()
                return


def environment_of(config: ReplicaConfig) -> dict[str, str]:
    """Return the environment of a replica process: what differs from the defaults."""
    chosen = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            text = json.dumps(value) if isinstance(value, Mapping | tuple) else str(value)
            chosen[ENVIRONMENT_PREFIX + field.name.upper()] = text
    return chosen


class _ReplicasMetrics:
    """The metrics of all replicas, with the labels `replica` and `pool`; one that is silent is left out."""

    def __init__(self, addresses: Callable[[], Mapping[str, tuple[str, str]]]) -> None:
        self._addresses = addresses
        self._client = httpx.Client(timeout=SCRAPE_SECONDS, trust_env=False)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        addresses = sorted(self._addresses().items())
        with ThreadPoolExecutor(len(addresses) or 1) as threads:
            answers = threads.map(self._read, [url for _, (_, url) in addresses])
        for (replica_id, (pool, _)), answer in zip(addresses, answers, strict=True):
            labels = {"replica": replica_id, "pool": pool}
            for read in answer:
                family = families.setdefault(read.name, Metric(read.name, read.documentation, read.type))
                for sample in read.samples:
                    merged: Any = sample._replace(labels={**sample.labels, **labels})
                    family.samples.append(merged)
        yield from families.values()

    def _read(self, url: str) -> list[Metric]:
        try:
            return list(text_string_to_metric_families(self._client.get(url).text))
        except (httpx.HTTPError, ValueError):
            return []
