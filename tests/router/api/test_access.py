"""Who may see the page, its data and explanations: by peer, by Host header, by browsers and proxies."""

import asyncio
from typing import Any

import httpx
import pytest

from replicas.process.settings import SettingsError, build
from router.api.access import AdminAccess, refusal_of
from router.config import RouterConfig
from tests.router.http_server import HttpServer, http_server
from tests.router.quiet_fleet import QuietFleet

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
GUARDED = [
    ("GET", "/live/state"),
    ("GET", "/live/prefixes"),
    ("GET", "/live/decisions"),
    ("GET", "/page/main.js"),
]
GUARDED += [("POST", "/explain/v1/chat/completions"), ("POST", "/explain/v1/completions")]


def is_refused(
    access: str = "loopback", *, peer: str | None = "127.0.0.1", http_version: str = "1.1", **headers: str
) -> bool:
    headers = {"host": "localhost:8000", **headers}
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": http_version,
        "client": None if peer is None else (peer, 40000),
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
    }
    return refusal_of(AdminAccess(access), scope) is not None


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.0.0.1", "[::1]:8000"])
def test_a_client_on_loopback_that_asks_for_loopback_is_let_in(peer: str, host: str) -> None:
    assert not is_refused(peer=peer, host=host)


@pytest.mark.parametrize(
    "peer", ["192.168.1.7", "10.0.0.1", "::ffff:10.0.0.1", "fe80::1", "2001:db8::1", "", None]
)
def test_a_client_from_elsewhere_is_not(peer: str | None) -> None:
    assert is_refused(peer=peer)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example:8000",
        "127.0.0.1@evil.example",
        "evil.example:127",
        "localhost:8000:8000",
        "192.168.1.7:8000",
        "0.0.0.0",
        "[fe80::1]",
        "[::1",
        "2130706433",
    ],
)
def test_a_name_that_was_pointed_at_loopback_does_not_get_in(host: str) -> None:
    assert is_refused(host=host)


@pytest.mark.parametrize(
    "name", ["forwarded", "via", "x_forwarded_for", "x_forwarded_host", "x_forwarded_proto", "x_real_ip"]
)
def test_what_a_proxy_forwards_is_not_from_here(name: str) -> None:
    assert is_refused(**{name: "203.0.113.9"})


def test_what_a_proxy_forwards_without_a_word_as_nginx_does_is_not_either() -> None:
    assert is_refused(http_version="1.0", host="127.0.0.1:8000", connection="close")
    assert not is_refused("everyone", http_version="1.0")


def test_a_page_of_another_site_may_link_here_and_nothing_else() -> None:
    assert not is_refused(sec_fetch_site="none", sec_fetch_dest="document")
    assert not is_refused(sec_fetch_site="same-origin", sec_fetch_dest="empty")
    assert not is_refused(sec_fetch_site="cross-site", sec_fetch_dest="document")
    assert is_refused(sec_fetch_site="cross-site", sec_fetch_dest="iframe")
    assert is_refused(sec_fetch_site="cross-site", sec_fetch_dest="empty")
    assert is_refused(sec_fetch_site="cross-site")


def test_everyone_and_nobody_ask_no_further() -> None:
    assert not is_refused("everyone", peer="203.0.113.9", host="evil.example", via="proxy")
    assert is_refused("nobody")


def test_another_word_for_the_setting_is_refused() -> None:
    with pytest.raises(SettingsError, match="loopback, everyone, nobody"):
        build(RouterConfig, {"admin_access": "all"})


async def answers(server: HttpServer, **headers: str) -> set[tuple[int, str | None]]:
    """Statuses and error codes of all that is guarded."""
    found = set()
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as http:
        asked = [http.request(method, path, json={}) for method, path in GUARDED]
        asked.append(http.get("/", headers=HTML))
        for answer in await asyncio.gather(*asked):
            is_error = answer.status_code >= 400
            found.add((answer.status_code, answer.json()["error"]["code"] if is_error else None))
    return found


async def test_over_a_socket_loopback_gets_in_unless_it_goes_by_another_name() -> None:
    async with http_server(QuietFleet(), host="0.0.0.0", open=True) as server:
        # The bodies of explanations are empty, so that these are refused for another reason.
        assert await answers(server) == {(200, None), (400, "missing_required_parameter")}
        assert await answers(server, host="evil.example") == {(403, "admin_access")}
        assert await answers(server, **{"x-forwarded-for": "127.0.0.1"}) == {(403, "admin_access")}


async def test_a_request_with_two_host_headers_is_not_let_in() -> None:
    async with http_server(QuietFleet()) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /live/state HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert (await reader.readline()).split()[1] in (b"400", b"403")
        writer.close()
        await writer.wait_closed()


async def test_switched_off_it_is_shut_to_loopback_too_and_says_how_to_open_it() -> None:
    async with http_server(QuietFleet(), admin_access="nobody") as server:
        assert await answers(server) == {(403, "admin_access")}
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            error = (await http.get("/live/state")).json()["error"]
        assert error["type"] == "permission_error" and "admin_access=loopback" in error["message"]


async def test_open_to_everyone_it_asks_for_no_name() -> None:
    async with http_server(QuietFleet(), host="0.0.0.0", open=True, admin_access="everyone") as server:
        assert (403, "admin_access") not in await answers(server, host="kvasir.example")


async def test_what_is_not_guarded_stays_open() -> None:
    async with (
        http_server(QuietFleet(), admin_access="nobody") as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as http,
    ):
        for path in ("/", "/v1/models", "/health", "/metrics"):
            assert (await http.get(path)).status_code == 200
