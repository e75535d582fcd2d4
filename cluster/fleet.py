"""kvasir fleet: a fleet on any Ray cluster, kept as a file says by a controller that lives there.

Owns the arguments, what is printed and exit codes. Decides nothing of the fleet: the controller does,
and refuses what cannot be before anything is touched.
"""

import argparse
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.capacity import misfit
from cluster.config import FleetSpec, pool_of_id
from cluster.errors import ClusterError, NotRunning
from cluster.fleet_file import parse_fleet, settings_from
from cluster.status import Registry, align, read_registry
from replicas.protocol.settings import SettingsError, without_password

if TYPE_CHECKING:
    from cluster.members import FleetView, ReplicaView  # it loads Ray, which a refused file need not wait for


Say = Callable[[str], None]

WAIT_SECONDS = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(
        dest="fleet_command", metavar="COMMAND", required=True, parser_class=type(parser)
    )

    def add(name: str, what: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, allow_abbrev=False, help=what, description=what)
        command.add_argument(
            "--address",
            metavar="RAY",
            help="the Ray cluster, host:port (default: RAY_ADDRESS, else the one on this machine)",
        )
        return command

    def add_waiting(command: argparse.ArgumentParser) -> None:
        command.add_argument(
            "--no-wait", action="store_true", help="do not wait until the fleet is as it should be"
        )
        command.add_argument(
            "--timeout",
            type=_seconds,
            default=WAIT_SECONDS,
            metavar="SECONDS",
            help="wait no longer than that; the controller goes on (default: %(default)g)",
        )

    apply = add("apply", "make the fleet what FILE says, and keep it so")
    apply.add_argument("file", metavar="FILE", type=Path, help="YAML; deploy/fleet.yaml explains every field")
    apply.add_argument("--redis-url", metavar="URL", help="goes before the file's redis_url")
    apply.add_argument("--dry-run", action="store_true", help="only say whether the file would be taken")
    add_waiting(apply)
    status = add("status", "show pools and replicas, and how busy they are")
    status.add_argument("--json", action="store_true", help="print it as JSON")
    scale = add("scale", "give a pool another number of replicas, until the next apply")
    scale.add_argument("pool", metavar="POOL")
    scale.add_argument("num_replicas", metavar="N", type=_count)
    add_waiting(scale)
    drain = add("drain", "let a replica finish what runs and leave; a fresh one takes its place")
    drain.add_argument("replica", metavar="REPLICA")
    add_waiting(drain)
    rollout = add("rollout", "make a pool's replicas anew, a few at a time, with other settings or the same")
    rollout.add_argument("pool", metavar="POOL")
    rollout.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting; repeatable"
    )
    add_waiting(rollout)
    stop = add("stop", "end all replicas and the controller; requests that run are aborted")
    stop.add_argument("--timeout", type=_seconds, default=60.0, metavar="SECONDS")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"needs a number of seconds above 0, not {text}")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"needs a whole number, not {text}")
    return int(text)


def run(arguments: argparse.Namespace, environment: Mapping[str, str], say: Say) -> int:
    """The command. Raises ClusterError."""
    if arguments.fleet_command == "apply":
        spec = _read(arguments)
        with connected(arguments, environment) as ray:
            return _apply(ray, arguments, spec, say)
    with connected(arguments, environment) as ray:
        controller = _controller(ray)
        match arguments.fleet_command:
            case "status":
                return _status(ray, controller, as_json=arguments.json, say=say)
            case "stop":
                return _stop(ray, controller, arguments.timeout, say)
            case "scale":
                refusal = _ask(
                    ray, arguments, controller.scale.remote(arguments.pool, arguments.num_replicas)
                )
            case "drain":
                refusal = _ask(ray, arguments, controller.drain.remote(arguments.replica))
            case "rollout":
                try:
                    values = settings_from(arguments.set)
                except SettingsError as error:
                    raise ClusterError(str(error)) from error
                refusal = _ask(ray, arguments, controller.roll_out.remote(arguments.pool, values))
        return _conclude(ray, controller, arguments, refusal, say)


def _read(arguments: argparse.Namespace) -> FleetSpec:
    try:
        return parse_fleet(arguments.file.read_text(encoding="utf-8"), arguments.redis_url)
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"cannot read {arguments.file}: {error}") from error
    except SettingsError as error:
        raise ClusterError(f"{arguments.file}: {error}") from error


