"""Habit: how a client breaks its prompts' prefixes, told from two bodies and the place where they part.

Owns the kinds, and what there is to do about each. A place alone does not say it: that a tool's parameters
are the same in another order takes both bodies.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any

from router.explain.leaves import (
    NEVER_WRITTEN,
    SYSTEM_FIELDS,
    TOOL_FIELDS,
    TURN_FIELDS,
    leaves_of,
    spelled,
    steps_of,
)
from router.explain.places import Place, PlaceKind

_IMAGE = "data:image/"
"""How an image begins that a body has as a text."""

_INLINE = frozenset({"inlineData", "inline_data"})
"""Gemini's name of an image in a body; the types of parts are in none of its fields."""

_Steps = tuple[str | int, ...]


class Habit(StrEnum):
    MODEL = "model"
    SALT = "salt"
    SETTINGS = "settings"
    TIME = "time"
    RANDOM_ID = "random_id"
    NUMBER = "number"
    KEY_ORDER = "key_order"
    TOOLS_CHANGED = "tools_changed"
    TOOL_ORDER = "tool_order"
    TOOL_EDITED = "tool_edited"
    ARGUMENTS_REWRITTEN = "arguments_rewritten"
    RESULT_TRIMMED = "result_trimmed"
    HISTORY_CUT = "history_cut"
    IMAGE_CHANGED = "image_changed"
    HISTORY_EDITED = "history_edited"
    SYSTEM_EDITED = "system_edited"
    TEMPLATE = "template"
    TEXT = "text"


WHAT: Mapping[Habit, str] = {
    Habit.MODEL: "another model",
    Habit.SALT: "another cache_salt",
    Habit.SETTINGS: "other settings",
    Habit.TIME: "a date or time",
    Habit.RANDOM_ID: "an id that is another one each time",
    Habit.NUMBER: "a number that changes",
    Habit.KEY_ORDER: "JSON keys in another order",
    Habit.TOOLS_CHANGED: "tools that come and go",
    Habit.TOOL_ORDER: "tools in another order",
    Habit.TOOL_EDITED: "a tool that was edited",
    Habit.ARGUMENTS_REWRITTEN: "arguments of a call written anew",
    Habit.RESULT_TRIMMED: "a tool's result cut short or cleared",
    Habit.HISTORY_CUT: "earlier turns dropped or summed up",
    Habit.IMAGE_CHANGED: "another image at the same place",
    Habit.HISTORY_EDITED: "an earlier turn that was edited",
    Habit.SYSTEM_EDITED: "a system prompt that was edited",
    Habit.TEMPLATE: "the chat template writes it otherwise",
    Habit.TEXT: "a text that changes",
}

ADVICE: Mapping[Habit, str] = {
    Habit.MODEL: "Stay with one model within a conversation: nothing is shared between models.",
    Habit.SALT: "Prompts with different salts share nothing. Use one for all that may share, and no other.",
    Habit.SETTINGS: "Keep settings that the chat template writes into the prompt, such as the effort of"
    " reasoning, as they are within a conversation.",
    Habit.TIME: "Take dates and times out of the beginning. Say them in the latest message, where nothing"
    " comes after them, or as a day without a time.",
    Habit.RANDOM_ID: "Take ids of requests and sessions out of the prompt, or put them behind all that is"
    " shared.",
    Habit.NUMBER: "Put numbers that change, such as what is left of a budget, into the latest message.",
    Habit.KEY_ORDER: "Write JSON with its keys in a fixed order: sort them, or keep the text that was sent"
    " first.",
    Habit.TOOLS_CHANGED: "Send the same tools throughout a conversation, and say with tool_choice which may"
    " be called. A tool that comes later is best described in a message.",
    Habit.TOOL_ORDER: "Send tools in a fixed order, sorted by name for instance: never as a set or map has"
    " them.",
    Habit.TOOL_EDITED: "Descriptions of tools stand at the very beginning of most prompts: leave them as they"
    " are, and say what changes in a message.",
    Habit.ARGUMENTS_REWRITTEN: "Send the arguments of earlier calls back as the text that came, instead of"
    " reading and writing them.",
    Habit.RESULT_TRIMMED: "Cut a result when it is first sent, not later. If old ones must go, let many of"
    " them go at once, and seldom.",
    Habit.HISTORY_CUT: "Each cut computes all that follows it again: cut seldom and much instead of a little"
    " with each turn.",
    Habit.IMAGE_CHANGED: "Put a picture that changes, such as the latest screenshot, into the latest message,"
    " behind all that is shared, and leave earlier ones where they are: all that follows another picture is"
    " computed again. The same picture in another file counts as another one: send the bytes that were sent.",
    Habit.HISTORY_EDITED: "Send earlier turns back as they were, to the byte; correct them in a new message.",
    Habit.SYSTEM_EDITED: "Keep the system prompt as it is, with what all requests share first; what changes"
    " belongs into the latest message.",
    Habit.TEMPLATE: "The body is the same, but the model's template writes earlier turns in another way than"
    " when they were new, without their reasoning for instance. Only another template changes that.",
    Habit.TEXT: "Put what all requests share first, and what changes last.",
}

