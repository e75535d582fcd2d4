"""The faults of a storm, and the parts of a running cluster that they are done to.

Owns the finding of processes, what is done to them, and whether all is well again. Knows the cluster as its
operators do: by its state file, its registry, its processes and its metrics. Whatever is frozen is let go.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import httpx
import psutil
import redis

from cluster.local.processes import find_marked, named_children
from cluster.local.run_directory import ClusterState, RunDirectory
from cluster.registry import read_registry
from loadtests.storm.gauges import raised_gauges
from replicas.protocol.status import ReplicaState

FREEZE_SECONDS = (1.0, 6.0)
LOOK_SECONDS = 0.25
ASK_SECONDS = 5.0

BEYOND_REPAIR = ("gcs-kill",)
"""Ray's control service keeps all that it knows in memory: what runs serves on, and none that dies is started
again. Only done if it is named."""


class RunningCluster:
    """The cluster of `kvasir up` in `directory`. `num_replicas` were ready at first."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.num_replicas = len(self.ready_replicas())

    def state(self) -> ClusterState:
        state = self.directory.read_state()
        if state is None:
            raise RuntimeError(f"no cluster runs in {self.directory.path}")
        return state

    def ready_replicas(self) -> dict[str, int]:
        """Processes by name."""
        ready = ReplicaState.READY.value
        return {
            each.replica_id: each.pid for each in self.state().replicas if each.pid and each.state == ready
        }

    def engines(self) -> dict[str, int]:
        """Engines that have a process of their own."""
        return {
            f"engine of {name}": child.pid
            for name, pid in self.ready_replicas().items()
            for child in _children(pid)
            if "spawn_main" in " ".join(child.cmdline())
        }

    def routers(self) -> dict[str, int]:
        """None where there is but one: without it, none would be left to answer."""
        return {
            name: pid for name, pid in named_children(self.state().router_pid).items() if "router-" in name
        }

    def redis(self) -> dict[str, int]:
        pid = self.state().redis_pid
        return {"Redis": pid} if pid else {}

    def controller(self) -> dict[str, int]:
        return self._titled("ray::FleetController")

    def ray(self, part: str) -> dict[str, int]:
        """One of Ray's own processes, by the name of its program."""
        return self._titled(part)

    def complaint(self) -> str | None:
        """Say what is wrong; None if all replicas are ready, in every router's eyes too."""
        try:
            return self._complaint()
        except (httpx.HTTPError, RuntimeError, OSError) as error:
            return f"{type(error).__name__}: {error}"

    def _complaint(self) -> str | None:
        state = self.state()
        ready = self.ready_replicas()
        if len(ready) < self.num_replicas:
            return "replicas: " + ", ".join(f"{each.replica_id} {each.state}" for each in state.replicas)
        if len(self.routers()) < len(state.router_admins) or not self.controller():
            return "a router or the controller is not back"
        for name, pid in {**ready, **self.redis()}.items():
            if not _lives(pid):
                return f"{name} has died, and its parent has not noticed yet"
        for name, pid in ready.items():
            if not _is_child_of_raylet(pid):
                return f"{name} has lost its raylet"
        registry = read_registry(state.redis_url)
        if registry.complaint is not None:
            return f"Redis: {registry.complaint}"
        epochs = {str(each.replica_id): each.epoch for each in registry.records.values()}
        for entry in state.replicas:
            if epochs.get(entry.replica_id) != entry.epoch:
                return f"{entry.replica_id} has no lease"
        for page in state.router_pages:
            answer = httpx.get(f"{page}/ready", timeout=ASK_SECONDS, trust_env=False)
            if answer.json().get("num_replicas") != self.num_replicas:
                return f"{page} knows {answer.json().get('num_replicas')} replicas"
        return None

    def raised_gauges(self) -> set[tuple[str, str]]:
        """Return the raised gauges of work in progress, by process."""
        state = self.state()
        addresses = {page: f"{page}/metrics" for page in state.router_pages}
        addresses |= {
            each.replica_id: f"http://{each.metrics_address}/metrics"
            for each in state.replicas
            if each.metrics_address
        }
        found = set()
        for name, address in addresses.items():
            text = httpx.get(address, timeout=ASK_SECONDS, trust_env=False).text
            found |= {(gauge, name) for gauge in raised_gauges(text)}
        return found

    def processes(self) -> dict[int, str]:
        """All of the cluster's, with what they are: a title without what varies."""
        pids = find_marked(self.directory.path, self.directory.ray_directory)
        return {pid: title for pid in pids if (title := _title(pid))}

    def frozen(self) -> list[str]:
        return [
            f"{title} (process {pid}) is frozen"
            for pid, title in self.processes().items()
            if psutil.pid_exists(pid) and psutil.Process(pid).status() == psutil.STATUS_STOPPED
        ]

    def _titled(self, start: str) -> dict[str, int]:
        return {title: pid for pid, title in self.processes().items() if title.startswith(start)}


