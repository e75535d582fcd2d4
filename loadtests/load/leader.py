"""The side of a load test that leads: hands out the plan, collects all records, ends the run, writes it down.

Owns when a run is over and what is kept of it. In a distributed run it is the master's, else that of the one
process. Requests are sent by `worker.py`.
"""

import logging
import random
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gevent
from locust.env import Environment
from locust.runners import MasterRunner, Runner

from loadtests.load.attribution import attribute
from loadtests.load.cluster_samples import ClusterSamples
from loadtests.load.options import (
    LeaderOptions,
    LoadOptions,
    OptionsError,
    api_key_of,
    leader_options,
    load_options,
    seed_of,
)
from loadtests.load.records import unanswered
from loadtests.load.target import Target, TargetError, find_target, page_tokens
from loadtests.load.users import LEAD_SECONDS
from loadtests.load.worker import PLAN, RECORDS
from loadtests.reports.report import RequestRecord, make_report
from loadtests.reports.run_figures import images_of
from loadtests.reports.run_file import Run, RunFileError, RunInfo, surroundings, write_run
from loadtests.reports.table import render
from loadtests.workloads import ideal_hits

SPAWN_RATE = 100.0
SETTLE_SECONDS = 0.5
"""From the last answer until the replicas' counters have it."""
GRACE_SECONDS = 30.0
RECORDS_SECONDS = 10.0
"""Longest wait, after a run was stopped by hand, for the records of what was on its way."""
LOST = "lost by the load generator"
BAD_OPTIONS = 2

logger = logging.getLogger(__name__)


class LoadLeader:
    """Lives as long as its process; leads one run after another."""

    def __init__(self, environment: Environment, runner: Runner) -> None:
        self._environment, self._runner = environment, runner
        self._run: _LeadRun | None = None
        self._last: _LeadRun | None = None
        self._has_failed = False
        runner.register_message(RECORDS, self._take_records)
        environment.events.test_start.add_listener(self._start)
        environment.events.test_stop.add_listener(self._stop)
        environment.events.quitting.add_listener(self._quit)

    def tick(self) -> tuple[int, float] | None:
        """For Locust's shape: how many users there should be; None ends the run."""
        if self._has_failed:
            self._has_failed = False
            return None
        # Another number of users while a run starts would make Locust give that up and start again.
        if self._run is None or not self._run.has_started:
            return max(1, self._num_connected()), SPAWN_RATE
        if self._run.is_over(self._connected()):
            return None
        return self._run.num_users(), SPAWN_RATE

    def _num_connected(self) -> int:
        return len(self._connected())

    def _connected(self) -> list[str]:
        runner = self._runner
        if not isinstance(runner, MasterRunner):
            return ["local"]
        clients = runner.clients
        return [client.id for client in clients.ready + clients.spawning + clients.running]

    def _start(self, **_: Any) -> None:
        parsed, base_url = self._environment.parsed_options, self._environment.host
        assert parsed is not None
        try:
            own = leader_options(parsed)
            seed = seed_of(parsed)
            seed = random.randrange(1, 1_000_000) if seed is None else seed
            if not base_url:
                raise OptionsError("--host says where the server is, as http://127.0.0.1:8000.")
            target = find_target(base_url, parsed.model or None, api_key_of(parsed))
            options = load_options(parsed, model=target.model, seed=seed)
            if options.sends_images:
                options = options.with_defaults(page_tokens(target, options.api_key) or {})
            self._run = _LeadRun(options, own, target, self._connected())
        except (OptionsError, TargetError) as error:
            logger.error("%s", error)
            self._has_failed = True
            self._environment.process_exit_code = BAD_OPTIONS
            return
        for index, sender in enumerate(self._run.senders):
            self._runner.send_message(PLAN, self._run.plan(index), sender)
        self._run.start()

    def _take_records(self, msg: Any, **_: Any) -> None:
        for run in (self._run, self._last):
            if run is not None and run.run_id == msg.data["run_id"]:
                run.take(msg.data)

    def _stop(self, **_: Any) -> None:
        if self._run is not None:
            self._gather(self._run)
            self._run.end()
            self._last, self._run = self._run, None
            self._write(self._last)

    def _gather(self, run: "_LeadRun") -> None:
        """Wait for the last records. Locust itself tells its workers of the end later, and waits half a
        second, if it quits."""
        latest = time.perf_counter() + RECORDS_SECONDS
        if isinstance(self._runner, MasterRunner) and not run.has_all(self._connected()):
            self._runner.send_message("stop")
        while not run.has_all(self._connected()) and time.perf_counter() < latest:
            gevent.sleep(0.05)

    def _quit(self, **_: Any) -> None:
        """Record the last requests of a run that was stopped by hand."""
        if self._last is not None and self._last.has_news:
            self._write(self._last)

    def _write(self, run: "_LeadRun") -> None:
        num_foreign = run.write()
        if num_foreign:
            logger.error("%d cached tokens came from other tenants", num_foreign)
            self._environment.process_exit_code = 1


