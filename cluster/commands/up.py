"""`kvasir up`: runs a LocalCluster from a parsed command line until a signal.

Owns the options and the signals. `local_cluster.py` knows what is started, and how.
"""

import argparse
import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cluster.commands.key_store import KeyFileStore
from cluster.config import EngineSource
from cluster.errors import ClusterError
from cluster.fleet_file import NOT_OF_A_LOCAL_CLUSTER, settings_from
from cluster.local.joined_servers import JoinedServer, ask_servers, folder_of
from cluster.local.local_cluster import LocalCluster, LocalOptions
from cluster.local.run_directory import RunDirectory
from cluster.sizes import in_words
from replicas.config import ReplicaConfig
from replicas.loadable import files_complaint
from replicas.process.settings import SettingsError, build
from replicas.remote_engine.server import read_key
from router.routing.policies import POLICIES
from router.shared.origins import may_be_origin, means_loopback

SPLIT_RAM_BYTES = 256 * 2**20
"""Host memory of each replica with `--prefill`, if nothing is said: prompts pass through it."""
LOOPBACK_BYTES_PER_SECOND = 5e8
"""Speed of a pull between two processes of one machine, about. Measured speeds take its place."""


def options_from(
    arguments: argparse.Namespace, directory: RunDirectory, environment: Mapping[str, str]
) -> LocalOptions:
    """Build the options. Raises ClusterError for contradictions."""
    if arguments.policy not in POLICIES:
        raise ClusterError(f"there is no policy {arguments.policy}; there are {', '.join(sorted(POLICIES))}")
    model = str(Path(arguments.model).absolute()) if arguments.model else None
    if arguments.disk is not None and arguments.ram is None:
        raise ClusterError("--disk needs --ram, through which KV goes to the disk and back")
    ram = _ram(arguments)
    takes_bodies = arguments.engine == "openai"
    engines, joined = _joined(arguments, takes_bodies=takes_bodies)
    own: dict[str, Any] = {
        "engine": arguments.engine if joined is None or takes_bodies else "remote",
        "model": model if joined is None or takes_bodies else folder_of(joined, model),
        "model_name": arguments.model_name,
        "host_kv_bytes": ram,
        "disk_kv_bytes": arguments.disk,
        "kv_folder": None if arguments.disk is None else str(directory.kv_directory),
    }
    if joined is not None:
        own |= {"engine_url": joined.url, "block_size": joined.block_size}
        own |= {"engine_key_file": _absolute(arguments.join_key_file)}
    try:
        chosen = {**settings_from(arguments.set, NOT_OF_A_LOCAL_CLUSTER), **own}
        if arguments.prefill is not None:
            chosen = {"pull_bytes_per_second": LOOPBACK_BYTES_PER_SECOND, **chosen}
        replica = build(ReplicaConfig, chosen)
    except SettingsError as error:
        raise ClusterError(str(error)) from error
    if arguments.prefill is not None and (why := replica.whole_because) is not None:
        raise ClusterError(f"--prefill would split no prompt, because {why}")
    if (complaint := files_complaint(replica)) is not None:
        raise ClusterError(complaint)
    return LocalOptions(
        run_directory=directory,
        num_replicas=arguments.replicas,
        num_prefillers=arguments.prefill or 0,
        num_routers=arguments.routers,
        replica=replica,
        host=arguments.host,
        port=arguments.port,
        picker_port=arguments.picker_port,
        policy=arguments.policy,
        redis_url=environment.get("REDIS_URL") or None,
        keys_file=_keys_file(arguments),
        is_open=arguments.open,
        cors_origins=_cors_origins(arguments),
        environment=environment,
        engines=engines,
    )


def _ram(arguments: argparse.Namespace) -> int | None:
    """Return the host memory of a replica, if any. Raises ClusterError where no prompt could be split though
    some replicas are to compute prompts for others, and where the machine has less."""
    ram: int | None = arguments.ram
    if arguments.prefill is not None:
        if arguments.join or arguments.join_file or arguments.join_dns:
            raise ClusterError("--prefill is for replicas of ours: roles of servers stand in a fleet file")
        if arguments.engine not in ("torch", "vllm"):
            raise ClusterError(f"--prefill is for torch and vllm: {arguments.engine} has no KV to pull")
        if arguments.prefill >= arguments.replicas:
            raise ClusterError(
                f"--prefill {arguments.prefill} leaves none of {arguments.replicas} replicas to decode:"
                " give more --replicas"
            )
        ram = SPLIT_RAM_BYTES if ram is None else ram
    if ram is not None and ram * arguments.replicas > (memory := _memory_bytes()):
        raise ClusterError(
            f"--ram {in_words(ram)} for each of {arguments.replicas} replicas is more than the"
            f" {in_words(memory)} of memory that this machine has"
        )
    return ram


def _joined(
    arguments: argparse.Namespace, *, takes_bodies: bool
) -> tuple[EngineSource, JoinedServer] | tuple[None, None]:
    """Ask the servers to join, if there are any. Raises ClusterError."""
    if not (arguments.join or arguments.join_file or arguments.join_dns):
        if takes_bodies:
            raise ClusterError("--engine openai is for servers that run: give --join URL")
        return None, None
    if arguments.ram is not None:
        raise ClusterError("--ram is for replicas of ours: the memory of a server that runs is its own")
    try:
        engines = EngineSource(tuple(arguments.join), _absolute(arguments.join_file), arguments.join_dns)
        return engines, ask_servers(engines, read_key(arguments.join_key_file), takes_bodies=takes_bodies)
    except SettingsError as error:
        raise ClusterError(str(error)) from error


def _absolute(file: str | None) -> str | None:
    return None if file is None else str(Path(file).expanduser().absolute())


def _keys_file(arguments: argparse.Namespace) -> str | None:
    """Check the keys file before anything starts. Raises ClusterError."""
    if arguments.keys is None:
        if not (arguments.open or means_loopback(arguments.host)):
            raise ClusterError(
                f"without API keys, everyone who reaches {arguments.host} would be one tenant: make a key "
                "with ./kvasir keys create --file FILE --tenant NAME and add --keys FILE, or add --open"
            )
        return None
    if arguments.open:
        raise ClusterError("--open is for a cluster without --keys")
    path = Path(arguments.keys).expanduser().absolute()
    KeyFileStore(path).read()
    return str(path)


def _cors_origins(arguments: argparse.Namespace) -> list[str]:
    """Check the origins. Raises ClusterError."""
    origins: list[str] = arguments.cors_origin
    for origin in origins:
        if not may_be_origin(origin):
            raise ClusterError(
                f"--cors-origin takes an origin as browsers name it, such as https://chat.example.org, or *,"
                f" not {origin}"
            )
    return origins


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def serve(options: LocalOptions, say: Callable[[str], None]) -> int:
    """Run the cluster until SIGINT, SIGTERM or SIGHUP; returns the exit code."""

    def tell(sentence: str) -> None:
        # Where it goes may be gone or full: no reason for a cluster to end.
        with contextlib.suppress(OSError):
            say(sentence)

    try:
        asyncio.run(_serve(LocalCluster(options, tell)))
    except asyncio.CancelledError:
        tell("Everything is stopped.")
    return 0


async def _serve(cluster: LocalCluster) -> None:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()

    def listen() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, task.cancel)

    listen()
    await cluster.run(on_ray_started=listen)
