"""Child processes of `kvasir up`: they die with it, and leftovers are found again.

Owns the mark that tells its processes from others.
"""

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from cluster.errors import StartFailed

MARK = "KVASIR_CLUSTER_OF"
"""Environment variable that every process of a cluster inherits; its value is the run directory."""

_PR_SET_PDEATHSIG = 1


class Service:
    """One long-running child with a log file. Its process group ends with it, unless `children_outlive_it`:
    then its children live until `stop`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        children_outlive_it: bool = False,
    ) -> None:
        self.name = name
        self.log = log
        self._children_outlive_it = children_outlive_it
        self._command = tuple(command)
        self._environment = dict(environment)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start it. Raises StartFailed. A log that cannot be opened only loses its content."""
        with await asyncio.to_thread(self._open_log) as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=asyncio.subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                    preexec_fn=death_with_parent(signal.SIGKILL),
                )
            except OSError as error:
                raise StartFailed(f"cannot start {self.name}: {error}") from error

    def _open_log(self) -> BinaryIO:
        try:
            return self.log.open("ab")
        except OSError:
            return Path(os.devnull).open("ab")

    async def wait(self) -> int:
        assert self._process is not None, "start it first"
        return await self._process.wait()

    def kill_group(self) -> None:
        """Kill what it left behind in its process group."""
        if self._process is not None and not self._children_outlive_it:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def has_ended(self) -> bool:
        return self._process is None or self._process.returncode is not None

    async def stop(self, grace_seconds: float) -> None:
        """Ask, wait, kill. Safe in any state."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_seconds):
                    await self._process.wait()
                    return

    async def complaint(self) -> str:
        """Return the last lines of its log, for an error message."""
        try:
            text = await asyncio.to_thread(self.log.read_text, encoding="utf-8", errors="replace")
        except OSError as error:
            return f"its log cannot be read: {error}"
        return "\n".join(text.strip().splitlines()[-5:])


def death_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """Return the hook for a child before exec: the kernel signals the child when the calling thread ends."""
    if not hasattr(os, "sched_getaffinity"):  # not Linux: `kvasir down` still finds leftovers
        return None
    libc = ctypes.CDLL(None)  # loaded here: nothing that takes a lock may happen between fork and exec
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, number)


def find_marked(run_directory: Path, ray_directory: Path) -> list[int]:
    """Find the processes of the cluster in `run_directory`, by inherited mark or by open files.

    Both are needed, because Redis and Ray's processes overwrite their environment with their title. Skips
    this process and its ancestors.
    """
    mark = f"{MARK}={run_directory}".encode() + b"\0"
    spared = _ancestry()
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [
        pid
        for pid in pids
        if pid not in spared
        and (_has_mark(pid, mark) or _holds_files(pid, run_directory / "logs", ray_directory))
    ]


def _has_mark(pid: int, mark: bytes) -> bool:
    with suppress(OSError):
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        return environment.startswith(mark) or b"\0" + mark in environment
    return False


def _holds_files(pid: int, logs: Path, ray_directory: Path) -> bool:
    """Whether it writes our logs (readers do not count), or has Ray's files open."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = entry.readlink()
                if target.is_relative_to(ray_directory) or (
                    entry.name == "1" and target.is_relative_to(logs)
                ):
                    return True
    return False


def _ancestry() -> set[int]:
    pids, pid = set(), os.getpid()
    while pid > 0 and pid not in pids:
        pids.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return pids


def named_children(pid: int | None) -> dict[str, int]:
    """Return a process's children by short name; empty without /proc."""
    found = {}
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with suppress(OSError):
                found[Path(f"/proc/{child}/comm").read_text().strip()] = int(child)
    return found


def kill_marked(run_directory: Path, ray_directory: Path, patience_seconds: float = 5.0) -> int:
    """Kill what is left of a cluster; returns the number of processes."""
    killed: set[int] = set()
    deadline = time.monotonic() + patience_seconds
    while (left := find_marked(run_directory, ray_directory)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(left)
        time.sleep(0.02)
    return len(killed)