@contextlib.contextmanager
def connected(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Iterator[Any]:
    """Ray, as a driver of the cluster that was named. Raises ClusterError."""
    import ray

    from cluster.actors import NAMESPACE

    address = arguments.address or environment.get("RAY_ADDRESS") or "auto"
    host = address.rpartition(":")[0]
    # On loopback Ray would look for this machine under its address on the network.
    options: dict[str, Any] = {"_node_ip_address": host} if host.startswith("127.") else {}
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **options,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(f"there is no Ray cluster at {address}: {' '.join(str(error).split())}") from error
    try:
        yield ray
    except ray.exceptions.RayTaskError as error:
        raise ClusterError(f"the fleet controller failed at that: {error.cause!r}") from error
    except ray.exceptions.RayError as error:
        raise ClusterError(f"the fleet controller does not answer: {' '.join(str(error).split())}") from error
    finally:
        ray.shutdown()


def _controller(ray: Any) -> Any:
    from cluster.actors import CONTROLLER_NAME, NAMESPACE

    try:
        return ray.get_actor(CONTROLLER_NAME, NAMESPACE)
    except ValueError:
        raise NotRunning("no fleet runs on this Ray cluster; start one with kvasir fleet apply") from None


def _apply(ray: Any, arguments: argparse.Namespace, spec: FleetSpec, say: Say) -> int:
    from cluster.actors import find_or_create_controller, machines
    from cluster.controller import FleetController
    from cluster.model_check import check_models

    refusal = misfit(spec, machines())
    if refusal is not None:
        raise ClusterError(refusal)
    # A controller that runs looks by itself, at what is new to it; for none, not even one is started.
    is_checked = arguments.dry_run or not _has_controller(ray)
    if is_checked:
        found = check_models(spec.pools)
        if found.refusal is not None:
            raise ClusterError(found.refusal)
        for note in found.notes:
            say(note)
    if arguments.dry_run:
        say(f"{arguments.file} has {len(spec.pools)} pools, and the cluster can hold and load them.")
        return 0
    controller = find_or_create_controller(FleetController, replace(spec, pools=()), runs_itself=True)
    refusal = _ask(ray, arguments, controller.apply.remote(spec, is_checked=is_checked))
    return _conclude(ray, controller, arguments, refusal, say)


def _has_controller(ray: Any) -> bool:
    try:
        _controller(ray)
    except NotRunning:
        return False
    return True


def _ask(ray: Any, arguments: argparse.Namespace, call: Any) -> str | None:
    answer: str | None = ray.get(call, timeout=arguments.timeout)
    return answer


def _conclude(ray: Any, controller: Any, arguments: argparse.Namespace, refusal: str | None, say: Say) -> int:
    if refusal is not None:
        raise ClusterError(refusal)
    if arguments.no_wait:
        return 0
    deadline = time.monotonic() + arguments.timeout
    view: FleetView | None = None
    while True:
        try:
            seen_version = None if view is None else view.version
            left = max(0.0, deadline - time.monotonic())
            fresh: FleetView = ray.get(controller.view.remote(seen_version), timeout=left)
        except ray.exceptions.GetTimeoutError:
            why = "" if view is None else missing(view)
            raise ClusterError(
                f"the fleet is not what it should be after {arguments.timeout:g} s{why}; "
                "the controller goes on"
            ) from None
        if view is not None:
            for note in fresh.notes:
                say(note)
        view = fresh
        complaint = None
        if arguments.fleet_command in ("apply", "rollout"):  # else an old failure is no news
            complaint = trouble(view, arguments.pool if "pool" in arguments else None)
        if complaint is not None:
            raise ClusterError(complaint)
        if all(pool.is_settled for pool in view.pools) and not _orphans(view):
            ready = ", ".join(f"{pool.name} {pool.num_ready}" for pool in view.pools)
            say(f"ready: {ready}")
            return 0


def missing(view: "FleetView") -> str:
    """What there is, and who waits for room, to be put behind a sentence."""
    ready = ", ".join(f"{pool.name} {pool.num_ready} of {pool.num_replicas}" for pool in view.pools)
    waiting = [replica.replica_id for replica in view.replicas if replica.is_waiting_for_room]
    if not waiting:
        return f" (ready: {ready})"
    return f" (ready: {ready}; waiting for room in the Ray cluster: {', '.join(waiting)})"


def trouble(view: "FleetView", pool_name: str | None) -> str | None:
    """Why waiting will not help, for one pool or for any: one sentence, or None."""
    for pool in view.pools:
        if pool_name not in (None, pool.name):
            continue
        if pool.failure is not None:
            return f"the rollout of pool {pool.name} was given up, the old replicas serve on: {pool.failure}"
        if pool.num_ready == 0:
            for replica in view.replicas:
                if replica.cause and replica.refused_to_start and pool_of_id(replica.replica_id) == pool.name:
                    return f"pool {pool.name} does not start: {replica.replica_id}: {replica.cause}"
    return None


def _orphans(view: "FleetView") -> list[str]:
    names = {pool.name for pool in view.pools}
    return [replica.replica_id for replica in view.replicas if pool_of_id(replica.replica_id) not in names]


def _stop(ray: Any, controller: Any, timeout: float, say: Say) -> int:
    with contextlib.suppress(ray.exceptions.GetTimeoutError):
        ray.get(controller.stop_fleet.remote(), timeout=timeout)
    ray.kill(controller, no_restart=True)
    say("The fleet is stopped.")
    return 0


def _status(ray: Any, controller: Any, *, as_json: bool, say: Say) -> int:
    view: FleetView = ray.get(controller.view.remote())
    registry = Registry({}) if view.redis_url is None else read_registry(view.redis_url)
    say(json.dumps(as_plain(view, registry), indent=2) if as_json else render(view, registry))
    return 0


def as_plain(view: "FleetView", registry: Registry) -> dict[str, Any]:
    """The fleet as JSON has it."""
    return {
        "redis_url": None if view.redis_url is None else without_password(view.redis_url),
        "redis_complaint": registry.complaint,
        "controller_metrics": view.metrics_address,
        "complaints": list(view.complaints),
        "pools": [asdict(pool) for pool in view.pools],
        "replicas": [
            {
                "replica_id": replica.replica_id,
                "pool": pool_of_id(replica.replica_id),
                "state": replica.state.value,
                "revision": replica.revision,
                "cause": replica.cause,
                "is_waiting_for_room": replica.is_waiting_for_room,
                **(asdict(replica.report) if replica.report else {}),
                "load": asdict(registry.records[replica.replica_id].load)
                if replica.replica_id in registry.records
                else None,
            }
            for replica in view.replicas
        ],
    }


def render(view: "FleetView", registry: Registry) -> str:
    pools = [("POOL", "MODEL", "READY", "WANTED", "REVISION", "")]
    for pool in view.pools:
        remark = "" if pool.is_settled else "on its way"
        if pool.failure is not None:
            remark = f"rollout given up: {pool.failure}"
        pools.append(
            (pool.name, pool.model, str(pool.num_ready), str(pool.num_replicas), pool.revision, remark)
        )
    replicas = [("REPLICA", "STATE", "REVISION", "ADDRESS", "REQUESTS", "PENDING TOKENS")]
    for replica in view.replicas:
        record = registry.records.get(replica.replica_id)
        load = None if record is None else record.load
        replicas.append(
            (
                replica.replica_id,
                _state(replica),
                replica.revision or "-",
                replica.report.address if replica.report else "-",
                "-" if load is None else str(load.num_running + load.num_waiting),
                "-" if load is None else str(load.num_pending_tokens),
            )
        )
    redis_line = f"Redis    {'-' if view.redis_url is None else without_password(view.redis_url)}"
    if registry.complaint is not None:
        redis_line += f"  NOT REACHABLE: {registry.complaint}"
    lines = [*align(pools), "", *align(replicas), "", redis_line]
    if view.metrics_address is not None:
        lines.append(f"metrics  http://{view.metrics_address}/metrics (the controller's)")
    return "\n".join([*lines, *(f"WRONG    {complaint}" for complaint in view.complaints)])


def _state(replica: "ReplicaView") -> str:
    if replica.is_waiting_for_room:
        return f"{replica.state.value} (waits for room)"
    return replica.state.value + (f" ({replica.cause})" if replica.cause else "")
