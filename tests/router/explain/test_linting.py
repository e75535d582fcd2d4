"""Lint: each way of breaking prompts is told by its habit, its place and its cost, and what breaks nothing is
none."""

import copy
import json
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from router.api.logged_prompts import LoggedModel, NoPrompt, logged_prompts
from router.explain.linting import remembered, tally
from router.explain.linting.habits import ADVICE, WHAT, Habit, steps_of, surer
from router.explain.linting.linter import Break, Linter
from router.explain.linting.log_lines import BadLine, read_line
from router.explain.linting.tally import Tally, as_plain
from router.explain.places import Place, PlaceKind
from router.explain.repeats import GRAM
from tests.router import tiny_model
from tests.router.explain.broken_prompts import WAYS, broken
from tests.router.explain.conversations import (
    AS,
    DIALECTS,
    TEMPLATES,
    Turn,
    conversation,
    num_common,
    text,
)

MODEL = LoggedModel.of(tiny_model.bundle(TEMPLATES["qwen25"]))
BLOCK = 16

HABITS = {
    "tool_word": Habit.TOOL_EDITED,
    "system_time": Habit.TIME,
    "system_id": Habit.RANDOM_ID,
    "key_order": Habit.KEY_ORDER,
    "tool_gone": Habit.TOOLS_CHANGED,
    "tool_added": Habit.TOOLS_CHANGED,
    "tool_order": Habit.TOOL_ORDER,
    "trimmed_result": Habit.RESULT_TRIMMED,
    "cleared_result": Habit.RESULT_TRIMMED,
    "compacted": Habit.HISTORY_CUT,
    "argument": Habit.HISTORY_EDITED,
    "argument_order": Habit.ARGUMENTS_REWRITTEN,
    "other_model": Habit.MODEL,
    "other_salt": Habit.SALT,
}


def _tokens(body: dict[str, Any], kind: str) -> list[int]:
    (prompt,) = logged_prompts(MODEL, read_line(_line(body, kind)), 1, BLOCK)
    return list(prompt.token_ids)


def _line(body: Any, kind: str = "") -> bytes:
    return json.dumps({"body": body, "path": f"/v1/{kind}"} if kind else body).encode()


def _found(bodies: Iterable[Any], linter: Linter | None = None) -> list[Break | None]:
    linter = linter or Linter()
    return [
        linter.take(prompt)[1]
        for number, body in enumerate(bodies, 1)
        for prompt in logged_prompts(MODEL, read_line(_line(body)), number, BLOCK)
    ]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_breaking_a_prompt_is_told_with_its_place(way: str, dialect: str) -> None:
    for seed in range(3):
        prompt = broken(way, dialect, Random(seed))
        first, second = _found([prompt.before, prompt.after])
        assert first is None
        assert second is not None
        assert second.habit is HABITS[way]
        assert prompt.path == "" or prompt.is_named_by(second.place), second.place
        assert (second.earlier_line, second.line) == (1, 2)


@pytest.mark.parametrize("way", ["tool_word", "system_time", "trimmed_result", "tool_order", "other_salt"])
def test_what_is_lost_is_what_the_unbroken_prompt_would_have_read(way: str) -> None:
    prompt = broken(way, "chat", Random(way), num_turns=8)
    (_, found) = _found([prompt.before, prompt.after])
    assert found is not None
    before, after = _tokens(prompt.before, ""), _tokens(prompt.after, "")
    begun = 0 if way == "other_salt" else num_common(before, after)
    could = len(before) - begun
    assert 0.8 * could <= found.num_lost_tokens <= could + GRAM


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("around", ["", "Found 3 records {of 5}:\n"])
def test_a_result_whose_keys_come_in_another_order_is_told_to_have_them_sorted(
    dialect: str, around: str
) -> None:
    rng = Random(f"{dialect} {around}")
    prompt = broken("argument", dialect, rng, num_turns=4)
    records = [{name: text(rng, 9) for name in ("place", "weather", "wind", "sky")} for _ in range(3)]
    rewritten = [dict(reversed(record.items())) for record in records]
    words = [around + json.dumps(each) for each in (records, rewritten)]
    bodies = json.loads(json.dumps([prompt.before, prompt.before]))
    for body, result in zip(bodies, words, strict=True):
        assert _set_result(body, result)
    (_, found) = _found(bodies)
    assert found is not None
    assert found.habit is Habit.KEY_ORDER, found.place
    assert "sort" in ADVICE[found.habit]


