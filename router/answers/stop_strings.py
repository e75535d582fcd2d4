"""StopStrings: passes an answer's text up to the first stop string, incrementally.

Owns the possible beginning of a stop string, which cannot be emitted yet. Not for other text, such as
reasoning.
"""

from collections.abc import Sequence

from router.shared.literals import num_begun


class StopStrings:
    """`add` the text of each token, even empty; `finish` at the end. The joined output ends before the first
    stop string, or with it if it `is_shown`. Text of the first `min_tokens` tokens stops nothing."""

    __slots__ = ("_held", "_is_shown", "_min_tokens", "_num_tokens", "_strings", "found")

    def __init__(self, strings: Sequence[str], *, min_tokens: int = 0, is_shown: bool = False) -> None:
        assert strings and all(strings), "a stop string is never empty"
        self._strings = tuple(strings)
        self._min_tokens = min_tokens
        self._is_shown = is_shown
        self._held = ""
        self._num_tokens = 0
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """Return the text that is now certain."""
        self._num_tokens += 1
        if not piece or self.found is not None:
            return ""
        if self._num_tokens <= self._min_tokens:
            return piece
        text = self._held + piece
        first = _first(text, self._strings)
        if first is not None:
            start, self.found = first
            self._held = ""
            return text[: start + len(self.found)] if self._is_shown else text[:start]
        end = len(text) - num_begun(text, self._strings)
        self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        """Emit what was held back."""
        held, self._held = self._held, ""
        return held


def _first(text: str, strings: Sequence[str]) -> tuple[int, str] | None:
    """Return the stop string that is complete first (the longer one, if two end together) and its start."""
    found: tuple[int, int, str] | None = None
    for candidate in strings:
        start = text.find(candidate)
        if start >= 0 and (found is None or (start + len(candidate), start) < found[:2]):
            found = (start + len(candidate), start, candidate)
    return None if found is None else (found[1], found[2])
