"""Counts instructions of a decision, and of a request at the door of a router, with valgrind.

Owns how they are counted. Processor time depends on what else runs on the machine, and a processor's own
counters are out of reach in most containers. Valgrind counts user space alone, and nearly the same each time.
The row's name says which Python and which processors the figures hold for.
"""

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

ROW = f"instructions, {platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}, "
ROW += platform.machine()

NUM_DECISIONS = 2000
NUM_WARM_UP, NUM_REQUESTS = 96, 192
"""Requests of each kind. A warm-up fills caches and the bytecode that Python specializes."""


def count_instructions() -> Mapping[str, float]:
    """Takes minutes. Raises RuntimeError where valgrind is not installed."""
    if shutil.which("valgrind") is None or shutil.which("callgrind_control") is None:
        raise RuntimeError("valgrind is not installed (Debian: apt-get install valgrind)")
    return {**_decisions(), **_requests()}


def _decisions() -> Mapping[str, float]:
    with _Counted("loadtests.ratchet.decisions") as counted:
        return {
            f"{name}, instructions": counted.count(f"{kind} {NUM_DECISIONS}") / NUM_DECISIONS
            for name, kind in (("a decision", "plain"), ("a decision with tiers", "tiers"))
        }


def _requests() -> Mapping[str, float]:
    """Chats of 1,000 tokens with answers of 32."""
    found = {}
    with _Counted("loadtests.ratchet.requests") as counted:
        for seed, kind in enumerate(("streamed", "whole")):
            counted.act(f"{kind} {NUM_WARM_UP} {2 * seed}")
            total = counted.count(f"{kind} {NUM_REQUESTS} {2 * seed + 1}")
            found[f"a request {kind}, instructions"] = total / NUM_REQUESTS
    return found


class _Counted:
    """A process that follows orders, under valgrind, which counts while it is told to."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        self._out = Path(self._folder.name) / "counts"
        # Hashes of texts are the same in every run, or sets would not be.
        command = ["env", "PYTHONHASHSEED=0", "valgrind", "--tool=callgrind", "--instr-atstart=no"]
        command += [f"--callgrind-out-file={self._out}", sys.executable, "-m", self._module]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        with self._folder, self._process:
            self._process.kill()

    def act(self, order: str) -> None:
        self._write(order)
        self._write("")

    def count(self, order: str) -> int:
        """Return the instructions of an order, without its preparation."""
        self._write(order)
        self._control("--instr=on")
        self._control("--zero")
        self._write("")
        self._control("--dump")
        self._control("--instr=off")
        newest = max(self._out.parent.glob(f"{self._out.name}.*"), key=lambda path: int(path.suffix[1:]))
        return _total(newest)

    def _write(self, line: str) -> None:
        """Raises RuntimeError if the process ends before it answers."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError(f"{self._module} has ended")

    def _control(self, order: str) -> None:
        command = ["callgrind_control", order, str(self._process.pid)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)


def _total(out: Path) -> int:
    """Callgrind's own sum, in its last line or, of a dump, in its first."""
    with out.open(encoding="utf-8", errors="replace") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(("summary:", "totals:")))
