"""`kvasir fleet apply --follow`: applies the file again when it changed or the cluster lost it.

Owns the interval, what is printed, and the ready file. `fleet.py` knows what one look does.
"""

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ClusterError

FOLLOW_SECONDS = 5.0
"""Time between looks."""


@dataclass(frozen=True, slots=True)
class Look:
    """Whether the fleet matches its file, and a sentence about it."""

    is_ready: bool
    sentence: str


def follow(
    look: Callable[[Callable[[], None]], Look], ready_file: Path | None, say: Callable[[str], None]
) -> int:
    """Look until SIGTERM or SIGINT, ignoring failures; a second signal ends at once. Repeated sentences are
    printed once. `ready_file` exists only while the fleet is as it should be: a look that is about to change
    the fleet calls its argument first, which removes the file."""
    ended = threading.Event()

    def end(number: int, _: object) -> None:
        ended.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)

    def unready() -> None:
        _mark(ready_file, False)

    unready()
    said = None
    try:
        while not ended.is_set():
            try:
                seen = look(unready)
            except ClusterError as error:
                seen = Look(False, str(error))
            _mark(ready_file, seen.is_ready)
            if seen.sentence != said:
                said = seen.sentence
                say(said)
            ended.wait(FOLLOW_SECONDS)
    finally:
        unready()
    return 0


def _mark(ready_file: Path | None, is_ready: bool) -> None:
    if ready_file is None:
        return
    if is_ready:
        ready_file.touch()
    else:
        ready_file.unlink(missing_ok=True)
