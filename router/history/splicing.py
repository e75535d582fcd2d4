"""Splicing: what a template writes behind an assistant's message, whatever it writes for the message itself.

Owns how the place is found. The conversation is rendered once more with a text in the message's stead that
no client sends; behind it, at the first token that ends a turn, begins what follows the message, and the
prompt must end with just that. Where a template refuses that text, drops it, or ends turns otherwise, there
is nothing to splice, which costs a client nothing but tokens that could have been read from cache.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

STANDS_FOR_ANSWER = "\ufdd1answer\ufdd1"
STANDS_FOR_NEXT = "\ufdd1next\ufdd1"
"""Noncharacters, which Unicode keeps out of texts. A client that sends it nonetheless is not spliced."""

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
"""The conversation's text, as for its prompt: with the same tools and arguments, and what the model is to
continue. Raises a ValueError for what the template refuses."""


def text_after(
    render: Render,
    prompt: str,
    messages: Sequence[Message],
    position: int,
    *,
    ends_of_turn: Collection[str],
) -> tuple[str, str] | None:
    """The token that ends the turn of the answer at `position`, and what follows; None if nobody can tell.

    `messages` are those of the `prompt`, with the client's special tokens broken already (see `quoting`):
    those in `ends_of_turn` are the template's then. An answer whose own tokens end with one has it already.

    The calls of the message are left out, since some templates write them and no text; where a template then
    refuses the results behind them, they are left as they are.
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


class _Place(NamedTuple):
    """The first token that ends a turn behind the answer's stand-in, and what stands before and behind it."""

    before: str
    end: str
    behind: str


def _place(render: Render, conversation: Sequence[Message], ends_of_turn: Collection[str]) -> _Place | None:
    try:
        text = render(conversation)
    except ValueError:
        return None
    _, _, text = text.partition(STANDS_FOR_ANSWER)
    starts = [(start, -len(end)) for end in ends_of_turn if (start := text.find(end)) >= 0]
    if not starts or STANDS_FOR_ANSWER in text:
        return None
    start, length = min(starts)  # of two at one place the longer, as a tokenizer reads it
    return _Place(text[:start], text[start : start - length], text[start - length :])


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