class _LeadRun:
    """One run, from its plan to its file."""

    def __init__(self, options: LoadOptions, own: LeaderOptions, target: Target, senders: list[str]) -> None:
        self.senders = senders
        self.run_id = f"{options.seed}-{time.time_ns()}"
        self.has_news = False
        self.has_started = False
        self._options, self._own, self._target = options, own, target
        self._shape = options.make_shape()
        self._workload, num_left_out = options.make_workload(target.context_length)
        self._records: dict[int, RequestRecord] = {}
        self._done: set[str] = set()
        self._samples = ClusterSamples(own.replica_metrics)
        self._notes: list[str] = []
        if num_left_out:
            length = target.context_length
            self._notes.append(f"left out {num_left_out} requests that exceed the context of {length} tokens")
        self._was_completed = False
        self._surroundings = surroundings()
        self._time_zero = 0.0
        self._kills: list[gevent.Greenlet] = []

    def plan(self, index: int) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "base_url": self._target.base_url,
            "options": self._options.as_dict(),
            "context_length": self._target.context_length,
            "index": index,
            "num_workers": len(self.senders),
        }

    def start(self) -> None:
        """Right after the plan went out."""
        self._time_zero = time.perf_counter() + LEAD_SECONDS
        self._samples.start(self._time_zero)
        for at in self._own.kill_at if self._own.kill_command else ():
            wait = self._time_zero + at - time.perf_counter()
            self._kills.append(gevent.spawn_later(max(0.0, wait), self._kill, at))
        logger.info(
            "%s, seed %d: %d requests in %.0f s to %s",
            self._options.workload,
            self._options.seed,
            len(self._workload.requests),
            self._options.duration_seconds,
            self._target.base_url,
        )
        self.has_started = True

    def num_users(self) -> int:
        if not self._options.closed_loop:
            return len(self.senders)
        seconds = min(max(0.0, self._now()), self._options.duration_seconds)
        wanted = round(self._options.closed_loop * self._shape.rate_at(seconds))
        return max(len(self.senders), wanted)

    def is_over(self, connected: list[str]) -> bool:
        latest = self._options.duration_seconds + self._options.timeout_seconds + GRACE_SECONDS
        self._was_completed = self.has_all(connected) or self._now() > latest
        return self._was_completed

    def has_all(self, connected: list[str]) -> bool:
        """Every process is done, or gone."""
        return all(sender in self._done or sender not in connected for sender in self.senders)

    def take(self, message: dict[str, Any]) -> None:
        for number, fields in message["records"]:
            self._records[number] = RequestRecord(**{**fields, "itl_seconds": tuple(fields["itl_seconds"])})
        if message["is_done"]:
            self._done.add(message["sender"])
        self.has_news |= bool(message["records"])

    def end(self) -> None:
        for kill in self._kills:
            kill.kill()
        gevent.sleep(SETTLE_SECONDS)
        self._samples.stop()

    def write(self) -> int:
        """Prints the figures and writes the file. Returns how many tokens another tenant had cached."""
        self.has_news = False
        run = self._finished()
        counted = [record for record in run.records if record.arrival_seconds >= self._own.warmup_seconds]
        report = replace(make_report(counted), images=images_of(run))
        print(render(report, ideal_hits(self._workload)))
        num_foreign = sum(record.num_other_tenant_tokens or 0 for record in run.records)
        if self._own.run_file:
            try:
                write_run(run, Path(self._own.run_file))
            except RunFileError as error:
                logger.error("%s", error)
        return num_foreign

    def _finished(self) -> Run:
        records = dict(self._records)
        notes = list(self._notes)
        num_missing = len(self._workload.requests) - len(records)
        if num_missing and not self._was_completed:
            notes.append(f"stopped by hand; {num_missing} requests were never sent")
        elif num_missing and not self._options.closed_loop:
            notes.append(f"{num_missing} requests were lost with their load generator")
            for number, request in enumerate(self._workload.requests):
                if number not in records:
                    records[number] = unanswered(request, LOST, tenant=request.tenant)
        attributed = attribute(self._workload, records)
        options, own = self._options, self._own
        info = RunInfo(
            test=own.test_name,
            policy=own.policy,
            engine=own.engine,
            num_replicas=own.num_replicas or self._target.num_replicas or len(own.replica_metrics) or None,
            workload=_described(options),
            seed=options.seed,
            command=_command(),
            commit=self._surroundings.commit,
            machine=self._surroundings.machine,
            started_at=self._surroundings.started_at,
            warmup_seconds=own.warmup_seconds,
            notes=tuple(notes),
            cluster=own.cluster,
            kill_seconds=own.kill_at if own.kill_command else (),
        )
        ordered = tuple(
            sorted(
                (attributed[number] for number in sorted(attributed)), key=lambda each: each.arrival_seconds
            )
        )
        return Run(info, ordered, tuple(self._samples.samples), self._samples.totals)

    def _kill(self, at: float) -> None:
        began = self._now()
        status = subprocess.run(self._own.kill_command, shell=True, check=False).returncode
        self._notes.append(f"kill command at {began:.1f} s (planned {at:g} s), status {status}")

    def _now(self) -> float:
        return time.perf_counter() - self._time_zero


def _described(options: LoadOptions) -> dict[str, object]:
    """Name and parameters, those of the defaults left out."""
    described: dict[str, object] = {"name": options.workload}
    for setting in options.parameters.replace(",", " ").split():
        name, _, value = setting.partition("=")
        described[name] = value
    given = {
        "qps": options.qps,
        "duration_seconds": options.duration_seconds,
        "trace": options.trace or None,
        "speed": None if options.speed == 1 else options.speed,
        "scale_tokens": None if options.scale_tokens == 1 else options.scale_tokens,
        "shape": options.shape,
        "shape_low": options.shape_low,
        "shape_high": options.shape_high,
        "shape_period": options.shape_period,
        "closed_loop_users": options.closed_loop or None,
    }
    return described | {name: value for name, value in given.items() if value is not None}


def _command() -> str:
    words = ["--api-key=…" if word.startswith("--api-key=") else word for word in sys.argv[1:]]
    for position, word in enumerate(words[:-1]):
        if word == "--api-key":
            words[position + 1] = "…"
    return f"locust {shlex.join(words)}"
