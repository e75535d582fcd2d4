"""Holds the load generator against a server with known delays: `python -m loadtests.benches.check_harness`.

Owns the comparison: what was sent, by the server's clock, and what was measured, by the client's. One process
and several; prints figures and asserts nothing.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loadtests.figures import print_header
from loadtests.load.locust_run import HeadlessRun, run_headless
from loadtests.stacks.delay_server import MODEL, DelayServer, running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--first", type=float, default=0.050, help="seconds to the first token")
    add("--gap", type=float, default=0.010, help="seconds between tokens")
    add("--tokens", type=int, default=20)
    add("--qps", type=float, nargs="+", default=[10.0, 50.0, 100.0])
    add("--seconds", type=float, default=15.0)
    add("--processes", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    print_header("What the load generator measures")
    print("Medians in ms, sent (by the server's clock) / seen (by the client's):")
    print("| processes | requests/s | requests | TTFT | ITL | E2E seen | sent late, p99 |")
    print("|---|---|---|---|---|---|---|")
    for processes in options.processes:
        for qps in options.qps:
            print(_row(options, processes, qps), flush=True)


def _row(options: argparse.Namespace, processes: int, qps: float) -> str:
    server = DelayServer(first_seconds=options.first, gap_seconds=options.gap)
    with running(server), tempfile.TemporaryDirectory() as folder:
        run = run_headless(
            HeadlessRun(
                base_url=server.url,
                model=MODEL,
                workload="no-reuse",
                options={"qps": str(qps), "output_tokens": str(options.tokens), "prompt_tokens": "200"},
                seed=1,
                duration_seconds=options.seconds,
                output=Path(folder) / "run.json",
                processes=processes,
            )
        )
    failed = [record for record in run.records if record.error is not None]
    ttft = [record.ttft_seconds for record in run.records if record.ttft_seconds is not None]
    gaps = [gap for record in run.records for gap in record.itl_seconds]
    e2e = [record.e2e_seconds for record in run.records if record.e2e_seconds is not None]
    late = sorted(record.lateness_seconds for record in run.records)
    number = f"{len(run.records)}, {len(failed)} failed" if failed else f"{len(run.records)}"
    cells = [
        f"{processes}",
        f"{qps:g}",
        number,
        f"{_median(server.ttft_seconds)} / {_median(ttft)}",
        f"{_median(server.itl_seconds)} / {_median(gaps)}",
        _median(e2e),
        f"{late[int(len(late) * 0.99)] * 1e3:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _median(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f}"


if __name__ == "__main__":
    main()
