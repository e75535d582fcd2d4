"""What is refused by a request's head alone: hosts, origins, content types and encodings."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence

import httpx
import pytest

from router.shared.origins import calls_address
from tests.router import tiny_model
from tests.router.features.api_keys.some_keys import ACME, bearer, some_keys
from tests.router.http_server import HttpServer, http_server
from tests.router.quiet_fleet import QuietFleet
from tests.router.scripted_dispatch import says

BODY = json.dumps({"model": tiny_model.MODEL, "prompt": "Hello"}).encode()
JSON = {"content-type": "application/json"}
POSTS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/explain/v1/completions",
    "/nowhere",
]
GETS = ["/", "/health", "/ready", "/metrics", "/v1/models", "/live/state", "/nowhere"]


async def status_of(
    server: HttpServer, headers: Mapping[str, str] | Sequence[tuple[str, str]], path: str = "/tokenize"
) -> tuple[int, str]:
    """Of a post, with nothing in its head but this: its status and error code."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    head = "".join(f"{name}: {value}\r\n" for name, value in pairs)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        f"POST {path} HTTP/1.1\r\n{head}content-length: {len(BODY)}\r\n\r\n".encode("latin-1") + BODY
    )
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += await reader.read(65536)
    length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(answer.partition(b"\r\n\r\n")[2]) < length:
        answer += await reader.read(65536)
    writer.close()
    await writer.wait_closed()
    content = json.loads(answer.partition(b"\r\n\r\n")[2])
    return int(answer.split()[1]), content.get("error", {}).get("code") or ""


def refused(server: HttpServer) -> dict[str, int]:
    lines = server.context.metrics.render().decode().splitlines()
    found = {}
    for line in lines:
        if line.startswith("router_refused_requests_total{"):
            fault = line.partition('fault="')[2].partition('"')[0]
            found[fault] = round(float(line.rpartition(" ")[2]))
    return found


async def test_on_loopback_every_route_answers_to_loopbacks_names_only() -> None:
    async with http_server(QuietFleet()) as server:
        elsewhere = {"host": f"evil.example:{server.port}"}
        async with httpx.AsyncClient(base_url=server.url, headers=elsewhere, timeout=60) as http:
            answers = [await http.get(path) for path in GETS]
            answers += [await http.post(path, content=BODY, headers=JSON) for path in POSTS]
        assert {answer.status_code for answer in answers} == {403}
        assert {answer.json()["error"]["code"] for answer in answers} == {"host_not_allowed"}
        assert "allowed_hosts" in answers[0].json()["error"]["message"]
        counted = refused(server)
        assert {"origin", "content_type", "content_encoding", "key_missing"} < counted.keys()
        assert counted == dict.fromkeys(counted, 0) | {"host": len(answers)}
        assert server.dispatcher.generations == []


@pytest.mark.parametrize("host", ["localhost", "LocalHost:1", "127.0.0.1:8000", "[::1]:8000", "127.9.9.9"])
async def test_loopbacks_names_are_answered_whatever_the_port(host: str) -> None:
    async with http_server() as server:
        assert await status_of(server, {"host": host, **JSON}) == (200, "")


async def test_a_probe_that_sends_no_host_at_all_is_answered() -> None:
    async with http_server() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()
        await writer.wait_closed()


async def test_a_proxy_on_this_machine_may_pass_on_a_name_that_is_allowed() -> None:
    async with http_server(allowed_hosts="llm.example,other.example") as server:
        assert (await status_of(server, {"host": "LLM.example", **JSON}))[0] == 200
        assert (await status_of(server, {"host": "other.example:443", **JSON}))[0] == 200
        assert (await status_of(server, {"host": "evil.example", **JSON}))[0] == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
async def test_a_router_that_others_reach_has_any_name(host: str) -> None:
    async with http_server(host=host, open=True) as server:
        assert (await status_of(server, {"host": "kvasir-router.llm.svc", **JSON}))[0] == 200


async def test_where_names_are_allowed_no_other_is_answered_on_any_address() -> None:
    settings: dict[str, object] = {
        "host": "0.0.0.0",
        "open": True,
        "allowed_hosts": "LLM.example,[2001:db8::1]",
    }
    async with http_server(QuietFleet(), **settings) as server:
        for host in ("llm.example", "llm.EXAMPLE:8000", "localhost", "127.0.0.1:8000", "[2001:DB8::1]:80"):
            assert await status_of(server, {"host": host, **JSON}) == (200, "")
        for host in ("evil.example", "llm.example.evil.example", "192.0.2.1", "", "llm.example, x"):
            assert await status_of(server, {"host": host, **JSON}) == (403, "host_not_allowed")
        for path in POSTS:
            assert (await status_of(server, {"host": "evil.example", **JSON}, path))[0] == 403


