"""LocalCluster: everything that `kvasir up` runs on one machine, from Redis to the router.

Owns the order of starting and stopping, and the state file. Reports progress as sentences;
`cluster/commands/up.py` prints them.
"""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.config import BackoffSpec, EngineSource, FleetSpec, PoolSpec
from cluster.controller.views import FleetView
from cluster.errors import StartFailed
from cluster.local.fleet_watch import FleetWatch
from cluster.local.processes import Service, kill_marked
from cluster.local.ray_head import RayHead, start_ray, stop_ray
from cluster.local.raylet import Raylet, lives
from cluster.local.redis_server import PrivateRedis, free_ports_in_a_row
from cluster.local.replica_entries import replica_entries
from cluster.local.run_directory import ClusterState, RunDirectory
from cluster.local.state_writer import StateWriter
from cluster.sizes import in_words
from replicas.config import ReplicaConfig
from replicas.process.settings import without_password
from replicas.protocol.status import ReplicaState, Role

ROUTER_START_SECONDS = 60.0
ROUTER_STOP_SECONDS = 2.0
FLEET_STOP_SECONDS = 4.0
STOP_SECONDS = 20.0
"""Seconds to stop; `kvasir down` kills what is left then."""
ROUTER = "the router"
REDIS = "Redis"
RAY_CPUS = 64
"""CPUs that Ray believes in. Replicas ask for a hundredth each, so this never binds."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Options of a local cluster. `redis_url` None starts a private Redis; `port` 0 takes a free one.
    Of the replicas, `num_prefillers` compute prompts for the others; with 0 each does both.
    Gateways have a port of their own if there is a `picker_port`. Without `keys_file` all clients are one
    tenant, and another address than loopback needs `is_open`."""

    run_directory: RunDirectory
    num_replicas: int
    num_routers: int
    replica: ReplicaConfig
    host: str
    port: int
    policy: str
    redis_url: str | None
    environment: Mapping[str, str]
    picker_port: int | None = None
    keys_file: str | None = None
    is_open: bool = False
    cors_origins: Sequence[str] = ()
    engines: EngineSource | None = None
    num_prefillers: int = 0


