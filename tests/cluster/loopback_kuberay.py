"""KubeRay on loopback: `python -m tests.cluster.loopback_kuberay FOLDER RAYCLUSTER`, the latter in JSON.

Pods are processes. Ray and its autoscaler are the real ones, started as KubeRay starts them, and the
autoscaler speaks to a server that knows of Kubernetes' API what it asks for. Owns what KubeRay makes of a
RayCluster: as many workers of each group as it says, none taken away but those that the autoscaler has named.
Answers as `ray_machines` does, and to `pods` with their names; `evict NAME` ends one politely; `join` lets a
machine join that is no pod of the cluster, like what applies a fleet.
"""

import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ray._raylet import GcsClient

from loadtests.stacks.local_stack import free_port
from tests.certificates import Authority
from tests.cluster.kvasir_command import wait_until
from tests.cluster.ray_autoscaler import SMALL
from tests.cluster.ray_machines import answer

NETWORK = "127.0.0."
HEAD, GUEST, FIRST_WORKER = f"{NETWORK}30", f"{NETWORK}29", 31
RAY = (sys.executable, "-m", "ray.scripts.scripts")
START = (*RAY, "start", "--block", "--disable-usage-stats", *SMALL)
ATTEMPTS = 3

Object = dict[str, Any]


class Cluster:
    def __init__(self, described: Object, address: str) -> None:
        self._lock = threading.Lock()
        self._address = address
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._num_started = 0
        self._version = 1
        self.described = described
        self.name: str = described["metadata"]["name"]
        self._pods = {self.head: self._pod(self.head, "head", "headgroup")}

    @property
    def head(self) -> str:
        return f"{self.name}-head"

    def pods(self) -> list[Object]:
        with self._lock:
            return list(self._pods.values())

    def listed(self, items: list[Object]) -> Object:
        return {"metadata": {"resourceVersion": str(self._version)}, "items": items}

    def patch(self, changes: list[Object]) -> None:
        """JSON patches of what Ray's autoscaler sets: `replicas` and `scaleStrategy` of groups."""
        with self._lock:
            for change in changes:
                sys.stderr.write(f"Ray's autoscaler patches {change}\n")
                parts = change["path"].strip("/").split("/")
                assert parts[:2] == ["spec", "workerGroupSpecs"] and len(parts) == 4, change
                self.described["spec"]["workerGroupSpecs"][int(parts[2])][parts[3]] = change["value"]
            self._version += 1
            self._reconcile()

    def evict(self, name: str) -> None:
        """SIGTERM, as when a node is drained."""
        self._processes[name].terminate()

    def _follow(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """A pod that has ended, and that nobody has taken away, is replaced by another."""
        process.wait()
        with self._lock:
            if self._pods.pop(name, None) is not None:
                del self._processes[name]
                self._reconcile()

    def reconcile(self) -> None:
        with self._lock:
            self._reconcile()

    def _reconcile(self) -> None:
        for group in self.described["spec"]["workerGroupSpecs"]:
            for name in group.get("scaleStrategy", {}).get("workersToDelete", []):
                if self._pods.pop(name, None) is not None:
                    self._processes.pop(name).terminate()
            wanted = min(max(group["replicas"], group["minReplicas"]), group["maxReplicas"])
            while self._num_of(group["groupName"]) < wanted:
                self._add(group)

    def _num_of(self, group: str) -> int:
        return sum(pod["metadata"]["labels"]["ray.io/group"] == group for pod in self._pods.values())

    def _add(self, group: Object) -> None:
        address = f"{NETWORK}{FIRST_WORKER + self._num_started}"
        name = f"{self.name}-{group['groupName']}-worker-{self._num_started}"
        self._num_started += 1
        parameters = group["rayStartParams"]
        words = ["--address", self._address, "--node-ip-address", address]
        words += ["--num-cpus", parameters["num-cpus"]]
        # KubeRay hands it to a shell, which takes the quotes away.
        words += ["--resources", json.loads(parameters["resources"])]
        process = subprocess.Popen([*START, *words], env=as_pod(name, group["groupName"]), stdout=sys.stderr)
        self._processes[name] = process
        threading.Thread(target=self._follow, args=(name, process), daemon=True).start()
        self._pods[name] = self._pod(name, "worker", group["groupName"])

    def _pod(self, name: str, kind: str, group: str) -> Object:
        labels = {"ray.io/cluster": self.name, "ray.io/node-type": kind, "ray.io/group": group}
        return {
            "metadata": {"name": name, "labels": labels, "resourceVersion": "1"},
            "status": {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]},
            "spec": {"containers": [{"name": f"ray-{kind}", "resources": {}}]},
        }


