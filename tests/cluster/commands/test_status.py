import json
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from cluster.commands import status
from cluster.commands.status import as_plain, render
from cluster.local.local_cluster import summary
from cluster.local.run_directory import ClusterState, ReplicaEntry, RunDirectory
from cluster.registry import Registry, read_registry
from replicas.config import ReplicaConfig
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import MODELS_KEY, ReplicaRecord, encode_record, replica_key, replicas_key
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState

LOAD = LoadSnapshot(
    num_running=3, num_waiting=2, num_used_blocks=40, num_cached_blocks=10, num_total_blocks=100
)


def record(name: str, epoch: str, state: ReplicaState = ReplicaState.READY) -> ReplicaRecord:
    return ReplicaRecord(ReplicaId(name), Epoch(epoch), "127.0.0.1:9", state, "digest", 0, LOAD)


READY = ReplicaEntry("replica-0", "ready", 77, "127.0.0.1:9", "e1")
LEASE = record("replica-0", "e1")
PREDICTED = replace(LEASE, load=LoadSnapshot(num_cached_blocks=10, is_predicted=True))


def state(*entries: ReplicaEntry, ready: bool = True) -> ClusterState:
    return ClusterState(1, "redis://r/0", 2, "127.0.0.10:5", "http://h:8000", 3, 16, ready, entries)


def row(table: str, name: str) -> list[str]:
    (line,) = (line for line in table.splitlines() if line.startswith(name))
    return line.split()


NO_LEASE = Registry({})


@pytest.mark.parametrize(
    ("entry", "lease", "expected"),
    [
        (READY, LEASE, ["ready", "e1", "77", "127.0.0.1:9", "3", "+2", "waiting", "40/100", "160"]),
        (READY, PREDICTED, ["ready", "e1", "77", "127.0.0.1:9", "0", "0/0", "160", "(predicted)"]),
        (replace(READY, state="starting", pid=None, address=None, epoch=None), LEASE, ["starting", *"-----"]),
        (replace(READY, state="stopped"), LEASE, ["stopped", "e1", "77"]),
        (READY, None, ["silent", "e1"]),
        (None, replace(LEASE, epoch=Epoch("e9"), state=ReplicaState.DRAINING), ["draining", "e9", "-"]),
    ],
)
def test_a_replica_is_shown_as_its_process_and_its_lease_say(
    entry: ReplicaEntry | None, lease: ReplicaRecord | None, expected: list[str]
) -> None:
    registry = NO_LEASE if lease is None else Registry({lease.replica_id: lease})
    table = render(state(*([] if entry is None else [entry])), registry)
    assert row(table, "replica-0")[1:][: len(expected)] == expected
    assert "DISK" not in table


def test_roles_are_shown_where_a_replica_has_one_of_its_own() -> None:
    other = replace(READY, replica_id="replica-1", role="prefill")
    both = Registry({ReplicaId(name): record(name, "e1") for name in ("replica-0", "replica-1", "replica-2")})
    table = render(state(READY, other), both)
    assert table.splitlines()[0].endswith("ROLE")
    assert [row(table, f"replica-{number}")[-1] for number in range(3)] == ["both", "prefill", "-"]
    assert "ROLE" not in render(state(READY), both)
    assert [each["role"] for each in as_plain(state(READY, other), NO_LEASE)["replicas"]] == [
        *("both", "prefill"),
    ]


def test_json_says_what_the_table_says() -> None:
    registry = Registry({ReplicaId("replica-0"): LEASE}, refused=("replica x: bad",))
    shown = json.loads(json.dumps(as_plain(replace(state(READY), redis_url="redis://:pass@r/0"), registry)))
    (replica,) = shown["replicas"]
    assert (replica["replica_id"], replica["state"], replica["epoch"], replica["pid"]) == (
        *("replica-0", "ready", "e1"),
        77,
    )
    assert replica["load"]["num_running"] == 3 and replica["load"]["num_waiting"] == 2
    assert shown["ready"] and shown["router_url"] == "http://h:8000"
    assert shown["refused_records"] == ["replica x: bad"] and shown["redis_complaint"] is None
    assert "pass" not in shown["redis_url"]


def test_the_registry_is_read_from_redis_and_the_dead_are_left_out(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        client.sadd(MODELS_KEY, "m")
        client.sadd(replicas_key("m"), "replica-0", "replica-1")
        client.hset(
            replica_key("m", ReplicaId("replica-0")), mapping=encode_record(record("replica-0", "e1"))
        )
    registry = read_registry(redis_url)
    assert registry == Registry({ReplicaId("replica-0"): record("replica-0", "e1")})


def test_the_password_of_redis_is_not_shown() -> None:
    running = replace(state(), redis_url="redis://:secret@r/0")
    assert "redis://:***@r/0" in render(running, Registry({}))
    said = summary(running, "toy", RunDirectory(Path("run")), ReplicaConfig())
    assert "secret" not in said + render(running, Registry({}))


def test_a_router_that_hangs_or_answers_nonsense_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "ASK_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        pages = [f"http://127.0.0.1:{silent.getsockname()[1]}", "http://127.0.0.1:1"]
        assert status.ask_programs(pages) == []
        assert time.monotonic() - started < 5
