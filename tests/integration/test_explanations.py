"""What a router says of prompts that were broken in known ways: place, cause, tokens; over real engines."""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import pytest

from cluster.cli import main
from loadtests.stacks.local_stack import LocalStack, local_stack
from replicas.checkpoints.weights import tokenizer_bundle
from replicas.toy_model import checkpoint_directory
from router.api.logged_prompts import LoggedModel, logged_prompts
from router.explain.linting.linter import Linter
from router.explain.linting.log_lines import read_line
from router.explain.nearest import MOST_BLOCKS
from tests.integration.observe import wait_until
from tests.router.explain.broken_prompts import TEXT_WAYS, BrokenPrompt, broken

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NUM_EXPLAINED = int(os.environ.get("KVASIR_EXPLAINED", "3"))
"""Of each way of breaking a prompt."""
ENGINE = os.environ.get("KVASIR_EXPLAINED_ENGINE", "simulated")
ENGINES = [ENGINE] if ENGINE != "simulated" else [ENGINE, pytest.param("torch", marks=pytest.mark.slow)]
BETWEEN_SECONDS = 0.0 if NUM_EXPLAINED < 10 else 0.3
"""A router gives a part of its processor to looking for places, and many requests come one after another."""

TOY = LoggedModel.of(tokenizer_bundle(checkpoint_directory(None)))
WORDS = "lamp river stone weather harbour window letter market garden winter silver engine paper".split()

CLIENT = httpx.Client(verify=False, timeout=120)

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
LENGTHS = {"chat": "max_tokens", "messages": "max_tokens", "responses": "max_output_tokens"}
BLOCK_SIZE = {"torch": 16, "simulated": 16, "vllm": 32}[ENGINE]


@pytest.fixture(scope="module", params=ENGINES)
def explained_stack(request: pytest.FixtureRequest) -> Iterator[LocalStack]:
    settings = {"engine": request.param, "model_name": "toy", "num_threads": 1}
    with local_stack(num_replicas=2, replica_settings=settings) as stack:
        yield stack


