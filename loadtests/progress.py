"""showing(): one line that says how far something is, while it lasts, on standard error.

Owns when it is written: again and again on a terminal, elsewhere a line now and then.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

ON_TERMINAL_SECONDS = 0.5
ELSEWHERE_SECONDS = 10.0


@contextlib.contextmanager
def showing(line: Callable[[float], str | None]) -> Iterator[None]:
    """`line` is called in a thread, with the seconds since the start. None is not written."""
    is_terminal = sys.stderr.isatty()
    ended = threading.Event()
    began = time.monotonic()

    def keep_showing() -> None:
        while not ended.wait(ON_TERMINAL_SECONDS if is_terminal else ELSEWHERE_SECONDS):
            text = line(time.monotonic() - began)
            if text is not None:
                _write(f"\r\x1b[K{text}" if is_terminal else f"{text}\n")

    thread = threading.Thread(target=keep_showing, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if is_terminal:
            _write("\r\x1b[K")


def _write(text: str) -> None:
    with contextlib.suppress(OSError):  # whoever read it may be gone
        sys.stderr.write(text)
        sys.stderr.flush()
