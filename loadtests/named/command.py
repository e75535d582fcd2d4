"""`kvasir loadtest NAME`: the same traffic to one fresh cluster per policy, and what each made of it.

Owns the runs, what is left of them in the output folder, and the exit status. Every policy gets a cluster
that was started for it: its caches are empty, and nothing of the one before can help or disturb it.
"""

import argparse
import contextlib
import dataclasses
import json
import shlex
import shutil
import signal
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from loadtests.load.locust_run import HeadlessRun, LoadTestFailed, run_headless
from loadtests.named.plan import JOINED, LoadtestError, LoadtestPlan, PlannedRun, make_plan, tenants_of
from loadtests.named.run_progress import RunProgress
from loadtests.named.summary import complaints, doubts, fairness_table, phase_table, sentence, table
from loadtests.progress import showing
from loadtests.reports.comparison import RunSet, compare
from loadtests.reports.page import write_pages
from loadtests.reports.report import Slo
from loadtests.reports.run_file import Run, RunFileError, read_run, write_run
from loadtests.stacks.fresh_cluster import FreshCluster, fresh_cluster
from loadtests.stacks.key_file import write_key_file
from router.caller import Tenant

BUSY_PERCENT = 30.0
INTERRUPTED = 130
HTML, MARKDOWN, LOGS = "report.html", "report.md", "logs"

Say = Callable[[str], None]


def run(arguments: argparse.Namespace, say: Say) -> int:
    """Returns the exit status. Raises LoadtestError, or ClusterError if a cluster does not come up."""
    plan = make_plan(arguments)
    try:
        plan.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadtestError(f"{plan.output} cannot be made: {error.strerror}") from error
    say(_announcement(plan))
    runs: list[tuple[str, Run]] = []
    was_interrupted = False
    try:
        with _one_interrupt():
            _run_all(plan, runs, say)
    except KeyboardInterrupt:
        was_interrupted = True
    except (LoadTestFailed, RunFileError) as error:
        raise LoadtestError(f"the load generator did not get through: {error}") from error
    if was_interrupted and not runs:
        _forget_output(plan)
        say("Interrupted before anything was measured; everything is stopped.")
        return INTERRUPTED
    problems = _conclude(plan, runs, say)
    if was_interrupted:  # what was cut off explains every difference
        say("Interrupted: this is what was measured until then. Everything is stopped.")
        return INTERRUPTED
    if arguments.open:
        webbrowser.open((plan.output / HTML).as_uri())
    for problem in problems:
        say(f"PROBLEM {problem}")
    return 1 if problems else 0


def _forget_output(plan: LoadtestPlan) -> None:
    """Only what is ours: the folder may have been there before, with other files in it."""
    for planned in plan.runs:
        shutil.rmtree(plan.output / LOGS / planned.name, ignore_errors=True)
    for folder in (plan.output / LOGS, plan.output):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _announcement(plan: LoadtestPlan) -> str:
    size, test = plan.size, plan.test
    rate = "at the trace's pace" if size.qps is None else f"at {size.qps:g} per second"
    policies = list(dict.fromkeys(each.label for each in plan.runs))
    fleet = f"on {size.num_replicas} fresh replicas ({plan.engine}) with {size.cache_tokens} tokens of cache"
    if plan.engine == JOINED:
        fleet = f"in front of {size.num_replicas} servers that run"
    return (
        f"{plan.name}: {test.summary}\n"
        f"{len(plan.runs)} runs ({', '.join(policies)}) of {size.duration_seconds:g} s {rate}, each {fleet}."
    )


def _run_all(plan: LoadtestPlan, runs: list[tuple[str, Run]], say: Say) -> None:
    """Run everything. Finished and started runs are in `runs`, whatever happens."""
    for number, planned in enumerate(plan.runs, start=1):
        label = f"[{number}/{len(plan.runs)}] {planned.label}"
        notes = _busyness()
        for note in notes:
            say(f"{label}: {note}: times will be longer, and differ from run to run.")
        path = plan.output / f"{planned.name}.json.gz"
        try:
            with _keys(plan) as keys:
                words = [*plan.cluster_words, *planned.cluster_words, *keys.cluster_words]
                with fresh_cluster(words, plan.output / LOGS / planned.name) as cluster:
                    say(f"{label}: cluster up in {cluster.start_seconds:.1f} s at {cluster.state.router_url}")
                    _send(plan, planned, cluster, keys, label)
        finally:
            if path.is_file():
                runs.append((planned.name, _described(path, notes)))