def sent(stack: LocalStack, dialect: str, body: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {**body, "model": "toy", LENGTHS[dialect]: 2, "stream": False, **fields}
    answer = CLIENT.post(stack.url + PATHS[dialect], json=body)
    assert answer.status_code == 200, answer.text
    return answer


def explained(stack: LocalStack, prompt_id: str, *, with_place: bool = True) -> dict[str, Any]:
    """Once the place has been looked for, which comes a little later."""
    found: list[dict[str, Any]] = []

    def has_place() -> bool:
        answer = CLIENT.get(f"{stack.url}/v1/cache/explain/{prompt_id}")
        found[:] = answer.json()["prompts"] if answer.status_code == 200 else []
        return bool(found) and (not with_place or found[0]["place"] is not None)

    wait_until(has_place, "the place is found", seconds=20)
    (prompt,) = found
    return prompt


def usage_of(answer: httpx.Response) -> tuple[int, int]:
    """Prompt tokens and cached tokens."""
    usage = answer.json()["usage"]
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached + usage["cache_creation_input_tokens"], cached
    length = usage.get("prompt_tokens", usage.get("input_tokens"))
    details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    return length, details["cached_tokens"]


def is_named(prompt: BrokenPrompt, place: dict[str, Any]) -> bool:
    if prompt.is_around:
        return str(place["path"]).startswith(prompt.path)
    return bool(place["path"] == prompt.path and place["kind"] == prompt.kind)


def wrong_in(stack: LocalStack, prompt: BrokenPrompt) -> str:
    """What a router says wrongly of a prompt that was broken, after the one before it; empty if it is right.

    Where a whole tool has changed, it may have more of another conversation that begins alike, which may have
    been evicted since.
    """
    first = sent(stack, prompt.dialect, prompt.before)
    explained(stack, first.json()["id"], with_place=False)
    second = sent(stack, prompt.dialect, prompt.after)
    explanation = explained(stack, second.json()["id"])
    nearest, spans = explanation["nearest"], explanation["spans"]
    num_tokens, num_cached = usage_of(second)
    changed = next((span["start"] for span in spans if span["cause"] == "prefix_changed"), None)
    new = next((span["start"] for span in spans if span["cause"] == "never_cached"), changed)
    lost = lost_by_cause(spans)
    unchanged = nearest["diverges_at"] // BLOCK_SIZE * BLOCK_SIZE
    """Another conversation may have some tokens more in common with it, by chance, and be no nearer."""
    facts = {
        "place": is_named(prompt, explanation["place"]),
        "nearest": prompt.is_around or nearest["answer_id"] == first.json()["id"],
        "counts": (explanation["prompt_tokens"], explanation["cached_tokens"]) == (num_tokens, num_cached)
        and num_cached + sum(span["end"] - span["start"] for span in spans) == num_tokens,
        "cause": changed is not None
        and new is not None
        and 0 <= min(new, changed) - unchanged <= MOST_BLOCKS * BLOCK_SIZE,
        "what came before": all(
            span["cause"] == ("evicted" if span["replica"] == explanation["replica"] else "held_elsewhere")
            for span in spans
            if new is None or changed is None or span["start"] < min(new, changed)
        ),
        "lost": explanation["lost_tokens"] == sum(lost.values()),
        "as lint says": nearest["answer_id"] != first.json()["id"]
        or lost["prefix_changed"]
        <= lost_by_lint(prompt.dialect, prompt.before, prompt.after)[1]
        <= lost_by_cause(spans, nearest["diverges_at"]).total(),
        "header": second.headers["x-kvasir-cache"] == header_of(explanation, lost),
    }
    wrong = [what for what, is_right in facts.items() if not is_right]
    return f"{', '.join(wrong)}: {prompt.path or prompt.way} {json.dumps(explanation)}" if wrong else ""


def lost_by_cause(spans: list[dict[str, Any]], start: int = 0) -> Counter[str]:
    """From that token on. A third conversation may have the block in which a change is: lint, which knows of
    none, counts what was changed in it. Elsewhere nothing but the change loses anything behind it."""
    lost: Counter[str] = Counter()
    for span in spans:
        if span["cause"] not in ("never_cached", "below_a_block") and span["end"] > start:
            lost[span["cause"]] += span["end"] - max(start, span["start"])
    return lost


def header_of(explanation: dict[str, Any], lost: Counter[str]) -> str:
    parts = "".join(f"; {cause}={num}" for cause, num in lost.most_common()) if len(lost) > 1 else ""
    cached, num_lost = explanation["cached_tokens"], explanation["lost_tokens"]
    return f"{explanation['outcome']}; cached={cached}; lost={num_lost}; cause={explanation['cause']}{parts}"


def lost_by_lint(dialect: str, *bodies: dict[str, Any]) -> list[int]:
    """What each prompt has lost to a change, by a log of them alone."""
    linter, lost = Linter(), []
    for number, body in enumerate(bodies):
        line = json.dumps({"body": {**body, "model": "toy"}, "path": PATHS[dialect]}).encode()
        (prompt,) = logged_prompts(TOY, read_line(line), number, BLOCK_SIZE)
        found = linter.take(prompt)[1]
        lost.append(0 if found is None else found.num_lost_tokens)
    return lost


def test_prompts_that_only_begin_alike_have_lost_no_more_than_that(explained_stack: LocalStack) -> None:
    """Six documents behind the same beginning, as they are asked about: header, explanation, metric and lint
    all say that they are new."""
    name = 'router_missed_tokens_total{model="toy",cause="prefix_changed"}'
    before = metric(explained_stack, name)
    for place in ("system", "message"):
        rng = Random(place)
        bodies = []
        for _ in range(6):
            words = " ".join(f"{rng.choice(WORDS)}{rng.randrange(99)}" for _ in range(400))
            document = f"Answer from this. {words.replace(' ', '. ', 9)}"
            messages = [
                {"role": "system" if place == "system" else "user", "content": document},
                {"role": "user", "content": "Who wrote this, and what is it about?"},
            ]
            body = {"messages": messages}
            answer = sent(explained_stack, "chat", body)
            explanation = explained(explained_stack, answer.json()["id"], with_place=False)
            lost = lost_by_cause(explanation["spans"])
            assert sum(lost.values()) == explanation["lost_tokens"] <= 64, explanation
            assert not lost["prefix_changed"]
            assert answer.headers["x-kvasir-cache"] == header_of(explanation, lost)
            bodies.append(body)
        assert lost_by_lint("chat", *bodies) == [0] * 6
    assert metric(explained_stack, name) == before


def metric(stack: LocalStack, name: str) -> float:
    lines = CLIENT.get(f"{stack.url}/metrics").text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(name)), 0.0)


