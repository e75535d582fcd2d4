"""A real Prometheus for a test: it scrapes a cluster's own file of targets, every second.

Owns the process, and how an answer of its API becomes numbers. Does not know what is asked.
"""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import yaml

from loadtests.stacks.local_stack import free_port
from tests.integration.observe import wait_until
from tests.tools import needed_tool

SCRAPE_SECONDS = 1


class RealPrometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/-/ready", timeout=30).status_code == 200
        return False

    def health(self) -> set[str]:
        """Of the targets: "up", and what else there is."""
        found = httpx.get(f"{self.url}/api/v1/targets", timeout=30).json()["data"]["activeTargets"]
        return {each["health"] for each in found}

    def over_time(self, expression: str, start: float, end: float) -> list[list[float]]:
        """The values of every series between two times (of the wall clock). Raises ValueError for what it
        does not understand."""
        parameters: dict[str, str | float] = {
            "query": expression,
            "start": start,
            "end": end,
            "step": SCRAPE_SECONDS,
        }
        answer = httpx.get(f"{self.url}/api/v1/query_range", params=parameters, timeout=60).json()
        if answer["status"] != "success":
            raise ValueError(f"{expression}: {answer['error']}")
        return [[float(value) for _, value in series["values"]] for series in answer["data"]["result"]]


@contextlib.contextmanager
def real_prometheus(folder: Path, targets: Path, rules: Path) -> Iterator[RealPrometheus]:
    """Up, and with every target that the file names. Its log is in `folder`."""
    configuration = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": f"{SCRAPE_SECONDS}s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "kvasir",
                "file_sd_configs": [{"files": [str(targets)], "refresh_interval": f"{SCRAPE_SECONDS}s"}],
            }
        ],
    }
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(configuration), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = [
        needed_tool("prometheus"),
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    prometheus = RealPrometheus(f"http://{address}")
    try:
        wait_until(prometheus.is_ready, "Prometheus", seconds=60)
        wait_until(lambda: prometheus.health() == {"up"}, "Prometheus' targets", seconds=60)
        yield prometheus
    finally:
        process.terminate()
        process.wait(60)
