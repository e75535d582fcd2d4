"""The replicas' /metrics during a load test.

Owns the reading, once a second, and the sums. Runs under gevent; a replica that does not answer leaves a gap.
Addresses are fixed, or come from a file of targets as `kvasir up` writes it for Prometheus, which is read
again each time, since a restarted replica has another address.
"""

import json
import re
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import gevent
from gevent.pool import Group

from loadtests.reports.run_file import EngineTotals, LoadSample

INTERVAL_SECONDS = 1.0
TIMEOUT_SECONDS = 2.0
REPLICA_JOB = "kvasir-replica"
GAUGES = (
    "replica_running_requests",
    "replica_waiting_requests",
    "replica_pending_tokens",
    "replica_used_blocks",
    "replica_cached_blocks",
    "replica_total_blocks",
)
COUNTERS = ("replica_prompt_tokens_total", "replica_cached_tokens_total", "replica_cross_user_tokens_total")
TIER_COUNTERS = tuple(f'replica_cached_tokens_by_tier_total{{tier="{tier}"}}' for tier in ("host", "disk"))
IMAGE_COUNTERS = (
    'replica_images_total{outcome="taken"}',
    "replica_image_bytes_total",
    "replica_encoded_image_tokens_total",
)
"""Zero where the replica does not have them, as those of tiers."""

ALL_COUNTERS = (*COUNTERS, *TIER_COUNTERS, *IMAGE_COUNTERS)

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{[^}]*\})? (\S+)", re.MULTILINE)


class ClusterSamples:
    """Samples of one run. `replicas` are [NAME=]URL, or files of targets that end in .json."""

    def __init__(self, replicas: Sequence[str]) -> None:
        self.samples: list[LoadSample] = []
        self._files = [Path(each) for each in replicas if each.endswith(".json")]
        self._replicas = [_named(each) for each in replicas if not each.endswith(".json")]
        self._first: dict[str, dict[str, float]] = {}
        self._latest: dict[str, dict[str, float]] = {}
        self._last: dict[str, dict[str, float]] = {}
        """Last values of the replicas that answered last time."""
        self._has_restarted = False
        self._start = time.perf_counter()
        self._greenlet: gevent.Greenlet | None = None

    def start(self, start_seconds: float) -> None:
        """`start_seconds` is the run's time zero on this process's clock."""
        self._start = start_seconds
        self._read_all()
        self._greenlet = gevent.spawn(self._keep_reading)

    def stop(self) -> None:
        """Reads the counters once more."""
        if self._greenlet is not None:
            self._greenlet.kill()
            self._greenlet = None
            self._read_all()

    @property
    def totals(self) -> EngineTotals | None:
        """None if a replica did not answer in the end or began anew: a sum that lacks something is none."""
        expected = {name for name, _ in self._replicas} | self._first.keys()
        if not expected or self._has_restarted or not expected <= self._last.keys():
            return None
        increases = (
            sum(int(self._last[name][counter] - self._first[name][counter]) for name in self._last)
            for counter in ALL_COUNTERS
        )
        return EngineTotals(*increases)

    def _keep_reading(self) -> None:
        while True:
            began = time.perf_counter()
            self._read_all()
            gevent.sleep(max(0.0, INTERVAL_SECONDS - (time.perf_counter() - began)))

    def _read_all(self) -> None:
        self._last = {}
        group = Group()
        for name, url in [*self._replicas, *(found for file in self._files for found in _targets(file))]:
            group.spawn(self._read, name, url)
        group.join()

    def _read(self, name: str, url: str) -> None:
        try:
            # No proxy: replicas are inside.
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                url, timeout=TIMEOUT_SECONDS
            ) as response:
                values = parse_metrics(response.read().decode("utf-8", errors="replace"))
        except (OSError, ValueError):
            return
        if not all(counter in values for counter in COUNTERS):
            return
        counters = {counter: values.get(counter, 0.0) for counter in ALL_COUNTERS}
        self._first.setdefault(name, counters)
        before = self._latest.get(name, counters)
        self._has_restarted |= any(counters[counter] < before[counter] for counter in COUNTERS)
        self._latest[name] = self._last[name] = counters
        seconds = time.perf_counter() - self._start
        if seconds >= 0:
            numbers = [int(values.get(gauge, 0.0)) for gauge in GAUGES]
            self.samples.append(LoadSample(seconds, name, *numbers))


def _targets(file: Path) -> Iterator[tuple[str, str]]:
    """Names and addresses of replicas; none while the file is not there."""
    try:
        groups = json.loads(file.read_text(encoding="utf-8"))
        for group in groups:
            if group["labels"].get("job") == REPLICA_JOB:
                for target in group["targets"]:
                    yield group["labels"].get("replica", target), f"http://{target}/metrics"
    except (OSError, ValueError, KeyError, TypeError):
        return


def parse_metrics(text: str) -> dict[str, float]:
    """Values by name, summed over labels; and those that have labels by name and labels, too."""
    values: dict[str, float] = {}
    for name, labels, number in _SAMPLE.findall(text):
        try:
            value = float(number)
        except ValueError:
            continue
        for each in {name, name + labels}:
            values[each] = values.get(each, 0.0) + value
    return values


def _named(replica: str) -> tuple[str, str]:
    name, equals, url = replica.partition("=")
    if not equals or "/" in name:
        name, url = urlsplit(replica).netloc or replica, replica
    url = url if "://" in url else f"http://{url}"
    return name, url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/metrics"
