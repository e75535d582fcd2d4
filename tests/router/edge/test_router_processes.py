"""Several routers on one port: real processes, real connections, real deaths."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from loadtests.load.streaming import Answer, Connection, StreamCut
from loadtests.stacks.key_file import write_key_file
from loadtests.stacks.local_stack import LocalStack, free_port, local_stack, python_command
from router.caller import Limits, Tenant

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

PATH = "/v1/chat/completions"
REPLICA = {"engine": "simulated", "simulated_hardware": "h100-8b"}


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with local_stack(replica_settings=REPLICA, router_settings={"processes": 2}) as running:
        wait_until(lambda: len(asyncio.run(seen_routers(running.port, 8))) == 2)
        yield running


def routers(supervisor: int) -> dict[str, int]:
    """Those that live, by name."""
    pids = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    found = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):
            found[Path(f"/proc/{pid}/comm").read_text().strip()] = int(pid)
    return found


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def both_back(stack: LocalStack, without: int) -> bool:
    living = routers(stack.pid("router"))
    return len(living) == 2 and without not in living.values()


def body(num_tokens: int = 2, *, content: str = "Hello") -> bytes:
    return json.dumps(
        {
            "model": "toy_model",
            "stream": True,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": content}],
        }
    ).encode()


class RoutedConnection(Connection):
    """One that can say which process it has at its other end, once that has answered it."""

    def router(self) -> int:
        assert self._writer is not None
        own_port = self._writer.get_extra_info("sockname")[1]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name().startswith("router-") and any(
                    each.raddr and each.raddr.port == own_port for each in process.net_connections("tcp")
                ):
                    return process.pid
        raise AssertionError("no router has this connection")


async def seen_routers(port: int, num_connections: int) -> set[int]:
    found = set()
    for _ in range(num_connections):
        connection = RoutedConnection("127.0.0.1", port)
        with contextlib.suppress(OSError, EOFError):
            await connection.get("/health")
            found.add(connection.router())
        connection.abort()
    return found


async def connection_to(port: int, router: int) -> Connection:
    while True:
        connection = RoutedConnection("127.0.0.1", port)
        await connection.get("/health")
        if connection.router() == router:
            return connection
        connection.abort()


def admin_addresses(stack: LocalStack, name: str) -> set[str]:
    """What the routers' log says."""
    log = (stack.run_directory / f"{name}.log").read_text()
    return set(re.findall(r"operators are served on (http:\S+)", log))


async def ask(port: int, num_tokens: int = 2) -> Answer:
    """One request on a connection of its own, which must be answered in full."""
    connection = Connection("127.0.0.1", port)
    try:
        answer = await connection.post(PATH, body(num_tokens))
    finally:
        connection.abort()
    assert (answer.status, answer.is_whole) == (200, True)
    return answer


async def test_connections_are_spread_over_the_routers_though_one_is_always_first_to_wake(
    stack: LocalStack,
) -> None:
    counted: Counter[int] = Counter()
    connections = [RoutedConnection("127.0.0.1", stack.port) for _ in range(64)]
    for connection in connections:
        await connection.get("/health")
    for connection in connections:
        counted[connection.router()] += 1
        connection.abort()
    assert len(counted) == 2
    assert min(counted.values()) >= 10, "one in a thousand million, if each goes here or there by chance"


def test_nobody_else_may_listen_on_the_port_of_several_routers(stack: LocalStack) -> None:
    settings = {"port": stack.port, "redis_url": stack.redis_url, "processes": 2}
    second = subprocess.run(
        python_command("router", settings), capture_output=True, text=True, timeout=120, check=False
    )
    assert second.returncode == 2
    assert "cannot listen" in second.stderr


