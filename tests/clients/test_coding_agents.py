"""The Codex CLI and Claude Code from npm, unchanged: five turns with reasoning and a tool call in each."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loadtests.stacks.local_stack import LocalStack
from replicas.media.probes import probe_png
from tests.clients.agents import claude_at, codex_at, run
from tests.clients.words import NOTES

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens are those of the prompts of all its requests, the cached ones among them."""

    text: str
    num_prompt_tokens: int
    num_cached_tokens: int


def notes_in(folder: Path) -> Path:
    for number, word in enumerate(NOTES, 1):
        (folder / f"note-{number}").write_text(f"the word is {word}\n", "utf-8")
    return folder


def conversation(ask: Callable[[int], Turn]) -> list[Turn]:
    turns = [ask(number) for number, _ in enumerate(NOTES, 1)]
    assert [turn.text for turn in turns] == [f"The note says {word}." for word in NOTES]
    return turns


def check_caching(turns: Sequence[Turn]) -> None:
    """Both requests of a later turn find the conversation so far: all but new words and part of a block."""
    for before, turn in itertools.pairwise(turns):
        assert turn.num_cached_tokens >= 0.98 * turn.num_prompt_tokens, turns
        assert turn.num_prompt_tokens > before.num_prompt_tokens


def test_codex_reads_five_notes_and_its_later_turns_are_cached(
    talking_cluster: LocalStack, tmp_path: Path
) -> None:
    folder = notes_in(tmp_path)
    codex, environment = codex_at(talking_cluster, folder)
    counted = Counter[str]()

    def ask(number: int) -> Turn:
        """Its usage counts the turns before, too."""
        resume = ["resume", "--last"] if number > 1 else []
        options = ["--skip-git-repo-check", "--json"]
        command = [codex, "exec", *resume, *options, f"Codex, read note {number}."]
        events = [
            json.loads(line)
            for line in run(command, folder, environment).splitlines()
            if line.startswith("{")
        ]
        items = [event["item"] for event in events if event["type"] == "item.completed"]
        commands = [item for item in items if item["type"] == "command_execution"]
        assert [item["exit_code"] for item in commands] == [0], items
        [usage] = [event["usage"] for event in events if event["type"] == "turn.completed"]
        texts = [item["text"] for item in items if item["type"] == "agent_message"]
        own = Counter(usage) - counted
        counted.update(own)
        return Turn(texts[-1], own["input_tokens"], own["cached_input_tokens"])

    check_caching(conversation(ask))


def test_claude_code_reads_five_notes_and_its_later_turns_are_cached(
    talking_cluster: LocalStack, tmp_path: Path
) -> None:
    folder = notes_in(tmp_path)
    claude, environment = claude_at(talking_cluster)

    def ask(number: int) -> Turn:
        resume = ["--continue"] if number > 1 else []
        options = ["--model", "talking", "--output-format", "json", "--allowedTools", "Bash(cat:*)"]
        command = [claude, "-p", f"Claude, read note {number}.", *resume, *options]
        answer: dict[str, Any] = json.loads(run(command, folder, environment))
        assert not answer["is_error"] and answer["num_turns"] == 2, answer
        usage = answer["usage"]
        num_cached_tokens = usage["cache_read_input_tokens"]
        num_prompt_tokens = usage["input_tokens"] + usage["cache_creation_input_tokens"] + num_cached_tokens
        return Turn(answer["result"], num_prompt_tokens, num_cached_tokens)

    check_caching(conversation(ask))


@pytest.mark.parametrize("agent", ["Codex", "Claude"])
def test_an_agent_goes_on_after_its_tool_has_shown_a_picture(
    talking_cluster: LocalStack, tmp_path: Path, agent: str
) -> None:
    (tmp_path / "picture.png").write_bytes(probe_png(32, 16, b"\xff\0\0"))
    look = f"{agent}, look at the picture."
    if agent == "Codex":
        command, environment = codex_at(talking_cluster, tmp_path)
        first, later = (
            ["exec", "--skip-git-repo-check"],
            ["exec", "resume", "--last", "--skip-git-repo-check"],
        )
    else:
        command, environment = claude_at(talking_cluster)
        first, later = ["-p", "--model", "talking"], ["--continue", "-p", "--model", "talking"]
    said = [
        run([command, *first, look], tmp_path, environment),
        run([command, *later, "Say hello."], tmp_path, environment),
    ]
    assert "It cannot be seen." in said[0]
    assert "Hello there, my friend!" in said[1]
