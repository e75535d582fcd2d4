"""Load tests started from Locust's page, with a master and workers that were started one by one."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loadtests.load.locust_run import LOCUSTFILE
from loadtests.reports.run_file import Run, read_run
from loadtests.stacks.local_stack import free_port
from tests.loadtests.delay_server import DelayServer, running

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

WAIT_SECONDS = 100.0


@contextlib.contextmanager
def master_and_two_workers(url: str, run_file: Path) -> Iterator[httpx.Client]:
    """Yields the page."""
    web_port, port = free_port(), free_port()
    locust = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE)]
    master = [*locust, "--master", f"--master-bind-port={port}", "--web-host=127.0.0.1", f"--host={url}"]
    master += [f"--web-port={web_port}", f"--run-file={run_file}"]
    commands = [master] + [[*locust, "--worker", f"--master-port={port}"]] * 2
    quiet = subprocess.DEVNULL
    processes = [subprocess.Popen(command, stdout=quiet, stderr=quiet) for command in commands]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{web_port}", trust_env=False, timeout=30) as page:
            yield page
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


def wait_until(
    page: httpx.Client, *, state: str, num_workers: int = 2, num_requests: int | None = None
) -> None:
    """Until the page says so. Workers report their rows every three seconds."""
    deadline = time.monotonic() + WAIT_SECONDS
    shown = {}
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            shown = page.get("/stats/requests").json()
            rows = {row["name"]: row["num_requests"] for row in shown["stats"]}
            is_there = num_requests is None or rows.get("e2e") == rows.get("ttft") == num_requests
            if shown["state"] == state and len(shown["workers"]) == num_workers and is_there:
                return
        time.sleep(0.1)
    raise TimeoutError(f"the page never showed {state} with {num_requests} requests, but {shown}")


def wait_for_run(run_file: Path, workload: str) -> Run:
    """The file is written when all is over."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        if run_file.is_file() and (run := read_run(run_file)).info.test == workload:
            return run
        time.sleep(0.1)
    raise TimeoutError(f"no run of {workload} was written")


def test_runs_are_started_from_the_page_one_after_another(tmp_path: Path) -> None:
    run_file = tmp_path / "run.json"
    with (
        running(DelayServer(first_seconds=0.02)) as server,
        master_and_two_workers(server.url, run_file) as page,
    ):
        wait_until(page, state="ready")
        seeds = set()
        for workload, set_text in (("cross-user", "system_tokens=32"), ("rag", "document_tokens=8")):
            num_before = len(server.bodies)
            form = {"workload": workload, "qps": "8", "duration": "3", "set": set_text}
            assert page.post("/swarm", data=form).json()["success"]
            run = wait_for_run(run_file, workload)
            wait_until(page, state="stopped", num_requests=len(run.records))
            assert run.info.test == run.info.workload["name"] == workload
            assert set_text.split("=")[0] in run.info.workload
            assert len(run.records) == len(server.bodies) - num_before > 5
            assert {record.error for record in run.records} == {None}
            seeds.add(run.info.seed)
        assert len(seeds) == 2
