"""Runs the load tests of `locustfile.py` without a browser, from a program.

Owns the child process: Locust changes Python's sockets and threads for its whole process, so none of our own
asyncio code can share one with it.
"""

import inspect
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtests.reports.run_file import Run, read_run
from loadtests.stacks.local_stack import free_port
from loadtests.workloads import GENERATORS

END_SECONDS = 20.0
LOCUSTFILE = Path(__file__).resolve().parents[1] / "locustfile.py"


class LoadTestFailed(Exception):
    """No run file was written; the message has Locust's reason, if it gave one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadlessRun:
    """One run of the locustfile.

    `options` are the locustfile's own, by name without dashes ("qps"), or parameters of the workload
    ("num_tenants"). An empty `model` is the only one served. A `duration_seconds` of None takes the
    locustfile's. `replica_metrics` are the replicas' /metrics as NAME=URL or URL, or a file of targets for
    Prometheus (.json). The run is written to `output`. With several processes, one leads and the others send.
    """

    base_url: str
    model: str
    workload: str
    seed: int
    output: Path
    options: Mapping[str, str] = field(default_factory=dict)
    duration_seconds: float | None = None
    replica_metrics: Sequence[str] = ()
    processes: int = 1

    def command(self) -> list[str]:
        words = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary"]
        words += [f"--host={self.base_url}", f"--model={self.model}", f"--workload={self.workload}"]
        words += [f"--seed={self.seed}", f"--run-file={self.output}"]
        if self.duration_seconds is not None:
            words.append(f"--duration={self.duration_seconds:g}")
        if self.processes > 1:
            port = free_port()  # where they find each other; Locust's own would be the same for every run
            words += [f"--processes={self.processes}", f"--master-bind-port={port}", f"--master-port={port}"]
        words += [f"--replica-metrics={each}" for each in self.replica_metrics]
        generator = GENERATORS.get(self.workload)
        parameters = set(inspect.signature(generator).parameters) if generator is not None else set()
        for name, value in self.options.items():
            is_parameter = name in parameters and name != "qps"
            words.append(f"--set={name}={value}" if is_parameter else f"--{name}={value}")
        return words


def run_headless(run: HeadlessRun, on_line: Callable[[str], None] | None = None) -> Run:
    """Send a workload to a cluster and read what was written of it.

    Raises LoadTestFailed or RunFileError. Failed requests are no exception: they are in the records.
    `on_line` gets each line that Locust prints.
    """
    run.output.unlink(missing_ok=True)
    lines: list[str] = []
    with subprocess.Popen(
        run.command(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is for the caller; Locust is asked to end once, here
    ) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                lines.append(line.rstrip("\n"))
                if on_line is not None:
                    on_line(lines[-1])
        except BaseException:
            _end(child)
            raise
    if not run.output.is_file():
        raise LoadTestFailed(_reason(lines))
    return read_run(run.output)


def _end(child: "subprocess.Popen[str]") -> None:
    """Let it write down what it has measured so far; its output must be read meanwhile."""
    child.send_signal(signal.SIGINT)  # while a shape runs, Locust dies of SIGTERM on the spot
    try:
        child.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()


def _reason(lines: Sequence[str]) -> str:
    """Return the errors in Locust's log; without any, the end of all that it said."""
    errors = [line.partition("/ERROR/")[2].partition(": ")[2] for line in lines if "/ERROR/" in line]
    return "\n".join(errors or lines[-20:])
