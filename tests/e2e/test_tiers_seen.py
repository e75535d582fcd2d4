"""What a person sees of memory below the device, over a real router and a replica that has all three tiers.

Answers, metrics on both sides, explanations and the page at `/` in a real browser say the same numbers.
"""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect, sync_playwright
from prometheus_client.parser import text_string_to_metric_families

from cluster.cli import main
from loadtests.stacks.local_stack import LocalStack, free_port, local_stack
from tests.integration.observe import is_router_idle, wait_until
from tests.tools import needed_tool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

WORDS = ("river", "stone", "lamp", "seven", "garden", "quiet", "engine", "paper")
METRICS_PORT = free_port()
TIERS = ("device", "host", "disk")


class Asked:
    """A stack and the sums of what its answers have said."""

    def __init__(self, stack: LocalStack) -> None:
        rng = random.Random(6)
        self.stack = stack
        self.texts = [" ".join(rng.choices(WORDS, k=500)) for _ in range(9)]
        self.tokens: Counter[str] = Counter()

    def ask(self, text: str) -> Counter[str]:
        """The cached tokens of one answer, by tier."""
        body = {"model": "toy", "prompt": text, "max_tokens": 2, "temperature": 0}
        answer = httpx.post(f"{self.stack.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        details = answer.json()["usage"]["prompt_tokens_details"]
        tokens = Counter({tier: details[f"{tier}_cached_tokens"] for tier in TIERS})
        assert tokens.total() == details["cached_tokens"]
        self.tokens += tokens
        return tokens


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """More prompts than the device holds, and more than host memory does."""
    settings: dict[str, Any] = {
        "engine": "torch",
        "model_name": "toy",
        "num_threads": 1,
        "num_blocks": 130,
        "host_kv_bytes": 6 * 2**20,
        "disk_kv_bytes": 64 * 2**20,
        "kv_folder": str(tmp_path_factory.mktemp("kv")),
        "metrics_port": METRICS_PORT,
    }
    with local_stack(num_replicas=1, replica_settings=settings) as stack:
        asked = Asked(stack)
        for _ in range(3):
            for text in asked.texts:
                asked.ask(text)
        asked.ask(asked.texts[-1])
        yield asked


def samples(url: str, name: str, label: str = "tier") -> dict[str, float]:
    text = httpx.get(url, timeout=60).text
    return {
        sample.labels[label]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_answers_and_the_metrics_of_both_sides_agree_to_the_token(asked: Asked) -> None:
    assert asked.tokens["disk"] > 0 and asked.tokens["device"] > 0
    router = samples(f"{asked.stack.url}/metrics", "router_cached_tokens_by_tier_total")
    replica = f"http://127.0.0.1:{METRICS_PORT}/metrics"
    wanted = {tier: asked.tokens[tier] for tier in TIERS}
    assert router == samples(replica, "replica_cached_tokens_by_tier_total") == wanted
    fill, most = samples(replica, "replica_tier_bytes"), samples(replica, "replica_tier_bytes_limit")
    assert set(fill) == {"host", "disk"} and most["disk"] == 64 * 2**20
    assert all(0 < fill[tier] <= most[tier] for tier in fill)
    for name in ("moves", "moved_tokens", "move_seconds"):
        moved = samples(replica, f"replica_tier_{name}_total", "way")
        assert set(moved) == {"load", "read", "write"} and all(moved.values()), name
    tokens = samples(replica, "replica_tier_moved_tokens_total", "way")
    assert tokens["read"] >= asked.tokens["disk"] and tokens["load"] >= asked.tokens["disk"]


def test_explain_says_where_a_prompt_lies_and_what_either_way_takes(
    asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_until(lambda: is_router_idle(asked.stack), "nothing changes meanwhile")
    places = ["--url", asked.stack.url, "--run-dir", str(tmp_path)]
    assert main(["explain", "--completion", asked.texts[0], *places]) == 0
    told = capsys.readouterr().out
    assert "DEVICE  HOST  DISK" in told
    assert "\non disk at replica-0, " in told and " ms to load, " in told and " ms to compute" in told


@pytest.mark.parametrize(("width", "number"), [(320, 0), (1280, 3)])
def test_the_page_shows_how_full_each_tier_is_and_which_served_a_prompt(
    asked: Asked, width: int, number: int
) -> None:
    for _ in range(2):
        asked.ask(asked.texts[number])
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=needed_tool("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(asked.stack.url)
        replica = page.locator("#fleet .row").first
        expect(replica).to_contain_text("host memory: 5.7 MiB of 5.7 MiB", timeout=30_000)
        expect(replica).to_contain_text("of 64 MiB")
        rows = page.locator("#decisions .entry")
        expect(rows.nth(0).locator(".tiers")).to_have_count(0)
        expect(rows.nth(1)).to_contain_text("from disk")
        rows.nth(1).get_by_role("button").click()
        details = rows.nth(1).locator(".details")
        expect(details).to_contain_text("Expected on disk at replica-0, ")
        expect(details.get_by_role("table")).to_contain_text("Disk")
        expect(details.get_by_role("table")).not_to_contain_text("NaN")
        scrolled, shown = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        browser.close()
    assert scrolled <= shown and complaints == []
