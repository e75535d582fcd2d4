"""Broken prompts: conversations whose next turn breaks the prefix of the one before, each in a known way, and
the place that has to be named.

`broken(way, dialect, rng)` makes one of any way in WAYS. Ways of NAMESPACE_WAYS leave the text as it is: what
changes is where its chain is rooted, or which template writes it.
"""

import copy
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
    return WAYS[way](Pair(way, dialect, before, after, rng))


@dataclass(frozen=True, slots=True)
class Pair:
    """Two conversations, the second of which is to be broken."""

    way: str
    dialect: str
    before: Conversation
    after: Conversation
    rng: Random

    def at(self, path: str = "", kind: PlaceKind | None = None, **fields: Any) -> BrokenPrompt:
        as_body = AS[self.dialect]
        bodies = as_body(self.before), as_body(self.after)
        return BrokenPrompt(self.way, self.dialect, *bodies, path, kind, **fields)

    def changed(self, new: str) -> BrokenPrompt:
        """Where the one text `new` stands."""
        (path,) = [path for path, value in _texts(AS[self.dialect](self.after)) if value == new]
        return self.at(spelled(path), PlaceKind.VALUE, value=new)

    def early_turn(self) -> Turn:
        return self.after.turns[self.rng.randrange(len(self.before.turns) - 1)]


def _texts(body: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    if isinstance(body, str):
        yield path, body
    elif isinstance(body, dict | list):
        items = body.items() if isinstance(body, dict) else enumerate(body)
        for step, inner in items:
            yield from _texts(inner, (*path, step))


def _tool_word(pair: Pair) -> BrokenPrompt:
    """One word in the description of a tool is another one."""
    tool = pair.after.tools[pair.rng.randrange(len(pair.after.tools))]
    words = tool["description"].split(" ")
    words[pair.rng.randrange(len(words))] = "elsewhere" + str(pair.rng.randrange(1000))
    tool["description"] = " ".join(words)
    return pair.changed(tool["description"])


def _system_time(pair: Pair) -> BrokenPrompt:
    """The system prompt begins with the time."""
    minute = pair.rng.randrange(59)
    rest = pair.before.system
    pair.before.system = f"The time is 2026-03-04T10:{minute:02}:07Z. {rest}"
    pair.after.system = f"The time is 2026-03-04T10:{minute + 1:02}:07Z. {rest}"
    return pair.changed(pair.after.system)


def _system_id(pair: Pair) -> BrokenPrompt:
    """The system prompt names a request that is another one each time."""
    rest = pair.before.system
    ids = [uuid.UUID(int=pair.rng.getrandbits(128), version=4) for _ in range(2)]
    pair.before.system, pair.after.system = (
        f"{rest[:12]}[request {request_id}] {rest[12:]}" for request_id in ids
    )
    return pair.changed(pair.after.system)


def _key_order(pair: Pair) -> BrokenPrompt:
    """The parameters of a tool come in another order."""
    number = pair.rng.randrange(len(pair.after.tools))
    for made in (pair.before, pair.after):
        properties = made.tools[number]["parameters"]["properties"]
        properties |= {name: {"type": "string"} for name in ("zone", "area") if name not in properties}
    parameters = pair.after.tools[number]["parameters"]
    parameters["properties"] = dict(reversed(parameters["properties"].items()))
    tool = {
        "chat": f"tools[{number}].function.parameters",
        "messages": f"tools[{number}].input_schema",
        "responses": f"tools[{number}].parameters",
        "gemini": f"tools[0].functionDeclarations[{number}].parametersJsonSchema",
    }[pair.dialect]
    return pair.at(f"{tool}.properties", PlaceKind.KEYS)


def _tool_path(dialect: str, number: int) -> str:
    return f"tools[0].functionDeclarations[{number}]" if dialect == "gemini" else f"tools[{number}]"


def _tool_gone(pair: Pair) -> BrokenPrompt:
    number = pair.rng.randrange(len(pair.after.tools) - 1)
    del pair.after.tools[number]
    return pair.at(_tool_path(pair.dialect, number), is_around=True)


def _tool_added(pair: Pair) -> BrokenPrompt:
    number = pair.rng.randrange(len(pair.before.tools) - 1)
    del pair.before.tools[number]
    return pair.at(_tool_path(pair.dialect, number), is_around=True)


def _tool_order(pair: Pair) -> BrokenPrompt:
    number = pair.rng.randrange(len(pair.after.tools) - 1)
    pair.after.tools[number:] = reversed(pair.after.tools[number:])
    return pair.at(_tool_path(pair.dialect, number), is_around=True)


def _trimmed_result(pair: Pair) -> BrokenPrompt:
    """The result of a call is cut short once it is old."""
    turn = pair.early_turn()
    name, arguments, result = turn.calls[0]
    turn.calls[0] = (name, arguments, result[: max(9, len(result) // 2)] + "[trimmed]")
    return pair.changed(turn.calls[0][2])


def _cleared_result(pair: Pair) -> BrokenPrompt:
    turn = pair.early_turn()
    name, arguments, _ = turn.calls[0]
    turn.calls[0] = (name, arguments, "[Old tool result cleared]")
    return pair.changed(turn.calls[0][2])


def _compacted(pair: Pair) -> BrokenPrompt:
    """The first turns become a summary."""
    summary = "Summary of what was said before: " + text(pair.rng)
    pair.after.turns[:3] = [Turn(summary, "I see.")]
    return pair.changed(summary)


def _argument_order(pair: Pair) -> BrokenPrompt:
    """The arguments of an earlier call are written anew, with their keys in another order."""
    turn = pair.early_turn()
    name, arguments, result = turn.calls[0]
    turn.calls[0] = (name, dict(reversed(arguments.items())), result)
    return pair.at(_changed_call(pair), PlaceKind.KEYS)


def _changed_call(pair: Pair) -> str:
    before, after = (AS[pair.dialect](each) for each in (pair.before, pair.after))
    return spelled(next(path for path in _call_paths(after) if _at(before, path) != _at(after, path)))


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


def _argument(pair: Pair) -> BrokenPrompt:
    """An argument of an earlier call is another one."""
    turn = pair.early_turn()
    turn.calls[0][1]["city"] = "Reykjavík " + str(pair.rng.randrange(1000))
    return pair.at(f"{_changed_call(pair)}.city", PlaceKind.VALUE)


def _other_fields(**fields: Any) -> Callable[[Pair], BrokenPrompt]:
    def make(pair: Pair) -> BrokenPrompt:
        made = pair.at()
        return replace(made, after={**made.after, **fields})

    return make


NAMESPACE_WAYS: dict[str, Callable[[Pair], BrokenPrompt]] = {
    "other_model": _other_fields(model="another"),
    "other_salt": _other_fields(cache_salt="another salt"),
}

WAYS: dict[str, Callable[[Pair], BrokenPrompt]] = {
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
