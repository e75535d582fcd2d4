"""`python -m router` as a process, for tests that need no more than its sockets."""

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

_ADDRESS = re.compile(r"(listening on|operators are served on) (\S+)")


@contextlib.contextmanager
def running_router(*flags: str, has_admin: bool = False) -> Iterator[tuple[str, str]]:
    """A router as a process of its own, without a fleet: the clients' address, and the operators' (which is
    the same unless it has one of its own). It ends in order."""
    command = [sys.executable, "-m", "router", "--port=0", "--redis-url=redis://127.0.0.1:1/0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            found = _addresses(process, 2 if has_admin else 1)
            yield found["listening on"], found.get("operators are served on", found["listening on"])
        finally:
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=50)
    assert process.returncode == 0, log


def _addresses(process: subprocess.Popen[str], number: int) -> dict[str, str]:
    """By what the router says of them, in whatever order."""
    assert process.stderr is not None
    found = {}
    for line in process.stderr:
        if says := _ADDRESS.search(line):
            found[says[1]] = says[2]
        if len(found) == number:
            return found
    raise AssertionError(f"the router said only {found}")