class LocalCluster:
    def __init__(self, options: LocalOptions, say: Say) -> None:
        self._options = options
        self._directory = options.run_directory
        self._say = say
        self._state: ClusterState | None = None
        self._complaints: Sequence[str] = ()
        self._writer = StateWriter(options.run_directory, say)

    async def run(self, on_ray_started: Callable[[], None]) -> None:
        """Start everything, say when it serves, keep it alive until cancelled, leave nothing behind.

        `on_ray_started` is called when Ray has been started, which takes signal handlers away.
        Raises AlreadyRunning or StartFailed.
        """
        with self._claimed():
            kill_marked(self._directory.path, self._directory.ray_directory)
            port = take_port(self._options.host, self._options.port)
            with self._writable():
                self._directory.renew()
                if self._options.replica.kv_folder is not None:
                    self._directory.kv_directory.mkdir(mode=0o700, exist_ok=True)
            try:
                await self._run(port, on_ray_started)
            finally:
                kill_marked(self._directory.path, self._directory.ray_directory)
                shutil.rmtree(self._directory.ray_directory, ignore_errors=True)
                self._directory.forget()

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            with self._writable():
                stack.enter_context(self._directory.claim())
            yield

    @contextlib.contextmanager
    def _writable(self) -> Iterator[None]:
        """Require a run directory at start; a disk that fills up later ends nothing."""
        try:
            yield
        except OSError as error:
            raise StartFailed(f"cannot write to {self._directory.path}: {error.strerror}") from error

    async def _run(self, port: int, on_ray_started: Callable[[], None]) -> None:
        async with contextlib.AsyncExitStack() as stack:
            redis, redis_url = await self._start_redis(stack)
            admins = self._admin_addresses()
            router, router_url = await self._start_router(stack, port, redis_url, admins)
            with self._stage("Ray") as stage:
                head = start_ray(self._directory.ray_directory, RAY_CPUS, self._say)
                stack.callback(stop_ray)
                on_ray_started()
                stage.append(head.address)
            self._state = ClusterState(
                pid=os.getpid(),
                redis_url=redis_url,
                redis_pid=redis.pid if redis else None,
                ray_address=head.address,
                router_url=router_url,
                router_pid=router.pid,
                block_size=self._options.replica.tokens_per_block,
                ready=False,
                router_admins=admins,
                keys_file=self._options.keys_file,
                stop_seconds=STOP_SECONDS + self._options.replica.seconds_to_spill,
            )
            watch = FleetWatch(self._spec(head, redis_url), self._on_view)
            stack.push_async_callback(watch.stop, FLEET_STOP_SECONDS + self._options.replica.seconds_to_spill)
            async with _one_error(), asyncio.TaskGroup() as tasks:
                tasks.create_task(watch.keep(self._say))
                tasks.create_task(self._writer.keep())
                await self._wait_ready(watch, router, router_url)
                for service in filter(None, (redis, router)):
                    tasks.create_task(self._keep(service))
                tasks.create_task(self._keep_raylet(stack, head))

    async def _start_redis(self, stack: contextlib.AsyncExitStack) -> tuple[Service | None, str]:
        if self._options.redis_url is not None:
            self._say(f"Redis     {without_password(self._options.redis_url)} (from REDIS_URL)")
            return None, self._options.redis_url
        with self._stage("Redis") as stage:
            log = self._directory.logs / "redis.log"
            environment = self._options.environment
            redis = await asyncio.to_thread(PrivateRedis, self._directory.socket_directory, log, environment)
            stack.push_async_callback(redis.service.stop, 1.0)
            await redis.start()
            stage.append(f"{redis.url} (pid {redis.service.pid})")
        return redis.service, redis.url

    async def _start_router(
        self, stack: contextlib.AsyncExitStack, port: int, redis_url: str, admins: Sequence[str]
    ) -> tuple[Service, str]:
        host = self._options.host
        command = [sys.executable, "-P", "-m", "router", "--host", host, "--port", str(port)]
        command += ["--policy", self._options.policy, "--secret-file", str(self._directory.secret_file)]
        command += ["--index-stride", str(self._options.replica.index_stride)]
        if admins:
            admin_port = admins[0].rpartition(":")[2]
            command += ["--processes", str(len(admins)), "--admin-port", admin_port]
        if self._options.picker_port is not None:
            command += ["--picker-port", str(self._options.picker_port), "--picker-host", host]
        if self._options.keys_file is not None:
            command += ["--keys-file", self._options.keys_file]
        elif self._options.is_open:
            command += ["--open", "true"]
        if self._options.cors_origins:
            command += ["--cors-origins", ",".join(self._options.cors_origins)]
        command += _shared_settings(self._options.replica)
        # Everybody on the machine can read a command line, and the URL may have a password.
        environment = {**self._options.environment, "KVASIR_ROUTER_REDIS_URL": redis_url}
        router = Service("the router", command, self._directory.logs / "router.log", environment)
        stack.push_async_callback(router.stop, ROUTER_STOP_SECONDS)
        await router.start()
        shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
        return router, f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"

    def _admin_addresses(self) -> tuple[str, ...]:
        """Return a port for each of several routers, or for one router with keys; else none."""
        num_routers = self._options.num_routers
        if num_routers == 1 and self._options.keys_file is None:
            return ()
        first = free_ports_in_a_row(num_routers)
        return tuple(f"127.0.0.1:{first + number}" for number in range(num_routers))

    def _spec(self, head: RayHead, redis_url: str) -> FleetSpec:
        num_replicas, config = self._options.num_replicas, self._options.replica
        wants_gpu = config.engine in ("torch", "vllm") and config.device != "cpu"
        pool = PoolSpec(
            num_replicas,
            replica=replace(
                config,
                redis_url=redis_url,
                secret_file=str(self._directory.secret_file),
                metrics_port=0 if config.metrics_port is None else config.metrics_port,
            ),
            num_cpus=0.01,
            num_gpus=_gpu_share(head.num_gpus, num_replicas) if wants_gpu else 0.0,
            num_threads=max(1, len(os.sched_getaffinity(0)) // num_replicas),
        )
        if self._options.engines is not None:
            pool = replace(pool, name="server", num_replicas=0, engines=self._options.engines)
        return FleetSpec(
            by_role(pool, self._options.num_prefillers),
            log_directory=str(self._directory.logs),
            log_format=self._options.replica.log_format,
            metrics_port=0,
        )

    async def _wait_ready(self, watch: FleetWatch, router: Service, router_url: str) -> None:
        with self._stage("replicas") as stage:
            stage.append(f"{await watch.wait_ready()} ready")
        assert self._state is not None
        with self._stage("router") as stage:
            models = await _served_models(router, self._state.router_pages)
            stage.append(f"{router_url} (pid {router.pid})")
            if self._options.num_routers > 1:
                stage.append(f"{self._options.num_routers} routers on it")
        self._write(replace(self._state, ready=True))
        self._say(summary(self._state, models[0], self._directory, self._options.replica))
        for complaint in self._complaints:  # later ones are told as they come
            self._say(f"fleet     {complaint}")

    def _on_view(self, view: FleetView) -> None:
        assert self._state is not None
        entries = replica_entries(view, self._state.replicas, lives)
        self._complaints = view.complaints
        if self._state.ready:
            for note in view.notes:
                self._say(f"fleet     {note}")
        self._write(replace(self._state, replicas=entries, controller_metrics=view.metrics_address))

    def _write(self, state: ClusterState) -> None:
        self._state = state
        self._writer.write(state)

    async def _keep(self, service: Service) -> None:
        backoff = BackoffSpec()
        num_early_deaths = 0
        while True:
            since = time.monotonic()
            code = await service.wait()
            early = time.monotonic() - since < backoff.healthy_seconds
            num_early_deaths = num_early_deaths + 1 if early else 1
            self._say(f"{service.name} ended with code {code} (log: {service.log}); starting it again")
            service.kill_group()
            await asyncio.sleep(backoff.delay_seconds(num_early_deaths))
            try:
                await service.start()
            except StartFailed as error:
                self._say(str(error))
                continue
            assert self._state is not None
            if service.name == ROUTER:
                self._write(replace(self._state, router_pid=service.pid))
            elif service.name == REDIS:
                self._write(replace(self._state, redis_pid=service.pid))

    async def _keep_raylet(self, stack: contextlib.AsyncExitStack, head: RayHead) -> None:
        """Restart the raylet when it dies; replicas need it to be replaced. Ray's other processes end with
        Ray."""
        log = self._directory.logs / "raylet.log"
        raylet = Raylet(head, self._directory.ray_directory, log, self._options.environment)
        await raylet.wait_first_dead()
        self._say(
            "Ray's raylet ended; starting another; its replicas will take over from those that still serve"
        )
        stack.push_async_callback(raylet.service.stop, ROUTER_STOP_SECONDS)
        await raylet.service.start()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep(raylet.service))
            tasks.create_task(raylet.end_orphans(self._directory.path, self._has_others_than))

    def _has_others_than(self, pids: Collection[int]) -> bool:
        """Whether the whole fleet is ready in processes other than `pids`."""
        assert self._state is not None
        replicas = self._state.replicas
        is_ready = all(replica.state == ReplicaState.READY.value for replica in replicas)
        return (
            is_ready
            and len(replicas) >= (1 if self._options.engines else self._options.num_replicas)
            and not any(replica.pid in pids for replica in replicas)
        )

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[list[str]]:
        """Print the block's duration and the notes that it adds to the list."""
        started = time.monotonic()
        details: list[str] = []
        yield details
        self._say(f"{name:<9} {time.monotonic() - started:5.2f} s  {' '.join(details)}")


