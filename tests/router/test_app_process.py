"""`python -m router`: its settings, its ports and its Unix socket, its end."""

import random
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from router.__main__ import main
from router.assembly import Router
from router.config import RouterConfig
from tests.redis_server import RedisServer
from tests.router.features.api_keys.documents import yaml_of
from tests.router.router_process import running_router


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
        ["--processes=0"],
        ["--admin-port=70000", "--port=0"],
        ["--admin-port=0", "--admin-socket=x", "--port=0"],
        ["--admin-socket=/nowhere/admin.sock", "--port=0"],
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
    own_redis: RedisServer,
) -> None:
    with running_router(f"--redis-url={own_redis.url}") as (url, _):
        assert httpx.get(url + "/health", timeout=30).status_code == 200
        assert httpx.get(url + "/ready", timeout=30).status_code == 503
        answer = httpx.post(url + "/v1/chat/completions", json={"model": "x", "messages": []}, timeout=30)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"


OPERATORS = ["/page/main.js", "/live/state", "/live/prefixes", "/live/decisions", "/metrics"]
EVERYBODY = ["/health"]
HTML = {"accept": "text/html"}


def statuses(http: httpx.Client, paths: list[str]) -> Mapping[str, int]:
    return {path: http.get(path).status_code for path in paths}


def explain_status(http: httpx.Client) -> int:
    return http.post("/explain/v1/completions", json={}).status_code


def test_with_an_admin_port_the_clients_port_has_no_admin_routes_and_that_port_nothing_else() -> None:
    with (
        running_router("--admin-port=0", has_admin=True) as (main_url, admin_url),
        httpx.Client(base_url=main_url, timeout=30) as main,
        httpx.Client(base_url=admin_url, timeout=30) as admin,
    ):
        assert main_url != admin_url
        assert statuses(main, OPERATORS) == dict.fromkeys(OPERATORS, 404)
        assert statuses(admin, OPERATORS) == dict.fromkeys(OPERATORS, 200)
        assert statuses(main, EVERYBODY) == statuses(admin, EVERYBODY) == dict.fromkeys(EVERYBODY, 200)
        assert (explain_status(main), explain_status(admin)) == (404, 400)
        assert main.get("/ready").status_code == admin.get("/ready").status_code == 503
        assert admin.get("/", headers=HTML).headers["content-type"].startswith("text/html")
        assert main.get("/", headers=HTML).headers["content-type"] == "application/json"
        assert main.get("/v1/models").status_code == 200
        assert admin.get("/v1/models").status_code == 404
        assert admin.post("/v1/completions", json={}).status_code == 404
        # The rule of who may see the page holds here too.
        assert admin.get("/live/state", headers={"host": "evil.example"}).status_code == 403


def test_an_admin_socket_is_for_this_user_alone_needs_no_host_and_is_gone_afterwards(
    tmp_path: Path,
) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(path))
    transport = httpx.HTTPTransport(uds=str(path))
    with (
        running_router(f"--admin-socket={path}", has_admin=True) as (main_url, admin_url),
        httpx.Client(base_url="http://anything", transport=transport, timeout=30) as admin,
    ):
        assert admin_url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert statuses(admin, [*OPERATORS, *EVERYBODY]) == dict.fromkeys([*OPERATORS, *EVERYBODY], 200)
        assert httpx.get(f"{main_url}/metrics", timeout=30).status_code == 404
    assert not path.exists()


def test_switched_off_the_page_is_shut_at_the_socket_too_and_metrics_are_not(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    transport = httpx.HTTPTransport(uds=str(path))
    with (
        running_router(f"--admin-socket={path}", "--admin-access=nobody", has_admin=True),
        httpx.Client(base_url="http://anything", transport=transport, timeout=30) as admin,
    ):
        assert admin.get("/live/state").status_code == 403
        assert admin.get("/metrics").status_code == 200


def test_a_socket_that_a_living_router_has_is_not_taken_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        assert main(["--port=0", f"--admin-socket={path}"], {}) == 2
        assert str(path) in capsys.readouterr().err
    assert path.exists()
