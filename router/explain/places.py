"""PromptPlaces: from a position in a prompt's text to the place in the client's own body that it came from.

Owns the search. A chat template may write messages and tools in any order, as they are, trimmed or as JSON,
so nothing is known of it: the leaves of the body are looked for in the text. Long ones are found from one end
to the other, which is quick and cannot go astray for long; short ones only around the position that is asked
for, between the long ones next to it. What lies between leaves is the template's, or the punctuation of JSON.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice, takewhile
from typing import Any, NamedTuple, Protocol

from router.explain.leaves import TOOL_FIELDS, Leaf, Path, leaves_of, spelled
from router.prompt.quoting import unquote

STRONG_CHARACTERS = 8
"""A leaf of this length is searched in the whole text; shorter ones may occur elsewhere."""

LONG_CHARACTERS = 24
"""A leaf of this length is searched farther ahead, too."""

TEMPLATE_CHARACTERS = 256
"""Text that a template writes between two leaves, besides its own instructions."""

HEAD_CHARACTERS = 2_048
WIDE_CHARACTERS = 16_384
"""Its instructions, which stand at the beginning, and where they are very long."""

NUM_FIRSTS = 4
"""How many of the first leaves of the tools may be missing from the prompt, or changed in it."""

NUM_LOOKED_AT = 9
"""How many leaves of the tools show whether a place is where they begin."""

NUM_AHEAD = 3
"""How many leaves are looked for before one that stands far away."""

HOLE = "\0"
"""Stands for the tools when turns are searched."""

BESIDE_CHARACTERS = 64

MAX_TRIES = 64
"""How many times a short form may be found inside a word before it is given up."""

_CLOSING = "}]"
_PUNCTUATION = set("\"'}], \n\t")


class PlaceKind(StrEnum):
    VALUE = "value"
    KEYS = "keys"
    """The name of a key, the order of keys, or how many there are: `path` is the object or list."""
    TEMPLATE = "template"
    """Text of the chat template; `path` is what stands nearest around it."""


@dataclass(frozen=True, slots=True)
class Place:
    """`path` is empty where nothing of the body is near. `offset` counts characters into the value, as it
    stands in the prompt. Where it is not `is_certain` the neighbours of `path` are as likely."""

    path: str
    kind: PlaceKind
    is_certain: bool
    offset: int | None = None
    key: str | None = None
    sentence: str | None = None
    """A description, if there is more to say than the path."""


class _FoundText(NamedTuple):
    """The place of a leaf; `number` counts the leaves of its group."""

    start: int
    end: int
    number: int
    leaf: Leaf


@dataclass(frozen=True, slots=True)
class _LeafGroup:
    """Leaves, in the order in which templates write them, and the text that they are looked for in: from
    character `hole` on it lacks `num_missing` of the prompt's."""

    text: str
    leaves: Sequence[Leaf]
    anchors: Sequence[_FoundText]
    hole: int
    num_missing: int

    def around(self, start: int, end: int) -> list[_FoundText]:
        """Return the leaves around a position of the prompt: the nearest long ones, and the short ones
        between."""
        start, end = self._inside(start), self._inside(end)
        anchors = self.anchors
        place = bisect_right(anchors, start, key=lambda anchor: anchor.start)
        before = anchors[place - 1] if place else None
        ahead = anchors[place : bisect_left(anchors, end, lo=place, key=lambda anchor: anchor.start) + 1]
        found = ([] if before is None else [before]) + list(ahead)
        for left, right in zip([before, *ahead], [*ahead, None], strict=True):
            found += _short_between(self.text, self.leaves, left, right)
            if right is None or right.start >= end:
                break
        return [self._of_prompt(one) for one in found]

    def _inside(self, position: int) -> int:
        return position if position <= self.hole else max(self.hole, position - self.num_missing)

    def _of_prompt(self, found: _FoundText) -> _FoundText:
        if found.start < self.hole:
            return found
        start, end = found.start + self.num_missing, found.end + self.num_missing
        return _FoundText(start, end, found.number, found.leaf)


