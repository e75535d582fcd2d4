"""Splicing: finds the text that a template writes after an assistant's message.

Owns the search. The conversation is rendered once more with a placeholder for the message that no client
sends. The text after the message begins behind it, at the first token that ends a turn; the prompt must end
with exactly that. If a template refuses the placeholder, drops it, or ends turns otherwise, nothing is
spliced, which only costs cached tokens.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

STANDS_FOR_ANSWER = "\ufdd1answer\ufdd1"
STANDS_FOR_NEXT = "\ufdd1next\ufdd1"
"""Unicode noncharacters, which texts do not have. A client that sends one is not spliced."""

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
"""Renders a conversation as for its prompt, with the same tools, arguments and generation prompt. Raises
ValueError if the template refuses it."""


def text_after(
    render: Render,
    prompt: str,
    messages: Sequence[Message],
    position: int,
    *,
    ends_of_turn: Collection[str],
) -> tuple[str, str] | None:
    """Return the token that ends the turn of the answer at `position`, and the following text; None if not
    found.

    `messages` are those of the `prompt`, in which the client's special tokens are broken already (see
    `quoting`), so those in `ends_of_turn` are the template's. An answer may end with that token already.

    The message's calls are left out, since some templates write them instead of the text. If a template then
    refuses the results of the calls, the calls stay.
    """
    message = messages[position]
    bare = {"role": message["role"], "content": STANDS_FOR_ANSWER}
    for stand_in in (bare, {**message, "content": STANDS_FOR_ANSWER}):
        conversation = [*messages[:position], stand_in, *messages[position + 1 :]]
        found = _place(render, conversation, ends_of_turn)
        if found is None or not prompt.endswith(found.behind):
            continue
        if found.before.strip() and not _is_before_next(render, conversation, position, ends_of_turn):
            continue
        return found.end, found.behind
    return None


class _Seam(NamedTuple):
    """The first token that ends a turn behind the placeholder, with the texts before and behind it."""

    before: str
    end: str
    behind: str


def _place(render: Render, conversation: Sequence[Message], ends_of_turn: Collection[str]) -> _Seam | None:
    try:
        text = render(conversation)
    except ValueError:
        return None
    _, _, text = text.partition(STANDS_FOR_ANSWER)
    starts = [(start, -len(end)) for end in ends_of_turn if (start := text.find(end)) >= 0]
    if not starts or STANDS_FOR_ANSWER in text:
        return None
    start, length = min(starts)  # of two at one place the longer, as a tokenizer reads it
    return _Seam(text[:start], text[start : start - length], text[start - length :])


def _is_before_next(
    render: Render, conversation: Sequence[Message], position: int, ends_of_turn: Collection[str]
) -> bool:
    """Whether the token that was found ends the answer's own turn, and not a later one."""
    rest = conversation[position + 1 :]
    if not rest:
        return True
    marked = [*conversation[: position + 1], {**rest[0], "content": STANDS_FOR_NEXT}, *rest[1:]]
    found = _place(render, marked, ends_of_turn)
    return found is not None and STANDS_FOR_NEXT in found.behind
