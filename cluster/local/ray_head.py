"""Runs Ray on this one machine for `kvasir up`: loopback only, quiet, small.

Owns Ray's start-up settings.
"""

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import StartFailed
from cluster.local.processes import kill_marked

NODE_ADDRESS = "127.0.0.10"
"""Not 127.0.0.1, which Ray silently replaces with the machine's network address."""

OBJECT_STORE_BYTES = 80 * 2**20
"""Just above Ray's minimum; only small reports use it."""

RAY_ENVIRONMENT: Mapping[str, str] = {
    "RAY_AUTH_MODE": "token",  # else any user of the machine could run code as this one
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_enable_worker_prestart": "0",  # each worker that waits for work costs 50 MB
    "RAY_prestart_worker_first_driver": "0",
    # Else Ray ends every process of the cluster, this one too, a minute after its control service died.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "31536000",
    "RAY_memory_monitor_refresh_ms": "0",  # else Ray kills replicas when other programs use the memory
    # How long Ray's parts wait for one another at the start. They do not notice that one of them has died, so
    # this is also how long that takes.
    "RAY_gcs_server_port_wait_time_s": "60",
    "RAY_gcs_rpc_server_connect_timeout_s": "15",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_raylet_client_num_connect_attempts": "30",
    # Else a worker ends a second after its raylet: a replica serves on until the next raylet has others.
    "RAY_raylet_death_check_interval_milliseconds": "31536000000",
}
"""Must be set before Ray is imported; TOKEN_PATH too."""

TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
"""Variable that names the file with Ray's token. Without it Ray writes one to the home directory."""


@dataclass(frozen=True, slots=True)
class RayHead:
    address: str
    num_cpus: float
    num_gpus: float


def start_ray(directory: Path, num_cpus: int, say: Callable[[str], None]) -> RayHead:
    """Start Ray; blocks for seconds. Call from the main thread: Ray's processes die with the calling thread.

    Raises StartFailed. Ray's fixed limit of 30 s for its node may be too short for a cold disk, so there is a
    second try.
    """
    _clean_up(directory)
    try:
        return _start(directory, num_cpus)
    except Exception as error:  # Ray raises whatever it likes, Exception itself for a timeout
        say(f"Ray did not start ({_in_one_line(error)}); trying again")
    _clean_up(directory)
    try:
        return _start(directory, num_cpus)
    except Exception as error:
        raise StartFailed(
            f"Ray did not start, and a second attempt failed, too: {_in_one_line(error)}"
        ) from error


def _in_one_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0].rstrip(".: ")


def _clean_up(directory: Path) -> None:
    """Clean up after a failed start."""
    stop_ray()
    kill_marked(directory, directory)  # Ray's processes are known by the files there that they have open
    shutil.rmtree(directory, ignore_errors=True)


def _start(directory: Path, num_cpus: int) -> RayHead:
    import ray

    context: Any = ray.init(
        address="local",
        namespace="kvasir",
        num_cpus=num_cpus,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address=NODE_ADDRESS,
        _temp_dir=str(directory),
    )
    resources: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return RayHead(context.address_info["gcs_address"], resources.get("CPU", 0.0), resources.get("GPU", 0.0))


def stop_ray() -> None:
    import ray

    ray.shutdown()