@dataclass(frozen=True, slots=True)
class _Keys:
    """API keys for `kvasir up` and the load generator."""

    cluster_words: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def _keys(plan: LoadtestPlan) -> Iterator[_Keys]:
    """Make new keys if tenants have any, in files that are removed afterwards."""
    if not plan.test.has_keys:
        yield _Keys()
        return
    with tempfile.TemporaryDirectory(prefix="kvasir-keys-") as name:
        ours, theirs = Path(name) / "cluster.json", Path(name) / "clients.json"
        named = [Tenant(name=tenant, slo_seconds=plan.slo_ttft) for tenant in tenants_of(plan)]
        theirs.write_text(json.dumps(write_key_file(ours, named)), encoding="utf-8")
        yield _Keys((f"--keys={ours}",), {"api-keys": str(theirs)})


def _busyness() -> tuple[str, ...]:
    """Note other work on the machine. Asked before each run, since it varies."""
    busy = psutil.cpu_percent(1.0)
    if busy <= BUSY_PERCENT:
        return ()
    return (f"other programs used {busy:.0f} % of the machine just before the run",)


def _send(plan: LoadtestPlan, planned: PlannedRun, cluster: FreshCluster, keys: _Keys, label: str) -> None:
    options = {**plan.locust_options(planned), **keys.options}
    if plan.test.kill_at:
        directory = shlex.quote(str(cluster.directory.path))
        options["kill-command"] = (
            f"{shlex.quote(sys.executable)} -P -m loadtests.named.kill_replica {directory}"
            + (" all" if plan.test.kills_all else "")
        )
        options["kill-at"] = " ".join(
            f"{share * plan.size.duration_seconds:g}" for share in plan.test.kill_at
        )
    progress = RunProgress(label, cluster.state.router_pages[0])
    with showing(progress.line):
        run_headless(
            HeadlessRun(
                base_url=cluster.state.router_url,
                model="",  # the only one
                workload=plan.test.workload,
                options=options,
                seed=planned.seed,
                duration_seconds=plan.size.duration_seconds,
                replica_metrics=[str(cluster.directory.targets_file)],
                output=plan.output / f"{planned.name}.json.gz",
            ),
            on_line=progress.hear,
        )


def _described(path: Path, notes: tuple[str, ...]) -> Run:
    """Return the run that Locust wrote, with the command that was typed instead of Locust's."""
    found = read_run(path)
    command = f"./kvasir {shlex.join(sys.argv[1:])}"
    info = dataclasses.replace(found.info, command=command, notes=(*found.info.notes, *notes))
    found = dataclasses.replace(found, info=info)
    write_run(found, path)
    return found


def _conclude(plan: LoadtestPlan, runs: list[tuple[str, Run]], say: Say) -> list[str]:
    """Write the report and say what came of it. Returns what must not be."""
    slo = Slo(plan.slo_ttft)
    write_pages(runs, slo, html=plan.output / HTML, markdown_file=plan.output / MARKDOWN)
    problems: list[str] = []
    for run_set in compare(runs, slo):
        problems += _say_set(plan, run_set, say)
    say(f"\nReport: {(plan.output / HTML).as_uri()}")
    return problems


def _say_set(plan: LoadtestPlan, run_set: RunSet, say: Say) -> list[str]:
    """Returns what must not be."""
    say(f"\n{table(run_set)}")
    if (phases := phase_table(run_set)) is not None:
        say(f"\n{phases}")
    if (told := sentence(run_set)) is not None:
        say(f"\n{told}")
    for each in (each for variant in run_set.variants for each in variant.runs):
        for note in each.run.info.notes:
            say(f"{each.name}: {note}.")
    if plan.test.has_keys:
        say(f"\n{fairness_table(run_set, Slo(plan.slo_ttft))}")
    for line in doubts(run_set):
        say(line)
    return complaints(run_set, plan.test.expected_errors, is_killing=bool(plan.test.kill_at))


@contextlib.contextmanager
def _one_interrupt() -> Iterator[None]:
    """The first of these signals ends what runs; further ones do not disturb the taking down."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(_number: int, _frame: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
