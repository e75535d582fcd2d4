"""`python -m router`: its settings, its port, its end."""

import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from router.__main__ import main
from router.assembly import Router
from router.config import RouterConfig
from tests.redis_server import RedisServer
from tests.router.features.api_keys.documents import yaml_of


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
        ["--keys-file=/nowhere", "--port=0"],
        ["--keys-file=/dev/null", "--port=0"],
        ["--keys-file=/dev/null", "--open=true", "--port=0"],
        ["--keys-in-redis=true", "--port=0"],
        ["--keys-in-redis=true", "--keys-file=x", "--secret=00000000000000000000000000000000"],
    ],
)
def test_a_wrong_setting_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert main(flags, {}) == 2
    assert capsys.readouterr().err.strip().count("\n") == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "203.0.113.1", "localhost.example.com", "kvasir"])
def test_without_keys_a_router_does_not_leave_loopback(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--host={host}", "--port=0"], {}) == 2
    said = capsys.readouterr().err.strip()
    assert f"without API keys the router does not listen on {host}," in said
    assert "set keys_file" in said and "or open" in said
    assert RouterConfig(host=host, open=True) and RouterConfig(host=host, keys_file="keys.yaml")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_without_keys_a_router_is_for_this_machine(host: str) -> None:
    assert not RouterConfig(host=host).has_keys


def test_a_router_says_loudly_that_it_has_no_keys(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    Router(RouterConfig(), rng=random.Random(0))
    warning = "there are no API keys: everyone who reaches this router is the one tenant 'default'"
    assert any(warning in record.message and record.levelname == "WARNING" for record in caplog.records)
    caplog.clear()
    (tmp_path / "keys.yaml").write_bytes(yaml_of(1))
    (tmp_path / "keys.yaml").chmod(0o600)
    Router(RouterConfig(keys_file=str(tmp_path / "keys.yaml")), rng=random.Random(0))
    assert not any("API keys" in record.message for record in caplog.records)


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
