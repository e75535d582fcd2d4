"""kvasir status: registry in Redis and state file joined, as a table or as JSON.

Asks Redis, so it answers while replicas are busy and controllers are down, and the routers for the programs
that they know, if these answer within a moment.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from cluster.commands.tables import align, size
from cluster.local.processes import named_children
from cluster.local.run_directory import ClusterState, ReplicaEntry
from cluster.registry import Registry
from replicas.process.settings import without_password
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.status import ReplicaId, ReplicaState, Role

SILENT = "silent"
"""State of a replica whose process lives, by the controller's account, while its lease has run out."""

HEADER = ("REPLICA", "STATE", "EPOCH", "PID", "ADDRESS", "REQUESTS", "BLOCKS", "CACHED TOKENS")
PROGRAM_HEADER = ("PROGRAM", "AGENT", "STATE", "HOME", "TOKENS", "TURNS", "SERVED")
STATES = ("paused", "active", "waiting")
MAX_PROGRAMS = 20
MAX_NAME = 24
ASK_SECONDS = 1.0
TIERS = ("HOST MEMORY", "DISK")
"""Columns for KV below the device, used and total; shown if any replica has such a tier."""


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """One replica, from the state file and the registry. `role` is None if only the registry has it."""

    replica_id: ReplicaId
    state: str
    epoch: str | None
    pid: int | None
    address: str | None
    load: LoadSnapshot | None
    role: str | None


def replica_rows(state: ClusterState, registry: Registry) -> Iterator[ReplicaRow]:
    entries = {ReplicaId(entry.replica_id): entry for entry in state.replicas}
    for replica_id in sorted(entries.keys() | registry.records.keys()):
        entry, record = entries.get(replica_id), registry.records.get(replica_id)
        if entry is not None and record is not None and record.epoch != entry.epoch:
            serves_on = entry.state == ReplicaState.STARTING and entry.epoch is not None
            if not serves_on:  # else the next incarnation has registered, and is about to be known
                record = None  # the lease of an earlier incarnation, which has yet to expire
        yield ReplicaRow(
            replica_id,
            _state(entry, record, is_registry_read=registry.complaint is None),
            (record.epoch if record else None) or (entry.epoch if entry else None),
            entry.pid if entry else None,
            (record.address if record else None) or (entry.address if entry else None),
            record.load if record else None,
            entry.role if entry else None,
        )