def _shared_settings(replica: ReplicaConfig) -> list[str]:
    """Return the logging and tracing settings that routers share with replicas; unset ones are left to the
    router's environment."""
    default, flags = ReplicaConfig(), []
    for name in ("log_format", "log_level", "otlp_endpoint", "trace_sample_ratio"):
        value = getattr(replica, name)
        if value != getattr(default, name):
            flags += ["--" + name.replace("_", "-"), str(value)]
    return flags


def take_port(host: str, port: int) -> int:
    """`port` if it is free on `host`, any free one for 0. Raises StartFailed."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            taken: int = probe.getsockname()[1]
            return taken
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise StartFailed(
            f"the router cannot listen on {host} port {port}: {reason}; choose another --port"
        ) from error


def by_role(pool: PoolSpec, num_prefillers: int) -> tuple[PoolSpec, ...]:
    """Divide the pool in two, if some of its replicas compute prompts for the others."""
    if not num_prefillers:
        return (pool,)
    counts = {Role.PREFILL: num_prefillers, Role.DECODE: pool.num_replicas - num_prefillers}
    return tuple(
        replace(pool, name=role.value, num_replicas=count, replica=replace(pool.replica, role=role.value))
        for role, count in counts.items()
    )


def _gpu_share(num_gpus: float, num_replicas: int) -> float:
    """Return each replica's share of a GPU; Ray counts in ten-thousandths."""
    return min(1.0, int(10_000 * num_gpus / num_replicas) / 10_000)


