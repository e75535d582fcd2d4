"""The page at `/` and its data over a real socket: what was served shows, capped, and not what was said."""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from replicas.protocol.frames import LoadSnapshot
from router.errors import GenerationFailed
from router.features.live_page import live_view
from router.features.live_page.feature import PREFIXES_SECONDS
from router.features.live_page.page_files import FILES
from tests.router.http_server import HttpServer, http_server
from tests.router.quiet_fleet import QuietFleet, replica_view
from tests.router.scripted_dispatch import says

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
SYSTEM = "A secret system prompt, the same for all who ask. " * 6


@pytest.fixture
def fleet() -> QuietFleet:
    busy = LoadSnapshot(num_running=3, num_waiting=2, num_pending_tokens=900, num_used_blocks=10)
    return QuietFleet(views=[replica_view("replica-7", busy), replica_view("replica-8")])


@pytest.fixture
async def server(fleet: QuietFleet) -> AsyncIterator[HttpServer]:
    async with http_server(fleet) as running:
        running.dispatcher.script = says([5, 6], num_cached_tokens=32, num_cross_user_tokens=32)
        yield running


async def ask(http: httpx.AsyncClient, question: str, **fields: Any) -> httpx.Response:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 2, **fields}
    return await http.post("/v1/chat/completions", json=body)


async def live(http: httpx.AsyncClient, path: str) -> Any:
    answer = await http.get(f"/live/{path}")
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


async def test_a_browser_gets_the_page_and_a_program_json(http: httpx.AsyncClient) -> None:
    page = await http.get("/", headers=HTML)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.content == FILES["index.html"].content
    for headers in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        plain = await http.get("/", headers=headers)
        assert plain.json() == {"name": "kvasir", "models": ["tiny", "untemplated", "gpt-tiny", "tiny-sql"]}
        assert plain.headers["vary"] == page.headers["vary"] == "accept"
    for headers in (HTML, {}):
        head = await http.head("/", headers=headers)
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) > 0


