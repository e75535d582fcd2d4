"""A run directory, and what is written into it of a cluster."""

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.commands.status import render
from cluster.controller.actors import ReplicaReport
from cluster.controller.views import FleetView, PoolView, ReplicaView
from cluster.errors import AlreadyRunning
from cluster.local.local_cluster import summary
from cluster.local.replica_entries import replica_entries
from cluster.local.run_directory import ClusterState, ReplicaEntry, RunDirectory, default_run_directory
from cluster.local.scrape_targets import scrape_targets
from cluster.registry import Registry
from replicas.config import ReplicaConfig
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState
from tests.cluster.commands.test_status import record, row, state

STATE = ClusterState(
    pid=12,
    redis_url="redis://127.0.0.1:1/0",
    redis_pid=13,
    ray_address="127.0.0.10:5",
    router_url="http://127.0.0.1:8000",
    router_pid=14,
    block_size=16,
    ready=True,
    replicas=(ReplicaEntry("replica-0", "ready", 15, "127.0.0.1:9", "e1"),),
    router_admins=("127.0.0.1:9101", "127.0.0.1:9102"),
    stop_seconds=35.0,
)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def test_a_state_is_read_as_it_was_written(directory: RunDirectory) -> None:
    with directory.claim():
        directory.write_state(STATE)
    assert directory.read_state() == STATE


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', '{"replicas": [3]}'])
def test_a_state_file_that_makes_no_sense_counts_as_none(directory: RunDirectory, content: str) -> None:
    with directory.claim():
        (directory.path / "cluster.json").write_text(content)
    assert directory.read_state() is None


def test_only_one_cluster_claims_a_directory_at_a_time(directory: RunDirectory) -> None:
    with directory.claim():
        assert directory.owner() == os.getpid()
        stop = f"{os.getpid()}.*stop it with ./kvasir down --run-dir {directory.path}, or"
        with pytest.raises(AlreadyRunning, match=stop), directory.claim():
            pass
    assert directory.owner() is None
    with directory.claim():
        pass