@pytest.mark.timeout(300 + 3 * NUM_EXPLAINED)
@pytest.mark.parametrize("way", TEXT_WAYS)
def test_a_broken_prompt_is_explained_by_its_place_and_the_tokens_lost(
    explained_stack: LocalStack, way: str
) -> None:
    wrong = []
    for number in range(NUM_EXPLAINED):
        dialect = [*PATHS][number % len(PATHS)]
        num_turns = 4 if way == "compacted" else 2  # the first three become one
        rng = Random(f"{way} {dialect} {number}")
        prompt = broken(way, dialect, rng, num_tools=3, num_turns=num_turns)
        wrong += [found] if (found := wrong_in(explained_stack, prompt)) else []
        time.sleep(BETWEEN_SECONDS)
    head = f"\n{ENGINE} {way}: {NUM_EXPLAINED - len(wrong)} of {NUM_EXPLAINED} right"
    sys.stdout.write("\n  ".join([head, *wrong]) + "\n")
    assert len(wrong) <= NUM_EXPLAINED // 100


def test_the_vendors_own_fields_name_what_has_changed(explained_stack: LocalStack) -> None:
    prompt = broken("tool_word", "messages", Random(1), num_tools=3, num_turns=2)
    first = sent(explained_stack, "messages", prompt.before, diagnostics={"previous_message_id": None})
    assert first.json()["diagnostics"] is None
    told = []
    for previous in (first.json()["id"], "msg_unknown"):
        answer = sent(
            explained_stack, "messages", prompt.after, diagnostics={"previous_message_id": previous}
        )
        told.append(answer.json()["diagnostics"]["cache_miss_reason"])
    length, _ = usage_of(first)
    assert told[0]["type"] == "tools_changed"
    assert 0 < told[0]["cache_missed_input_tokens"] <= length
    assert told[1] == {"type": "previous_message_not_found"}
    prompt = broken("system_time", "responses", Random(2), num_tools=3, num_turns=2)
    first = sent(explained_stack, "responses", prompt.before)
    options = {"comparison_response_id": first.json()["id"]}
    answer = sent(explained_stack, "responses", prompt.after, prompt_cache_options=options)
    found = answer.json()["prompt_cache_diagnostics"]
    assert (found["type"], found["reason"]) == ("cache_miss", "input_changed")
    assert found["comparison_reusable_tokens"] == usage_of(first)[0]
    answer = sent(explained_stack, "responses", prompt.before, prompt_cache_options=options)
    assert answer.json()["prompt_cache_diagnostics"] == {"type": "cache_hit"}


def test_ids_that_nobody_has_are_not_found(explained_stack: LocalStack) -> None:
    answer = CLIENT.get(f"{explained_stack.url}/v1/cache/explain/chatcmpl-nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "explanation_not_found")


def test_kvasir_why_says_it_in_words(explained_stack: LocalStack, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = broken("tool_word", "chat", Random(3), num_tools=3, num_turns=2)
    sent(explained_stack, "chat", prompt.before)
    answer = sent(explained_stack, "chat", prompt.after)
    explained(explained_stack, answer.json()["id"])
    assert main(["why", answer.json()["id"], "--url", explained_stack.url]) == 0
    words = capsys.readouterr().out
    assert f"in your request: {prompt.path}" in words
    assert "it has other tools" in words
