"""What a local cluster costs: seconds from `./kvasir up` to the first answer, and memory when idle.

python -m loadtests.benches.up --engine torch --replicas 2
"""

import argparse
import json
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from loadtests.figures import print_header, proportional_set_bytes

ROOT = Path(__file__).resolve().parents[2]
UP_SECONDS = 180.0
IDLE_SECONDS = 5.0


def first_answer(state_file: Path, up: "subprocess.Popen[bytes]") -> float:
    """Wait until the cluster answers a chat request. Returns the time of the answer (monotonic)."""
    deadline = time.monotonic() + UP_SECONDS
    while time.monotonic() < deadline:
        if up.poll() is not None:
            raise RuntimeError(f"kvasir up ended with code {up.returncode}")
        if state_file.exists():
            url = json.loads(state_file.read_text(encoding="utf-8"))["router_url"]
            if answered(url):
                return time.monotonic()
        time.sleep(0.05)
    raise TimeoutError("kvasir up did not answer in time")


def answered(url: str) -> bool:
    try:
        models = httpx.get(f"{url}/v1/models").json()["data"]
        if not models:
            return False
        body = {
            "model": models[0]["id"],
            "messages": [{"role": "user", "content": "What is a KV cache?"}],
            "max_tokens": 16,
        }
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def members(up: int, run_directory: Path) -> dict[int, psutil.Process]:
    """Every process of the cluster: descendants of `up`, and what Ray started away from them.

    Those have the run directory in the environment that `up` handed down.
    """
    root = psutil.Process(up)
    found = {process.pid: process for process in (root, *root.children(recursive=True))}
    for process in psutil.process_iter():
        try:
            if any(str(run_directory) in value for value in process.environ().values()):
                found[process.pid] = process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def measure(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="kvasir-up-") as folder:
        run_directory = Path(folder)
        command = [str(ROOT / "kvasir"), "up", "--run-dir", folder, "--port", "0"]
        command += ["--engine", arguments.engine, "--replicas", str(arguments.replicas)]
        started = time.monotonic()
        up = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            answer = first_answer(run_directory / "cluster.json", up)
            print(f"- {arguments.replicas} x {arguments.engine}: first answer after {answer - started:.1f} s")
            time.sleep(IDLE_SECONDS)
            processes = members(up.pid, run_directory)
            sizes = {pid: proportional_set_bytes([pid]) for pid in processes}
            print(f"    idle memory (PSS) of {len(sizes)} processes: {sum(sizes.values()) / 2**20:.0f} MiB")
            for pid, size in sorted(sizes.items(), key=lambda entry: -entry[1])[:8]:
                print(f"      {size / 2**20:6.0f} MiB  {' '.join(processes[pid].cmdline())[:70]}")
            ended = time.monotonic()
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(60)
        print(f"    all of it gone after {time.monotonic() - ended:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="torch", choices=["torch", "simulated"])
    parser.add_argument("--replicas", type=int, default=2)
    arguments = parser.parse_args()
    print_header("A local cluster: start and idle memory")
    measure(arguments)


if __name__ == "__main__":
    main()