_PLAIN = frozenset(
    {
        Habit.TIME,
        Habit.RANDOM_ID,
        Habit.NUMBER,
        Habit.KEY_ORDER,
        Habit.TOOL_ORDER,
        Habit.ARGUMENTS_REWRITTEN,
        Habit.RESULT_TRIMMED,
    }
)
"""Habits that two bodies cannot show by chance."""

_UNSAID = NEVER_WRITTEN | {"id", "tool_use_id", "tool_call_id", "call_id"}

_TIMES = re.compile(
    r"\d{4}-\d{1,2}-\d{1,2}(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?)?(?:Z|[+-]\d{2}:?\d{2})?"
    r"|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
    r"|\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?"
    r"|\b(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b,?"
    r"|\b(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?"
    r"|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\b\.?(?:\s+\d{1,2}(?:st|nd|rd|th)?\b)?(?:,?\s+\d{4}\b)?"
    r"|\b1[5-9]\d{8}(?:\d{3})?\b"
)
_IDS = re.compile(
    r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
    r"|\b(?=[A-Za-z0-9_-]*\d)(?=[A-Za-z0-9_-]*[A-Za-z])[A-Za-z0-9_-]{10,}\b"
    r"|\b[0-9a-fA-F]{8,}\b|\b\d{9,}\b"
)
_NUMBERS = re.compile(r"\d+(?:[.,]\d+)*")
_decoder = json.JSONDecoder()
_OPENS = re.compile(r"[\[{]")
MOST_OPENED = 64
"""How many times JSON is looked for in a text that has none there."""


def habit_of(
    earlier: Mapping[str, Any], later: Mapping[str, Any], place: Place, *, same_space: bool
) -> Habit:
    """`place` is in `later`. Without the same space they share nothing, whatever their texts are."""
    if not same_space:
        return Habit.MODEL if earlier.get("model") != later.get("model") else Habit.SALT
    steps = steps_of(place.path)
    if steps and steps[0] in TOOL_FIELDS:
        return _of_tools(earlier, later)
    old, new = value_at(earlier, steps), value_at(later, steps)
    if steps and old == new and place.kind is not PlaceKind.KEYS:
        return Habit.SETTINGS if _settings(earlier) != _settings(later) else Habit.TEMPLATE
    if place.kind is PlaceKind.TEMPLATE and not steps:
        return Habit.SETTINGS if _settings(earlier) != _settings(later) else Habit.TEMPLATE
    if steps and steps[0] in TURN_FIELDS and _is_cut(earlier, later, steps):
        return Habit.HISTORY_CUT
    if _is_image(earlier, steps) and _is_image(later, steps):
        return Habit.IMAGE_CHANGED
    if not _is_argument(steps) and _have_other_key_order(earlier, later, steps):
        return Habit.KEY_ORDER
    if isinstance(old, str) and isinstance(new, str):
        volatile = _volatile(old, new)
        if volatile is not None:
            return volatile
    if _is_result(later, steps):
        return Habit.RESULT_TRIMMED if _is_shorter(old, new) else Habit.HISTORY_EDITED
    if _is_argument(steps):
        return _of_arguments(earlier, later, steps)
    if steps and (steps[0] in SYSTEM_FIELDS or _role(later, steps) in ("system", "developer")):
        return Habit.SYSTEM_EDITED
    return Habit.HISTORY_EDITED if steps and steps[0] in TURN_FIELDS[:3] else Habit.TEXT


def surer(earlier: Mapping[str, Any], later: Mapping[str, Any], place: Place) -> Place:
    """If a place is uncertain, return the first changed field, if only tools or only turns changed."""
    if place.is_certain:
        return place
    changed = [
        next((leaf for leaf in leaves if value_at(earlier, leaf.path) != value_at(later, leaf.path)), None)
        for leaves in leaves_of(later)
    ]
    found = [leaf for leaf in changed if leaf is not None and not leaf.is_key]
    if len(found) != 1 or None not in changed:
        return place
    return Place(spelled(found[0].path), PlaceKind.VALUE, is_certain=True)


