"""Raylet: Ray's process that starts and watches replicas on this machine, kept alive for a local cluster.

Owns its replacement. Replicas outlive a raylet and keep serving. The fleet starts new ones under the next
raylet, which take the leases over, and then the orphans are ended. Ray's control service is not replaced:
replicas serve on without it, but dead ones are not restarted.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from cluster.local.processes import Service, find_marked, named_children
from cluster.local.ray_head import NODE_ADDRESS, OBJECT_STORE_BYTES, RayHead
from cluster.local.redis_server import free_ports_in_a_row

LOOK_SECONDS = 0.5
ORPHAN_SECONDS = 3.0

_PORTS = ("dashboard-agent-grpc", "dashboard-agent-listen", "metrics-export", "runtime-env-agent")


class Raylet:
    """The first raylet is Ray's own child of this process; later ones are `service`."""

    def __init__(self, head: RayHead, directory: Path, log: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._first = named_children(os.getpid()).get("raylet")
        command = [sys.executable, "-P", "-m", "cluster.local.ray_start", "start", "--address", head.address]
        command += ["--node-ip-address", NODE_ADDRESS, "--num-cpus", f"{head.num_cpus:g}"]
        command += ["--num-gpus", f"{head.num_gpus:g}", "--object-store-memory", str(OBJECT_STORE_BYTES)]
        command += ["--disable-usage-stats", "--block"]
        # Given ports it does not wait for its agents to say theirs, which it does for 15 s only.
        for number, name in enumerate(_PORTS, start=free_ports_in_a_row(len(_PORTS))):
            command += [f"--{name}-port", str(number)]
        self.service = Service("Ray's raylet", command, log, environment, children_outlive_it=True)

    async def wait_first_dead(self) -> None:
        """Wait until the first raylet dies; forever if it cannot be found."""
        while self._first is None or await asyncio.to_thread(lives, self._first):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)

    def orphans(self, run_directory: Path) -> list[int]:
        """Return Ray's workers whose raylet died; only this process ends them."""
        return [
            pid
            for pid in find_marked(run_directory, self._directory)
            if _title(pid).startswith("ray::") and _name(_parent(pid)) != "raylet"
        ]

    async def end_orphans(self, run_directory: Path, is_replaced: Callable[[list[int]], bool]) -> None:
        """End orphans once the fleet has replaced them; until cancelled."""
        while True:
            orphans = await asyncio.to_thread(self.orphans, run_directory)
            if orphans and is_replaced(orphans):
                for pid in orphans:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(ORPHAN_SECONDS)


def lives(pid: int) -> bool:
    """Whether the process lives; a zombie does not."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def _parent(pid: int) -> int:
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return 0


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _title(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""
