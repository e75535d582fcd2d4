"""Instructions of a decision, and of a request at the door of a router, as valgrind counts them.

Owns how they are counted. Processor time depends on what else runs on the machine, and a processor's own
counters are out of reach in most containers. Valgrind counts user space alone, and nearly the same each time.
The row's name says which Python and which processors the figures hold for. What the router does without
requests is taken off.
"""

import asyncio
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from loadtests.benches.door import MODEL, OUTPUT_TOKENS, WORKLOAD
from loadtests.benches.router import bodies, closed_loop
from loadtests.stacks.local_stack import LocalStack, local_stack

ROW = f"instructions, {platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}, "
ROW += platform.machine()

FEW_DECISIONS, MANY_DECISIONS = 20, 4020
"""Enough decisions that the difference between two process starts, some millions of instructions, is
negligible."""
NUM_CONNECTIONS = 8
NUM_WARM_UP, NUM_REQUESTS = 16, 64
IDLE_SECONDS = 5.0

REPLICA = {
    "engine": "simulated",
    "simulated_hardware": "h100-8b",
    "num_blocks": 65536,
    "model_name": MODEL,
    "simulated_speed": 0.25,
}
"""Steps slow enough that a router under valgrind writes each token by itself, as it would without."""


def count_instructions() -> Mapping[str, float]:
    """Takes minutes. Raises RuntimeError where valgrind is not installed."""
    if shutil.which("valgrind") is None or shutil.which("callgrind_control") is None:
        raise RuntimeError("valgrind is not installed (Debian: apt-get install valgrind)")
    return {
        "a decision, instructions": _decision(),
        "a decision with tiers, instructions": _decision("tiers"),
        **_requests(),
    }


def _decision(*words: str) -> float:
    """The difference of two runs, which begin and end alike."""
    with tempfile.TemporaryDirectory() as folder:
        few, many = (
            _instructions_of(Path(folder) / "counts", "loadtests.ratchet.decisions", str(count), *words)
            for count in (FEW_DECISIONS, MANY_DECISIONS)
        )
    return (many - few) / (MANY_DECISIONS - FEW_DECISIONS)


def _instructions_of(out: Path, module: str, *words: str) -> int:
    subprocess.run(
        [*_counting(out), sys.executable, "-m", module, *words], check=True, capture_output=True, timeout=300
    )
    return _total(out)


def _requests() -> Mapping[str, float]:
    """Chats of 1,000 tokens with answers of 32, streamed and whole."""
    with tempfile.TemporaryDirectory() as folder, local_stack(replica_settings=REPLICA) as stack:
        counter = _RouterCounter(stack, Path(folder) / "counts")
        return {
            "a request streamed, instructions": counter.a_request(stream=True),
            "a request whole, instructions": counter.a_request(stream=False),
        }


class _RouterCounter:
    """The stack's router, started again under valgrind, which counts while it is told to."""

    def __init__(self, stack: LocalStack, out: Path) -> None:
        self._stack, self._out = stack, out
        command = stack.command("router")
        stack.terminate("router")
        stack.start("router", [*_counting(out), "--instr-atstart=no", *command])
        stack.wait_ready(1)
        self._control("--instr=on")
        self._send(NUM_WARM_UP, stream=True)
        num_idle, seconds = self._count(lambda: time.sleep(IDLE_SECONDS))
        self._idle_per_second = num_idle / seconds

    def a_request(self, *, stream: bool) -> float:
        self._send(NUM_WARM_UP, stream=stream)
        num_instructions, seconds = self._count(lambda: self._send(NUM_REQUESTS, stream=stream))
        return (num_instructions - self._idle_per_second * seconds) / NUM_REQUESTS

    def _send(self, count: int, *, stream: bool) -> None:
        requests = bodies(WORKLOAD, count, stream=stream, max_tokens=OUTPUT_TOKENS, seed=count + stream)
        answers = asyncio.run(closed_loop(self._stack, requests, NUM_CONNECTIONS))
        assert all(answer.status == 200 and answer.is_whole for answer in answers)

    def _count(self, action: Callable[[], None]) -> tuple[int, float]:
        """Instructions and seconds."""
        self._control("--zero")
        started = time.monotonic()
        action()
        seconds = time.monotonic() - started
        self._control("--dump")
        newest = max(self._out.parent.glob(f"{self._out.name}.*"), key=lambda path: int(path.suffix[1:]))
        return _total(newest), seconds

    def _control(self, order: str) -> None:
        command = ["callgrind_control", order, str(self._stack.pid("router"))]
        subprocess.run(command, check=True, capture_output=True, timeout=60)


def _counting(out: Path) -> Sequence[str]:
    """Return the command's prefix. Hash randomisation is off, since sets would differ between runs."""
    return ["env", "PYTHONHASHSEED=0", "valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"]


def _total(out: Path) -> int:
    """Callgrind's own sum, in its last line or, of a dump, in its first."""
    with out.open(encoding="utf-8", errors="replace") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(("summary:", "totals:")))
