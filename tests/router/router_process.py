"""`python -m router` as a process, for tests that need no more than its sockets."""

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def running_router(*flags: str, has_admin: bool = False) -> Iterator[tuple[str, str]]:
    """A router as a process of its own, without a fleet: the clients' address, and the operators' (which is
    the same unless it has one of its own). It ends in order."""
    command = [sys.executable, "-m", "router", "--port=0", "--redis-url=redis://127.0.0.1:1/0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            main = _after(process, "listening on")
            yield main, _after(process, "operators are served on") if has_admin else main
        finally:
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=50)
    assert process.returncode == 0, log


def _after(process: subprocess.Popen[str], words: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(rf"{words} (\S+)", line):
            return found[1]
    raise AssertionError(f"the router never said '{words}'")
