"""A report as a browser shows it: on a phone as on a desk, and without a network."""

from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from loadtests.reports.comparison import compare
from loadtests.reports.html_page import page
from loadtests.reports.report import Slo
from tests.loadtests.run_builder import random_run
from tests.tools import needed_tool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(90)]

SLO = Slo(2.0)
NOTE = "other programs used 100 % of the machine just before the run"
CUT_OFF = """[...document.querySelectorAll(".scroll")].filter(each => each.scrollWidth > each.clientWidth)
    .map(each => each.innerText)"""
LONG = "a-policy-with-a-name-that-is-far-too-long-for-the-width-of-a-phone"


@pytest.mark.parametrize("policies", [("round_robin", "kvasir"), (LONG, f"{LONG}-too")])
def test_a_report_is_as_wide_as_its_window_and_asks_for_nothing(
    policies: tuple[str, ...], tmp_path: Path
) -> None:
    runs = []
    for number, policy in enumerate(policies):
        run = random_run(number, policy=policy)
        info = replace(run.info, started_at="2026-11-25T10:45:00+00:00", notes=(NOTE,), engine="simulated")
        records = [replace(each, error="refused (503)" if each.error else None) for each in run.records]
        runs.append((f"run-1-{policy}", replace(run, info=info, records=tuple(records))))
    file = tmp_path / "report.html"
    file.write_text(page(compare(runs, SLO), SLO), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=needed_tool("chromium"), args=["--no-sandbox"])
        for width in (320, 390, 820, 1280, 1300):
            context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
            visit = context.new_page()
            asked: list[str] = []
            complaints: list[str] = []
            visit.on("request", lambda request, asked=asked: asked.append(request.url))
            visit.on("console", lambda message, said=complaints: said.append(message.text))
            visit.on("pageerror", lambda error, said=complaints: said.append(str(error)))
            visit.goto(file.as_uri())
            whole, shown = visit.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
            assert whole <= shown, width
            if width >= 1280 and LONG not in policies:
                assert visit.evaluate(CUT_OFF) == []
            assert asked == [file.as_uri()] and not complaints
            context.close()
        browser.close()