class Freezer:
    """Processes that are stopped, all of which go on when the block is left."""

    def __init__(self) -> None:
        self._frozen: set[int] = set()

    def __enter__(self) -> "Freezer":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*self._frozen]:
            self._let_go(pid)

    @contextlib.asynccontextmanager
    async def frozen(self, pid: int) -> AsyncIterator[None]:
        with contextlib.suppress(ProcessLookupError):
            self._frozen.add(pid)
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            self._let_go(pid)

    def _let_go(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        self._frozen.discard(pid)


class Faults:
    """Every fault by name; `do` does one to a part that it chooses, and says to which."""

    def __init__(self, cluster: RunningCluster, freezer: Freezer, rng: random.Random) -> None:
        self._cluster, self._freezer, self._rng = cluster, freezer, rng
        parts: dict[str, Callable[[], Mapping[str, int]]] = {
            "replica": cluster.ready_replicas,
            "engine": cluster.engines,
            "redis": cluster.redis,
            "controller": cluster.controller,
            "router": cluster.routers,
            "gcs": lambda: cluster.ray("gcs_server"),
            "raylet": lambda: cluster.ray("raylet"),
        }
        self._parts = parts
        self.names = [f"{part}-{what}" for part in parts for what in ("kill", "freeze")] + ["redis-cut"]

    def possible(self) -> list[str]:
        """Return the faults whose target exists, and that `kvasir up` repairs."""
        return [
            name
            for name in self.names
            if name not in BEYOND_REPAIR and self._parts[name.rpartition("-")[0]]()
        ]

    async def do(self, name: str) -> str | None:
        """None if the part is not there just now."""
        part, _, what = name.rpartition("-")
        choice = sorted((await asyncio.to_thread(self._parts[part])).items())
        if not choice:
            return None
        target, pid = self._rng.choice(choice)
        if what == "cut":
            return await asyncio.to_thread(_cut_clients, self._cluster.state().redis_url)
        if what == "kill":
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            while await asyncio.to_thread(_lives, pid):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return f"{target} (process {pid})"
        seconds = self._rng.uniform(*FREEZE_SECONDS)
        async with self._freezer.frozen(pid):
            await asyncio.sleep(seconds)
        return f"{target} (process {pid}) for {seconds:.1f} s"


async def wait_healthy(cluster: RunningCluster, seconds: float) -> str | None:
    """None as soon as two looks find that all is well, else the last complaint.

    One look is not enough: a process that is being ended still has its children for a moment.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    was_well = False
    while True:
        complaint = await asyncio.to_thread(cluster.complaint)
        if complaint is None and was_well:
            return None
        was_well = complaint is None
        if complaint is not None and loop.time() > deadline:
            return complaint
        await asyncio.sleep(LOOK_SECONDS)


def _cut_clients(redis_url: str) -> str:
    """Every connection of Redis ends, those that subscribe or block as well."""
    with redis.Redis.from_url(redis_url, protocol=2, socket_timeout=ASK_SECONDS) as client:
        number = sum(
            int(client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"))
            for kind in ("normal", "pubsub")
        )
    return f"{number} connections"


def _children(pid: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        yield from psutil.Process(pid).children(recursive=True)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_child_of_raylet(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid).parent()
        return parent is not None and parent.name() == "raylet"
    return False


def _title(pid: int) -> str:
    """Return a program's name, with the module or file that Python runs, or the title that one of Ray's
    gave itself."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return ""
    if words[0].startswith("ray::"):
        return words[0]
    name = Path(words[0]).name
    if "-m" in words[:-1]:
        return f"{name} -m {words[words.index('-m') + 1]}"
    return " ".join([name, *(Path(word).name for word in words[1:3] if word.endswith(".py"))])
