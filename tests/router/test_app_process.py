"""`python -m router`: its settings, its port, its end."""

import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from router.__main__ import main
from tests.redis_server import RedisServer


def test_a_taken_port_is_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main([f"--port={port}"], {}) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert str(port) in message


@pytest.mark.parametrize(
    "flags",
    [
        ["--port=70000"],
        ["--policy=best", "--port=0"],
        ["--secret=xyz", "--port=0"],
        ["--max-in-flight=0"],
        ["--replica-tls-certificate=x", "--replica-tls-ca=x"],
        ["--replica-tls-certificate=x", "--replica-tls-key=x"],
        ["--replica-tls-ca=x", "--replica-tls-name="],
        ["--replica-tls-ca=/nowhere", "--port=0"],
    ],
)
def test_a_wrong_setting_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert main(flags, {}) == 2
    assert capsys.readouterr().err.strip().count("\n") == 0


@pytest.mark.timeout(120)
def test_a_router_without_replicas_is_up_but_not_ready_and_leaves_in_order_on_sigterm(
    own_redis: RedisServer, free_port: int
) -> None:
    command = [sys.executable, "-m", "router", f"--port={free_port}", f"--redis-url={own_redis.url}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        url = f"http://127.0.0.1:{free_port}"
        deadline = time.monotonic() + 60
        while True:
            try:
                assert httpx.get(url + "/health", timeout=30).status_code == 200
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        assert httpx.get(url + "/ready", timeout=30).status_code == 503
        answer = httpx.post(url + "/v1/chat/completions", json={"model": "x", "messages": []}, timeout=30)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
