"""Literals: any of many strings in a text, as a regular expression, and what may be the beginning of one.

Owns the expression's spelling. Special tokens come by the hundred and begin alike: tried one after the other,
a text full of their beginnings would cost each place as many looks as there are tokens.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

_Trie = dict[str, Any]
"""By character; the key "" says that a literal ends here."""


def longest_of(literals: Iterable[str]) -> str:
    """Return a pattern of the longest literal that stands at a place. There is one literal at least."""
    return _spelled(_trie(literals))


def first_characters_of(literals: Iterable[str]) -> str:
    """Return a pattern of each first character of a literal that stands there, overlapping or not."""
    return "|".join(
        f"{re.escape(first)}(?={_spelled(rest)})"
        if rest.keys() - {""} and "" not in rest
        else re.escape(first)
        for first, rest in _trie(literals).items()
    )


def num_begun(text: str, literals: Sequence[str]) -> int:
    """How many of the text's last characters could be the beginning of a literal, none of which is in it."""
    longest = 0
    for literal in literals:
        start = text.find(literal[0], max(0, len(text) - len(literal) + 1))
        while start >= 0:
            if literal.startswith(text[start:]):
                longest = max(longest, len(text) - start)
                break
            start = text.find(literal[0], start + 1)
    return longest


def _trie(literals: Iterable[str]) -> _Trie:
    root: _Trie = {}
    for literal in literals:
        assert literal, "an empty literal stands everywhere"
        node = root
        for character in literal:
            node = node.setdefault(character, {})
        node[""] = {}
    return root


def _spelled(node: _Trie) -> str:
    stem: list[str] = []
    while len(node) == 1 and "" not in node:  # not by recursion, which long literals would exhaust
        ((character, node),) = node.items()
        stem.append(re.escape(character))
    branches = [re.escape(character) + _spelled(rest) for character, rest in node.items() if character]
    if not branches:
        return "".join(stem)
    any_branch = f"(?:{'|'.join(branches)})"
    return "".join(stem) + (any_branch + "?" if "" in node else any_branch)