def test_a_claim_ends_with_its_process_however_that_ends(directory: RunDirectory) -> None:
    script = (
        "import sys, time; from pathlib import Path; from cluster.local.run_directory import RunDirectory\n"
        f"with RunDirectory(Path({str(directory.path)!r})).claim():\n"
        "    print('claimed', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert directory.owner() == process.pid
        process.kill()
    assert directory.owner() is None


def test_the_secret_is_for_this_user_only_and_new_each_time(directory: RunDirectory) -> None:
    with directory.claim():
        directory.renew()
        first = directory.secret_file.read_text()
        directory.renew()
    assert directory.secret_file.read_text() != first
    assert len(bytes.fromhex(first)) == 32
    assert stat.S_IMODE(directory.secret_file.stat().st_mode) == 0o600


def test_sockets_lie_where_nobody_else_may_enter_and_where_their_paths_are_short(tmp_path: Path) -> None:
    for path in (tmp_path / "run", tmp_path / ("x" * 120)):
        directory = RunDirectory(path)
        with directory.claim():
            directory.renew()
            (directory.socket_directory / "redis.sock").touch()
            directory.renew()
            assert not list(directory.socket_directory.iterdir())
            assert stat.S_IMODE(directory.socket_directory.stat().st_mode) == 0o700
            assert len(str(directory.socket_directory / "redis.sock")) < 107
            directory.forget()
        assert not directory.socket_directory.exists()
    assert directory.socket_directory.parent == Path("/tmp")


def test_logs_of_the_previous_cluster_go_and_those_of_the_last_one_stay(directory: RunDirectory) -> None:
    with directory.claim():
        (directory.logs / "router.log").write_text("old")
        directory.renew()
        assert not (directory.logs / "router.log").exists()
        (directory.logs / "router.log").write_text("new")
        directory.forget()
    assert (directory.logs / "router.log").read_text() == "new"
    assert not directory.secret_file.exists()


def test_in_a_checkout_the_run_directory_is_at_its_root(tmp_path: Path) -> None:
    (tmp_path / "kvasir").touch()
    (tmp_path / "pyproject.toml").touch()
    inner = tmp_path / "a/b"
    inner.mkdir(parents=True)
    assert default_run_directory(inner, {}) == tmp_path / ".kvasir"


def test_only_this_user_reads_the_state_for_the_url_of_redis_may_have_a_password(
    directory: RunDirectory,
) -> None:
    with directory.claim():
        directory.write_state(STATE)
        directory.write_targets([])
    assert stat.S_IMODE((directory.path / "cluster.json").stat().st_mode) == 0o600
    assert (directory.path / "prometheus_targets.json").stat().st_mode & stat.S_IROTH


def begun_and_ended(directory: RunDirectory) -> str:
    """The secret of a cluster that has run there."""
    with directory.claim():
        directory.renew()
        secret = directory.secret_file.read_text()
        directory.forget()
    return secret


def test_kv_on_disk_outlives_the_cluster_with_the_secret_of_its_names(directory: RunDirectory) -> None:
    directory.kv_directory.mkdir(parents=True)
    (directory.kv_directory / "chunk").touch()
    first, second = begun_and_ended(directory), begun_and_ended(directory)
    assert first == second
    assert stat.S_IMODE(directory.secret_file.stat().st_mode) == 0o600
    assert (directory.kv_directory / "chunk").exists()
    (directory.kv_directory / "chunk").unlink()
    directory.kv_directory.rmdir()
    assert begun_and_ended(directory) != first


@pytest.mark.parametrize("left", ["", "ab", "no hexadecimal digits"])
def test_a_secret_that_was_not_written_whole_is_made_anew(directory: RunDirectory, left: str) -> None:
    directory.kv_directory.mkdir(parents=True)
    directory.secret_file.write_text(left)
    assert len(bytes.fromhex(begun_and_ended(directory))) == 32


def test_replicas_and_controller_are_targets_for_as_long_as_they_serve_metrics() -> None:
    entries = (
        ReplicaEntry("small-pool-0", "ready", 5, "127.0.0.1:9", "e1", "127.0.0.1:19"),
        ReplicaEntry("small-pool-1", "draining", 5, "127.0.0.1:10", "e1", "127.0.0.1:20"),
        ReplicaEntry("small-pool-2", "stopped", 5, "127.0.0.1:11", "e1", "127.0.0.1:21"),
        ReplicaEntry("small-pool-3", "starting", None, None, None),
    )
    _, _, controller, *replicas = scrape_targets(
        replace(STATE, replicas=entries, controller_metrics="127.0.0.1:7")
    )
    assert controller == {"targets": ["127.0.0.1:7"], "labels": {"job": "kvasir-controller"}}
    assert [group["targets"] for group in replicas] == [["127.0.0.1:19"], ["127.0.0.1:20"]]
    assert replicas[0]["labels"] == {
        "job": "kvasir-replica",
        "replica": "small-pool-0",
        "pool": "small-pool",
    }


NAME = ReplicaId("replica-0")
REPORT = ReplicaReport(77, "127.0.0.1:9", Epoch("e1"), "127.0.0.1:19", "r", "machine")
NONE = FleetView(1, (), (), None, (), None)


def view(shown: ReplicaState, report: ReplicaReport | None = None) -> FleetView:
    return replace(NONE, replicas=(ReplicaView(NAME, shown, report, None, 0, False, None, False),))


LATE = [view(ReplicaState.STOPPED, REPORT), NONE, view(ReplicaState.STARTING)]
READY = replica_entries(view(ReplicaState.READY, REPORT), (), lambda _: True)


@pytest.mark.parametrize(
    "views", [[NONE], [view(ReplicaState.STARTING)], [NONE, view(ReplicaState.STARTING)], LATE]
)
def test_a_replica_that_outlives_its_controller_is_shown_as_routers_see_it_and_scraped(
    views: list[FleetView],
) -> None:
    entries = READY
    for each in views:
        entries = replica_entries(each, entries, lambda pid: pid == 77)
    assert entries == (replace(READY[0], state="starting"),), "nobody takes it for one that has been replaced"
    table = render(state(*entries), Registry({NAME: record(NAME, "e1")}))
    assert row(table, NAME)[1:4] == ["ready", "e1", "77"]
    assert row(render(state(*entries), Registry({NAME: record(NAME, "e2")})), NAME)[1:3] == ["ready", "e2"]
    assert row(render(state(*entries), Registry({})), NAME)[1] == "starting"
    assert [target["targets"] for target in scrape_targets(state(*entries))][1:] == [["127.0.0.1:19"]]
    newer = replace(REPORT, pid=78, epoch=Epoch("e2"))
    (now,) = replica_entries(view(ReplicaState.READY, newer), entries, lambda _: True)
    assert (now.state, now.pid, now.epoch) == ("ready", 78, "e2")


def test_a_replica_has_the_role_of_its_pool() -> None:
    pool = PoolView("replica", "m", "r", 1, 1, is_settled=True, failure=None, role="prefill")
    ready = replace(view(ReplicaState.READY, REPORT), pools=(pool,))
    assert [entry.role for entry in replica_entries(ready, (), lambda _: True)] == ["prefill"]
    assert READY[0].role == "both"
    said = summary(state(replace(READY[0], role="prefill")), "m", RunDirectory(Path("run")), ReplicaConfig())
    assert "epoch e1  role prefill\n" in said
    assert " role " not in summary(state(*READY), "m", RunDirectory(Path("run")), ReplicaConfig())


def test_a_replica_whose_process_has_ended_is_gone_from_the_state() -> None:
    (starting,) = replica_entries(view(ReplicaState.STARTING), READY, lambda _: False)
    assert starting == ReplicaEntry(NAME, "starting", None, None, None)
    assert replica_entries(NONE, READY, lambda _: False) == ()
    stopped = view(ReplicaState.STOPPED, REPORT)
    assert [each.state for each in replica_entries(stopped, READY, lambda _: False)] == ["stopped"]
    draining = replica_entries(view(ReplicaState.DRAINING, REPORT), READY, lambda _: True)
    assert [each.state for each in replica_entries(stopped, draining, lambda _: True)] == ["stopped"]