def as_pod(name: str, group: str) -> dict[str, str]:
    return {**os.environ, "RAY_CLOUD_INSTANCE_ID": name, "RAY_NODE_TYPE_NAME": group}


def handler_of(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            *_, kind, name = ["", *urlsplit(self.path).path.strip("/").split("/")]
            if kind == "rayclusters" and name == cluster.name:
                self._answer(cluster.described)
            elif name == "pods":
                self._answer(cluster.listed(cluster.pods()))
            elif kind == "pods" and name == cluster.head:
                self._answer(cluster.pods()[0])
            else:
                self.send_error(404)

        def do_PATCH(self) -> None:
            cluster.patch(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._answer(cluster.described)

        def _answer(self, content: Object) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def serve(cluster: Cluster, folder: Path) -> dict[str, str]:
    """Kubernetes' API, and the environment in which Ray's autoscaler finds it and may use it."""
    authority = Authority(folder)
    own, autoscalers = authority.replica("localhost"), authority.router()
    server = ThreadingHTTPServer(("localhost", 0), handler_of(cluster))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.certificate, own.key)
    context.load_verify_locations(authority.certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return {
        "KUBERNETES_SERVICE_HOST": "localhost",
        "KUBERNETES_SERVICE_PORT_HTTPS": str(server.server_address[1]),
        "RAY_KUBERAY_CA_CERT_PATH": authority.certificate,
        "RAY_KUBERAY_CLIENT_CERT_PATH": autoscalers.certificate,
        "RAY_KUBERAY_CLIENT_KEY_PATH": autoscalers.key,
        "RAY_HEAD_POD_NAME": cluster.head,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # it calls `ray`
    }


def serves(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True


def start_head(address: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Ray gives up after 30 s, which are over soon where much else runs; KubeRay then starts it again."""
    for _ in range(ATTEMPTS):
        if _starts(address, subprocess.Popen(command, env=environment, stdout=sys.stderr)):
            return
    raise AssertionError("Ray has not started")


def _starts(address: str, head: subprocess.Popen[bytes]) -> bool:
    def has_joined() -> bool:
        return serves(address) and bool(GcsClient(address=address).get_all_node_info())

    wait_until(lambda: head.poll() is not None or has_joined(), lambda: "Ray does not start")
    return head.poll() is None


def main(folder: str, described: str) -> None:
    cluster = json.loads(Path(described).read_text())
    assert cluster["spec"]["autoscalerOptions"]["version"] == "v2"
    Path(folder).mkdir()
    address = f"{HEAD}:{free_port()}"
    running = Cluster(cluster, address)
    words = ["--head", "--no-monitor", "--port", address.rpartition(":")[2], "--node-ip-address", HEAD]
    words += ["--num-cpus", "0", "--temp-dir", folder, "--include-dashboard", "false"]
    environment = {**as_pod(running.head, "headgroup"), "RAY_enable_autoscaler_v2": "true"}
    start_head(address, [*START, *words], environment)
    words = ["--cluster-name", running.name, "--cluster-namespace", cluster["metadata"]["namespace"]]
    subprocess.Popen(
        [*RAY, "kuberay-autoscaler", *words, "--gcs-address", address],
        env={**os.environ, **serve(running, Path(folder) / "tls")},
        stdout=sys.stderr,
    )
    running.reconcile()

    def join(_: str) -> str:
        words = ["--address", address, "--node-ip-address", GUEST, "--num-cpus", "0"]
        subprocess.Popen([*START, *words], stdout=sys.stderr)
        return "joins"

    def pods(_: str) -> str:
        return json.dumps([pod["metadata"]["name"] for pod in running.pods()])

    def evict(name: str) -> str:
        running.evict(name)
        return "goes"

    answer(address, {"join": join, "pods": pods, "evict": evict})


if __name__ == "__main__":
    main(*sys.argv[1:])
