"""What `kvasir explain` and `kvasir where` say, against what the running router and its Redis do."""

import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.cli import main
from loadtests.stacks.local_stack import LocalStack
from tests.integration.observe import is_idle, is_router_idle, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

WORDS = ("river", "stone", "lamp", "seven", "garden", "quiet", "engine", "paper")


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def explained(stack: LocalStack, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{stack.url}/explain{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    (prompt,) = answer.json()["prompts"]
    assert isinstance(prompt, dict)
    return prompt


def test_an_explanation_agrees_with_what_the_router_then_does(simulated_stack: LocalStack) -> None:
    rng = random.Random(1)
    systems = [text(rng, 400) for _ in range(4)]
    seen = set()
    for number in range(40):
        if number % 2:
            messages = [
                {"role": "system", "content": rng.choice(systems)},
                {"role": "user", "content": text(rng, 30)},
            ]
            path, body = "/v1/chat/completions", {"messages": messages}
        else:
            path, body = "/v1/completions", {"prompt": rng.choice(systems) + text(rng, 20)}
        body = {**body, "model": "toy", "max_tokens": 2, "prompt_cache_key": f"key-{number % 3}"}
        wait_until(lambda: is_router_idle(simulated_stack), "nothing changes between the two")
        before = explained(simulated_stack, path, body)
        answer = httpx.post(simulated_stack.url + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        decision = before["decision"]
        assert decision["replica"] == answer.headers["x-kvasir-replica"]
        assert decision["reason"] == answer.headers["x-kvasir-reason"]
        assert decision["overlap_tokens"] == int(answer.headers["x-kvasir-overlap-tokens"])
        assert before["num_tokens"] == answer.json()["usage"]["prompt_tokens"]
        seen.add(decision["reason"])
    assert {"home", "overlap"} <= seen


def test_an_explanation_costs_nothing_and_keeps_nothing(simulated_stack: LocalStack) -> None:
    body = {"model": "toy", "messages": [{"role": "user", "content": text(random.Random(2), 300)}]}
    wait_until(lambda: is_idle(simulated_stack), "nothing changes meanwhile")
    first = explained(simulated_stack, "/v1/chat/completions", body)
    for _ in range(5):
        assert explained(simulated_stack, "/v1/chat/completions", body) == first
    assert first["decision"]["overlap_tokens"] == 0


def test_the_costs_in_an_explanation_add_up_and_the_cheapest_comes_first(simulated_stack: LocalStack) -> None:
    body = {"model": "toy", "prompt": text(random.Random(3), 300)}
    candidates = explained(simulated_stack, "/v1/completions", body)["candidates"]
    assert sorted(candidate["replica"] for candidate in candidates) == ["replica-0", "replica-1"]
    costs = [candidate["cost_seconds"] for candidate in candidates]
    assert costs == sorted(costs)
    for candidate in candidates:
        parts = (candidate[f"{name}_seconds"] for name in ("wait", "prefill", "delay", "room"))
        assert sum(parts) == pytest.approx(candidate["cost_seconds"])


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "nobody", "prompt": "x"}, 404, "does not exist"),
        ({"model": "toy"}, 400, "prompt"),
        ({"model": "toy", "prompt": "x", "temperature": 9}, 400, "temperature"),
    ],
)
def test_bad_input_is_answered_as_by_the_route_itself(
    simulated_stack: LocalStack, body: dict[str, Any], status: int, message: str
) -> None:
    answer = httpx.post(f"{simulated_stack.url}/explain/v1/completions", json=body, timeout=60)
    direct = httpx.post(f"{simulated_stack.url}/v1/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()) == (direct.status_code, direct.json())
    assert answer.status_code == status and message in answer.json()["error"]["message"]


def test_the_commands_show_a_prompt_that_one_replica_holds(
    simulated_stack: LocalStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = simulated_stack
    messages = [{"role": "user", "content": text(random.Random(4), 500)}]
    body = {"model": "toy", "messages": messages, "max_tokens": 1}
    answer = httpx.post(stack.url + "/v1/chat/completions", json=body, timeout=60)
    holder = answer.headers["x-kvasir-replica"]
    other = ({"replica-0", "replica-1"} - {holder}).pop()
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(messages))
    places = ["--url", stack.url, "--redis-url", stack.redis_url, "--run-dir", str(tmp_path)]

    def where(*arguments: str) -> dict[str, dict[str, Any]]:
        assert main(["where", *arguments, *places, "--json"]) == 0
        return {place["replica_id"]: place for place in json.loads(capsys.readouterr().out)}

    wait_until(lambda: where("--file", str(file))[holder]["num_tokens"] > 0, "the blocks in the index")
    wait_until(lambda: is_router_idle(stack), "the router has heard of them")
    prompt = explained(stack, "/v1/chat/completions", body)
    deepest = prompt["block_hashes"][-1]
    found = where("--file", str(file))
    assert found[holder]["num_tokens"] == deepest["num_tokens"] == prompt["num_tokens"] // 16 * 16
    assert found[holder]["num_entries"] == len(prompt["block_hashes"]) and found[holder]["has_set"]
    assert (found[other]["num_tokens"], found[other]["num_entries"]) == (0, 0) and found[other]["has_set"]
    by_hash = where(deepest["hash"])
    assert (by_hash[holder]["num_entries"], by_hash[other]["num_entries"]) == (1, 0)

    assert main(["explain", "--file", str(file), *places]) == 0
    shown = capsys.readouterr().out
    assert f"It would go to {holder}" in shown and "no other replica holds more of the prompt" in shown
    assert main(["where", "--file", str(file), *places]) == 0
    assert f"{deepest['num_tokens']} tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give a prompt, or --file FILE"),
        (["x", "--model", "nobody"], "does not exist"),
        (["--file", "/does/not/exist"], "cannot read"),
    ],
)
def test_the_commands_complain_in_one_sentence(
    simulated_stack: LocalStack,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    places = ["--url", simulated_stack.url, "--run-dir", str(tmp_path)]
    assert main(["explain", *arguments, *places]) != 0
    complaint = capsys.readouterr().err
    assert sentence in complaint and complaint.count("\n") == 1


def test_what_cannot_be_shown_whole_is_not_shown_in_part(
    simulated_stack: LocalStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = simulated_stack
    file = tmp_path / "request.json"
    file.write_text(json.dumps({"model": "toy", "prompt": ["one", "two"]}))
    places = ["--url", stack.url, "--redis-url", stack.redis_url, "--run-dir", str(tmp_path)]
    a_hash = "00112233445566778899aabbccddeeff"
    for arguments, sentence in [
        (["explain", "--file", str(file)], "2 prompts"),
        (["where", "--file", str(file)], "2 prompts"),
        (["where", a_hash, "--file", str(file)], "give a prompt, or --file FILE"),
        (["where", a_hash, "--model", "nobody"], "no live replica of nobody"),
    ]:
        assert main([*arguments, *places]) != 0
        complaint = capsys.readouterr().err
        assert sentence in complaint and complaint.count("\n") == 1