def goes_on(earlier: Mapping[str, Any], later: Mapping[str, Any], place: Place, habit: Habit) -> bool:
    """Whether a prompt goes on from another that it does not begin as, rather than being of another
    conversation or program that has some text in common with it."""
    if habit in _PLAIN:
        return True
    if habit in (Habit.MODEL, Habit.SALT):
        turns = [Counter(_said(turn) for turn in _turns(body)) for body in (earlier, later)]
        return 2 * (turns[0] & turns[1]).total() >= max(1, turns[0].total())
    steps = steps_of(place.path)
    if steps and steps[0] in TOOL_FIELDS:
        names = [{name for name, _ in _tools(body)} for body in (earlier, later)]
        return _are_alike(*names)
    if steps and steps[0] in TURN_FIELDS and habit is not Habit.SYSTEM_EDITED:
        at = steps[1] if len(steps) > 1 and isinstance(steps[1], int) else -1
        after = [{_said(turn) for turn in _turns(body, at + 1)} for body in (earlier, later)]
        return bool(after[0] & after[1])
    texts = [value_at(body, steps) for body in (earlier, later)]
    return _are_alike(*({*text.split()} if isinstance(text, str) else set() for text in texts))


def _turns(body: Mapping[str, Any], first: int = 0) -> list[Any]:
    """From `first` on; system prompts are none."""
    field = next((body[name] for name in TURN_FIELDS if body.get(name) is not None), None)
    turns = field if isinstance(field, list) else [field]
    return [turn for turn in turns[first:] if not (isinstance(turn, dict) and turn.get("role") == "system")]


def _are_alike(one: set[str], other: set[str]) -> bool:
    return 2 * len(one & other) >= max(1, len(one | other))


def value_at(body: Any, steps: Sequence[str | int]) -> Any:
    """None where there is none. Arguments that are JSON in a text are read."""
    for step in steps:
        if isinstance(body, str) and isinstance(step, str):
            try:
                body = json.loads(body)
            except ValueError:
                return None
        try:
            body = body[step]
        except (LookupError, TypeError):
            return None
    return body


