"""Broken prompts: conversations whose next turn breaks the prefix of the one before, each in a known way, and
the place that has to be named.

`broken(way, dialect, rng)` makes one of any way in WAYS. Ways of NAMESPACE_WAYS leave the text as it is: what
changes is where its chain is rooted, or which template writes it.
"""

import copy
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from router.explain.leaves import Path, spelled
from router.explain.places import Place, PlaceKind
from tests.router.explain.conversations import AS, Conversation, Turn, conversation, text


@dataclass(frozen=True, slots=True)
class BrokenPrompt:
    """`after` continues `before`, but for what was broken. `path` is what has to be named, or with
    `is_around` anything in it; it is empty where no text has changed. `value` is what stands there now."""

    way: str
    dialect: str
    before: dict[str, Any]
    after: dict[str, Any]
    path: str = ""
    kind: PlaceKind | None = None
    is_around: bool = False
    value: str = ""

    def is_named_by(self, place: Place) -> bool:
        if self.is_around:
            return place.path == self.path or place.path.startswith((self.path + ".", self.path + "["))
        return (place.path, place.kind) == (self.path, self.kind)


def broken(way: str, dialect: str, rng: Random, *, num_tools: int = 4, num_turns: int = 5) -> BrokenPrompt:
    """Of a random conversation, each of whose turns calls a tool."""
    before = conversation(rng, num_tools=num_tools, num_turns=num_turns)
    before.system = "You are a careful assistant. " + before.system
    for number, turn in enumerate(before.turns[:-1]):
        turn.question += f" (question {number})"
        turn.calls = [
            (
                rng.choice(before.tools)["name"],
                {"city": text(rng, 3), "days": number, "unit": "celsius"},
                result,
            )
            for result in [f"result {number}: " + text(rng, 60) + " and that is all of it"]
        ]
    after = copy.deepcopy(before)
    after.turns[-1].answer = "Here is what I know. " + text(rng)
    after.turns.append(Turn("And then? " + text(rng)))
    return WAYS[way](way, dialect, before, after, rng)


def _changed(way: str, dialect: str, before: Conversation, after: Conversation, new: str) -> BrokenPrompt:
    """Where the one text that begins with `new` stands."""
    body = AS[dialect](after)
    (path,) = [path for path, value in _texts(body) if value == new]
    return BrokenPrompt(way, dialect, AS[dialect](before), body, spelled(path), PlaceKind.VALUE, value=new)


