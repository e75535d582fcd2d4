"""The operators' port or Unix socket: what is there, what the clients' port then has not, and its end."""

import socket
import stat
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from router.__main__ import main
from tests.router.router_process import running_router

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


@pytest.mark.parametrize(
    "flags",
    [["--admin-port=70000"], ["--admin-port=0", "--admin-socket=x"], ["--admin-socket=/nowhere/admin.sock"]],
)
def test_a_wrong_setting_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert main([*flags, "--port=0"], {}) == 2
    assert capsys.readouterr().err.strip().count("\n") == 0
