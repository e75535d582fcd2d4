"""Every kind of block in the vendors' newest libraries is in the page's tables, and is taken as they say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from router.api.dialects import DIALECTS
from router.errors import InvalidRequest
from tests.clients.conftest import act

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAGE = Path(__file__).parents[2] / "docs" / "api-blocks.md"
READER = {"chats": "chat"}
USER, TOOL, ANSWER = PLACES = ("from a user", "in a tool's result", "in an earlier answer")
HI = {"role": "user", "content": "Hi"}
CALL_ID = "words_to_find"
Row = dict[str, set[str]]


def tables() -> dict[str, dict[str, Row]]:
    """By dialect and kind, what the page says of each place."""
    found: dict[str, dict[str, Row]] = {}
    for section in PAGE.read_text("utf-8").split("\n## ")[1:]:
        rows = found[section.partition("\n")[0].lower()] = {}
        for line in re.findall(r"^\| (`.*) \|$", section, re.MULTILINE):
            kinds, *cells = line.split(" | ")
            said = {place: set(cell.split(", ")) for place, cell in zip(PLACES, cells, strict=True)}
            rows |= dict.fromkeys(re.findall(r"`(\w+)`", kinds), said)
    return found


def spelt(kind: str) -> str:
    """As Google's fields are written."""
    first, *words = kind.split("_")
    return first + "".join(word.capitalize() for word in words)


def chats(group: str, place: str, blocks: list[Any]) -> dict[str, Any]:
    said = [*blocks, {"type": "text", "text": "Well."}]
    call = {"id": CALL_ID, "type": "function", "function": {"name": "look", "arguments": "{}"}}
    if group == "call":
        return {"messages": [HI, {"role": "assistant", "content": "", "tool_calls": blocks}, HI]}
    if place == USER:
        return {"messages": [{"role": "user", "content": said}]}
    if place == ANSWER:
        return {"messages": [HI, {"role": "assistant", "content": said}, HI]}
    found = {"role": "tool", "tool_call_id": CALL_ID, "content": said}
    return {"messages": [HI, {"role": "assistant", "tool_calls": [call]}, found]}


def responses(group: str, place: str, blocks: list[Any]) -> dict[str, Any]:
    said = [*blocks, {"type": "input_text", "text": "Well."}]
    if group == "item":
        return {"input": [HI, *blocks, {"role": "assistant", "content": "Well."}, HI]}
    if place == TOOL:
        call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
        return {"input": [HI, call, {"type": "function_call_output", "call_id": "c", "output": said}]}
    return {"input": [{"role": "user" if place == USER else "assistant", "content": said}, HI]}


def messages(group: str, place: str, blocks: list[Any]) -> dict[str, Any]:
    kinds = [block["type"] for block in blocks]
    said = [*blocks, {"type": "text", "text": "Well."}]
    result = {"type": "tool_result", "tool_use_id": CALL_ID, "content": "Seen."}
    calls = [{"type": "tool_use", "id": CALL_ID, "name": "look", "input": {}}]
    if place == ANSWER:
        answers = [result] if kinds == ["tool_use"] else []
        turns = [{"role": "assistant", "content": said}, {"role": "user", "content": [*answers, said[-1]]}]
    elif place == TOOL:
        turns = [
            {"role": "assistant", "content": calls},
            {"role": "user", "content": [result | {"content": said}]},
        ]
    else:
        results = [] if kinds == ["tool_result"] else [result]
        turns = [{"role": "assistant", "content": calls}, {"role": "user", "content": [*results, *said]}]
        if kinds in (["tool_addition"], ["tool_removal"]):
            turns[1] = {"role": "user", "content": [*results, said[-1]]}
            turns.append({"role": "system", "content": said})
    tools = [{"name": CALL_ID, "input_schema": {}}]
    return {"max_tokens": 5, "tools": tools, "messages": [HI, *turns]}


def gemini(group: str, place: str, blocks: list[Any]) -> dict[str, Any]:
    hi, said = {"parts": [{"text": "Hi"}]}, [*blocks, {"text": "Well."}]
    call = {"role": "model", "parts": [{"functionCall": {"name": "look"}}]}
    if place == ANSWER:
        return {"contents": [hi, {"role": "model", "parts": said}, hi]}
    if place == TOOL:
        found = {"name": "look", "response": {}, "parts": said}
        return {"contents": [hi, call, {"parts": [{"functionResponse": found}]}]}
    return {"contents": [hi, call, {"parts": said}]}


BODIES = {"chats": chats, "responses": responses, "messages": messages, "gemini": gemini}


def taken(dialect: str, group: str, place: str, blocks: list[Any]) -> tuple[str, Any, int]:
    body = {"model": "m", **BODIES[dialect](group, place, blocks)}
    request = DIALECTS[READER.get(dialect, dialect)].read(json.dumps(body).encode(), 1)
    return json.dumps(request.messages).replace("\\n", ""), request.tools, len(request.images)


def verdict(dialect: str, group: str, place: str, block: Any) -> str:
    try:
        found = taken(dialect, group, place, [block])
    except InvalidRequest:
        return "refused"
    if found == taken(dialect, group, place, []):
        return "passed over"
    return "told" if "which cannot be read here]" in found[0] else "read"


def test_each_kind_of_the_libraries_is_taken_as_the_page_says() -> None:
    known, page = act("many", "kinds_of_blocks.py"), tables()
    for dialect, groups in known.items():
        kinds = {spelt(kind) if dialect == "gemini" else kind for group in groups.values() for kind in group}
        assert kinds == set(page[dialect]), dialect
    wrong = [
        (dialect, place, block, found)
        for dialect, groups in known.items()
        for group, kinds in groups.items()
        for kind, examples in kinds.items()
        for place, said in page[dialect][spelt(kind) if dialect == "gemini" else kind].items()
        for block in examples
        if "–" not in said and (group != "result" or place == TOOL)
        if (found := verdict(dialect, group, place, block)) not in said
    ]
    assert not wrong, "\n".join(map(str, wrong))
    for dialect, rows in page.items():
        for kind, row in rows.items():
            assert "refused" not in row[TOOL] | row[ANSWER], (dialect, kind)
