"""The run directory of one local cluster: its lock, its state file, its logs, its secrets.

Owns the file names and formats.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import secrets
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cluster.errors import AlreadyRunning

LOCK_SECONDS = 0.2

TOKEN_BYTES = 32

MAX_SOCKET_DIRECTORY_BYTES = 90
"""Paths of Unix sockets are limited to 107 bytes."""


@dataclass(frozen=True, slots=True)
class ReplicaEntry:
    replica_id: str
    state: str
    pid: int | None
    address: str | None
    epoch: str | None
    metrics_address: str | None = None


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What `kvasir up` says of its cluster to the other commands. `ready` once it serves."""

    pid: int
    redis_url: str
    redis_pid: int | None
    ray_address: str
    router_url: str
    router_pid: int | None
    block_size: int
    ready: bool
    replicas: tuple[ReplicaEntry, ...] = ()
    controller_metrics: str | None = None
    router_admins: tuple[str, ...] = ()
    """Where each of several routers has its page, explanations and metrics; `router_pid` is their parent's.
    None: there is one router, and `router_url` has all that."""
    keys_file: str | None = None
    """Where its API keys are; None if it has none."""
    stop_seconds: float = 20.0
    """How long its end may take."""

    @property
    def router_pages(self) -> tuple[str, ...]:
        """Addresses of the page, one for each router."""
        return tuple(f"http://{admin}" for admin in self.router_admins) or (self.router_url,)


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        digest = hashlib.sha256(str(self.path).encode()).hexdigest()[:10]
        # Ray puts Unix sockets under this path, whose length is limited to 107 bytes.
        self.ray_directory = Path("/tmp") / f"kvasir-ray-{digest}"
        inside = self.path / "sockets"
        is_short = len(os.fsencode(inside)) <= MAX_SOCKET_DIRECTORY_BYTES
        self.socket_directory = inside if is_short else Path("/tmp") / f"kvasir-sockets-{digest}"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def secret_file(self) -> Path:
        return self.path / "secret"

    @property
    def ray_token_file(self) -> Path:
        return self.path / "ray-token"

    @property
    def targets_file(self) -> Path:
        """For Prometheus: where metrics are."""
        return self.path / "prometheus_targets.json"

    @property
    def kv_directory(self) -> Path:
        """The replicas' KV on disk, which outlives the cluster: the next one in this directory finds it."""
        return self.path / "kv"

    def command(self, words: str) -> str:
        """`./kvasir` with `words`, to be typed in the checkout, about the cluster of this directory."""
        if self.path.name == ".kvasir" and _is_checkout(self.path.parent):
            return f"./kvasir {words}"
        return f"./kvasir {words} --run-dir {shlex.quote(str(self.path))}"

    @property
    def _state_file(self) -> Path:
        return self.path / "cluster.json"

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Be the one cluster of this directory until the context is left. Raises AlreadyRunning."""
        self.logs.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("a+") as lock:
            if not _lock_within(lock.fileno(), LOCK_SECONDS):
                lock.seek(0)
                owner = lock.read().strip() or "unknown"
                raise AlreadyRunning(
                    f"a cluster already runs in {self.path} (process {owner}); "
                    f"stop it with {self.command('down')}, or choose another --run-dir"
                )
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            yield

    def owner(self) -> int | None:
        """The pid of the `kvasir up` that has claimed this directory and lives; None if there is none."""
        try:
            with (self.path / "lock").open("r") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    text = lock.read().strip()
                    return int(text) if text.isdigit() else None
        except OSError:
            return None
        return None

    def renew(self) -> None:
        """Forget the previous cluster's logs; make a cluster secret, Ray's token and a directory for sockets.

        All are for this user alone. Where there is KV on disk, the secret stays what it was, since the names
        of KV are made with it. Raises OSError if another user has made that directory.
        """
        for log in self.logs.glob("*.log"):
            log.unlink()
        _write_token(self.ray_token_file)
        if not (self.kv_directory.is_dir() and _has_token(self.secret_file)):
            _write_token(self.secret_file)
        shutil.rmtree(self.socket_directory, ignore_errors=True)
        self.socket_directory.mkdir(mode=0o700)

    def write_state(self, state: ClusterState) -> None:
        # Only this user may read it: the URL of Redis may have a password.
        _replace(self._state_file, dataclasses.asdict(state), 0o600)

    def write_targets(self, groups: Sequence[Mapping[str, Any]]) -> None:
        _replace(self.targets_file, groups, 0o644)

    def read_state(self) -> ClusterState | None:
        """None if there is none, or none that this version can read."""
        try:
            return msgspec.json.decode(self._state_file.read_bytes(), type=ClusterState)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def forget(self) -> None:
        """Remove what speaks of a running cluster. Logs stay, and KV on disk with the secret of its names."""
        self._state_file.unlink(missing_ok=True)
        self.targets_file.unlink(missing_ok=True)
        if not self.kv_directory.is_dir():
            self.secret_file.unlink(missing_ok=True)
        self.ray_token_file.unlink(missing_ok=True)
        shutil.rmtree(self.socket_directory, ignore_errors=True)


def _write_token(file: Path) -> None:
    """Another one in the file's place. Raises OSError."""
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as new:
        new.write(secrets.token_hex(TOKEN_BYTES) + "\n")


def _has_token(file: Path) -> bool:
    """Whether a whole one is there, which a full disk may have prevented."""
    try:
        return len(bytes.fromhex(file.read_text())) == TOKEN_BYTES
    except (OSError, ValueError):
        return False


def _replace(path: Path, content: Any, mode: int) -> None:
    """A reader finds the old content or the new, whole. Raises OSError."""
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(content, indent=2) + "\n")
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def _lock_within(descriptor: int, seconds: float) -> bool:
    """A process that only asks for the owner holds the lock too, for a moment."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)


def _is_checkout(directory: Path) -> bool:
    return (directory / "kvasir").is_file() and (directory / "pyproject.toml").is_file()


def default_run_directory(working_directory: Path, environment: Mapping[str, str]) -> Path:
    """`.kvasir` in the checkout that we are in, else in the user's state directory."""
    for directory in (working_directory, *working_directory.parents):
        if _is_checkout(directory):
            return directory / ".kvasir"
    state = environment.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local/state") / "kvasir"