class PromptPlaces:
    """Finds places in one body by the text of its prompt. Takes milliseconds for long texts."""

    def __init__(self, body: Mapping[str, Any], text: str) -> None:
        self._text = text
        tools, turns = leaves_of(body)
        turns = _surely_told(text, turns)
        anchors = _tool_anchors(text, tools)
        start, end = _extent(text, tools, anchors)
        outside = text if start == end else text[:start] + HOLE + text[end:]
        self._groups = (
            _LeafGroup(text, tools, anchors, len(text), 0),
            _LeafGroup(outside, turns, _turn_anchors(outside, turns), start, max(0, end - start - len(HOLE))),
        )

    def at(self, start: int, end: int | None = None) -> Place:
        """Return the place of the character at `start`; with `end`, of the token that stands there."""
        end = start + 1 if end is None else max(end, start + 1)
        around = sorted(found for group in self._groups for found in group.around(start, end))
        hits = [found for found in around if found.start < end and found.end > start]
        if not hits:
            return self._between(around, start)
        hit = hits[0]
        follows = any(found.end == start for found in around)
        is_sure = len(hits) == 1 and not (follows and hit.start > start) and _is_anchored(hit, around)
        return _place_in(hit, start, is_certain=is_sure)

    def _between(self, around: Sequence[_FoundText], start: int) -> Place:
        before = max((found for found in around if found.end <= start), key=lambda f: f.end, default=None)
        after = min((found for found in around if found.start >= start), key=lambda f: f.start, default=None)
        if before is None:
            return Place("", PlaceKind.TEMPLATE, is_certain=False)
        if before.end == start and not before.leaf.is_key:  # the other prompt's goes on, or ends here
            goes_on = before.leaf.is_text
            return _place_in(before, start, is_certain=goes_on and _is_anchored(before, around))
        passed = self._text[before.end : start]
        is_json = (
            before.leaf.element[0] in TOOL_FIELDS or len(before.leaf.path) > len(before.leaf.element) + 1
        )
        if is_json and set(passed) <= _PUNCTUATION:
            return _enclosing(before.leaf, passed, after)
        common = _common(before.leaf, after)
        return Place(spelled(common), PlaceKind.TEMPLATE, is_certain=False)


def _surely_told(text: str, leaves: list[Leaf]) -> list[Leaf]:
    """Without those whose words stand in the prompt more or less often than there are blocks for them: some
    were read, and which is not known."""
    counts = Counter(leaf.forms[0] for leaf in leaves if leaf.is_told)
    wrong = {words for words, number in counts.items() if text.count(words) != number}
    return [leaf for leaf in leaves if not leaf.is_told or leaf.forms[0] not in wrong] if wrong else leaves


class TokenText(Protocol):
    """The part of a tokenizer that is used here."""

    def characters_before(
        self, text: str, token_ids: Sequence[int], num_tokens: int, *, is_quoted: bool = False
    ) -> int: ...


def place_of_token(
    tokenizer: TokenText,
    body: Mapping[str, Any],
    text: str,
    token_ids: Sequence[int],
    number: int,
    *,
    is_quoted: bool = False,
) -> Place:
    """Find the place of token `number` of a chat's prompt; beyond the last token, the end of the prompt."""
    start = tokenizer.characters_before(text, token_ids, number, is_quoted=is_quoted)
    end = tokenizer.characters_before(text, token_ids, number + 1, is_quoted=is_quoted)
    return PromptPlaces(body, unquote(text) if is_quoted else text).at(start, end)


def place_in_prompt(prompt: Any, number: int, start: int) -> Place:
    """Find a place in a plain completion's prompt `number`, whose text or token ids are the prompt itself."""
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    path: Path = ("prompt", number) if several else ("prompt",)
    return Place(spelled(path), PlaceKind.VALUE, is_certain=True, offset=start)


