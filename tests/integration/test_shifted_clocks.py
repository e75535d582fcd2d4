"""A wall clock that jumps by an hour, in one process of a running cluster, changes nothing that clients see.

The processes are real and so is the jump: a library that is loaded before all others shifts what they are
told of the time, all but the monotonic clock, which no administrator and no time server can set.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from loadtests.stacks.local_stack import LocalStack, local_stack
from tests.tools import needed_tool

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

HOUR = 3600
LEASE_SECONDS = 1.5
SETTLE_SECONDS = 2.5 * LEASE_SECONDS
REPLICAS = {
    "engine": "simulated",
    "lease_seconds": LEASE_SECONDS,
    "heartbeat_seconds": 0.3,
    "model_name": "toy",
}

FLEET = ("replica-0", "router", "redis")


class Clocks:
    """The wall clock of each process, as far as it is told."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._library = folder / "shifted_clock.so"
        source = Path(__file__).with_name("shifted_clock.c")
        compile_flags = ("-shared", "-fPIC", "-nostdlib", "-o")
        subprocess.run([needed_tool("gcc"), *compile_flags, self._library, source], check=True)

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """Runs with a clock of its own."""
        self.shift(name, 0)
        return ["env", f"LD_PRELOAD={self._library}", f"SHIFTED_CLOCK={self._folder / name}", *command]

    def shift(self, name: str, seconds: int) -> None:
        with (self._folder / name).open("r+b" if (self._folder / name).exists() else "wb") as file:
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True).ljust(4096, b"\0"))


@pytest.fixture(scope="module")
def clocks(tmp_path_factory: pytest.TempPathFactory) -> Clocks:
    return Clocks(tmp_path_factory.mktemp("clocks"))


@pytest.fixture(scope="module")
def stack(clocks: Clocks) -> Iterator[LocalStack]:
    start = LocalStack.start

    def start_with_clock(self: LocalStack, name: str, command: Sequence[str] | None = None) -> None:
        start(self, name, None if command is None else clocks.command(name, command))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStack, "start", start_with_clock)
        with local_stack(num_replicas=2, replica_settings=REPLICAS) as stack:
            yield stack


def told_time(stack: LocalStack, name: str) -> float:
    """What a process takes the time to be, as it says itself."""
    if name == "redis":
        with redis.Redis.from_url(stack.redis_url) as client:
            return float(client.time()[0])
    if name == "router":
        return float(ask(stack, "What time is it?")["created"])
    lines = (stack.run_directory / f"{name}.log").read_text().splitlines()
    times = [line[:19] for line in lines if line[:2] == "20"]
    return time.mktime(time.strptime(times[-1], "%Y-%m-%d %H:%M:%S"))


def ask(stack: LocalStack, question: str) -> dict[str, object]:
    body = {"model": "toy", "messages": [{"role": "user", "content": question}], "max_tokens": 4}
    answer = httpx.post(stack.url + "/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def num_cached_tokens(stack: LocalStack, question: str) -> int:
    usage = ask(stack, question)["usage"]
    assert isinstance(usage, dict)
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def figures(stack: LocalStack) -> dict[str, list[float]]:
    families = text_string_to_metric_families(httpx.get(stack.url + "/metrics").text)
    found: dict[str, list[float]] = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.value)
    return found


def check_all_is_well(stack: LocalStack, occasion: str) -> None:
    """Leases, tokens, seals, registrations, the index, metrics and the page."""
    stack.wait_ready(2)
    ends_at = time.monotonic() + SETTLE_SECONDS
    number = 0
    while time.monotonic() < ends_at:
        number += 1
        ask(stack, f"{occasion}, question {number}")
        assert httpx.get(stack.url + "/ready").json()["num_replicas"] == 2
        time.sleep(0.1)
    question = f"{occasion}: " + "the same long question again " * 60
    ask(stack, question)
    assert num_cached_tokens(stack, question) > 100
    seen = figures(stack)
    assert seen["router_replicas"] == [2.0]
    assert sum(seen["router_refused_records"]) == 0
    assert max(seen["router_index_lag_seconds"]) < 60
    assert seen["router_index_connected"] == [1.0]
    assert max(seen["router_event_loop_lag_seconds"]) < 60
    page = httpx.get(stack.url + "/live/state").json()
    assert {replica["state"] for replica in page["replicas"]} == {"ready"}


@pytest.mark.parametrize("hours", [1, -1])
@pytest.mark.parametrize("name", FLEET)
def test_a_clock_that_jumps_by_an_hour_and_back(
    stack: LocalStack, clocks: Clocks, name: str, hours: int
) -> None:
    clocks.shift(name, hours * HOUR)
    if name == "replica-0":  # it starts with a wrong clock, too
        check_all_is_well(stack, f"{name} {hours} while it runs")
        stack.kill(name)
        stack.wait_ready(1)  # else the dead one may be counted for a moment
        stack.start(name)
    if name == "router":
        stack.kill(name)
        stack.start(name)
    check_all_is_well(stack, f"{name} {hours}")
    assert abs(told_time(stack, name) - time.time() - hours * HOUR) < HOUR / 10
    clocks.shift(name, 0)
    check_all_is_well(stack, f"{name} is right again after {hours}")