def _of_tools(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> Habit:
    old, new = _tools(earlier), _tools(later)
    old_names, new_names = [name for name, _ in old], [name for name, _ in new]
    if sorted(old_names) != sorted(new_names):
        return Habit.TOOLS_CHANGED
    if old_names != new_names:
        return Habit.TOOL_ORDER
    if json.dumps(old) == json.dumps(new):
        return Habit.TEMPLATE
    if [_sorted(tool) for _, tool in old] == [_sorted(tool) for _, tool in new]:
        return Habit.KEY_ORDER
    texts = [json.dumps([tool for _, tool in tools], ensure_ascii=False) for tools in (old, new)]
    return _volatile(*texts) or Habit.TOOL_EDITED


def _tools(body: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """With their names, however they are nested."""
    found: list[tuple[str, Any]] = []

    def add(tools: Any) -> None:
        for tool in tools if isinstance(tools, list) else ():
            if not isinstance(tool, dict):
                continue
            inner = tool.get("functionDeclarations", tool.get("function_declarations", tool.get("tools")))
            if isinstance(inner, list):
                add(inner)
                continue
            function = tool.get("function")
            found.append((str((function if isinstance(function, dict) else tool).get("name")), tool))

    for name in TOOL_FIELDS:
        add(body.get(name))
    return found


def _sorted(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _have_other_key_order(earlier: Mapping[str, Any], later: Mapping[str, Any], steps: _Steps) -> bool:
    """Whether the text at this place, or its turn, differs only in the order of keys: the body's own, and
    those of JSON within texts."""
    for end in dict.fromkeys((len(steps), min(2, len(steps)))):
        pair = [value_at(body, steps[:end]) for body in (earlier, later)]
        if json.dumps(pair[0]) != json.dumps(pair[1]) and _sorted(_read(pair[0])) == _sorted(_read(pair[1])):
            return json.dumps(_read(pair[0])) != json.dumps(_read(pair[1]))
    return False


def _read(value: Any) -> Any:
    """With the JSON that stands in texts read."""
    if isinstance(value, str):
        return _pieces(value)
    if isinstance(value, dict):
        return {name: _read(item) for name, item in value.items()}
    return [_read(item) for item in value] if isinstance(value, list) else value


def _pieces(text: str) -> list[Any]:
    """Return the JSON of a text, and what stands around it."""
    pieces: list[Any] = []
    start = at = num_opened = 0
    while num_opened < MOST_OPENED and (opens := _OPENS.search(text, at)):
        try:
            found, end = _decoder.raw_decode(text, opens.start())
        except (ValueError, RecursionError):
            num_opened, at = num_opened + 1, opens.end()
            continue
        pieces += [text[start : opens.start()], found]
        start = at = end
    return [*pieces, text[start:]]


def _said(turn: Any) -> str:
    """Return a turn's content in the prompt, in one spelling."""
    return _sorted(_without(turn, _UNSAID))


def _without(value: Any, names: Collection[str]) -> Any:
    if isinstance(value, dict):
        return {name: _without(item, names) for name, item in value.items() if name not in names}
    return [_without(item, names) for item in value] if isinstance(value, list) else value


def _volatile(old: str, new: str) -> Habit | None:
    """Whether two texts differ only in times, ids or numbers."""
    for habit, patterns in (
        (Habit.TIME, (_TIMES,)),
        (Habit.RANDOM_ID, (_IDS,)),
        (Habit.TIME, (_TIMES, _IDS)),
        (Habit.NUMBER, (_TIMES, _IDS, _NUMBERS)),
    ):
        texts = [old, new]
        for pattern in patterns:
            texts = [pattern.sub("\0", text) for text in texts]
        if texts[0] == texts[1]:
            return habit
    return None


def _settings(body: Mapping[str, Any]) -> str:
    names = (
        "chat_template_kwargs",
        "reasoning_effort",
        "reasoning",
        "thinking",
        "output_config",
        "documents",
    )
    config = body.get("generationConfig")
    thinking = config.get("thinkingConfig") if isinstance(config, dict) else None
    return _sorted([*(body.get(name) for name in names), thinking, "tools" in body or "functions" in body])


def _is_cut(earlier: Mapping[str, Any], later: Mapping[str, Any], steps: _Steps) -> bool:
    """Whether earlier turns are missing: those that follow stand nearer to the beginning."""
    old, new = earlier.get(str(steps[0])), later.get(str(steps[0]))
    if not isinstance(old, list) or not isinstance(new, list) or not (len(steps) > 1 or len(new) < len(old)):
        return False
    at = steps[1] if len(steps) > 1 and isinstance(steps[1], int) else 0
    before, after = [_said(turn) for turn in old], [_said(turn) for turn in new]
    if any(before[n] == after[n] for n in range(at + 1, min(len(old), len(new)))):
        return False  # those that follow are where they were
    places: dict[str, int] = {}
    for number, turn in enumerate(before):
        places.setdefault(turn, number)
    moved = [places[turn] - number for number, turn in enumerate(after) if turn in places]
    return any(distance > 0 for distance in moved) or (not moved and len(new) < len(old))


def _role(body: Mapping[str, Any], steps: _Steps) -> str | None:
    role = value_at(body, (*steps[:2], "role"))
    return role if isinstance(role, str) else None


def _is_result(body: Mapping[str, Any], steps: _Steps) -> bool:
    if "functionResponse" in steps or "function_response" in steps or "output" in steps[2:3]:
        return True
    if _role(body, steps) in ("tool", "function"):
        return True
    block = value_at(body, steps[:4])
    return isinstance(block, dict) and block.get("type") == "tool_result"


def _is_image(body: Mapping[str, Any], steps: _Steps) -> bool:
    """Whether a path of an image leads to one in this body. A text there that is one looks like an id."""
    value = value_at(body, steps)
    value = value.get("url") if isinstance(value, dict) and steps[-1] == "image_url" else value
    if isinstance(value, str):
        return value.startswith(_IMAGE)
    if not isinstance(value, dict):
        return False
    return (
        value.get("type") == "image" or bool(steps and steps[-1] in _INLINE) or bool(_INLINE & value.keys())
    )


def _is_shorter(old: Any, new: Any) -> bool:
    return isinstance(old, str) and isinstance(new, str) and len(new) < len(old)


def _is_argument(steps: _Steps) -> bool:
    return bool({"arguments", "args", "input"} & set(steps[1:]))


def _of_arguments(earlier: Mapping[str, Any], later: Mapping[str, Any], steps: _Steps) -> Habit:
    end = max(number for number, step in enumerate(steps) if step in ("arguments", "args", "input")) + 1
    old, new = (value_at(body, steps[:end]) for body in (earlier, later))
    both = [json.loads(value) if isinstance(value, str) else value for value in (old, new)]
    return Habit.ARGUMENTS_REWRITTEN if both[0] == both[1] else Habit.HISTORY_EDITED
