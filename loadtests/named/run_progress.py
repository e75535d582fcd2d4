"""How far a run is: one line that is written again and again on a terminal, a line now and then elsewhere.

Owns the line and the thread that keeps it current. The figures are the router's own, from its /metrics:
Locust says nothing until the end.
"""

import contextlib
import re
import sys
import threading
import time
import urllib.request
from types import TracebackType
from typing import Self

from loadtests.load.cluster_samples import parse_metrics

ON_TERMINAL_SECONDS = 0.5
ELSEWHERE_SECONDS = 10.0

_SENDING = re.compile(r": (\d+) requests in [\d.]+ s to http")


class RunProgress:
    """Shows itself while the context lasts. Give `hear` each line that Locust says."""

    def __init__(self, label: str, router_url: str) -> None:
        self._label, self._url = label, f"{router_url}/metrics"
        self._is_terminal = sys.stderr.isatty()
        self._began: float | None = None
        self._total = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_showing, daemon=True)
        # No proxy: the router is on this machine.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def hear(self, line: str) -> None:
        found = _SENDING.search(line)
        if found is not None and self._began is None:
            self._total, self._began = int(found[1]), time.monotonic()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._is_terminal:
            _write("\r\x1b[K")

    def _keep_showing(self) -> None:
        pause = ON_TERMINAL_SECONDS if self._is_terminal else ELSEWHERE_SECONDS
        while not self._ended.wait(pause):
            if self._began is None:
                continue
            with contextlib.suppress(OSError, ValueError):
                with self._open(self._url, timeout=2) as response:
                    values = parse_metrics(response.read().decode())
                line = self._line(values, time.monotonic() - self._began)
                _write(f"\r\x1b[K{line}" if self._is_terminal else f"{line}\n")

    def _line(self, values: dict[str, float], seconds: float) -> str:
        num_open = round(values.get("router_in_flight", 0))
        num_done = round(values.get("router_e2e_seconds_count", 0))
        num_failed = round(values.get("router_request_errors_total", 0))
        num_prompt = values.get("router_prompt_tokens_total", 0)
        hits = f"{values.get('router_cached_tokens_total', 0) / num_prompt:.1%}" if num_prompt else "–"
        return (
            f"{self._label}  {seconds:3.0f} s  sent {num_open + num_done + num_failed} of {self._total}  "
            f"done {num_done}  errors {num_failed}  hit rate {hits}"
        )


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