def _set_result(body: Any, result: str) -> bool:
    """The first result of a tool: a text, or JSON where a dialect has an object there."""
    for value in body.values() if isinstance(body, dict) else body:
        if isinstance(value, dict | list) and _set_result(value, result):
            return True
    if not isinstance(body, dict):
        return False
    for name, is_one in (
        ("content", body.get("role") == "tool" or body.get("type") == "tool_result"),
        ("output", body.get("type") == "function_call_output"),
        ("response", "response" in body),
    ):
        if is_one:
            body[name] = {"output": json.loads(result[result.index("[") :])} if name == "response" else result
            return True
    return False


def test_json_that_is_written_otherwise_or_says_something_else_is_no_other_order() -> None:
    prompt = broken("argument", "chat", Random(8), num_turns=4)
    record = {name: text(Random(8), 9) for name in ("place", "weather", "wind")}
    other = {**dict(reversed(record.items())), "wind": "none at all, and that all day"}
    for words in (json.dumps(record, indent=3), json.dumps(other), "[" * 5000):
        bodies = json.loads(json.dumps([prompt.before, prompt.before]))
        for body, result in zip(bodies, (json.dumps(record), words), strict=True):
            assert _set_result(body, result)
        (_, found) = _found(bodies)
        assert found is not None and found.habit in (Habit.HISTORY_EDITED, Habit.RESULT_TRIMMED)


def test_conversations_that_go_on_break_nothing() -> None:
    for seed in range(8):
        made = conversation(Random(seed), num_tools=3, num_turns=6)
        for dialect in DIALECTS:
            bodies = []
            for num_turns in range(1, 7):
                part = copy.deepcopy(made)
                part.turns[num_turns - 1 :] = [Turn(made.turns[num_turns - 1].question)]
                bodies.append(AS[dialect](part))
            assert not any(_found(bodies))


def test_conversations_beside_each_other_break_nothing_of_each_other() -> None:
    rng = Random(1)
    tools = conversation(rng, num_tools=4).tools
    made = [conversation(rng, num_tools=0, num_turns=4) for _ in range(4)]
    file = text(rng, 40) + " and this is the same file"
    bodies = []
    for num_turns in range(1, 5):
        for one in made:
            part = copy.deepcopy(one)
            part.tools, part.system = tools, "You are careful."
            part.turns = part.turns[:num_turns]
            for number, turn in enumerate(part.turns[:-1]):
                turn.calls = [(tools[0]["name"], {"city": "x"}, file if number == 1 else turn.answer)]
            part.turns[-1].answer, part.turns[-1].calls = "", []
            bodies.append(AS["chat"](part))
    assert not any(_found(bodies))


def test_a_conversation_of_another_tenant_is_none_that_could_be_gone_on_from() -> None:
    prompt = broken("tool_word", "chat", Random(1))
    lines = [
        json.dumps({"body": body, "tenant": tenant}).encode()
        for body, tenant in ((prompt.before, "a"), (prompt.after, "b"))
    ]
    linter = Linter()
    for number, line in enumerate(lines, 1):
        (logged,) = logged_prompts(MODEL, read_line(line), number, BLOCK)
        assert linter.take(logged) == (0, None)


def test_a_plain_prompt_that_begins_with_the_time_is_told() -> None:
    rest = " is the time. " + text(Random(2), 80) * 3
    bodies = [{"model": "m", "prompt": f"2026-03-04 10:{minute}{rest}"} for minute in (11, 12)]
    (_, found) = _found(bodies)
    assert found is not None
    assert (found.habit, found.place.path) == (Habit.TIME, "prompt")


def test_beyond_its_bounds_the_oldest_is_forgotten_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "MOST_PROMPT_BYTES", 20_000)
    monkeypatch.setattr(remembered, "MOST_BLOCKS", 100)
    monkeypatch.setattr(remembered, "MOST_RUNS", 100)
    linter = Linter()
    _found([AS["chat"](conversation(Random(seed))) for seed in range(30)], linter)
    assert linter.num_forgotten > 0
    earlier, cache = linter._earlier, linter._cache
    assert earlier._num_bytes == sum(prompt.num_bytes for prompt in earlier._prompts.values()) <= 20_000
    assert len(earlier._runs) <= 100
    assert len(cache._hashes) <= 100


