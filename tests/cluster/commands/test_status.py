import json
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from cluster.commands import status
from cluster.commands.status import as_plain, program_lines, render
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


def test_without_redis_the_table_says_so_and_one_that_still_starts_is_marked() -> None:
    table = render(state(READY, ready=False), read_registry("redis://127.0.0.1:9/0"))
    assert row(table, "replica-0")[:4] == ["replica-0", "ready", "e1", "77"]
    assert "NOT REACHABLE" in table and "(still starting)" in table


def test_tiers_below_the_device_are_shown_where_a_replica_has_any() -> None:
    registry = {
        ReplicaId(name): replace(record(name, "e1"), load=load)
        for name, load in {
            "a": LoadSnapshot(
                num_host_bytes=3 << 19, max_host_bytes=1 << 28, num_disk_bytes=700, max_disk_bytes=2 << 30
            ),
            "b": LoadSnapshot(max_host_bytes=1 << 40),
            "c": LOAD,
        }.items()
    }
    entries = [ReplicaEntry(name, "ready", 7, "h:9", "e1") for name in "abcd"]
    table = render(state(*entries), Registry(registry))
    cells = [re.split(r" {2,}", line)[-2:] for line in table.splitlines()[:5]]
    assert cells == [
        ["HOST MEMORY", "DISK"],
        ["1.5 MiB/256 MiB", "700 B/2.0 GiB"],
        ["0 B/1.0 TiB", "-"],
        ["-", "-"],
        ["-", "-"],
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


@pytest.mark.parametrize(("keys_file", "chat"), [(None, "chat"), ("keys.yaml", "chat --api-key KEY")])
def test_what_to_try_names_the_run_directory_and_the_port(keys_file: str | None, chat: str) -> None:
    running = replace(state(), router_url="http://127.0.0.1:8123", keys_file=keys_file)
    said = summary(running, "toy", RunDirectory(Path("/tmp/my run")), ReplicaConfig())
    assert f"  ./kvasir {chat} --run-dir '/tmp/my run'\n" in said
    assert "curl http://127.0.0.1:8123/v1/" in said


def program(session: str, **more: object) -> dict[str, object]:
    told: dict[str, object] = {
        **{"tenant": "red", "model": "toy", "source": "codex", "session": session, "agent": None},
        "salt": None,
        **{"state": "paused", "home": "replica-0", "tokens": 12_345, "turns": 7},
        **{"attained_seconds": 8.25, "waits_seconds": None},
    }
    return told | more


def told(
    programs: Sequence[object], tenants: Sequence[object], num_programs: int | None = None
) -> dict[str, object]:
    number = len(programs) if num_programs is None else num_programs
    return {"programs": programs, "tenants": tenants, "num_programs": number}


def test_programs_are_told_by_tenant_and_each_once_however_many_routers_know_it() -> None:
    waits = program("s-2", state="waiting", waits_seconds=12.3, home=None, tenant="green", agent="a")
    red, green = ({"tenant": name, "active": 1, "paused": 1, "waiting": 0} for name in ("red", "green"))
    late = green | {"active": 0, "paused": 0, "waiting": 1}
    answers = [
        told([program("s-1", turns=6, home="replica-1"), waits], [red | {"active": 0}, late]),
        told([program("s-1"), program("s" * 40, state="active")], [red]),
    ]
    lines = program_lines(answers)
    assert lines[1:3] == [
        "programs of green: 0 paused, 0 active, 1 waiting",
        "programs of red: 1 paused, 1 active, 0 waiting",
    ]
    rows = [line.split() for line in lines[4:]]
    assert rows[0] == ["codex", "s-2", "a", "waiting", "12", "s", "-", "12,345", "7", "8.2", "s"]
    assert rows[2] == ["codex", "s-1", "-", "paused", "replica-0", "12,345", "7", "8.2", "s"]
    assert rows[1][1] == "s" * 23 + "…" and len(rows) == 3
    assert program_lines([told([], [])]) == program_lines([]) == []
    many = told([program(f"s-{n}") for n in range(25)], [red | {"paused": 150}], num_programs=150)
    assert program_lines([many])[1] == "programs of red: 150 paused, 1 active, 0 waiting"
    assert program_lines([many])[-1] == "and 130 more"


def test_a_router_that_hangs_or_answers_nonsense_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "ASK_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        pages = [f"http://127.0.0.1:{silent.getsockname()[1]}", "http://127.0.0.1:1"]
        assert status.ask_programs(pages) == []
        assert time.monotonic() - started < 5
