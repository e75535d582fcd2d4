"""The page at `/` in a real browser, over a real router and replicas: what it shows, and where it fits."""

import re
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Route, expect, sync_playwright

from loadtests.stacks.local_stack import LocalStack, local_stack, python_command
from replicas.media.probes import probe_png
from tests.certificates import Authority
from tests.tools import needed_tool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

RULES = " ".join(f"Rule {number}: answer in plain words and stay kind." for number in range(1, 81))
expect.set_options(timeout=30_000)

HOSTILE_KEY = "<img src=x onerror=x()>"


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    """Two users' requests under one system prompt have been answered, some with a hostile key."""
    needed_tool("chromium")
    settings = {"engine": "simulated", "model_name": "toy", "num_blocks": 4096}
    with local_stack(num_replicas=2, replica_settings=settings) as running:
        for user in ("ada", "grace", "ada", "grace"):
            for number in range(3):
                ask(running, user, f"Question {number} of {user}: why?")
        ask(running, "eve", "Who goes there?", system=RULES[::-1], prompt_cache_key=HOSTILE_KEY)
        yield running


def ask(stack: LocalStack, user: str, question: str, *, system: str = RULES, **fields: Any) -> httpx.Response:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": "toy", "messages": messages, "max_tokens": 3, "user": user, **fields}
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


