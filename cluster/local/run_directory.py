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
from replicas.protocol.status import Role

LOCK_SECONDS = 0.2

TOKEN_BYTES = 32

MAX_SOCKET_DIRECTORY_BYTES = 90
"""Unix socket paths are limited to 107 bytes."""


@dataclass(frozen=True, slots=True)
class ReplicaEntry:
    replica_id: str
    state: str
    pid: int | None
    address: str | None
    epoch: str | None
    metrics_address: str | None = None
    role: str = Role.BOTH.value


@dataclass(frozen=True, slots=True)
class ClusterState:
    """State that `kvasir up` publishes to other commands. `ready` once it serves."""

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
    """Admin addresses of several routers, whose parent is `router_pid`. Empty: `router_url` has
    everything."""
    keys_file: str | None = None
    """Path of the API keys; None without keys."""
    stop_seconds: float = 20.0
    """Seconds that stopping may take."""

    @property
    def router_pages(self) -> tuple[str, ...]:
        """Return the page's address for each router."""
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
        """File that tells Prometheus where metrics are."""
        return self.path / "prometheus_targets.json"

    @property
    def kv_directory(self) -> Path:
        """Folder of the replicas' KV, which the next cluster in this directory finds."""
        return self.path / "kv"

    def command(self, words: str) -> str:
        """Return the `./kvasir` command line for this cluster."""
        if self.path.name == ".kvasir" and _is_checkout(self.path.parent):
            return f"./kvasir {words}"
        return f"./kvasir {words} --run-dir {shlex.quote(str(self.path))}"

    @property
    def _state_file(self) -> Path:
        return self.path / "cluster.json"

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Lock the directory for one cluster. Raises AlreadyRunning."""
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
        """Return the pid of the live `kvasir up` that holds this directory, or None."""
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
        """Remove the previous cluster's logs; make a cluster secret, Ray's token and a directory for sockets.

        All are private to this user. If there is KV on disk, the secret stays, since KV is named with it.
        Raises OSError if another user owns the directory.
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
        """Read the state; None if it is missing or of another version."""
        try:
            return msgspec.json.decode(self._state_file.read_bytes(), type=ClusterState)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def forget(self) -> None:
        """Remove the state of a running cluster. Logs stay, and so do KV on disk and its secret."""
        self._state_file.unlink(missing_ok=True)
        self.targets_file.unlink(missing_ok=True)
        if not self.kv_directory.is_dir():
            self.secret_file.unlink(missing_ok=True)
        self.ray_token_file.unlink(missing_ok=True)
        shutil.rmtree(self.socket_directory, ignore_errors=True)


def _write_token(file: Path) -> None:
    """Replace the token file. Raises OSError."""
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as new:
        new.write(secrets.token_hex(TOKEN_BYTES) + "\n")


def _has_token(file: Path) -> bool:
    """Whether the token file is complete; a full disk may have truncated it."""
    try:
        return len(bytes.fromhex(file.read_text())) == TOKEN_BYTES
    except (OSError, ValueError):
        return False


def _replace(path: Path, content: Any, mode: int) -> None:
    """Replace a file atomically. Raises OSError."""
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
    """Lock, waiting briefly: a process that asks for the owner holds the lock for a moment."""
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
    """Return `.kvasir` in the current checkout, else in the user's state directory."""
    for directory in (working_directory, *working_directory.parents):
        if _is_checkout(directory):
            return directory / ".kvasir"
    state = environment.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local/state") / "kvasir"