@pytest.mark.parametrize(
    ("address", "host", "is_own"),
    [
        ("10.1.2.3", "10.1.2.3:8001", True),
        ("::ffff:10.1.2.3", "10.1.2.3", True),
        ("2001:db8::7", "[2001:DB8:0::7]:8001", True),
        ("10.1.2.3", "10.1.2.4", False),
        ("10.1.2.3", "llm.example", False),
        ("llm.example", "llm.example", False),
    ],
)
def test_a_router_knows_the_address_that_it_was_reached_at(address: str, host: str, is_own: bool) -> None:
    assert calls_address(host.encode(), address) is is_own


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize(
    "name", ["authorization", "x-api-key", "x-goog-api-key", "x-kvasir-cache-group", "host"]
)
async def test_a_header_that_says_who_asks_or_whom_comes_once(name: str, is_gated: bool) -> None:
    async with http_server(keys=some_keys() if is_gated else None) as server:
        head = [("host", "localhost"), *bearer(ACME).items(), *JSON.items()]
        value = dict(head).get(name, ACME)
        for twice in ([(name, value), *head, (name, value)], [*head, (name, "x"), (name.title(), value)]):
            assert await status_of(server, twice) == (400, "repeated_header")
        assert await status_of(server, [("x-other", "1"), *head, ("x-other", "1")]) == (200, "")
        assert refused(server)["repeated"] == 2
        assert server.dispatcher.generations == []


FOREIGN = [
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site", "origin": "http://localhost:3000"},
    {"origin": "https://evil.example"},
    {"origin": "http://localhost:1"},
    {"origin": "null"},
]


@pytest.mark.parametrize("headers", FOREIGN)
async def test_pages_of_other_origins_post_nothing_on_loopback(headers: dict[str, str]) -> None:
    async with http_server(QuietFleet()) as server:
        host = {"host": f"localhost:{server.port}"}
        for path in POSTS:
            for kind in ({}, JSON, {"content-type": "text/plain"}):
                assert await status_of(server, {**host, **headers, **kind}, path) == (
                    403,
                    "origin_not_allowed",
                )
        assert refused(server)["origin"] == 3 * len(POSTS)
        assert server.dispatcher.generations == []


@pytest.mark.parametrize("headers", FOREIGN)
async def test_under_a_public_name_only_what_a_browser_would_have_asked_leave_for_gets_in(
    headers: dict[str, str],
) -> None:
    async with http_server(host="0.0.0.0", open=True) as server:
        host = {"host": "llm.example"}
        assert (await status_of(server, {**host, **headers, **JSON}))[0] == 200
        assert (await status_of(server, {**host, **headers}))[0] == 403
        assert (await status_of(server, {**host, **headers, "content-type": "text/plain"}))[0] == 415
        form = {"content-type": "multipart/form-data; boundary=a"}  # which browsers send without asking
        sound = "/v1/audio/transcriptions"
        assert (await status_of(server, {**host, **headers, **form}, sound))[0] == 403
        assert (await status_of(server, {**host, **form}, sound))[0] == 404  # no server has it


async def test_the_routers_own_page_and_programs_with_a_fetch_of_their_own_may_post() -> None:
    async with http_server() as server:
        origin = {"host": f"localhost:{server.port}", "origin": f"http://localhost:{server.port}"}
        assert (await status_of(server, {**origin, **JSON}))[0] == 200
        assert (await status_of(server, {**origin, "sec-fetch-site": "same-origin", **JSON}))[0] == 200
        # A proxy has changed the host, and the browser knows better.
        changed = {"host": "127.0.0.1:8000", "origin": "https://llm.example", "sec-fetch-site": "same-origin"}
        assert (await status_of(server, {**changed, **JSON}))[0] == 200
        # What fetch of Node.js sends.
        assert (await status_of(server, {"host": "localhost", "sec-fetch-mode": "cors", **JSON}))[0] == 200


async def test_pages_of_other_origins_may_still_be_linked_from() -> None:
    async with http_server() as server, httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        assert (await http.get("/v1/models", headers={"sec-fetch-site": "cross-site"})).status_code == 200


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "",
        "application/json",
        "APPLICATION/JSON",
        "application/json; charset=utf-8",
        "application/json;charset=UTF-8",
        "application/vnd.api+json",
        "text/json",
    ],
)
async def test_json_is_taken_by_any_of_its_names_and_without_one(content_type: str | None) -> None:
    async with http_server() as server:
        server.dispatcher.script = says([65])
        headers = {"host": "localhost"} | ({} if content_type is None else {"content-type": content_type})
        for path in ("/tokenize", "/v1/completions"):
            assert await status_of(server, headers, path) == (200, "")


@pytest.mark.parametrize(
    "content_type",
    [
        "text/plain",
        "text/plain;charset=UTF-8",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/octet-stream",
        "application/jsonlines",
        "json",
        "*/*",
    ],
)
async def test_other_types_are_refused_on_every_route_that_reads_a_body(content_type: str) -> None:
    async with http_server() as server:
        headers = {"host": "localhost", "content-type": content_type}
        there = [path for path in POSTS if path != "/nowhere"]
        for path in there:
            assert await status_of(server, headers, path) == (415, "unsupported_content_type")
        for path in ("/nowhere", "/v1/files", "/v1/batches", "/v1/moderations"):
            assert await status_of(server, headers, path) == (404, "unknown_url")
        assert refused(server)["content_type"] == len(there)


async def test_a_refused_body_does_not_become_the_next_request() -> None:
    async with http_server() as server:
        smuggled = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\n"
            b"content-length: %d\r\n\r\n%b"
            % (len(smuggled), smuggled)
            + b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
        answers = await reader.read()
        writer.close()
        await writer.wait_closed()
        assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"415", b"200"]
