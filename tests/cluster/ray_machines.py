"""A Ray cluster of several nodes on loopback: `python -m tests.cluster.ray_machines FOLDER COUNT`.

Takes Ray's folder and the number of machines besides the head, and prints the head's address. For each line
`kill N` that it reads it kills machine N, with all that runs there; for `status` it prints what
`kvasir fleet status --json` would, for `machines` how many live; for `complain TEXT` it lets Ray tell all its
drivers. Ends with its input.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private.utils import publish_error_to_driver
from ray._private.worker import global_worker
from ray.cluster_utils import Cluster

from cluster.commands.fleet_words import as_plain
from cluster.controller.actors import CONTROLLER_NAME, NAMESPACE, nodes
from cluster.registry import read_registry

HEAD = "127.0.0.10"


def main(folder: str, num_machines: int) -> None:
    # Ray writes its address there, whatever folder it is told to use, and makes it only on its usual ways.
    Path(get_default_ray_temp_dir()).mkdir(exist_ok=True)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            **{"num_cpus": 0, "include_dashboard": False, "node_ip_address": HEAD},
            **{"temp_dir": folder, "object_store_memory": 80 * 2**20},
        },
    )
    machines = [
        cluster.add_node(
            wait=False,
            num_cpus=2,
            resources={"slot": 3},
            node_ip_address=f"127.0.0.{11 + number}",
            object_store_memory=80 * 2**20,
        )
        for number in range(num_machines)
    ]
    cluster.wait_for_nodes()

    def kill(number: str) -> str:
        raylet = psutil.Process(machines[int(number)].all_processes["raylet"][0].process.pid)
        for process in (raylet, *raylet.children(recursive=True)):
            os.kill(process.pid, signal.SIGKILL)
        return "killed"

    answer(cluster.address, {"kill": kill})


def answer(address: str, commands: Mapping[str, Callable[[str], str]]) -> None:
    """Print the address, and then one line for each that is read."""
    output, sys.stdout = sys.stdout, sys.stderr  # Ray prints what it thinks of its machines
    output.write(address + "\n")
    output.flush()
    for line in sys.stdin:
        if not ray.is_initialized():  # type: ignore[no-untyped-call]
            options: dict[str, Any] = {"_node_ip_address": address.rpartition(":")[0]}
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, **options)
        command, _, argument = line.strip().partition(" ")
        known = {"status": _status, "machines": _machines, "complain": _complain, **commands}
        output.write(known[command](argument) + "\n")
        output.flush()


def _machines(_: str) -> str:
    return str(len(nodes()))


def _complain(text: str) -> str:
    publish_error_to_driver("test", text, global_worker.gcs_client)
    return "told"


def _status(_: str) -> str:
    controller: Any = ray.get_actor(CONTROLLER_NAME, NAMESPACE)
    view: Any = ray.get(controller.view.remote())
    assert view.redis_url is not None
    return json.dumps(as_plain(view, read_registry(view.redis_url)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
