"""Quotes texts and special tokens in a grammar."""

import json
import re
from collections.abc import Collection

_ASCII_CLASSES = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
    r"\s": r"[\x20\t\n\r\f\v]",
    r"\S": r"[^\x20\t\n\r\f\v]",
}
_SPECIAL_NAME = re.compile(r"<[^<>\s\[\]]+>")


def literal(text: str) -> str:
    """Quote a text for Lark, which quotes like JSON."""
    return json.dumps(text)


def slashed(regex: str) -> str:
    """Write a regular expression between slashes: bare slashes and line breaks are escaped, escaped ones
    stay."""
    named = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
    inside = re.sub(r"(?s)\\.|[/\n\r]", lambda found: named.get(found[0], found[0]), regex)
    return f"/{inside}/"


def with_ascii_classes(regex: str) -> str:
    r"""Replace `\d`, `\w` and `\s` by the digits, letters and blanks of ASCII, also within brackets.

    That is what clients mean who ask for numbers and identifiers, and what JSON schemas' patterns mean.
    """
    return re.sub(r"(?s)\\.", lambda found: _ASCII_CLASSES.get(found[0], found[0]), regex)


def is_special(mark: str, special_tokens: Collection[str]) -> bool:
    """Whether a grammar names the mark as a token of its own, which no text matches."""
    return mark in special_tokens and _SPECIAL_NAME.fullmatch(mark) is not None


def mark(text: str, special_tokens: Collection[str]) -> str:
    """Return a mark as the grammar has it: as a token, or as text."""
    return text if is_special(text, special_tokens) else literal(text)
