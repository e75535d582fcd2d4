"""What a router process takes of memory while many clients send it the worst of bodies, and afterwards."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import httpx
import psutil
import pytest

from loadtests.stacks.local_stack import LocalStack, local_stack
from tests.integration.observe import is_router_idle, metrics, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

MIB = 2**20
CHART_LIMIT_BYTES = 2048 * MIB
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
NESTED = b'{"model": "toy", "messages": ' + b"[" * 200 + b"]" * 200


@contextlib.contextmanager
def running(**settings: object) -> Iterator[LocalStack]:
    replica = {"engine": "simulated", "model_name": "toy", "num_blocks": 4096}
    with local_stack(replica_settings=replica, router_settings=settings) as stack:
        yield stack


class Uploads:
    """Bodies of `num_bytes` that come from all hosts at once and never end."""

    def __init__(self, stack: LocalStack, num_bodies: int, num_bytes: int) -> None:
        self._stack = stack
        self._num_bytes = num_bytes
        self._clients = [self._connect(HOSTS[number % len(HOSTS)]) for number in range(num_bodies)]
        self._threads = [threading.Thread(target=self._send, args=(client,)) for client in self._clients]

    def _connect(self, host: str) -> socket.socket:
        client = socket.socket()
        client.bind((host, 0))
        client.connect(("127.0.0.1", self._stack.port))
        client.settimeout(20)
        return client

    def _send(self, client: socket.socket) -> None:
        part = (NESTED + b",") * (65_536 // len(NESTED))
        with contextlib.suppress(OSError):
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n")
            client.sendall(b"content-length: %d\r\n\r\n" % self._num_bytes)
            num_sent = 0
            while num_sent + len(part) < self._num_bytes:
                client.sendall(part)
                num_sent += len(part)

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()
        for thread in self._threads:
            thread.join()


def resident_bytes(stack: LocalStack) -> int:
    """Of the router and what it has started."""
    router = psutil.Process(stack.pid("router"))
    return sum(process.memory_info().rss for process in (router, *router.children(recursive=True)))


def flood(stack: LocalStack, num_bodies: int, num_bytes: int) -> tuple[int, int, int]:
    """Memory before, at most, and after."""
    before = most = resident_bytes(stack)
    with Uploads(stack, num_bodies, num_bytes):
        for _ in range(30):
            assert httpx.get(stack.url + "/health", timeout=60).status_code == 200
            most = max(most, resident_bytes(stack))
        wait_until(lambda: metrics(stack)["router_refused_bodies_total"] > 0, "some are refused")
        most = max(most, resident_bytes(stack))
    wait_until(lambda: metrics(stack)["router_body_bytes"] == 0, "all of it given back")
    wait_until(lambda: is_router_idle(stack), "nothing in flight")
    return before, most, resident_bytes(stack)


def test_many_bodies_at_once_take_no_more_memory_than_they_may() -> None:
    with running(max_body_bytes=2 * MIB, body_memory_bytes=16 * MIB) as stack:
        before, most, after = flood(stack, num_bodies=100, num_bytes=2 * MIB)
        assert most - before < 96 * MIB  # 200 MiB are sent
        assert after - before < 64 * MIB


@pytest.mark.slow
def test_a_router_stays_within_the_charts_limit_whatever_bodies_it_is_sent() -> None:
    with running() as stack:
        before, most, after = flood(stack, num_bodies=250, num_bytes=8 * MIB)
        assert most < CHART_LIMIT_BYTES / 2
        assert after - before < 128 * MIB
