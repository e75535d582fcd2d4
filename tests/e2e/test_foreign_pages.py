"""Pages of other sites, in a real browser on the router's machine: what they can make it do."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from playwright.sync_api import Page, sync_playwright

from tests.router.router_process import running_router
from tests.tools import needed_tool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

BODY = '{"model": "x", "prompt": "x"}'


class _AnyPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = b"<!doctype html><title>elsewhere</title>"
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    """Another origin on this machine; `evil.example` means this machine too."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _AnyPage) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://evil.example:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def router() -> Iterator[str]:
    with running_router() as (url, _):
        yield url


@pytest.fixture
def page() -> Iterator[Page]:
    path = needed_tool("chromium")
    arguments = ["--no-sandbox", "--host-resolver-rules=MAP evil.example 127.0.0.1"]
    arguments += ["--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser.new_page()
        browser.close()


def counted(router: str, name: str) -> float:
    """The sum of a counter's series."""
    lines = httpx.get(f"{router}/metrics", timeout=30).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


def test_what_a_foreign_page_can_post_unasked_reaches_no_model(
    page: Page, router: str, elsewhere: str
) -> None:
    page.goto(elsewhere)
    url = f"{router}/v1/completions"
    post = (
        "([url, body, type]) => fetch(url, {method: 'POST', mode: 'no-cors', body: new Blob([body], {type})})"
    )
    for kind in ("", "text/plain", "application/x-www-form-urlencoded"):
        page.evaluate(f"async (all) => {{ await ({post})(all); }}", [url, BODY, kind])
    page.evaluate("([url, body]) => { navigator.sendBeacon(url, new Blob([body])); }", [url, BODY])
    assert (
        page.evaluate(
            # With its true type the browser asks first, and gets no leave.
            "([url, body]) => fetch(url,"
            " {method: 'POST', body, headers: {'content-type': 'application/json'}})"
            ".then(() => 'sent', () => 'not sent')",
            [url, BODY],
        )
        == "not sent"
    )
    page.evaluate(
        """(url) => {
            const form = document.createElement("form");
            Object.assign(form, {method: "POST", action: url, enctype: "text/plain"});
            document.body.append(form);
            form.submit();
        }""",
        url,
    )
    page.wait_for_url(url)
    assert "origin_not_allowed" in page.content()
    assert counted(router, "router_refused_requests_total") >= 5
    assert counted(router, "router_requests_total") <= 1  # the question whether it may: OPTIONS


def test_a_name_that_was_pointed_at_this_machine_gets_nothing(page: Page, router: str) -> None:
    rebound = router.replace("127.0.0.1", "evil.example")
    answer = page.goto(f"{rebound}/metrics")
    assert answer is not None and answer.status == 403
    status = "([path, body]) => fetch(path, {method: 'POST', body}).then((answer) => answer.status)"
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        assert page.evaluate(status, [path, BODY]) == 403


def test_the_routers_own_origin_may_post(page: Page, router: str) -> None:
    page.goto(f"{router}/")
    headers = "{'content-type': 'application/json'}"
    post = (
        f"([path, body]) => fetch(path, {{method: 'POST', body, headers: {headers}}}).then((a) => a.status)"
    )
    assert page.evaluate(post, ["/v1/completions", BODY]) == 503  # there is no replica
