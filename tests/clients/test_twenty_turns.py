"""Claude Code, Codex and OpenCode over twenty turns with tools, a subagent and a conversation cut short.

What could be read from cache at best is reckoned by `kvasir lint` from the bodies that the router recorded.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtests.stacks.local_stack import LocalStack
from tests.clients.agents import claude_at, codex_at, opencode_at, run
from tests.clients.conftest import talking_stack
from tests.clients.words import HELPER_AT, HELPER_STEPS, NUM_STEPS, SHORTENED_AT, following_steps

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

LONG = "This line says nothing of use. " * 1_200
"""A tool's result that fills the context, so that an agent shortens the conversation by itself."""

NUM_TOKENS_TO_SHORTEN_AT = 20_000

HARDWARE = {"simulated_hardware": "h100-8b", "simulated_speed": 2}
"""Computing a prompt again takes some time: where it takes none a turn may as well go elsewhere."""

CHANGED = {
    "Claude": {"system[2].text", "messages[0].content"},
    "Codex": {"tools[4].name", "tools", "input[2].content[0].text"},
    "OpenCode": {"tools[6].function.name", "messages[1].content"},
}
"""Fields at which prompts leave earlier ones: those of the subagent, of the summary, and behind it."""

NOT_REPEATED = ("never_cached", "below_a_block", "prefix_changed")
"""Causes of tokens that no earlier prompt begins with."""

SHORTEN = {
    "Claude": "Respond with plain text only",
    "Codex": "CONTEXT CHECKPOINT COMPACTION",
    "OpenCode": "anchored summary",
}

RULES = {
    "Claude": following_steps(
        "Claude",
        ("Bash", "command"),
        ("Agent", "prompt", {"description": "read", "subagent_type": "general-purpose"}),
        "Async agent launched",
        SHORTEN["Claude"],
    ),
    "Codex": following_steps(
        "Codex", ("exec_command", "cmd"), ("spawn_agent", "message", {}), '"nickname"', SHORTEN["Codex"]
    ),
    "OpenCode": following_steps(
        "OpenCode",
        ("bash", "command"),
        ("task", "prompt", {"description": "read", "subagent_type": "general"}),
        "OpenCode's helper has seen it.",
        SHORTEN["OpenCode"],
    ),
}


def write_steps(folder: Path, agent: str) -> None:
    """Each step names the next one."""
    is_told = agent == "Claude"  # by a command of its user's
    after = {number: f"{agent}, go to step {number + 1}." for number in range(1, HELPER_STEPS[1])}
    after |= {
        HELPER_AT: f"{agent}, ask a helper.",
        NUM_STEPS: f"{agent}, all is done.",
        HELPER_STEPS[1]: f"{agent}, all helping is done.",
    }
    if is_told:
        after[SHORTENED_AT] = after[NUM_STEPS]
    else:
        after[SHORTENED_AT] = LONG + after[SHORTENED_AT]
    for number, text in after.items():
        (folder / f"step-{number}").write_text(text + "\n", "utf-8")


def work(agent: str, cluster: LocalStack, folder: Path) -> None:
    write_steps(folder, agent)
    begin, go_on = (f"{agent}, go to step {number}." for number in (1, SHORTENED_AT + 1))
    if agent == "Claude":
        command, environment = claude_at(cluster)
        hints = {**environment, "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1"}
        asked = [command, "--model", "talking", "--allowedTools", "Bash(cat:*),Agent"]
        run([*asked, "-p", begin], folder, hints)
        run([*asked, "--continue", "-p", "/compact"], folder, hints)
        said = run([*asked, "--continue", "-p", go_on], folder, hints)
    elif agent == "Codex":
        limit = f"model_auto_compact_token_limit = {NUM_TOKENS_TO_SHORTEN_AT}\n"
        command, environment = codex_at(cluster, folder, limit)
        said = run([command, "exec", "--skip-git-repo-check", begin], folder, environment)
    else:
        command, environment = opencode_at(cluster, folder, NUM_TOKENS_TO_SHORTEN_AT + 8_000)
        said = run([command, "run", begin], folder, environment)
    assert "I have read all steps." in said


def explained(cluster: LocalStack) -> Iterator[dict[str, Any]]:
    """The explanation of each prompt that the router has logged."""
    log = (cluster.run_directory / "router.log").read_text("utf-8")
    for line in log.splitlines():
        if " request_id=" in line:
            number = line.split(" request_id=")[1].split()[0]
            answer = httpx.get(f"{cluster.url}/v1/cache/explain/{number}").json()
            [prompt] = answer["prompts"]
            yield prompt


def num_repeated_and_missed(prompt: Mapping[str, Any]) -> int:
    """Tokens that an earlier prompt begins with, too, and that were computed nevertheless."""
    spans = prompt["spans"]
    return sum(span["end"] - span["start"] for span in spans if span["cause"] not in NOT_REPEATED)


def num_cached_at_best(bodies: Path, model: Path) -> int:
    command = [sys.executable, "-m", "cluster.cli", "lint", str(bodies), "--model", str(model), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found: Mapping[str, int] = json.loads(done.stdout)
    assert found["num_bad_lines"] == found["num_refused"] == found["num_forgotten"] == 0, done.stderr
    return found["num_cached_tokens_at_best"]


@pytest.mark.parametrize("agent", RULES)
def test_an_agent_reads_what_it_repeats_and_each_lost_token_has_a_field(agent: str, tmp_path: Path) -> None:
    bodies = tmp_path / "bodies.jsonl"
    (tmp_path / "work").mkdir()
    settings = {"record_bodies": bodies, "log_requests": True}
    with talking_stack(tmp_path, RULES[agent], HARDWARE, settings) as cluster:
        work(agent, cluster, tmp_path / "work")
        prompts = list(explained(cluster))
    asked = bodies.read_text("utf-8")
    assert f"step-{HELPER_STEPS[1]}" in asked and f"step-{NUM_STEPS}" in asked
    assert SHORTEN[agent] in asked
    assert len(prompts) > NUM_STEPS + HELPER_STEPS[1] - HELPER_STEPS[0]
    num_cached = sum(prompt["cached_tokens"] for prompt in prompts)
    num_missed = sum(num_repeated_and_missed(prompt) for prompt in prompts)
    at_best = num_cached_at_best(bodies, tmp_path / "talking")
    lost = [(prompt["lost_tokens"], prompt["place"]) for prompt in prompts if prompt["lost_tokens"]]
    sys.stdout.write(f"{agent}: {num_cached} cached, {num_missed} missed, {at_best} at best; lost: {lost}\n")
    assert num_cached >= 0.99 * max(at_best, num_cached + num_missed)
    assert lost and {place and place["path"] for _, place in lost} <= CHANGED[agent], lost
    check_programs(agent, [prompt["program"] for prompt in prompts])


def check_programs(agent: str, programs: Sequence[Mapping[str, Any]]) -> None:
    """Each is recognised as a turn of the main agent or of its subagent, or as a call of the main one's."""
    assert all(program["source"].startswith(agent.lower()) for program in programs), programs
    turns, calls = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for program in programs:
        counted = calls if program["is_side_call"] else turns
        counted[program["session"], program["agent"]] += 1
    [(main, num_turns), (_, num_helping)] = turns.most_common()
    assert num_turns > NUM_STEPS and num_helping == HELPER_STEPS[1] - HELPER_STEPS[0] + 2, turns
    assert calls.keys() == {main}, calls