def _tool_anchors(text: str, leaves: Sequence[Leaf]) -> list[_FoundText]:
    """The long leaves of the tools, which stand close together; a name or description of theirs may stand
    elsewhere as well."""
    strong = [index for index, leaf in enumerate(leaves) if len(leaf.forms[0]) >= STRONG_CHARACTERS]
    best: list[_FoundText] = []
    for first in range(min(NUM_FIRSTS, len(strong))):
        begin, until = strong[first], strong[first : first + NUM_LOOKED_AT][-1] + 1
        cursor = 0
        for _ in range(MAX_TRIES):
            here = _first(text, leaves[begin], cursor, len(text))
            if here is None:
                break
            cursor = here[1]
            found = _chain(text, leaves[:until], begin, here[0])
            if (len(found), -_length(found)) > (len(best), -_length(best)):
                best = found
    if not best or len(best) * 3 < min(len(strong), NUM_LOOKED_AT):
        return []
    return _chain(text, leaves, best[0].number, best[0].start)


def _length(found: Sequence[_FoundText]) -> int:
    return found[-1].end - found[0].start if found else 0


def _chain(text: str, leaves: Sequence[Leaf], first: int, cursor: int) -> list[_FoundText]:
    """The long ones from `first` on, each no farther from the last than what lies between them may take."""
    found: list[_FoundText] = []
    slack = 0
    for index in range(first, len(leaves)):
        leaf = leaves[index]
        if len(leaf.forms[0]) >= STRONG_CHARACTERS:
            here = _first(text, leaf, cursor, cursor + slack)
            if here is not None:
                found.append(_FoundText(*here, index, leaf))
                cursor, slack = here[1], TEMPLATE_CHARACTERS
                continue
        slack += len(leaf.forms[0]) + TEMPLATE_CHARACTERS
    return found


def _extent(text: str, leaves: Sequence[Leaf], anchors: Sequence[_FoundText]) -> tuple[int, int]:
    """Return the range of the tools: their long leaves, and adjacent short ones."""
    if not anchors:
        return 0, 0
    start, end = anchors[0].start, anchors[-1].end
    for found in reversed([*_short_between(text, leaves, None, anchors[0])]):
        if start - found.end <= BESIDE_CHARACTERS and found.end - found.start < STRONG_CHARACTERS:
            start = found.start
    for found in _short_between(text, leaves, anchors[-1], None):
        if found.start - end <= BESIDE_CHARACTERS:
            end = found.end
    return start, end


def _turn_anchors(text: str, leaves: Sequence[Leaf]) -> list[_FoundText]:
    """The long leaves of system texts and turns, from the first to the last. In `text` there are no tools."""
    found: list[_FoundText] = []
    cursor, slack = 0, HEAD_CHARACTERS
    for index, leaf in enumerate(leaves):
        length = len(leaf.forms[0])
        if length >= STRONG_CHARACTERS and leaf.path[-1] != "role":
            wide = WIDE_CHARACTERS if length >= LONG_CHARACTERS else 0
            here = _first(text, leaf, cursor, cursor + slack)
            here = here or (_first(text, leaf, cursor, cursor + slack + wide) if wide else None)
            if here is not None and not _is_overtaken(text, leaves, index, cursor, here[0]):
                found.append(_FoundText(*here, index, leaf))
                cursor = here[1]
                slack = HEAD_CHARACTERS if len(found) < NUM_FIRSTS else TEMPLATE_CHARACTERS
                continue
        slack += length + TEMPLATE_CHARACTERS
    return found


def _is_overtaken(text: str, leaves: Sequence[Leaf], index: int, cursor: int, start: int) -> bool:
    """Whether one of the next long leaves stands before it: then this is another text that is like it, and
    the leaf itself is not in the prompt."""
    if start - cursor <= TEMPLATE_CHARACTERS:
        return False
    after = islice((leaf for leaf in leaves[index + 1 :] if len(leaf.forms[0]) >= LONG_CHARACTERS), NUM_AHEAD)
    return any(_first(text, leaf, cursor, start - len(leaf.forms[0])) is not None for leaf in after)