@dataclass
class Visit:
    """An open page, and whatever went wrong in it."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def listen(self) -> None:
        def on_console(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                self.complaints.append(message.text)

        self.page.on("console", on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = needed_tool("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(stack: LocalStack, browser: Browser, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """At 1,280 pixels unless the test has a width of its own."""
    width = getattr(request, "param", 1280)
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme="dark")
    visit = Visit(context.new_page())
    visit.listen()
    visit.page.goto(stack.url)
    expect(visit.page.locator("#status")).to_have_text("live")
    yield visit
    context.close()
    assert visit.complaints == []


def test_the_page_shows_the_replicas_and_where_the_shared_prefix_lies(
    stack: LocalStack, visit: Visit
) -> None:
    served_by = ask(stack, "ada", "Once more?").headers["x-kvasir-replica"]
    page = visit.page
    replicas = page.locator("#fleet .row")
    expect(replicas).to_have_count(2)
    for number in range(2):
        expect(replicas.nth(number)).to_contain_text(f"replica-{number}")
        expect(replicas.nth(number)).to_contain_text("ready")
        expect(replicas.nth(number)).to_contain_text("simulated, toy")
    shared = page.locator("#prefixes .row", has=page.locator(".toggle:not([hidden])")).first
    expect(shared).to_contain_text("cross-user")
    expect(shared).to_contain_text("own")
    expect(shared).to_contain_text(served_by)
    expect(shared.locator(".users .tag")).to_have_count(2)
    expect(shared.locator(".number .value").nth(1)).to_have_text("13")


def test_a_key_is_shown_as_the_text_that_it_is(visit: Visit) -> None:
    expect(visit.page.locator("#prefixes").get_by_text(HOSTILE_KEY)).to_be_visible()
    assert visit.page.locator("main img").count() == 0


def test_a_decision_opens_by_keyboard_and_says_why(stack: LocalStack, visit: Visit) -> None:
    page = visit.page
    rows = page.locator("#decisions .entry")
    expect(rows.first).to_contain_text("overlap")
    button = rows.first.get_by_role("button")
    button.focus()
    page.keyboard.press("Enter")
    details = rows.first.locator(".details")
    expect(details).to_be_visible()
    expect(details).to_contain_text("Sent to replica-")
    expect(details.get_by_role("table")).to_contain_text("(chosen)")
    expect(details.get_by_role("table")).not_to_contain_text("NaN")
    expect(button).to_have_attribute("aria-expanded", "true")
    opened = button.get_attribute("aria-label")

    # Whoever reads it keeps it where it is; what is new waits to be asked for.
    before = rows.first.bounding_box()
    ask(stack, "grace", "Does it move?")
    expect(page.locator("#held")).to_have_text("Show 1 new")
    assert rows.first.get_by_role("button").get_attribute("aria-label") == opened
    assert rows.first.bounding_box() == before
    page.locator("#held").click()
    expect(rows.first.get_by_role("button")).not_to_have_attribute("aria-label", str(opened))


def look(stack: LocalStack, *images: bytes) -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + b64encode(image).decode()}}
        for image in images
    ]
    messages = [{"role": "user", "content": [{"type": "text", "text": "Compare them."}, *parts]}]
    body = {"model": "pictures", "messages": messages, "max_tokens": 3}
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


def test_images_are_counted_and_the_one_that_differs_is_named(browser: Browser, tmp_path: Path) -> None:
    from replicas.toy_model.make_image_model import write_image_model

    write_image_model(tmp_path / "pictures")
    settings = {"engine": "simulated", "model": str(tmp_path / "pictures"), "model_name": "pictures"}
    red, green, blue = (probe_png(224, 224, colour) for colour in (b"\xff\0\0", b"\0\xff\0", b"\0\0\xff"))
    with local_stack(num_replicas=1, replica_settings=settings) as running:
        look(running, red, green)
        look(running, red, blue)
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        visit = Visit(context.new_page())
        visit.listen()
        page = visit.page
        page.goto(running.url)
        newest, first = page.locator("#decisions .entry").nth(0), page.locator("#decisions .entry").nth(1)
        expect(first.locator(".images").first).to_have_text(
            re.compile(r"^2 images, 0 of [1-9]\d* tokens cached$")
        )
        expect(newest.locator(".images").first).to_have_text(
            re.compile(r"^2 images, [1-9]\d* of [1-9]\d* tokens cached$")
        )
        expect(newest.locator(".remark")).to_have_text("image 2 of message 1 differs")
        newest.get_by_role("button").click()
        expect(newest.locator(".details .difference")).to_contain_text("image 2 of message 1 differs")
        assert page.locator("#decisions img").count() == 0
        context.close()
        assert visit.complaints == []


def test_the_tree_of_prefixes_closes_and_opens(visit: Visit) -> None:
    page = visit.page
    rows = page.locator("#prefixes .row")
    toggle = page.locator("#prefixes .toggle:not([hidden])").first
    expect(toggle).to_be_visible()
    num_open = rows.count()
    toggle.click()
    expect(toggle).to_have_attribute("aria-expanded", "false")
    assert rows.count() < num_open
    toggle.press("Enter")
    expect(toggle).to_have_attribute("aria-expanded", "true")
    assert rows.count() == num_open
    page.get_by_role("button", name="Most recent").click()
    expect(page.locator("#prefixes-note")).to_contain_text("kept")


@pytest.mark.parametrize("visit", [320, 390, 820, 1280], indirect=True)
def test_nothing_has_to_be_scrolled_sideways(visit: Visit) -> None:
    page = visit.page
    expect(page.locator("#decisions .entry").first).to_be_visible()
    page.locator("#decisions .row").first.click()
    expect(page.locator("#decisions .details").first).to_contain_text("Sent to")
    width, shown = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert width <= shown
    if width <= 390:
        hits = page.locator(".prefixes .hit .cut").first
        assert hits.evaluate(
            "(e) => { e.textContent = '1,234×: 500 cross-user, 300 own, 434 unattributed';"
            " return e.scrollWidth <= e.clientWidth; }"
        ), "it is cut"


@pytest.mark.parametrize("visit", [390, 1280], indirect=True)
def test_nothing_jumps_while_the_page_looks_again(stack: LocalStack, visit: Visit) -> None:
    page = visit.page
    for what in ("#decisions .entry", "#prefixes .row", "#fleet .row"):
        expect(page.locator(what).first).to_be_visible()
    places = (
        "[...document.querySelectorAll('section, .table, figure')].map((e) => e.offsetTop + e.offsetHeight)"
    )
    before = page.evaluate(places)
    for number in range(4):
        ask(stack, "ada", f"A new one, number {number}?")
    with page.expect_response("**/live/prefixes*"):
        pass
    with page.expect_response("**/live/state"):
        pass
    assert page.evaluate(places) == before


@contextmanager
def replica_that_wants_tls(stack: LocalStack, ca: Authority) -> Iterator[None]:
    """Beside those of the stack, whose router has no certificates."""
    pair = ca.replica()
    tls = {"tls_certificate": pair.certificate, "tls_key": pair.key, "tls_client_ca": ca.certificate}
    settings = {"replica_id": "shy", **stack.shared, "engine": "simulated", "model_name": "toy"}
    stack.start("shy", python_command("replicas", settings | tls))
    try:
        yield
    finally:
        assert stack.terminate("shy") == 0


@pytest.mark.parametrize("visit", [320, 1280], indirect=True)
def test_a_replica_that_is_not_connected_says_why(stack: LocalStack, ca: Authority, visit: Visit) -> None:
    page = visit.page
    replicas = page.locator("#fleet .row")
    with replica_that_wants_tls(stack, ca):
        shy = replicas.filter(has_text="shy")
        expect(shy).to_contain_text("not connected", timeout=30_000)
        reason = shy.get_by_text(
            "it hangs up at once: it may want TLS, and this router has no replica_tls_ca"
        )
        expect(reason).to_be_visible()
        expect(page.locator("#fleet .complaint:visible")).to_have_count(1)
        width, shown = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert width <= shown
        cell, row = reason.bounding_box(), shy.bounding_box()
        assert cell is not None and row is not None
        assert cell["width"] > 0.8 * row["width"], "it has the row's whole width"
    expect(replicas).to_have_count(2, timeout=30_000)


def test_a_router_that_is_gone_is_said_to_be(visit: Visit) -> None:
    page = visit.page

    def refuse(route: Route) -> None:
        route.abort()

    page.route("**/live/**", refuse)
    expect(page.locator("#notice")).to_contain_text("The router does not answer")
    expect(page.locator("#fleet .row")).to_have_count(2)
    page.unroute("**/live/**", refuse)
    expect(page.locator("#notice")).to_be_hidden()
    # The browser's own words about the requests that were cut off.
    visit.complaints = [text for text in visit.complaints if "ERR_FAILED" not in text]


def test_a_page_that_is_paused_asks_for_nothing(visit: Visit) -> None:
    page = visit.page
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#status")).to_have_text("paused")
    page.wait_for_timeout(1500)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(2500)
    assert asked == []
    with page.expect_response("**/live/state"):
        page.get_by_role("button", name="Resume").click()


@pytest.mark.parametrize("visit", [1280, 390], indirect=True)
def test_the_api_s_page_shows_every_route_and_its_fields(visit: Visit, stack: LocalStack) -> None:
    page = visit.page
    page.goto(f"{stack.url}/docs")
    document = httpx.get(f"{stack.url}/openapi.json").json()
    operations = [each for item in document["paths"].values() for each in item.values()]
    expect(page.locator("#operations > details")).to_have_count(len(operations))
    chat = page.locator("#post_v1_chat_completions")
    chat.locator("summary").first.click()
    for words in ("ChatBody", "temperature", "ChatCompletion", "429"):
        expect(chat).to_contain_text(words)
    whole, shown = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert whole <= shown
