"""`kvasir fleet apply --follow`: the file again whenever it has changed, or the cluster holds it no longer.

Owns how often it looks, what is said of it, and the file that tells others that all is well. What a look is,
`fleet.py` knows.
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
    """Whether the fleet is what its file says, and a sentence about that."""

    is_ready: bool
    sentence: str


def follow(
    look: Callable[[Callable[[], None]], Look], ready_file: Path | None, say: Callable[[str], None]
) -> int:
    """Look until SIGTERM or SIGINT, whatever comes of it; a second one ends it at once. The same is not said
    twice on end. `ready_file` exists while the fleet is what it should be, and not afterwards: a look that is
    about to change the fleet calls what it is given."""
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
