"""Browsers that ask for pages of other origins: nothing without the setting, the API alone with it."""

from collections.abc import AsyncIterator

import httpx
import pytest

from replicas.process.settings import SettingsError, build
from router.config import RouterConfig
from tests.router import tiny_model
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import says

PAGE = "https://chat.example.org"
OTHER = "https://evil.example.org"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
ASKS = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
CHATS = "/v1/chat/completions"


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with http_server(cors_origins=(PAGE + "/",)) as running:
        running.dispatcher.script = says([tiny_model.END_OF_TURN])
        yield running


@pytest.mark.parametrize("stream", [False, True])
async def test_a_page_that_may_call_can_read_the_answer(http: httpx.AsyncClient, stream: bool) -> None:
    headers = {"origin": PAGE, "sec-fetch-site": "cross-site"}
    answer = await http.post(CHATS, json=CHAT | {"stream": stream}, headers=headers)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    wrong = await http.post(CHATS, json={}, headers=headers)
    assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (400, PAGE)
    models = await http.get("/v1/models", headers=headers)
    assert models.headers["access-control-expose-headers"] == "*"


async def test_other_pages_and_other_routes_are_as_they_were(http: httpx.AsyncClient) -> None:
    for origin, path in (
        (OTHER, CHATS),
        (PAGE, "/live/state"),
        (PAGE, "/explain/v1/completions"),
        (PAGE, "/"),
    ):
        for answer in (
            await http.options(path, headers={"origin": origin, **ASKS}),
            await http.post(path, json=CHAT, headers={"origin": origin}),
            await http.get(path, headers={"origin": origin}),
        ):
            assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("text", [f"['{PAGE}']", f"{PAGE}, {OTHER}", f'["{OTHER}", "{PAGE}/"]'])
async def test_a_list_however_it_is_written_lets_its_pages_in(text: str) -> None:
    origins = build(RouterConfig, {"cors_origins": text}).cors_origins
    async with (
        http_server(cors_origins=origins) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as http,
    ):
        answer = await http.options(CHATS, headers={"origin": PAGE, **ASKS})
        assert answer.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize(
    "origin",
    ["https://a.example.org", "http://localhost:3000", "http://[::1]:3000/", "chrome-extension://abc"],
)
def test_what_browsers_call_an_origin_is_one(origin: str) -> None:
    assert RouterConfig(cors_origins=(origin, "*")).cors_origins == (origin, "*")


@pytest.mark.parametrize(
    "origin",
    [
        "chat.example.org",
        "https://*.example.org",
        "https://a.org/chat",
        "['https://a.org']",
        "null",
        "https://",
    ],
)
def test_what_no_browser_calls_an_origin_is_refused_when_the_router_starts(origin: str) -> None:
    with pytest.raises(SettingsError, match="cors_origins takes origins as browsers name them"):
        RouterConfig(cors_origins=(origin,))


async def test_every_origin_may_where_that_is_set_and_none_where_nothing_is() -> None:
    for origins, allowed in ((("*",), OTHER), ((), None)):
        async with (
            http_server(cors_origins=origins) as server,
            httpx.AsyncClient(base_url=server.url, timeout=60) as http,
        ):
            answer = await http.options(CHATS, headers={"origin": OTHER, **ASKS})
            assert answer.headers.get("access-control-allow-origin") == allowed
            assert answer.status_code == (204 if allowed else 405)
