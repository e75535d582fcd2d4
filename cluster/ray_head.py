"""Ray on this one machine, inside `kvasir up`: loopback only, quiet, small.

Owns Ray's start-up settings. Knows nothing of the fleet that runs on it.
"""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NODE_ADDRESS = "127.0.0.10"
"""Not 127.0.0.1, which Ray silently replaces by the machine's address on the network."""

OBJECT_STORE_BYTES = 80 * 2**20
"""Just above Ray's minimum: nothing but small reports goes through it."""

RAY_ENVIRONMENT: Mapping[str, str] = {
    "RAY_AUTH_MODE": "disabled",  # loopback only, one user; else Ray leaves a token in the home directory
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_enable_worker_prestart": "0",  # each worker that waits for work costs 50 MB
    "RAY_prestart_worker_first_driver": "0",
    # Else Ray ends every process of the cluster, this one too, a minute after its control service died.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "31536000",
    "RAY_memory_monitor_refresh_ms": "0",  # else Ray kills replicas when other programs use the memory
}
"""Must be in the environment before Ray is imported."""


@dataclass(frozen=True, slots=True)
class RayHead:
    address: str
    num_cpus: float
    num_gpus: float


def start_ray(directory: Path, num_cpus: int) -> RayHead:
    """Blocks for some seconds. Call from the main thread: Ray's processes die with the calling thread."""
    import ray

    shutil.rmtree(directory, ignore_errors=True)
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
