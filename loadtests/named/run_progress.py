"""How far a run is, as one line.

The figures are the router's own, from its /metrics: Locust says nothing until the end.
"""

import contextlib
import re
import time
import urllib.request

from loadtests.load.cluster_samples import parse_metrics

_SENDING = re.compile(r": (\d+) requests in [\d.]+ s to http")


class RunProgress:
    """Give `hear` each line that Locust says; `line` is for `showing`."""

    def __init__(self, label: str, router_url: str) -> None:
        self._label, self._url = label, f"{router_url}/metrics"
        self._began: float | None = None
        self._total = 0
        # No proxy: the router is on this machine.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def hear(self, line: str) -> None:
        found = _SENDING.search(line)
        if found is not None and self._began is None:
            self._total, self._began = int(found[1]), time.monotonic()

    def line(self, _seconds: float) -> str | None:
        """None before anything is sent, and where the router does not answer."""
        if self._began is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            with self._open(self._url, timeout=2) as response:
                values = parse_metrics(response.read().decode())
            return self._line(values, time.monotonic() - self._began)
        return None

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