@contextlib.asynccontextmanager
async def _one_error() -> AsyncIterator[None]:
    """Unwrap a StartFailed from a task group."""
    try:
        yield
    except BaseExceptionGroup as group:
        failures = group.subgroup(StartFailed)
        if failures is None:
            raise
        failure: BaseException = failures
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        raise failure from None


async def _served_models(router: Service, pages: Sequence[str]) -> list[str]:
    """Return the models that the routers serve, once each serves any."""
    try:
        async with asyncio.timeout(ROUTER_START_SECONDS):
            while not (models := await asyncio.to_thread(_models, pages)):
                if router.has_ended():
                    raise StartFailed(f"the router did not start:\n{await router.complaint()}")
                await asyncio.sleep(0.05)
            return models
    except TimeoutError:
        raise StartFailed(
            f"the router found no replica within {ROUTER_START_SECONDS:g} s; see {router.log}"
        ) from None


def _models(pages: Sequence[str]) -> list[str]:
    """Return the models; none while any router is not ready."""
    models: list[str] = []
    try:
        for page in pages:
            with urllib.request.urlopen(f"{page}/ready", timeout=2) as response:
                models = list(json.load(response)["models"])
    except (OSError, ValueError, KeyError):
        return []
    return models


def summary(state: ClusterState, model: str, directory: RunDirectory, replica: ReplicaConfig) -> str:
    """List what runs where, and three commands to try."""
    lines = ["", f"router     {state.router_url}  pid {state.router_pid}"]
    lines += [f"page       {page}/  (the fleet, live, in a browser)" for page in state.router_pages]
    lines += [
        f"Redis      {without_password(state.redis_url)}",
    ]
    lines += [
        f"{entry.replica_id:<10} {entry.address}  pid {entry.pid}  epoch {entry.epoch}"
        + ("" if entry.role == Role.BOTH else f"  role {entry.role}")
        for entry in state.replicas
    ]
    if replica.host_kv_bytes is not None:
        below = f"{in_words(replica.host_kv_bytes)} of memory"
        if replica.disk_kv_bytes is not None:
            below += f" and {in_words(replica.disk_kv_bytes)} of disk in {replica.kv_folder}"
        lines += [f"KV         {below}, for each replica"]
    lines += [
        f"metrics    {state.router_pages[0]}/metrics; for Prometheus (file_sd): {directory.targets_file}"
    ]
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    url = f"{state.router_url}/v1"
    if state.keys_file is None:
        make = "./kvasir keys create --file FILE --tenant NAME makes one, for up --keys FILE"
        lines += [f"keys       none: all clients are one tenant; {make}"]
    else:
        lines += [
            f"keys       {state.keys_file}, followed; page and metrics ask for none, and are not on the API"
        ]
    key, shown = (" -H 'authorization: Bearer KEY'", "KEY") if state.keys_file else ("", "-")
    if replica.routes:
        lines += [f"passed on  {', '.join(replica.routes)}"]
    lines += [
        "",
        "Try:",
        f"  curl {url}/chat/completions -H 'content-type: application/json'{key} -d '{body}'",
        f'  client = OpenAI(base_url="{url}", api_key="{shown}")',
        f'  client.chat.completions.create(model="{model}", messages=[…])',
        "  " + directory.command("chat --api-key KEY" if state.keys_file else "chat"),
        "",
        "Ctrl-C ends all of it.",
    ]
    return "\n".join(lines)
