"""Runs the load tests of `locustfile.py` without a browser, from a program.

Owns the child process: Locust changes Python's sockets and threads for its whole process, so none of our own
asyncio code can share one with it. Knows nothing of workloads or of figures.
"""

import inspect
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from loadtests.run_file import Run, read_run
from loadtests.workloads import GENERATORS

END_SECONDS = 20.0
LOCUSTFILE = Path(__file__).resolve().parent / "locustfile.py"


class LoadTestFailed(Exception):
    """No run file was written; the message says why, as far as Locust did."""


def run_headless(
    *,
    base_url: str,
    model: str,
    workload: str,
    options: Mapping[str, str],
    seed: int,
    duration_seconds: float | None,
    replica_metrics: Sequence[str],
    output: Path,
    processes: int = 1,
    on_line: Callable[[str], None] | None = None,
) -> Run:
    """Send a workload to a cluster and read what was written to `output`.

    Raises LoadTestFailed or RunFileError. Failed requests are no exception: they are in the records.

    `options` are the locustfile's own, by name without dashes ("qps"), or parameters of the workload
    ("num_tenants"). A `duration_seconds` of None takes the locustfile's. `replica_metrics` are the replicas'
    /metrics as NAME=URL or URL, or a file of targets for Prometheus (.json). With several processes, one
    leads and the others send. `on_line` gets each line that Locust prints.
    """
    command = headless_command(
        base_url=base_url,
        model=model,
        workload=workload,
        options=options,
        seed=seed,
        duration_seconds=duration_seconds,
        replica_metrics=replica_metrics,
        output=output,
        processes=processes,
    )
    output.unlink(missing_ok=True)
    lines: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is for whoever called; Locust is asked to end once, here
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
    if not output.is_file():
        raise LoadTestFailed(_reason(lines))
    return read_run(output)


def _end(child: "subprocess.Popen[str]") -> None:
    """Let it write down what it has measured so far; somebody must read what it says meanwhile."""
    child.send_signal(signal.SIGINT)  # while a shape runs, Locust dies of SIGTERM on the spot
    try:
        child.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()


def headless_command(
    *,
    base_url: str,
    model: str,
    workload: str,
    options: Mapping[str, str],
    seed: int,
    duration_seconds: float | None,
    replica_metrics: Sequence[str],
    output: Path,
    processes: int = 1,
) -> list[str]:
    """What `run_headless` starts."""
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary"]
    command += [f"--host={base_url}", f"--model={model}", f"--workload={workload}", f"--seed={seed}"]
    command += [f"--run-file={output}"]
    if duration_seconds is not None:
        command.append(f"--duration={duration_seconds:g}")
    if processes > 1:
        command.append(f"--processes={processes}")
    command += [f"--replica-metrics={each}" for each in replica_metrics]
    parameters = set(inspect.signature(GENERATORS[workload]).parameters) if workload in GENERATORS else set()
    for name, value in options.items():
        is_parameter = name in parameters and name != "qps"
        command.append(f"--set={name}={value}" if is_parameter else f"--{name}={value}")
    return command


def _reason(lines: Sequence[str]) -> str:
    """The errors in Locust's log; without any, the end of all that it said."""
    errors = [line.partition("/ERROR/")[2].partition(": ")[2] for line in lines if "/ERROR/" in line]
    return "\n".join(errors or lines[-20:])
