"""RouterProcesses: several routers that accept from one port, each a process of its own.

Owns their start by fork, their restart, and the signals between. The parent holds the listening sockets and
accepts nothing, so connections that wait when a process dies are taken by the others, or by its successor.
"""

import contextlib
import ctypes
import gc
import logging
import mmap
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_NOT_STARTED = 2

FIRST_DELAY_SECONDS = 0.05
LONGEST_DELAY_SECONDS = 5.0
HEALTHY_SECONDS = 10.0
"""After a life of this length, a death counts as the first one."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


class ProcessSlot:
    """One process among its siblings: its number, and which of them accept connections."""

    def __init__(self, number: int, accepting: mmap.mmap) -> None:
        self.number = number
        self._accepting = accepting

    def accept(self) -> None:
        """Announce that this process accepts from now on."""
        self._accepting[self.number] = 1

    @property
    def has_accepting_sibling(self) -> bool:
        return any(flag for number, flag in enumerate(self._accepting[:]) if number != self.number)


@dataclass(slots=True)
class _Process:
    """The parent's record of one place. `pid` None: it waits for `start_at`."""

    place: ProcessSlot
    pid: int | None = None
    started_at: float = 0.0
    start_at: float = 0.0
    num_early_deaths: int = 0
    num_starts: int = 0


class RouterProcesses:
    """`run_one` is each process's work; its result is the exit code.

    `patience_seconds` is how long a process that was told to stop may take; then it is killed.
    """

    def __init__(
        self, num_processes: int, run_one: Callable[[ProcessSlot], int], *, patience_seconds: float
    ) -> None:
        self._run_one = run_one
        self._patience_seconds = patience_seconds
        self._pid = os.getpid()
        self._accepting = mmap.mmap(-1, num_processes)  # one byte each, shared with those that are forked
        self._processes = [_Process(ProcessSlot(number, self._accepting)) for number in range(num_processes)]
        self._kill_at: float | None = None
        self._code = 0

    @property
    def _is_stopping(self) -> bool:
        return self._kill_at is not None

    def run(self) -> int:
        """Keep all of them running until a signal comes, then wait for all to end. Returns the exit code."""
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        gc.freeze()  # what is loaded stays shared: the collector writes into what it walks
        try:
            while not self._is_stopping or self._living():
                self._start_due(unblocked)
                info = signal.sigtimedwait(_SIGNALS, self._seconds_to_wait())
                if info is not None and info.si_signo != signal.SIGCHLD:
                    self._stop(signal.SIGINT if self._is_stopping else signal.SIGTERM)
                elif self._kill_at is not None and time.monotonic() >= self._kill_at:
                    self._stop(signal.SIGKILL)
                self._bury()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        return self._code

    def _living(self) -> list[_Process]:
        return [process for process in self._processes if process.pid is not None]

    def _seconds_to_wait(self) -> float:
        if self._kill_at is not None:
            due = [self._kill_at]
        else:
            due = [process.start_at for process in self._processes if process.pid is None]
        return max(0.0, min(due) - time.monotonic()) if due else 3600.0

    def _start_due(self, unblocked: set[int | signal.Signals]) -> None:
        for process in self._processes:
            if process.pid is None and not self._is_stopping and process.start_at <= time.monotonic():
                process.started_at = time.monotonic()
                process.num_starts += 1
                process.pid = os.fork() or self._become(process.place, unblocked)
                logger.info("router-%d runs process=%d", process.place.number, process.pid)

    def _become(self, place: ProcessSlot, unblocked: set[int | signal.Signals]) -> int:
        """In the child: be that router, and end with it."""
        code = EXIT_FAILED
        try:
            _name_this_process(f"router-{place.number}", die_with=self._pid)
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            code = self._run_one(place)
        except BaseException:
            logger.critical("router-%d has failed", place.number, exc_info=True)
        finally:
            os._exit(code)  # what the parent has open is the parent's to close

    def _stop(self, number: signal.Signals) -> None:
        """Signal the processes that did not stop: at a second SIGINT, and when patience is over."""
        if number == signal.SIGKILL:
            logger.error("killing routers that did not stop in time number=%d", len(self._living()))
        if self._kill_at is None or number == signal.SIGKILL:
            self._kill_at = time.monotonic() + self._patience_seconds
        for process in self._living():
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _bury(self) -> None:
        for process in self._living():
            assert process.pid is not None
            pid, status = os.waitpid(process.pid, os.WNOHANG)
            if pid:
                self._on_end(process, os.waitstatus_to_exitcode(status))

    def _on_end(self, process: _Process, code: int) -> None:
        name, pid = f"router-{process.place.number}", process.pid
        process.pid = None
        self._accepting[process.place.number] = 0
        if self._is_stopping:
            self._code = self._code or (EXIT_FAILED if code else 0)
        elif code == EXIT_NOT_STARTED and process.num_starts == 1:
            # It has said why, and the others have the same settings.
            self._code = EXIT_NOT_STARTED
            self._stop(signal.SIGTERM)
        else:
            now = time.monotonic()
            is_early = now - process.started_at < HEALTHY_SECONDS
            process.num_early_deaths = process.num_early_deaths + 1 if is_early else 1
            delay = min(
                LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** min(10, process.num_early_deaths - 1)
            )
            process.start_at = now + delay
            logger.error(
                "%s has ended and is started again code=%d process=%d in_seconds=%.2f", name, code, pid, delay
            )


def _name_this_process(name: str, die_with: int) -> None:
    """Set the name in process lists, and let the process be told to stop when its parent dies."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != die_with:
        os.kill(os.getpid(), signal.SIGTERM)