def as_plain(
    state: ClusterState, registry: Registry, programs: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return the cluster for JSON."""
    return {
        "ready": state.ready,
        "router_url": state.router_url,
        "router_pages": list(state.router_pages),
        "router_pid": state.router_pid,
        "redis_url": without_password(state.redis_url),
        "redis_pid": state.redis_pid,
        "redis_complaint": registry.complaint,
        "refused_records": list(registry.refused),
        "ray_address": state.ray_address,
        "controller_metrics": state.controller_metrics,
        "block_size": state.block_size,
        "programs": list(programs),
        "replicas": msgspec.to_builtins(list(replica_rows(state, registry))),
    }


def ask_programs(pages: Iterable[str]) -> list[dict[str, Any]]:
    """Return the programs that each router knows, of those that answer within a moment."""
    found = []
    for page in pages:
        try:
            answer = httpx.get(f"{page}/live/programs", timeout=ASK_SECONDS, trust_env=False)
            content = answer.raise_for_status().json()
        except (httpx.HTTPError, ValueError):
            continue
        if isinstance(content, dict) and isinstance(content.get("programs"), list):
            found.append(content)
    return found


def program_lines(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format them by tenant, then one by one. A program that several routers know is told of once."""
    programs: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for program in (each for answer in answers for each in answer["programs"]):
        key = tuple(str(program[name]) for name in ("tenant", "model", "source", "session", "agent", "salt"))
        if key not in programs or program["turns"] > programs[key]["turns"]:
            programs[key] = program
    if not programs:
        return []
    counts: Counter[tuple[str, str]] = Counter()
    for each in (tenant for answer in answers for tenant in answer["tenants"]):
        for name in STATES:
            key = each["tenant"], name
            counts[key] = max(counts[key], each[name])  # each router knows most of the others', too
    lines = [
        f"programs of {tenant}: " + ", ".join(f"{counts[tenant, name]} {name}" for name in STATES)
        for tenant in sorted({tenant for tenant, _ in counts})
    ]
    listed = sorted(programs.values(), key=_place)
    rows = [PROGRAM_HEADER, *(_program_cells(each) for each in listed[:MAX_PROGRAMS])]
    more = max(len(programs), *(answer["num_programs"] for answer in answers)) - MAX_PROGRAMS
    return ["", *lines, *align(rows), *([f"and {more} more"] if more > 0 else [])]


def _place(program: Mapping[str, Any]) -> tuple[int, float]:
    """Sort key: the longest wait first, then active programs, then paused ones."""
    return -STATES.index(program["state"]), -(program["waits_seconds"] or 0.0)


def _program_cells(program: Mapping[str, Any]) -> tuple[str, ...]:
    waits = program["waits_seconds"]
    return (
        f"{program['source']} {_short(program['session'])}",
        _short(program["agent"] or "-"),
        program["state"] if waits is None else f"waiting {waits:.0f} s",
        program["home"] or "-",
        f"{program['tokens']:,}",
        str(program["turns"]),
        f"{program['attained_seconds']:.1f} s",
    )


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"


def render(state: ClusterState, registry: Registry, programs: Sequence[Mapping[str, Any]] = ()) -> str:
    replicas = list(replica_rows(state, registry))
    rows = [HEADER, *(_cells(row, state.block_size) for row in replicas)]
    if any(row.role not in (None, Role.BOTH) for row in replicas):
        rows = [(*rows[0], "ROLE"), *((*c, r.role or "-") for c, r in zip(rows[1:], replicas, strict=True))]
    if any(row.load is not None and row.load.max_host_bytes for row in replicas):
        tiers = [TIERS, *(_tier_cells(row.load) for row in replicas)]
        rows = [(*cells, *more) for cells, more in zip(rows, tiers, strict=True)]
    redis_line = f"Redis   {without_password(state.redis_url)}"
    if state.redis_pid:
        redis_line += f"  pid {state.redis_pid}"
    if registry.refused:
        redis_line += f"  IGNORED: {'; '.join(registry.refused)}"
    if registry.complaint:
        redis_line += f"  NOT REACHABLE: {registry.complaint}"
    phase = "" if state.ready else "  (still starting)"
    router_lines = [f"router  {state.router_url}  pid {state.router_pid}{phase}"]
    if state.router_admins:
        pids = named_children(state.router_pid)
        names = [f"router-{number}" for number in range(len(state.router_admins))]
        router_lines += [
            f"  {name}  pid {pids.get(name, '-')}  page and metrics {page}/"
            for name, page in zip(names, state.router_pages, strict=True)
        ]
    return "\n".join(
        [
            *align(rows),
            "",
            *router_lines,
            redis_line,
            f"Ray     {state.ray_address}",
            *program_lines(programs),
        ]
    )


def _state(entry: ReplicaEntry | None, record: ReplicaRecord | None, *, is_registry_read: bool) -> str:
    """Merge the controller's view of the process with the replica's own record; the later state wins."""
    if entry is None:
        assert record is not None, "a row comes from the one or the other"
        return record.state.value
    if record is not None and entry.state != ReplicaState.STOPPED:
        return record.state.value  # perhaps of one that serves until its next incarnation is ready
    is_running = entry.state in (ReplicaState.READY, ReplicaState.DRAINING)
    return SILENT if is_running and is_registry_read else entry.state


def _cells(row: ReplicaRow, block_size: int) -> tuple[str, ...]:
    pid = str(row.pid) if row.pid else "-"
    load = _load_cells(row.load, block_size)
    return (row.replica_id, row.state, row.epoch or "-", pid, row.address or "-", *load)


def _tier_cells(load: LoadSnapshot | None) -> tuple[str, str]:
    if load is None:
        return ("-", "-")
    return (
        _fill(load.num_host_bytes, load.max_host_bytes),
        _fill(load.num_disk_bytes, load.max_disk_bytes),
    )


def _fill(num_bytes: int, max_bytes: int) -> str:
    return f"{size(num_bytes)}/{size(max_bytes)}" if max_bytes else "-"


def _load_cells(load: LoadSnapshot | None, block_size: int) -> tuple[str, str, str]:
    if load is None:
        return ("-", "-", "-")
    waiting = f" +{load.num_waiting} waiting" if load.num_waiting else ""
    return (
        f"{load.num_running}{waiting}",
        f"{load.num_used_blocks}/{load.num_total_blocks}",
        f"{load.num_cached_blocks * block_size}{' (predicted)' if load.is_predicted else ''}",
    )
