"""Splicing: what a template writes behind an assistant's message, whatever it writes for the message itself.

Owns how the place is found. The conversation is rendered once more with a text in the message's stead that
no client sends; behind it, at the first token that ends a turn, begins what follows the message. Where a
template refuses that text, drops it, or writes no such token, there is nothing to splice, which costs a
client nothing but tokens that could have been read from cache.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

STANDS_FOR_ANSWER = "\ufdd1answer\ufdd1"
"""Noncharacters, which Unicode keeps out of texts. A client that sends it nonetheless is not spliced."""

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
"""The conversation's text, as for its prompt: with the same tools and arguments, and what the model is to
continue. Raises a ValueError for what the template refuses."""


def text_after(
    render: Render,
    messages: Sequence[Message],
    position: int,
    *,
    ends_of_turn: Collection[str],
) -> tuple[str, str] | None:
    """The token that ends the turn of the answer at `position`, and what follows; None if nobody can tell.

    `messages` are those of the prompt, with the client's special tokens broken already (see `quoting`): those
    in `ends_of_turn` are the template's then. An answer whose own tokens end with one has it already.

    The calls of the message are left as they are, since a template may check the results behind them; if it
    writes calls and no text, they are left out.
    """
    for stand_in in _stand_ins(messages[position]):
        try:
            text = render([*messages[:position], stand_in, *messages[position + 1 :]])
        except ValueError:
            continue
        _, found, behind = text.partition(STANDS_FOR_ANSWER)
        if not found:
            continue
        if STANDS_FOR_ANSWER in behind:
            return None
        return _at_end_of_turn(behind, ends_of_turn)
    return None


def _stand_ins(message: Message) -> list[Message]:
    answer = {**message, "content": STANDS_FOR_ANSWER}
    bare = {"role": message["role"], "content": STANDS_FOR_ANSWER}
    return [answer, bare] if message.get("tool_calls") or message.get("function_call") else [answer]


def _at_end_of_turn(text: str, ends_of_turn: Collection[str]) -> tuple[str, str] | None:
    starts = [(start, -len(end)) for end in ends_of_turn if (start := text.find(end)) >= 0]
    if not starts:
        return None
    start, length = min(starts)  # of two at one place the longer, as a tokenizer reads it
    return text[start : start - length], text[start - length :]