async def test_a_killed_router_takes_its_own_streams_and_no_other_and_a_retry_succeeds_at_once(
    stack: LocalStack,
) -> None:
    victim, other = routers(stack.pid("router")).values()
    doomed, spared = await connection_to(stack.port, victim), await connection_to(stack.port, other)
    streams = [asyncio.create_task(each.post(PATH, body(150))) for each in (doomed, spared)]
    await asyncio.sleep(0.3)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises((StreamCut, OSError, EOFError)):
        await streams[0]
    await ask(stack.port)
    whole = await streams[1]
    assert (whole.status, whole.is_whole) == (200, True)
    for connection in (doomed, spared):
        connection.abort()
    await asyncio.to_thread(wait_until, lambda: both_back(stack, victim))


@pytest.mark.parametrize("num_killed", [1, 2])
async def test_connections_that_wait_when_a_router_dies_are_served_by_who_is_there(
    stack: LocalStack, num_killed: int
) -> None:
    before = routers(stack.pid("router"))
    assert len(before) == 2
    for pid in before.values():
        os.kill(pid, signal.SIGSTOP)
    waiting = [asyncio.create_task(ask(stack.port)) for _ in range(20)]
    await asyncio.sleep(0.3)
    assert not any(each.done() for each in waiting)
    victims = [*before.values()][:num_killed]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    for pid in set(before.values()) - set(victims):
        os.kill(pid, signal.SIGCONT)
    await asyncio.wait_for(asyncio.gather(*waiting), 60)
    for pid in victims:
        await asyncio.to_thread(wait_until, lambda pid=pid: both_back(stack, pid))


async def test_a_frozen_router_holds_up_no_new_connection(stack: LocalStack) -> None:
    frozen = routers(stack.pid("router"))["router-0"]
    os.kill(frozen, signal.SIGSTOP)
    try:
        for _ in range(20):
            await asyncio.wait_for(ask(stack.port), 30)
    finally:
        os.kill(frozen, signal.SIGCONT)


async def test_a_router_that_comes_back_takes_nothing_before_it_has_found_replicas(stack: LocalStack) -> None:
    victim = routers(stack.pid("router"))["router-0"]
    redis = stack.pid("redis")
    os.kill(redis, signal.SIGSTOP)
    try:
        os.kill(victim, signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: both_back(stack, victim))
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            await ask(stack.port)
    finally:
        os.kill(redis, signal.SIGCONT)
    await asyncio.to_thread(wait_until, lambda: len(asyncio.run(seen_routers(stack.port, 8))) == 2)


async def keep_asking(port: int, until: asyncio.Event, failures: list[str]) -> int:
    """Requests one after the other, on a connection for as long as the router lets it live."""
    connection, num_answers = Connection("127.0.0.1", port), 0
    while not until.is_set():
        try:
            answer = await connection.post(PATH, body(4))
        except (OSError, EOFError, StreamCut) as error:
            failures.append(repr(error))
            connection.abort()
            return num_answers
        num_answers += 1
        if (answer.status, answer.is_whole) != (200, True):
            failures.append(f"status {answer.status}")
        if answer.headers.get("connection") == "close":
            await connection.close()
            connection = Connection("127.0.0.1", port)
    connection.abort()
    return num_answers


async def test_a_router_that_is_told_to_stop_under_load_loses_no_request(stack: LocalStack) -> None:
    failures: list[str] = []
    over = asyncio.Event()
    clients = [asyncio.create_task(keep_asking(stack.port, over, failures)) for _ in range(16)]
    await asyncio.sleep(0.5)
    for name in ("router-0", "router-1"):
        victim = routers(stack.pid("router"))[name]
        os.kill(victim, signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda victim=victim: both_back(stack, victim))
        await asyncio.sleep(0.5)
    over.set()
    answered = await asyncio.gather(*clients)
    assert failures == []
    assert min(answered) > 0


def test_each_can_explain_what_the_other_has_answered(stack: LocalStack) -> None:
    answer = httpx.post(stack.url + PATH, json={**json.loads(body()), "stream": False}, timeout=30)
    assert answer.status_code == 200, answer.text
    path, addresses = f"/explain/tenants/default/{answer.json()['id']}", admin_addresses(stack, "router")
    found = [httpx.get(address + path, timeout=30) for address in addresses]
    while [each.status_code for each in found] != [200, 200]:  # the other may be slow to answer
        found = [httpx.get(address + path, timeout=30) for address in addresses]
    assert found[0].json() == found[1].json()
    counted = [httpx.get(f"{address}/metrics", timeout=30).text for address in addresses]
    assert sum('router_explain_questions_total{outcome="answered"} 1.0' in text for text in counted) == 1


