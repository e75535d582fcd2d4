"""A Ray cluster on loopback that grows by itself: `python -m tests.cluster.ray_autoscaler FOLDER`.

Ray's own autoscaler decides; `LoopbackMachines` is its provider, as KubeRay's is elsewhere. A machine is a
`ray start` with two slots, and there are at most two. Answers as `ray_machines` does.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from ray.autoscaler.batching_node_provider import BatchingNodeProvider, NodeData, ScaleRequest
from ray.autoscaler.tags import NODE_KIND_HEAD, NODE_KIND_WORKER, STATUS_UP_TO_DATE

HEAD = "127.0.0.20"
HEAD_TYPE, MACHINE_TYPE = "ray.head.default", "machine"
MOST_MACHINES = 2
IDLE_SECONDS = 10.0
"""Long enough for a replica to be placed on a machine that has just joined, however busy everything is."""

RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats")
SMALL = ("--object-store-memory", str(80 * 2**20))


class LoopbackMachines(BatchingNodeProvider):
    """In Ray's monitor process. Machines are its children."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._machines: dict[str, subprocess.Popen[bytes]] = {}
        self._num_started = 0

    def get_node_data(self) -> dict[str, NodeData]:
        self._machines = {ip: machine for ip, machine in self._machines.items() if machine.poll() is None}
        machines = {
            ip: NodeData(NODE_KIND_WORKER, MACHINE_TYPE, ip, STATUS_UP_TO_DATE) for ip in self._machines
        }
        return {"head": NodeData(NODE_KIND_HEAD, HEAD_TYPE, HEAD, STATUS_UP_TO_DATE), **machines}

    def submit_scale_request(self, scale_request: ScaleRequest) -> None:
        for ip in scale_request.workers_to_delete:
            self._machines.pop(ip).terminate()
        while len(self._machines) < scale_request.desired_num_workers.get(MACHINE_TYPE, 0):
            self._num_started += 1
            ip = f"127.0.0.{20 + self._num_started}"
            words = ["--address", self.provider_config["address"], "--node-ip-address", ip, "--num-cpus", "2"]
            words += ["--resources", '{"slot": 2}']
            self._machines[ip] = subprocess.Popen([*RAY, *SMALL, *words])


def config(address: str) -> dict[str, Any]:
    provider = {
        **{"type": "external", "module": f"{__spec__.name}.LoopbackMachines", "address": address},
        **{"disable_node_updaters": True, "disable_launch_config_check": True},
        **{"foreground_node_launch": True, "worker_liveness_check": False},
    }
    none: dict[str, Any] = {"file_mounts": {}, "cluster_synced_files": [], "auth": {}}
    for name in (
        "initialization",
        "setup",
        "head_setup",
        "worker_setup",
        "head_start_ray",
        "worker_start_ray",
    ):
        none[f"{name}_commands"] = []
    return none | {
        **{"cluster_name": "loopback", "max_workers": MOST_MACHINES, "upscaling_speed": 100},
        **{"idle_timeout_minutes": IDLE_SECONDS / 60, "provider": provider, "head_node_type": HEAD_TYPE},
        "available_node_types": {
            HEAD_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "min_workers": 0, "max_workers": 0},
            MACHINE_TYPE: {
                **{"resources": {"CPU": 2, "slot": 2}, "node_config": {}},
                **{"min_workers": 0, "max_workers": MOST_MACHINES},
            },
        },
    }


def main(folder: str) -> None:
    from loadtests.stacks.local_stack import free_port
    from tests.cluster.ray_machines import answer

    port = free_port()
    address = f"{HEAD}:{port}"
    Path(folder).mkdir()
    file = Path(folder) / "autoscaling.json"
    file.write_text(json.dumps(config(address)))
    environment = {**os.environ, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "PYTHONPATH": os.getcwd()}
    words = [
        "--head",
        "--port",
        str(port),
        "--node-ip-address",
        HEAD,
        "--num-cpus",
        "0",
        "--temp-dir",
        folder,
    ]
    words += ["--include-dashboard", "false", "--autoscaling-config", str(file)]
    with subprocess.Popen([*RAY, *SMALL, *words], env=environment, stdout=subprocess.PIPE, text=True) as head:
        assert head.stdout is not None
        assert any("Ray runtime started" in line for line in head.stdout), "Ray has not started"
        threading.Thread(target=sys.stderr.writelines, args=[head.stdout], daemon=True).start()
        try:
            answer(address, {})
        finally:
            head.kill()


if __name__ == "__main__":
    main(sys.argv[1])
