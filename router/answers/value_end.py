"""ValueEnd: finds the end of a bare value between Qwen's marks, even if the model omits its end mark.

Owns which marks are part of the value. `</parameter>` always ends it. Any other mark must be where the chat
template would write it: at the beginning of a line, unless the value began on the line of its own mark. Even
so it is text if it closes what the value itself has opened, as in an example of a call, or if text follows it
that cannot follow a call. Elsewhere in a line only the answer's last marks end it.
"""

import re
from collections.abc import Callable

from router.answers.formats import CALL_BEGIN, CALL_END
from router.shared.literals import num_begun

FUNCTION_BEGIN = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter"
PARAMETER_END = "</parameter>"

_OPENED_BY = {FUNCTION_END: FUNCTION_BEGIN, CALL_END: CALL_BEGIN}
_MARKS = (PARAMETER_END, PARAMETER, *_OPENED_BY, *_OPENED_BY.values())
_BEGINNINGS = (*_MARKS, *("\n" + mark for mark in _MARKS))
_FOLLOWING = {FUNCTION_END: (CALL_END, CALL_BEGIN, FUNCTION_BEGIN), CALL_END: (CALL_BEGIN,)}

_mark = re.compile("|".join(map(re.escape, _MARKS)))
_space = re.compile(r"\s{0,256}")

IsNextParameter = Callable[[str], bool | None]
"""Whether a text begins with a parameter that may come next; None if more of it is needed."""


class ValueEnd:
    """`begin` for each value, then `find` in its text."""

    def __init__(self, is_next_parameter: IsNextParameter) -> None:
        self._is_next_parameter = is_next_parameter
        self.begin(is_block=True)

    def begin(self, *, is_block: bool) -> None:
        """A block is a value that begins on a line of its own."""
        self._is_block = is_block
        self._is_at_start = True
        self._num_open = dict.fromkeys(_OPENED_BY.values(), 0)

    def find(self, text: str, *, is_over: bool) -> tuple[str, str | None, str]:
        """Return more of the value; the text after it, None while it continues; and text that must be fed
        again with more. There is none of that if the answer `is_over`."""
        if "<" not in text and not is_over:
            return self._split(text, len(text.removesuffix("\n")))
        num_read = 0
        for found in _mark.finditer(text):
            at, mark = found.start(), found[0]
            if mark == PARAMETER_END:
                return text[:at].removesuffix("\n"), text[found.end() :], ""
            num_read = found.end()
            judge = self._is_end if self._stands_alone(text, at) else self._is_last
            is_end = judge(mark, text, at, is_over=is_over)
            if is_end:
                return text[:at].removesuffix("\n"), text[at:], ""
            if is_end is None:
                return self._split(text, at - text.startswith("\n", at - 1) if at else 0)
        if is_over:
            return text.removesuffix("\n"), None, ""
        return self._split(text, len(text) - num_begun(text[num_read:], _BEGINNINGS))

    def _split(self, text: str, at: int) -> tuple[str, None, str]:
        self._is_at_start &= not at
        return text[:at], None, text[at:]

    def _stands_alone(self, text: str, at: int) -> bool:
        if not self._is_block:
            return True
        return text[at - 1] == "\n" if at else self._is_at_start

    def _is_last(self, mark: str, text: str, at: int, *, is_over: bool) -> bool | None:
        """Within a line only the last marks of an answer end a value."""
        if mark not in _OPENED_BY:
            return False
        rest, _ = _after_mark(mark, text, at)
        if rest and not (mark == FUNCTION_END and CALL_END.startswith(rest)):
            return False
        return is_over or None

    def _is_end(self, mark: str, text: str, at: int, *, is_over: bool) -> bool | None:
        """Whether the mark ends the value; None if unknown yet."""
        if mark == PARAMETER:
            return self._is_next_parameter(text[at:])
        if mark in self._num_open:
            self._num_open[mark] += 1
            return False
        if self._num_open[_OPENED_BY[mark]]:
            self._num_open[_OPENED_BY[mark]] -= 1
            return False
        rest, ends_call = _after_mark(mark, text, at)
        if ends_call:
            if rest.startswith(PARAMETER_END):
                return False
            return is_over or not PARAMETER_END.startswith(rest) or None
        following = _FOLLOWING[mark]
        if rest.startswith(following):
            return True
        if any(each.startswith(rest) for each in following):
            return is_over or None
        return False


def _after_mark(mark: str, text: str, at: int) -> tuple[str, bool]:
    """Return the text after the mark, and whether `</tool_call>` follows a `</function>`; then the text after
    that."""
    rest = _after_space(text, at + len(mark))
    if mark == FUNCTION_END and rest.startswith(CALL_END):
        return _after_space(rest, len(CALL_END)), True
    return rest, False


def _after_space(text: str, at: int) -> str:
    found = _space.match(text, at)
    assert found is not None
    return text[found.end() :]