def _short_between(
    text: str, leaves: Sequence[Leaf], left: _FoundText | None, right: _FoundText | None
) -> Iterable[_FoundText]:
    """The short leaves between two long ones, each as near to the last as can be."""
    first = 0 if left is None else left.number + 1
    last = len(leaves) if right is None else right.number
    if left is None and right is not None:
        return _backwards(text, leaves, first, right)
    cursor = 0 if left is None else left.end
    stop = len(text) if right is None else right.start
    found: list[_FoundText] = []
    slack = TEMPLATE_CHARACTERS if left is not None else HEAD_CHARACTERS
    for index in range(first, last):
        leaf = leaves[index]
        here = _first(text, leaf, cursor, min(stop, cursor + slack + len(leaf.forms[0])), is_word=True)
        if here is None:
            slack += len(leaf.forms[0])
            continue
        found.append(_FoundText(*here, index, leaf))
        cursor, slack = here[1], TEMPLATE_CHARACTERS
    return found


def _backwards(text: str, leaves: Sequence[Leaf], first: int, right: _FoundText) -> Iterable[_FoundText]:
    cursor, slack = right.start, TEMPLATE_CHARACTERS
    found: list[_FoundText] = []
    for index in range(right.number - 1, first - 1, -1):
        leaf = leaves[index]
        low = max(0, cursor - slack - len(leaf.forms[0]))
        ends = [(at + len(form), at) for form in leaf.forms if (at := _last(text, form, low, cursor)) >= 0]
        if not ends:
            slack += len(leaf.forms[0])
            continue
        end, start = max(ends)
        found.append(_FoundText(start, end, index, leaf))
        cursor, slack = start, TEMPLATE_CHARACTERS
    return reversed(found)


def _last(text: str, form: str, low: int, high: int) -> int:
    at = text.rfind(form, low, high)
    for _ in range(MAX_TRIES):
        if at < 0 or _is_whole(text, at, at + len(form)):
            break
        at = text.rfind(form, low, at + len(form) - 1)
    return at


def _first(text: str, leaf: Leaf, low: int, high: int, *, is_word: bool = False) -> tuple[int, int] | None:
    """Return the leaf's first place, in any of its forms; `high` bounds its beginning."""
    best: tuple[int, int] | None = None
    for form in leaf.forms if is_word or not leaf.is_key else leaf.forms[:1]:
        at = text.find(form, low, high + len(form))
        if is_word:
            for _ in range(MAX_TRIES):
                if at < 0 or _is_whole(text, at, at + len(form)):
                    break
                at = text.find(form, at + 1, high + len(form))
        if at >= 0 and (best is None or at < best[0]):
            best = (at, at + len(form))
    return best


def _is_whole(text: str, start: int, end: int) -> bool:
    """Whether it is no part of a longer word."""
    if text[start].isalnum() and start and text[start - 1].isalnum():
        return False
    return not (text[end - 1].isalnum() and end < len(text) and text[end].isalnum())


def _is_anchored(hit: _FoundText, around: Sequence[_FoundText]) -> bool:
    """Whether a leaf is long, or stands where it has to beside the leaf before or after it."""
    if hit.end - hit.start >= STRONG_CHARACTERS:
        return True
    return any(
        abs(other.number - hit.number) == 1 and other.leaf.path[0] == hit.leaf.path[0] for other in around
    )


def _place_in(hit: _FoundText, start: int, *, is_certain: bool) -> Place:
    path = hit.leaf.path
    if hit.leaf.is_key:
        return Place(spelled(path[:-1]), PlaceKind.KEYS, is_certain, key=str(path[-1]))
    return Place(spelled(path), PlaceKind.VALUE, is_certain, offset=max(0, start - hit.start))


def _enclosing(leaf: Leaf, passed: str, after: _FoundText | None) -> Place:
    """Return the object or list whose punctuation it is."""
    path = leaf.path[:-1]
    for character in passed:
        if character in _CLOSING:
            path = path[:-1]
    if after is None or after.leaf.element != leaf.element:
        path = path if len(path) >= len(leaf.element) else leaf.element[:-1]
    return Place(spelled(path), PlaceKind.KEYS, is_certain=False)


def _common(leaf: Leaf, after: _FoundText | None) -> Path:
    if after is None:
        return leaf.element
    both = zip(leaf.path, after.leaf.path, strict=False)
    return tuple(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], both))
