"""Lint with images: two that differ are two prompts, and places behind an image are the right ones."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cluster.cli import main
from cluster.commands import lint
from replicas.media.probes import probe_png
from replicas.protocol.image_rules import written_rule
from replicas.protocol.images import ImageFormat, ImageSize
from router.api.logged_prompts import LoggedModel, NoPrompt, logged_prompts
from router.explain.linting.habits import Habit, habit_of
from router.explain.linting.linter import Break, Linter, LoggedPrompt
from router.explain.linting.log_lines import read_line
from router.explain.places import Place, PlaceKind
from router.explain.repeats import GRAM
from tests.router import tiny_model
from tests.router.explain.conversations import text
from tests.router.explain.image_prompts import RULE, TEMPLATE

BUNDLE = tiny_model.bundle(TEMPLATE)
MODEL = LoggedModel.of(BUNDLE, written_rule(RULE))
RED, BLUE = (probe_png(80, 40, colour) for colour in (b"\xff\0\0", b"\0\0\xff"))
NUM_IMAGE_TOKENS = RULE.num_tokens(ImageSize(ImageFormat.PNG, 80, 40))
BLOCK = 16
LONG = text(Random(3), 80)
QUESTION = "What is to be seen in this picture, and why? " + text(Random(4), 20)


def _chat(image: bytes, question: str = QUESTION) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    parts = [
        {"type": "text", "text": "Look at this: "},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": question},
    ]
    return {
        "messages": [
            {"role": "system", "content": "You look at pictures."},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": LONG},
        ]
    }


def _responses(image: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    parts = [{"type": "input_text", "text": "Look: "}, {"type": "input_image", "image_url": url}]
    return {"input": [{"role": "user", "content": parts}, {"role": "user", "content": LONG}]}


def _anthropic(image: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(image).decode()}
    parts = [{"type": "text", "text": "Look: "}, {"type": "image", "source": source}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": LONG}]
    return {"system": "You look at pictures.", "max_tokens": 1, "messages": turns}


def _gemini(image: bytes) -> dict[str, Any]:
    inline = {"mimeType": "image/png", "data": base64.b64encode(image).decode()}
    parts = [{"text": "Look: "}, {"inlineData": inline}]
    return {"contents": [{"role": "user", "parts": parts}, {"role": "model", "parts": [{"text": LONG}]}]}


def _prompt(body: dict[str, Any], line: int = 1) -> LoggedPrompt:
    (prompt,) = logged_prompts(MODEL, read_line(json.dumps(body).encode()), line, BLOCK)
    return prompt


def _second(*bodies: dict[str, Any]) -> Break | None:
    linter = Linter()
    found = [linter.take(_prompt(body, line))[1] for line, body in enumerate(bodies, 1)]
    return found[-1]


@pytest.mark.parametrize(
    ("form", "path"),
    [
        (_chat, "messages[1].content[1].image_url"),
        (_responses, "input[0].content[1].image_url"),
        (_anthropic, "messages[0].content[1]"),
        (_gemini, "contents[0].parts[1].inlineData"),
    ],
)
def test_another_image_is_found_with_its_path_and_what_it_costs(
    form: Callable[[bytes], dict[str, Any]], path: str
) -> None:
    found = _second(form(RED), form(BLUE))
    assert found is not None
    assert found.place.path.startswith(path)
    assert found.habit is Habit.IMAGE_CHANGED
    behind = len(_prompt(form(RED)).token_ids) - found.token - NUM_IMAGE_TOKENS
    assert 0.8 * behind <= found.num_lost_tokens <= behind + GRAM


def test_a_result_that_is_another_image_is_not_cut_short() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}

    def turns(image: bytes) -> dict[str, Any]:
        shown = _chat(image)["messages"][1]["content"][1]
        return {
            "messages": [
                {"role": "user", "content": "What is on the screen now, and what was there before?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": [shown]},
                {"role": "assistant", "content": LONG},
            ]
        }

    bodies = turns(RED), turns(BLUE)
    place = Place("messages[2].content[0].image_url", PlaceKind.VALUE, is_certain=True)
    assert habit_of(*bodies, place, same_space=True) is Habit.IMAGE_CHANGED
    trimmed = {"messages": [*bodies[0]["messages"][:2], {"role": "tool", "content": "gone"}]}
    at = Place("messages[2].content", PlaceKind.VALUE, is_certain=True)
    assert habit_of(bodies[0], trimmed, at, same_space=True) is not Habit.IMAGE_CHANGED


def test_a_text_behind_an_image_has_its_own_path() -> None:
    found = _second(_chat(RED), _chat(RED, QUESTION.replace("why", "how")))
    assert found is not None
    assert found.place.path == "messages[1].content[2].text"
    assert found.place.offset == QUESTION.index("why")


def test_the_same_image_breaks_nothing() -> None:
    assert _second(_chat(RED), _chat(RED)) is None
    assert _prompt(_chat(RED)).token_ids == _prompt(_chat(RED)).token_ids


def test_each_token_of_an_image_is_at_its_path() -> None:
    prompt = _prompt(_chat(RED))
    paths = [prompt.place_of(number).path for number in range(len(prompt.token_ids))]
    first = paths.index("messages[1].content[1].image_url")
    assert paths.count("messages[1].content[1].image_url") == NUM_IMAGE_TOKENS
    assert set(paths[first : first + NUM_IMAGE_TOKENS]) == {"messages[1].content[1].image_url"}
    assert paths[first + NUM_IMAGE_TOKENS] == "messages[1].content[2].text"


def test_for_a_model_of_text_an_image_is_refused_by_its_path() -> None:
    model = LoggedModel.of(BUNDLE)
    with pytest.raises(NoPrompt, match=r"messages\[1\]\.content\[1\]\.image_url"):
        list(logged_prompts(model, read_line(json.dumps(_chat(RED)).encode()), 1, BLOCK))


def test_the_command_takes_the_rule_from_the_models_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lint, "read_image_rule", lambda directory: (RULE, ""))
    monkeypatch.setattr(lint, "tokenizer_bundle", lambda directory: BUNDLE)
    log = tmp_path / "log"
    log.write_text("".join(json.dumps(_chat(image)) + "\n" for image in (RED, BLUE)))
    assert main(["lint", str(log), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert found["path"] == "messages[1].content[1].image_url"
