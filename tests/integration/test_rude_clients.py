"""Clients that flood, drip, leave or do not read, against a real router process."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from loadtests.stacks.local_stack import LocalStack, local_stack
from tests.integration.observe import is_idle, metric, metrics, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

HELLO = [{"role": "user", "content": "hello"}]
ROUTER = {"head_seconds": 2, "write_seconds": 2, "upload_seconds": 20, "max_connections": 400}


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    settings = {"engine": "simulated", "model_name": "toy", "num_blocks": 4096}
    with local_stack(replica_settings=settings, router_settings=ROUTER) as running:
        yield running


def post(**fields: object) -> bytes:
    body = json.dumps({"model": "toy", "messages": HELLO, "ignore_eos": True} | fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def connect(stack: LocalStack, *, local_host: str = "127.0.0.1", receive_bytes: int = 0) -> socket.socket:
    client = socket.socket()
    if receive_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(60)
    client.bind((local_host, 0))
    client.connect(("127.0.0.1", stack.port))
    return client


def log_of(stack: LocalStack) -> str:
    return (stack.run_directory / "router.log").read_text()


def test_a_client_that_sends_three_requests_at_once_and_leaves_is_no_failure(stack: LocalStack) -> None:
    before = metrics(stack)
    with connect(stack) as client:
        client.sendall(post(max_tokens=100) * 3)
        wait_until(lambda: metric(stack, "router_in_flight") > 0, "the first has begun")
    wait_until(lambda: is_idle(stack), "everything given back")
    text = httpx.get(stack.url + "/metrics").text
    assert 'code="500"} 0.0' in text
    assert 'kind="client_gone"} 0.0' not in text
    assert (metrics(stack) - before)["router_requests_total"] == 1
    assert "ERROR" not in log_of(stack)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_side_gets_its_whole_answer(stack: LocalStack, stream: bool) -> None:
    with connect(stack) as client, client.makefile("rb") as answer:
        client.sendall(post(max_tokens=100, stream=stream))
        client.shutdown(socket.SHUT_WR)
        text = answer.read()
    assert b"HTTP/1.1 200 OK" in text
    assert text.count(b'"finish_reason":"length"') == 1
    assert "ERROR" not in log_of(stack)


def test_endless_heads_hold_up_nobody_and_take_no_memory(stack: LocalStack) -> None:
    router = psutil.Process(stack.pid("router"))
    before = router.memory_info().rss
    stopped = threading.Event()
    num_bytes = [0]

    def flood(beginning: bytes, part: bytes) -> None:
        while not stopped.is_set():
            with contextlib.suppress(OSError), connect(stack, local_host="127.0.0.2") as client:
                client.sendall(b"GET /health HTTP/1.1\r\n" + beginning)
                while not stopped.is_set():
                    client.sendall(part)
                    num_bytes[0] += len(part)

    threads = [threading.Thread(target=flood, args=(b"x: ", b"y" * 2**16)) for _ in range(4)]
    threads += [threading.Thread(target=flood, args=(b"", b"x: y\r\n" * 10_000)) for _ in range(4)]
    for thread in threads:
        thread.start()
    slowest = 0.0
    for _ in range(20):
        started = time.monotonic()
        assert httpx.get(stack.url + "/health", timeout=60).status_code == 200
        slowest = max(slowest, time.monotonic() - started)
    stopped.set()
    for thread in threads:
        thread.join()
    assert num_bytes[0] > 2**23
    assert slowest < 5
    assert router.memory_info().rss - before < 64 * 2**20
    assert metrics(stack)["router_ended_connections_total"] > 0


def test_streams_that_nobody_reads_are_given_up(stack: LocalStack) -> None:
    with contextlib.ExitStack() as clients:
        for _ in range(12):
            client = clients.enter_context(connect(stack, receive_bytes=4096))
            client.sendall(post(max_tokens=8000, stream=True, n=8))
        wait_until(lambda: metric(stack, "router_in_flight") >= 12, "all have begun")
        wait_until(lambda: is_idle(stack), "everything given back", seconds=60)
    assert 'reason="not_read"} 0.0' not in httpx.get(stack.url + "/metrics").text
    assert "ERROR" not in log_of(stack)
