"""Repairs JSON as models write it, with raw line breaks and other control characters in strings.

Owns the incremental escaping, and the definition of a JSON object.
"""

import json
import re
from typing import NoReturn

_token = re.compile(r'\\.|\\\Z|["\x00-\x1f]', re.DOTALL)


class ControlEscaper:
    """`feed` it JSON in any pieces: it escapes control characters in strings and keeps all else."""

    __slots__ = ("_is_escaped", "_is_in_string")

    def __init__(self) -> None:
        self._is_in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> str:
        said: list[str] = []
        start = 0
        if self._is_escaped and text:
            self._is_escaped = False
            said.append(_as_escape(text[0])[1:] if text[0] < " " else text[0])
            start = 1
        for found in _token.finditer(text, start):
            token = found[0]
            if token == '"':
                self._is_in_string = not self._is_in_string
            elif self._is_in_string and token == "\\":
                self._is_escaped = True
            elif self._is_in_string and token[-1] < " ":
                said += (text[start : found.start()], _as_escape(token[-1]))
                start = found.end()
        return "".join((*said, text[start:])) if said else text


def with_escapes(text: str) -> str:
    """Return the whole of a JSON text."""
    return ControlEscaper().feed(text)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=refuse_constant), dict)
    except (ValueError, RecursionError):
        return False


def refuse_constant(name: str) -> NoReturn:
    """NaN and the like, which Python takes and JSON does not know."""
    raise ValueError(f"{name} is no JSON")


def _as_escape(character: str) -> str:
    return json.dumps(character)[1:-1]