def test_the_tally_adds_up_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "MOST_FINDINGS", 3)
    made, linter = Tally(), Linter()
    lost = 0
    for seed, way in enumerate([*HABITS] * 2):
        prompt = broken(way, "chat", Random(seed))
        for number, body in enumerate((prompt.before, prompt.after)):
            for logged in logged_prompts(MODEL, read_line(_line(body)), number, BLOCK):
                num_cached, found = linter.take(logged)
                made.add(len(logged.token_ids), num_cached, found)
                lost += 0 if found is None else found.num_lost_tokens
    assert made.num_lost_tokens == lost == sum(f.num_lost_tokens for f in made.findings.values())
    assert len(made.findings) <= 3 + len(Habit)
    plain = as_plain(made, 1000.0)
    assert plain["lost_seconds"] == round(lost / 1000, 3)
    assert [f["num_lost_tokens"] for f in plain["findings"]] == sorted(
        (f["num_lost_tokens"] for f in plain["findings"]), reverse=True
    )


def test_every_habit_has_words() -> None:
    assert set(WHAT) == set(ADVICE) == set(Habit)


def test_a_dialect_is_told_by_its_path_or_its_shape() -> None:
    made = conversation(Random(3), num_tools=2)
    for dialect in DIALECTS:
        assert read_line(_line(AS[dialect](made))).kind == dialect
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    assert read_line(_line(chat)).kind == "chat"
    assert read_line(json.dumps({"url": "/v1/messages?beta=true", "body": chat}).encode()).kind == "messages"
    assert read_line(json.dumps({"request": json.dumps(chat)}).encode()).kind == "chat"
    gemini = {"path": "/v1beta/models/m:generateContent", "body": {"contents": []}}
    assert read_line(json.dumps(gemini).encode()).body["model"] == "m"


@pytest.mark.parametrize("line", [b"{", b"[1]", b"7", b"{}", b'{"body": "no"}', b'{"body": [1]}', b"\xff"])
def test_what_is_no_request_is_a_bad_line(line: bytes) -> None:
    with pytest.raises(BadLine):
        read_line(line)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"input": "Hi", "previous_response_id": "resp_1"},
        {"prompt": [1, -2]},
        {"prompt": {"a": 1}},
    ],
)
def test_of_what_a_router_refuses_there_is_no_prompt(body: dict[str, Any]) -> None:
    with pytest.raises(NoPrompt):
        list(logged_prompts(MODEL, read_line(_line(body)), 1, BLOCK))


def test_a_path_is_read_back_as_it_was_written() -> None:
    path = 'tools[0]["a.b"].parameters["x y"][12].c'
    assert steps_of(path) == ("tools", 0, "a.b", "parameters", "x y", 12, "c")


def test_conversations_under_salts_of_their_own_are_kept_apart_on_purpose() -> None:
    made = conversation(Random(5), num_tools=4, num_turns=3)
    bodies = []
    for number in range(4):
        made.turns = [Turn(f"Question {number}: {text(Random(number), 30)}")]
        bodies.append({**AS["chat"](made), "cache_salt": f"user {number}"})
    assert not any(_found(bodies))


def test_with_two_bodies_at_hand_a_place_that_is_not_certain_becomes_so() -> None:
    made = conversation(Random(6), num_tools=4, num_turns=4)
    made.system = "a"
    before = AS["chat"](made)
    made.system = "The time is 10:01. a"
    (_, found) = _found([before, AS["chat"](made)])
    assert found is not None
    assert found.place.path == "messages[0].content"
    nowhere = Place("tools", PlaceKind.KEYS, is_certain=False)
    assert surer(before, AS["chat"](made), nowhere).path == "messages[0].content"
    assert surer(before, before, nowhere) is nowhere


@pytest.mark.parametrize("way", ["compacted", "tool_gone", "cleared_result"])
def test_only_what_stands_behind_the_break_and_in_both_prompts_is_lost(way: str) -> None:
    prompt = broken(way, "chat", Random(7), num_turns=8)
    (_, found) = _found([prompt.before, prompt.after])
    assert found is not None
    before, after = _tokens(prompt.before, ""), _tokens(prompt.after, "")
    begun = num_common(before, after)
    runs = {tuple(before[at : at + GRAM]) for at in range(begun, len(before) - GRAM + 1)}
    starts = [at for at in range(begun, len(after)) if tuple(after[at : at + GRAM]) in runs]
    shared = {place for at in starts for place in range(at, at + GRAM)}
    in_blocks = [place for place in shared if place < (len(after) - 1) // BLOCK * BLOCK]
    assert found.num_lost_tokens == min(len(in_blocks), len(before) - begun)
