"""Load tests by Locust against a server with known delays: real sockets, real Locust processes.

Locust changes Python's own modules, so it always runs as a child.
"""

import csv
import re
import signal
import socket
import statistics
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from loadtests.load.locust_run import LOCUSTFILE, HeadlessRun, LoadTestFailed, run_headless
from loadtests.reports.report import make_report
from loadtests.reports.run_file import Run, read_run
from tests.loadtests.delay_server import MODEL, DelayServer, num_words, running

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SMALL = {"system_tokens": "64", "question_tokens": "20", "output_tokens": "6"}


def load(
    server: DelayServer,
    folder: Path,
    workload: str = "cross-user",
    *,
    seconds: float = 3.0,
    processes: int = 1,
    lines: list[str] | None = None,
    **options: str,
) -> Run:
    """Names of options have _ for -; parameters of the workload have their own names."""
    known = {name if name in SMALL else name.replace("_", "-"): value for name, value in options.items()}
    defaults = SMALL if workload == "cross-user" else {}
    return run_headless(
        HeadlessRun(
            base_url=server.url,
            model=MODEL,
            workload=workload,
            options={**defaults, **known},
            seed=5,
            duration_seconds=seconds,
            output=folder / "run.json.gz",
            processes=processes,
        ),
        on_line=None if lines is None else lines.append,
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_what_is_measured_is_what_the_server_does(processes: int, tmp_path: Path) -> None:
    with running(DelayServer(first_seconds=0.5, gap_seconds=0.1)) as server:
        run = load(server, tmp_path, qps="15", processes=processes, csv=str(tmp_path / "rows"))
    assert [record.error for record in run.records] == [None] * len(run.records)
    ttft = [record.ttft_seconds for record in run.records if record.ttft_seconds is not None]
    gaps = [gap for record in run.records for gap in record.itl_seconds]
    # Generous, since the machine may be busy.
    assert 0.45 < statistics.median(ttft) < 1.0
    assert 0.09 < statistics.median(gaps) < 0.2
    assert len(ttft) == len(run.records)
    assert len(gaps) == 5 * len(run.records)

    # No request is lost between the processes: the server has seen each of them once.
    assert len(server.bodies) == len(run.records)
    assert sorted(num_words(body) for body in server.bodies) == sorted(
        record.num_input_tokens for record in run.records
    )
    with (tmp_path / "rows_stats.csv").open() as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    number = str(len(run.records))
    assert [rows[name]["Request Count"] for name in ("ttft", "e2e", "tpot", "cached")] == [number] * 4
    assert rows["itl"]["Request Count"] == str(len(gaps))
    assert 450 < float(rows["ttft"]["Median Response Time"]) < 1000


def test_requests_go_out_at_their_time_however_slow_the_answers_are(tmp_path: Path) -> None:
    with running(DelayServer(first_seconds=4.0)) as server:
        run = load(server, tmp_path, qps="10")
    assert len(run.records) > 15
    assert all(record.error is None for record in run.records)
    assert statistics.median(record.lateness_seconds for record in run.records) < 1.5
    report = make_report(run.records)
    assert report.good_share == 0.0  # nothing within 2 s


def test_whatever_goes_wrong_is_a_record_a_miss_and_a_failure_of_locusts(tmp_path: Path) -> None:
    fates = ["whole", "refused", "cut", "hang", "failed"]
    server = DelayServer(fate=lambda number, _body: fates[number % len(fates)])
    lines: list[str] = []
    with running(server):
        run = load(server, tmp_path, qps="10", request_timeout="1", lines=lines)
    errors = Counter(record.error for record in run.records)
    assert set(errors) == {None, "refused (429)", "truncated", "timed out", "failed"}
    assert sum(errors.values()) == len(server.bodies)
    assert make_report(run.records).good_share == errors[None] / len(run.records)
    assert any("exit code 1" in line for line in lines)
    assert any("refused (429)" in line for line in lines)


def test_a_server_that_stops_listening_costs_requests_and_no_record(tmp_path: Path) -> None:
    server = DelayServer()

    def stop_at_the_eighth(number: int, _body: dict[str, Any]) -> str:
        if number == 7:
            server.stop()
        return "whole"

    server.fate = stop_at_the_eighth
    with running(server):
        run = load(server, tmp_path, qps="10")
    errors = {record.error for record in run.records}
    assert None in errors
    assert errors & {"connection refused", "connection lost"}
    assert sum(record.error is None for record in run.records) >= 7
    assert len({record.session for record in run.records}) == len(run.records)


def test_a_cache_that_mixes_tenants_is_found_out(tmp_path: Path) -> None:
    """The server takes a system prompt for cached as soon as anyone has sent it, whatever the salt."""
    seen: set[str] = set()

    def num_cached(body: dict[str, Any]) -> int:
        system = body["messages"][0]["content"]
        is_known = system in seen
        seen.add(system)
        return 64 if is_known else 0

    lines: list[str] = []
    with running(DelayServer(num_cached=num_cached)) as server:
        run = load(server, tmp_path, qps="10", lines=lines)
    assert sum(record.num_other_tenant_tokens or 0 for record in run.records) >= 64
    assert any("cached tokens came from other tenants" in line for line in lines)
    assert any("exit code 1" in line for line in lines)


def test_a_closed_loop_has_so_many_in_flight_and_no_more(tmp_path: Path) -> None:
    with running(DelayServer(first_seconds=0.1)) as server:
        run = load(server, tmp_path, "chat", seconds=4.0, processes=2, closed_loop="3", qps="20")
    assert all(record.error is None for record in run.records)
    assert server.most_in_flight == 3
    assert len(run.records) > 20
    assert run.info.workload["closed_loop_users"] == 3


def test_replicas_that_are_slow_to_tell_their_metrics_do_not_begin_a_closed_loop_twice(
    tmp_path: Path,
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        running(DelayServer(first_seconds=0.5)) as server,
    ):
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        lines: list[str] = []
        run = load(
            *(server, tmp_path, "chat"),
            seconds=5.0,
            lines=lines,
            closed_loop="4",
            qps="20",
            replica_metrics=address,
        )
    assert Counter(record.error for record in run.records).keys() == {None}
    assert sum("requests in 5 s" in line for line in lines) == 1
    assert not any("stopped before the last answer" in line for line in lines)


SLOW_TO_STOP = """
import gevent
from loadtests.load.worker import LoadWorker
stop = LoadWorker._stop
LoadWorker._stop = lambda self, **_: (gevent.sleep(5.0), stop(self))
from loadtests.locustfile import *
"""


def test_a_run_that_is_stopped_by_hand_keeps_what_it_has(tmp_path: Path) -> None:
    """However long its processes take to say what was on its way, up to the leader's patience."""
    output, locustfile = tmp_path / "run.json", tmp_path / "slow_to_stop.py"
    locustfile.write_text(SLOW_TO_STOP)
    with running(DelayServer(first_seconds=200.0)) as server:
        run = HeadlessRun(
            base_url=server.url,
            model=MODEL,
            workload="cross-user",
            options={"qps": "5"},
            seed=1,
            duration_seconds=60.0,
            output=output,
            processes=2,
        )
        command = [str(locustfile) if word == str(LOCUSTFILE) else word for word in run.command()]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
            while len(server.bodies) < 6 and child.poll() is None:
                time.sleep(0.05)
            child.send_signal(signal.SIGINT)
            child.wait(60)
        num_sent = len(server.bodies)
    run = read_run(output)
    # Those that were on their way count too, and what was never to be sent does not.
    assert 6 <= num_sent <= len(run.records) < 100
    assert {record.error for record in run.records} == {"stopped"}
    assert len({record.session for record in run.records}) == len(run.records)
    assert any(note.startswith("stopped by hand") for note in run.info.notes)


def test_a_kill_command_runs_at_its_time(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with running(DelayServer()) as server:
        run = load(server, tmp_path, shape="replica-kill", kill_command=f"touch {mark}; exit 3")
    assert mark.exists()
    (note,) = run.info.notes
    began = re.fullmatch(r"kill command at (\d+\.\d) s \(planned (\d+\.?\d*) s\), status 3", note)
    assert began is not None, note
    assert 1.0 <= float(began[2]) < 2.0, "amid the run"
    assert float(began[1]) > float(began[2]) - 0.1, "not before its time"


def test_a_model_that_is_not_served_is_named(tmp_path: Path) -> None:
    with running(DelayServer()) as server, pytest.raises(LoadTestFailed, match="serves no model gpt"):
        run_headless(
            HeadlessRun(
                base_url=server.url,
                model="gpt",
                workload="chat",
                seed=1,
                duration_seconds=2.0,
                output=tmp_path / "run.json",
            )
        )