async def test_every_file_of_the_page_is_served_once_and_runs_nothing_but_our_own(
    http: httpx.AsyncClient,
) -> None:
    index = FILES["index.html"].content.decode()
    scripts = {name: file.content.decode() for name, file in FILES.items() if name.endswith(".js")}
    for name in FILES.keys() - {"index.html"}:
        assert f"/page/{name}" in index or any(f'"./{name}"' in script for script in scripts.values()), name
    for path in ["/", *(f"/page/{name}" for name in FILES.keys() - {"index.html"})]:
        answer = await http.get(path, headers=HTML)
        policy = answer.headers["content-security-policy"]
        assert (
            "default-src 'self'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        )
        assert answer.headers["x-content-type-options"] == "nosniff"
        known = {"if-none-match": answer.headers["etag"], **HTML}
        again = await http.get(path, headers=known)
        assert (again.status_code, again.content) == (304, b"")
        assert (await http.get(path, headers={**HTML, "if-none-match": '"other"'})).status_code == 200
    for name in ("nothing.js", "index.html", "../config.py", "%2e%2e/config.py"):
        assert (await http.get(f"/page/{name}")).status_code == 404


async def test_the_page_takes_nothing_from_elsewhere() -> None:
    for name, file in FILES.items():
        text = file.content.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http" not in text, name
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert forbidden not in text, (name, forbidden)


async def test_the_state_has_replicas_and_what_was_served(http: httpx.AsyncClient) -> None:
    await ask(http, "one", user="ada")
    await ask(http, "two", model="nobody")
    state = await live(http, "state")
    assert state["router"]["name"] == "router of a test" and state["router"]["policy"] == "kvasir"
    assert state["index"] == [
        {"model": "tiny", "entries": 7, "predictions": 0, "lag_seconds": 0.25, "is_connected": True}
    ]
    seven, eight = state["replicas"]
    assert (seven["id"], seven["running"], seven["waiting"], seven["pending_tokens"]) == (
        "replica-7",
        3,
        2,
        900,
    )
    assert (sum(seven["requests"]), seven["cached_tokens"]) == (1, 32)
    assert (sum(eight["requests"]), eight["tokens"]) == (0, 0)
    slots = state["slots"]
    assert (sum(slots["requests"]), sum(slots["errors"])) == (2, 1)
    assert (sum(slots["cross_user"]), sum(slots["own"]), sum(slots["unattributed"])) == (32, 0, 0)
    assert sum(slots["computed"]) == seven["tokens"] - 32
    assert [value for value in slots["ttft_p50"] if value is not None]


async def test_a_replica_with_memory_below_its_device_says_how_full_it_is(
    http: httpx.AsyncClient, fleet: QuietFleet
) -> None:
    tiers = LoadSnapshot(num_host_bytes=3, max_host_bytes=10, num_disk_bytes=70, max_disk_bytes=900)
    host_only = LoadSnapshot(max_host_bytes=10)
    fleet.views = [replica_view("a", tiers), replica_view("b", host_only), replica_view("c")]
    all_of_a, host_of_b, none_of_c = (await live(http, "state"))["replicas"]
    assert all_of_a["tiers"] == [
        {"tier": "host", "bytes": 3, "max_bytes": 10},
        {"tier": "disk", "bytes": 70, "max_bytes": 900},
    ]
    assert host_of_b["tiers"] == [{"tier": "host", "bytes": 0, "max_bytes": 10}]
    assert none_of_c["tiers"] == []


async def test_a_decision_says_from_which_tiers_its_prompt_was_read(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says([5], num_cached_tokens=64, num_slower_tier_tokens=48, num_disk_tokens=16)
    await ask(http, "one")
    (decision,) = (await live(http, "decisions"))["decisions"]
    assert (decision["cached_tokens"], decision["host_tokens"], decision["disk_tokens"]) == (64, 32, 16)
    server.dispatcher.script = lambda generation: [GenerationFailed("broken")]
    await ask(http, "two")
    newest, _ = (await live(http, "decisions"))["decisions"]
    assert (newest["host_tokens"], newest["disk_tokens"], newest["cached_tokens"]) == (None, None, None)
    assert (newest["status"], newest["error"]) == (500, "GenerationFailed")
    assert (await live(http, "decisions/2"))["findings"] == []


async def test_what_an_engine_does_not_say_is_neither_hit_nor_miss(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says([5], num_cached_tokens=None)
    answer = await ask(http, "one question of many words, which fills some blocks " * 3)
    assert answer.json()["usage"]["prompt_tokens_details"] == {}
    assert answer.headers["x-kvasir-cache"] == "unknown; cause=not_reported"
    (decision,) = (await live(http, "decisions"))["decisions"]
    assert (decision["cached_tokens"], decision["finding"]) == (None, "not_reported")
    assert (await live(http, "decisions/1"))["findings"][0]["kind"] == "not_reported"
    (node,) = (await live(http, "prefixes"))["nodes"]
    assert (node["requests"], node["unreported"], node["hits"]) == (1, 1, 0)
    state = await live(http, "state")
    assert sum(state["slots"]["requests"]) == 1 and sum(state["slots"]["computed"]) == 0


async def test_prompts_that_begin_alike_are_one_prefix_with_its_users_and_its_place(
    server: HttpServer, http: httpx.AsyncClient, fleet: QuietFleet
) -> None:
    server.dispatcher.script = says([5, 6])
    await ask(http, "What is the first question of them all, in many words and some more?", user="ada")
    num_shared = 16 * 5
    server.dispatcher.script = says([5], num_cached_tokens=num_shared, num_cross_user_tokens=num_shared)
    await ask(http, "Another one, which is as long as the first but asks about something else", user="grace")
    await ask(http, "And a third question, by someone else, about nothing in particular", user="eve")
    fleet.held = {"replica-7": 1000, "replica-8": 2}
    answer = await live(http, "prefixes")
    shared = answer["nodes"][0]
    assert (shared["parent"], shared["start"], shared["requests"]) == (None, 0, 3)
    assert shared["end"] >= num_shared
    assert len({user for user, _ in shared["users"]}) == 3
    assert shared["holders"] == [["replica-7", shared["end"]], ["replica-8", 32]]
    tails = [node for node in answer["nodes"] if node["parent"] == shared["id"]]
    assert len(tails) == 3 == shared["children"]
    assert all(tail["holders"] == [["replica-7", tail["end"]]] for tail in tails)
    assert {node["id"] for node in (await live(http, "prefixes?order=recent"))["nodes"]} == {
        node["id"] for node in answer["nodes"]
    }


async def test_a_decision_can_be_looked_up_with_its_findings(http: httpx.AsyncClient) -> None:
    await ask(http, "one", user="ada", prompt_cache_key="k" * 60)
    await ask(http, "two")
    listed = await live(http, "decisions")
    newest, first = listed["decisions"]
    assert (newest["number"], first["number"], listed["num_decisions"]) == (2, 1, 2)
    assert (first["replica"], first["reason"], first["expected_tokens"]) == ("replica-7", "overlap", 32)
    assert (first["cached_tokens"], first["cross_user_tokens"]) == (32, 32)
    assert newest["user"] is None and len(first["user"]) == 6
    assert [one["number"] for one in (await live(http, "decisions?after=1"))["decisions"]] == [2]
    explained = await live(http, "decisions/1")
    assert explained["key"] == "k" * 23 + "…"
    assert explained["findings"][0]["kind"] == "never_cached"
    assert explained["candidates"] == []


async def test_no_text_of_a_prompt_is_told(http: httpx.AsyncClient) -> None:
    await ask(http, "my password is swordfish", user="ada-lovelace", cache_salt="tenant-salt")
    told = [await live(http, path) for path in ("state", "prefixes", "decisions", "decisions/1")]
    text = json.dumps(told)
    for secret in ("swordfish", "secret system", "ada-lovelace", "tenant-salt"):
        assert secret not in text


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("prefixes?order=random", 400),
        ("decisions?after=-1", 400),
        ("decisions?after=x", 400),
        ("decisions?after=%D9%A3", 400),
        ("decisions/1", 404),
        ("decisions/x", 404),
        ("decisions/" + "9" * 5000, 404),
        ("nothing", 404),
    ],
)
async def test_bad_questions_are_refused_in_openais_shape(
    http: httpx.AsyncClient, path: str, status: int
) -> None:
    answer = await http.get(f"/live/{path}")
    assert answer.status_code == status and answer.json()["error"]["message"]


async def test_many_watchers_cost_what_one_does(http: httpx.AsyncClient, fleet: QuietFleet) -> None:
    await ask(http, "one")
    assert fleet.num_lookups == 0  # while nobody watches
    started = time.monotonic()
    for _ in range(20):
        await live(http, "prefixes")
    assert 1 <= fleet.num_lookups <= 1 + (time.monotonic() - started) / PREFIXES_SECONDS


async def test_a_large_fleet_and_many_prefixes_are_told_in_part(
    http: httpx.AsyncClient, fleet: QuietFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_view, "MAX_NODES", 3)
    fleet.views = [replica_view(f"replica-{number:03}") for number in range(300)]
    fleet.held = {f"replica-{number:03}": 100 for number in range(20)}
    for number in range(6):
        await ask(http, f"{number} times the question that fills up a block of its own")
    state = await live(http, "state")
    assert (len(state["replicas"]), state["num_replicas"]) == (live_view.MAX_REPLICAS, 300)
    prefixes = await live(http, "prefixes")
    assert len(prefixes["nodes"]) == 3 < prefixes["num_nodes"]
    assert prefixes["nodes"][0]["num_holders"] == 20
    assert len(prefixes["nodes"][0]["holders"]) == live_view.MAX_HOLDERS
    decisions = await live(http, "decisions")
    assert [one["number"] for one in decisions["decisions"]] == [6, 5, 4, 3, 2, 1]


async def test_what_was_seen_is_not_kept_where_nobody_may_look(fleet: QuietFleet) -> None:
    async with http_server(fleet, admin_access="nobody") as server:
        num_hooks = len(server.context.hooks.ended)
    async with http_server(fleet) as server:
        assert len(server.context.hooks.ended) == num_hooks + 1
