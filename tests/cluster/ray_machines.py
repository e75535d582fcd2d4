"""A Ray cluster of several nodes on loopback: `python -m tests.cluster.ray_machines FOLDER COUNT`.

Takes Ray's folder and the number of machines besides the head, prints the head's address, and kills
machine N, with all that runs there, for each line `kill N` that it reads. Ends with its input.
"""

import os
import signal
import sys

import psutil
from ray.cluster_utils import Cluster

HEAD = "127.0.0.10"


def main(folder: str, num_machines: int) -> None:
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
            resources={"slot": 2},
            node_ip_address=f"127.0.0.{11 + number}",
            object_store_memory=80 * 2**20,
        )
        for number in range(num_machines)
    ]
    cluster.wait_for_nodes()
    sys.stdout.write(cluster.address + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        raylet = psutil.Process(machines[int(line.split()[1])].all_processes["raylet"][0].process.pid)
        for process in (raylet, *raylet.children(recursive=True)):
            os.kill(process.pid, signal.SIGKILL)
        sys.stdout.write("killed\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
