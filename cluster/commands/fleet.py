"""kvasir fleet: a fleet on any Ray cluster, kept as its file says by a controller that lives there.

Owns the arguments and exit codes. The controller decides, and refuses impossible specs before it changes
anything.
"""

import argparse
import contextlib
import json
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.commands.fleet_words import as_plain, is_settled, missing, ready, render, trouble
from cluster.commands.follow import Look, follow
from cluster.commands.ray_token import refuse_open
from cluster.config import FleetSpec
from cluster.controller.capacity import misfit
from cluster.errors import ClusterError, NotRunning
from cluster.fleet_file import parse_fleet, settings_from
from cluster.registry import Registry, read_registry
from cluster.role_complaints import role_complaints
from replicas.process.secret_file import open_secret_complaint
from replicas.process.settings import SettingsError

if TYPE_CHECKING:
    from cluster.controller.views import FleetView  # it loads Ray, which a refused file need not wait for


Say = Callable[[str], None]

NO_FLEET = "no fleet runs on this Ray cluster; start one with kvasir fleet apply"

WAIT_SECONDS = 1800.0
LOOK_SECONDS = 30.0
"""Seconds that --follow waits for the controller to answer a question."""
CONNECT_SECONDS = 5.0
"""Seconds that a Ray cluster has to take a connection."""
APPLY_SECONDS = 120.0
"""Seconds that apply waits for the controller to take a file; it first asks machines whether models load."""
REFUSED_SECONDS = 60.0
"""Seconds until a refused file is tried again unchanged."""


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

    apply = add("apply", "make the fleet what FILE describes, and keep it that way")
    apply.add_argument("file", metavar="FILE", type=Path, help="YAML; deploy/fleet.yaml explains every field")
    apply.add_argument("--redis-url", metavar="URL", help="default: $REDIS_URL, else the file's redis_url")
    apply.add_argument(
        "--without-token", action="store_true", help="accept a Ray cluster that asks for no token"
    )
    instead_of_waiting = _add_waiting(apply)
    instead_of_waiting.add_argument(
        "--dry-run", action="store_true", help="only check whether the file could be applied"
    )
    instead_of_waiting.add_argument(
        "--follow",
        action="store_true",
        help="run until SIGTERM, and apply FILE again whenever it has changed or the cluster has lost it",
    )
    apply.add_argument(
        "--ready-file",
        metavar="PATH",
        type=Path,
        help="with --follow: path of a file that exists while the fleet is what FILE says",
    )
    status = add("status", "show pools and replicas, and how busy they are")
    status.add_argument("--json", action="store_true", help="print it as JSON")
    scale = add("scale", "give a pool another number of replicas, until the next apply")
    scale.add_argument("pool", metavar="POOL")
    scale.add_argument("num_replicas", metavar="N", type=_count)
    _add_waiting(scale)
    drain = add("drain", "let a replica finish its requests, then replace it")
    drain.add_argument("replica", metavar="REPLICA")
    _add_waiting(drain)
    rollout = add("rollout", "replace a pool's replicas step by step, with new settings or the same")
    rollout.add_argument("pool", metavar="POOL")
    rollout.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting; repeatable"
    )
    _add_waiting(rollout)
    stop = add("stop", "stop all replicas and the controller; running requests are aborted")
    stop.add_argument("--timeout", type=_seconds, default=60.0, metavar="SECONDS")