def _texts(body: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    if isinstance(body, str):
        yield path, body
    elif isinstance(body, dict | list):
        items = body.items() if isinstance(body, dict) else enumerate(body)
        for step, inner in items:
            yield from _texts(inner, (*path, step))


def _tool_word(
    way: str, dialect: str, before: Conversation, after: Conversation, rng: Random
) -> BrokenPrompt:
    """One word in the description of a tool is another one."""
    tool = after.tools[rng.randrange(len(after.tools))]
    words = tool["description"].split(" ")
    words[rng.randrange(len(words))] = "elsewhere" + str(rng.randrange(1000))
    tool["description"] = " ".join(words)
    return _changed(way, dialect, before, after, tool["description"])


def _system_time(
    way: str, dialect: str, before: Conversation, after: Conversation, rng: Random
) -> BrokenPrompt:
    """The system prompt begins with the time."""
    minute = rng.randrange(59)
    rest = before.system
    before.system = f"The time is 2026-03-04T10:{minute:02}:07Z. {rest}"
    after.system = f"The time is 2026-03-04T10:{minute + 1:02}:07Z. {rest}"
    return _changed(way, dialect, before, after, after.system)


def _system_id(
    way: str, dialect: str, before: Conversation, after: Conversation, rng: Random
) -> BrokenPrompt:
    """The system prompt names a request that is another one each time."""
    rest = before.system
    ids = [uuid.UUID(int=rng.getrandbits(128), version=4) for _ in range(2)]
    before.system, after.system = (f"{rest[:12]}[request {request_id}] {rest[12:]}" for request_id in ids)
    return _changed(way, dialect, before, after, after.system)


def _key_order(
    way: str, dialect: str, before: Conversation, after: Conversation, rng: Random
) -> BrokenPrompt:
    """The parameters of a tool come in another order."""
    number = rng.randrange(len(after.tools))
    for made in (before, after):
        properties = made.tools[number]["parameters"]["properties"]
        properties |= {name: {"type": "string"} for name in ("zone", "area") if name not in properties}
    parameters = after.tools[number]["parameters"]
    parameters["properties"] = dict(reversed(parameters["properties"].items()))
    tool = {
        "chat": f"tools[{number}].function.parameters",
        "messages": f"tools[{number}].input_schema",
        "responses": f"tools[{number}].parameters",
        "gemini": f"tools[0].functionDeclarations[{number}].parametersJsonSchema",
    }[dialect]
    bodies = AS[dialect](before), AS[dialect](after)
    return BrokenPrompt(way, dialect, *bodies, f"{tool}.properties", PlaceKind.KEYS)


def _tool_path(dialect: str, number: int) -> str:
    return f"tools[0].functionDeclarations[{number}]" if dialect == "gemini" else f"tools[{number}]"


def _tool_gone(
    way: str, dialect: str, before: Conversation, after: Conversation, rng: Random
) -> BrokenPrompt:
    number = rng.randrange(len(after.tools) - 1)
    del after.tools[number]
    path = _tool_path(dialect, number)
    return BrokenPrompt(way, dialect, AS[dialect](before), AS[dialect](after), path, is_around=True)


def _tool_added(
    way: str, dialect: str, before: Conversation, after: Conversation, rng: Random
) -> BrokenPrompt:
    number = rng.randrange(len(before.tools) - 1)
    del before.tools[number]
    path = _tool_path(dialect, number)
    return BrokenPrompt(way, dialect, AS[dialect](before), AS[dialect](after), path, is_around=True)


def _tool_order(
    way: str, dialect: str, before: Conversation, after: Conversation, rng: Random
) -> BrokenPrompt:
    number = rng.randrange(len(after.tools) - 1)
    after.tools[number:] = reversed(after.tools[number:])
    path = _tool_path(dialect, number)
    return BrokenPrompt(way, dialect, AS[dialect](before), AS[dialect](after), path, is_around=True)


def _trimmed_result(
    way: str, dialect: str, before: Conversation, after: Conversation, rng: Random
) -> BrokenPrompt:
    """The result of a call is cut short once it is old."""
    turn = after.turns[rng.randrange(len(before.turns) - 1)]
    name, arguments, result = turn.calls[0]
    turn.calls[0] = (name, arguments, result[: max(9, len(result) // 2)] + "[trimmed]")
    return _changed(way, dialect, before, after, turn.calls[0][2])


def _cleared_result(
    way: str, dialect: str, before: Conversation, after: Conversation, rng: Random
) -> BrokenPrompt:
    turn = after.turns[rng.randrange(len(before.turns) - 1)]
    name, arguments, _ = turn.calls[0]
    turn.calls[0] = (name, arguments, "[Old tool result cleared]")
    return _changed(way, dialect, before, after, turn.calls[0][2])


def _compacted(
    way: str, dialect: str, before: Conversation, after: Conversation, rng: Random
) -> BrokenPrompt:
    """The first turns become a summary."""
    summary = "Summary of what was said before: " + text(rng)
    after.turns[:3] = [Turn(summary, "I see.")]
    return _changed(way, dialect, before, after, summary)


def _argument_order(
    way: str, dialect: str, before: Conversation, after: Conversation, rng: Random
) -> BrokenPrompt:
    """The arguments of an earlier call are written anew, with their keys in another order."""
    turn = after.turns[rng.randrange(len(before.turns) - 1)]
    name, arguments, result = turn.calls[0]
    turn.calls[0] = (name, dict(reversed(arguments.items())), result)
    bodies = AS[dialect](before), AS[dialect](after)
    path = next(path for path in _call_paths(bodies[1]) if _at(bodies[0], path) != _at(bodies[1], path))
    return BrokenPrompt(way, dialect, *bodies, spelled(path), PlaceKind.KEYS)


def _call_paths(body: Any, path: Path = ()) -> Iterator[Path]:
    items = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for step, inner in items:
        if step in ("arguments", "args") or (step == "input" and path):
            yield (*path, step)
        else:
            yield from _call_paths(inner, (*path, step))


def _at(body: Any, path: Path) -> str:
    for step in path:
        body = body[step]
    return repr(body)


def _argument(way: str, dialect: str, before: Conversation, after: Conversation, rng: Random) -> BrokenPrompt:
    """An argument of an earlier call is another one."""
    turn = after.turns[rng.randrange(len(before.turns) - 1)]
    turn.calls[0][1]["city"] = "Reykjavík " + str(rng.randrange(1000))
    bodies = AS[dialect](before), AS[dialect](after)
    path = next(path for path in _call_paths(bodies[1]) if _at(bodies[0], path) != _at(bodies[1], path))
    return BrokenPrompt(way, dialect, *bodies, f"{spelled(path)}.city", PlaceKind.VALUE)


def _other_fields(**fields: Any) -> Callable[..., BrokenPrompt]:
    def make(way: str, dialect: str, before: Conversation, after: Conversation, rng: Random) -> BrokenPrompt:
        return BrokenPrompt(way, dialect, AS[dialect](before), {**AS[dialect](after), **fields})

    return make


NAMESPACE_WAYS: dict[str, Callable[..., BrokenPrompt]] = {
    "other_model": _other_fields(model="another"),
    "other_salt": _other_fields(cache_salt="another salt"),
}

WAYS: dict[str, Callable[..., BrokenPrompt]] = {
    "tool_word": _tool_word,
    "system_time": _system_time,
    "system_id": _system_id,
    "key_order": _key_order,
    "tool_gone": _tool_gone,
    "tool_added": _tool_added,
    "tool_order": _tool_order,
    "trimmed_result": _trimmed_result,
    "cleared_result": _cleared_result,
    "compacted": _compacted,
    "argument": _argument,
    "argument_order": _argument_order,
    **NAMESPACE_WAYS,
}
TEXT_WAYS = tuple(way for way in WAYS if way not in NAMESPACE_WAYS)