def test_each_router_has_page_and_metrics_to_itself_and_their_common_port_has_neither(
    stack: LocalStack,
) -> None:
    names = set()
    for address in admin_addresses(stack, "router"):
        names.add(httpx.get(f"{address}/live/state", timeout=30).json()["router"]["name"])
        assert "router_in_flight" in httpx.get(f"{address}/metrics", timeout=30).text
    assert len(names) == 2
    for path in ("/metrics", "/live/state"):
        assert httpx.get(stack.url + path, timeout=30).status_code == 404


def test_told_to_stop_all_finish_what_runs_and_end_in_order(stack: LocalStack) -> None:
    """Last in this file: nothing is left of the routers."""
    # One that is told to stop before it listens has not started, which is exit code 1.
    wait_until(lambda: len(asyncio.run(seen_routers(stack.port, 8))) == 2)
    pids = routers(stack.pid("router"))

    async def stream_over_the_end() -> Answer:
        stream = asyncio.create_task(ask(stack.port, 150))
        await asyncio.sleep(0.3)
        os.kill(stack.pid("router"), signal.SIGTERM)
        return await stream

    asyncio.run(stream_over_the_end())
    wait_until(lambda: stack.exit_status("router") is not None)  # a second signal would be one to hurry
    assert stack.terminate("router") == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


@pytest.mark.parametrize("flags", [["--policy=best"], ["--secret=xyz"]])
def test_a_wrong_setting_of_several_is_exit_code_2_too(flags: list[str], free_port: int) -> None:
    command = [sys.executable, "-m", "router", "--processes=2", f"--port={free_port}", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr


def test_routers_without_a_secret_make_up_one_for_all(stack: LocalStack) -> None:
    port, redis_url = free_port(), stack.redis_url
    open_replica = {**REPLICA, "replica_id": "open-0", "redis_url": redis_url}
    stack.start("open-0", python_command("replicas", open_replica))
    settings = {"port": port, "redis_url": redis_url, "processes": 2}
    stack.start("other", python_command("router", settings))
    wait_until(lambda: len(asyncio.run(seen_routers(port, 8))) == 2)
    hashes = []
    for address in sorted(admin_addresses(stack, "other")):
        wait_until(lambda url=f"{address}/ready": httpx.get(url, timeout=30).status_code == 200)
        asked = httpx.post(
            f"{address}/explain/v1/chat/completions", content=body(content="word " * 300), timeout=30
        )
        hashes.append(asked.json()["prompts"][0]["block_hashes"])
    assert len(hashes) == 2
    assert hashes[0] == hashes[1] != []
    assert stack.terminate("other") == 0


def test_two_processes_admit_one_limit(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    tenant = Tenant(name="limited", limits=Limits(requests_per_minute=2))
    key = write_key_file(path, [tenant])[tenant.name]
    headers = {"authorization": f"Bearer {key}"}
    router = {"processes": 2, "keys_file": path}
    with local_stack(replica_settings=REPLICA, router_settings=router) as stack:
        started, num_admitted, num_refused = time.monotonic(), 0, 0
        while num_refused < 8:  # so that both are asked
            answer = httpx.post(stack.url + PATH, content=body(), headers=headers, timeout=60)
            if answer.status_code == 200:
                num_admitted += 1
                time.sleep(1.5)  # longer than news take
            else:
                assert answer.status_code == 429, answer.text
                assert json.loads(answer.text)["error"]["code"] == "rate_limit_exceeded"
                num_refused += 1
        elapsed = time.monotonic() - started
        assert 2 <= num_admitted <= 2 * (1 + elapsed / 60) + 1