def _add_waiting(command: argparse.ArgumentParser) -> Any:
    """Add the options for waiting; returns the group, so that other flags can exclude it."""
    instead = command.add_mutually_exclusive_group()
    instead.add_argument(
        "--no-wait", action="store_true", help="do not wait until the fleet is as it should be"
    )
    command.add_argument(
        "--timeout",
        type=_seconds,
        default=WAIT_SECONDS,
        metavar="SECONDS",
        help="maximum wait; the controller goes on afterwards (default: %(default)g)",
    )
    return instead


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
    """Run the command. Raises ClusterError."""
    if arguments.fleet_command == "apply":
        if arguments.ready_file is not None and not arguments.follow:
            raise ClusterError("--ready-file needs --follow")
        arguments.redis_url = arguments.redis_url or environment.get("REDIS_URL")
        spec = _read(arguments)
        if (complaint := open_secret_complaint(spec.secret_file)) is not None:
            say(complaint)
        for complaint in role_complaints(spec):
            say(complaint)
        with connected(arguments, environment) as ray:
            if not arguments.without_token:
                refuse_open(ray.get_runtime_context().gcs_address)
            if arguments.dry_run:
                return _try(spec, arguments.file, say)
            if arguments.follow:
                return follow(_Followed(ray, arguments, say).look, arguments.ready_file, say)
            _refuse_misfit(spec)
            controller = _apply(ray, _find_controller(ray, arguments.timeout), spec, arguments.timeout, say)
            return _conclude(ray, controller, arguments, say)
    with connected(arguments, environment) as ray:
        if arguments.fleet_command == "stop":
            return _stop(ray, arguments.timeout, say)
        controller = _controller(ray, LOOK_SECONDS if "timeout" not in arguments else arguments.timeout)
        match arguments.fleet_command:
            case "status":
                return _status(ray, controller, as_json=arguments.json, say=say)
            case "scale":
                _ask(ray, controller.scale.remote(arguments.pool, arguments.num_replicas), arguments.timeout)
            case "drain":
                _ask(ray, controller.drain.remote(arguments.replica), arguments.timeout)
            case "rollout":
                try:
                    values = settings_from(arguments.set)
                except SettingsError as error:
                    raise ClusterError(str(error)) from error
                _ask(ray, controller.roll_out.remote(arguments.pool, values), arguments.timeout)
        return _conclude(ray, controller, arguments, say)


def _read(arguments: argparse.Namespace) -> FleetSpec:
    try:
        return parse_fleet(arguments.file.read_text(encoding="utf-8"), arguments.redis_url)
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"cannot read {arguments.file}: {error}") from error
    except SettingsError as error:
        raise ClusterError(f"{arguments.file}: {error}") from error


@contextlib.contextmanager
def connected(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Iterator[Any]:
    """Connect to Ray as a driver of the named cluster. Raises ClusterError."""
    import ray

    from cluster.controller.actors import NAMESPACE

    address = arguments.address or environment.get("RAY_ADDRESS") or "auto"
    host = address.rpartition(":")[0]
    # On loopback Ray would look for this machine under its address on the network.
    options: dict[str, Any] = {"_node_ip_address": host} if host.startswith("127.") else {}
    # What its machines complain of Ray prints to stdout, also while it ends, and there are our answers.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            _look_there(address)
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **options,
            )
        except (OSError, RuntimeError, ValueError) as error:
            said = " ".join(str(error).split())
            raise ClusterError(f"there is no Ray cluster at {address}: {said}") from error
        try:
            with _in_our_words(ray):
                yield ray
        finally:
            ray.shutdown()


def _look_there(address: str) -> None:
    """Raises OSError where nothing listens: Ray tries for minutes to reach a cluster that has ended."""
    from ray._private.services import canonicalize_bootstrap_address

    found = canonicalize_bootstrap_address(address) if address == "auto" else address
    if found is not None and "://" not in found:
        host, _, port = found.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise OSError(f"{found} does not answer: {error}") from error


@contextlib.contextmanager
def _in_our_words(ray: Any) -> Iterator[None]:
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise ClusterError(f"the fleet controller failed: {error.cause!r}") from error
    except ray.exceptions.RayError as error:
        raise ClusterError(f"the fleet controller does not answer: {' '.join(str(error).split())}") from error


def _controller(ray: Any, timeout: float) -> Any:
    controller = _find_controller(ray, timeout)
    if controller is None:
        raise NotRunning(NO_FLEET)
    return controller


def _find_controller(ray: Any, timeout: float) -> Any | None:
    """Find the controller. Raises ClusterError if its version differs, since it might misread what it is
    sent."""
    controller = _named_controller(ray)
    if controller is None:
        return None
    ours = version("kvasir")
    try:
        theirs = ray.get(controller.version.remote(), timeout=timeout)
    except AttributeError:
        theirs = "an older version"
    if theirs != ours:
        raise ClusterError(
            f"the fleet controller is of Kvasir {theirs}, and this command of {ours}: "
            "let Ray's head start again with the same version"
        )
    return controller


def _named_controller(ray: Any) -> Any | None:
    from cluster.controller.actors import CONTROLLER_NAME, NAMESPACE

    try:
        return ray.get_actor(CONTROLLER_NAME, NAMESPACE)
    except ValueError:
        return None


def _try(spec: FleetSpec, file: Path, say: Say) -> int:
    _refuse_misfit(spec)
    _refuse_unloadable(spec, say)
    say(f"{file} has {len(spec.pools)} pools, and the cluster has room for them and can load their models.")
    return 0


def _refuse_misfit(spec: FleetSpec) -> None:
    from cluster.controller.actors import machines

    refusal = misfit(spec, machines())
    if refusal is not None:
        raise ClusterError(refusal)


def _refuse_unloadable(spec: FleetSpec, say: Say) -> None:
    from cluster.controller.model_check import check_models

    found = check_models(spec.pools)
    if found.refusal is not None:
        raise ClusterError(found.refusal)
    for note in found.notes:
        say(note)


def _apply(
    ray: Any, controller: Any | None, spec: FleetSpec, timeout: float, say: Say, *, may_wait: bool = False
) -> Any:
    """Apply the spec to the controller, created if there is none, and return it. Raises ClusterError."""
    from cluster.controller.actors import find_or_create_controller
    from cluster.controller.fleet_controller import FleetController

    # A controller that runs looks by itself, at what is new to it; for none, not even one is started.
    is_checked = controller is None
    if is_checked:
        _refuse_unloadable(spec, say)
    controller = find_or_create_controller(FleetController, replace(spec, pools=()), runs_itself=True)
    _ask(ray, controller.apply.remote(spec, is_checked=is_checked, may_wait=may_wait), timeout)
    return controller


class _Followed:
    """The file of --follow. Applied unless it was the last one applied, so that manual scaling and rollouts
    stay. A refused file is retried rarely, because each try asks the machines."""

    def __init__(self, ray: Any, arguments: argparse.Namespace, say: Say) -> None:
        self._ray = ray
        self._arguments = arguments
        self._say = say
        self._refused: tuple[str, str, float] | None = None

    def look(self, unready: Callable[[], None]) -> Look:
        with _in_our_words(self._ray):
            spec = _read(self._arguments)
            controller = _find_controller(self._ray, LOOK_SECONDS)
            if controller is None or self._view(controller).applied_revision != spec.revision:
                unready()
                controller = self._apply(controller, spec)
            view = self._view(controller)
        complaint = trouble(view, None)
        if complaint is not None:
            return Look(False, complaint)
        if not is_settled(view):
            return Look(False, f"the fleet is not yet what it should be{missing(view)}")
        return Look(True, ready(view))

    def _apply(self, controller: Any | None, spec: FleetSpec) -> Any:
        from cluster.controller.actors import machines

        if self._refused is not None:
            revision, sentence, refused_at = self._refused
            if revision == spec.revision and time.monotonic() < refused_at + REFUSED_SECONDS:
                raise ClusterError(sentence)
        lacking = misfit(spec, machines())
        if lacking is not None:
            self._say(f"{lacking}; they wait for it")
        try:
            told = _apply(self._ray, controller, spec, APPLY_SECONDS, self._say, may_wait=True)
        except ClusterError as error:
            self._refused = (spec.revision, str(error), time.monotonic())
            raise
        self._refused = None
        self._say(f"{self._arguments.file} is applied")
        return told

    def _view(self, controller: Any) -> "FleetView":
        view: FleetView = self._ray.get(controller.view.remote(), timeout=LOOK_SECONDS)
        return view


def _ask(ray: Any, call: Any, timeout: float) -> None:
    """Wait for a call. Raises ClusterError with the controller's sentence if it refuses."""
    refusal: str | None = ray.get(call, timeout=timeout)
    if refusal is not None:
        raise ClusterError(refusal)


def _conclude(ray: Any, controller: Any, arguments: argparse.Namespace, say: Say) -> int:
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
        if is_settled(view):
            say(ready(view))
            return 0


def _stop(ray: Any, timeout: float, say: Say) -> int:
    """Stop the fleet, whichever version its controller is."""
    from cluster.controller import actors

    controller = _named_controller(ray)
    if controller is None:
        if actors.recall() is None:
            raise NotRunning(NO_FLEET)
        actors.forget()
        say("There is no controller. The state that it had kept is deleted.")
        return 0
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
