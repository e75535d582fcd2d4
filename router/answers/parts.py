"""Parts: the pieces of an answer, in the model's order.

Plain data, cheap to make, since there is one per token. Every dialect writes these in its own frames, and
none adds to them.
"""

import msgspec


class Text(msgspec.Struct, frozen=True, gc=False):
    """More of the answer's text."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """A piece of the model's reasoning before it answers."""

    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """The model calls a tool. `position` counts the calls of this answer from 0."""

    position: int
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments, which joined are the JSON object that the model has written."""

    position: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """End of a call, before any other part.

    A call is whole if its joined arguments are a JSON object. A client must not run one that broke off or is
    malformed.
    """

    position: int
    is_whole: bool = True


Part = Text | Reasoning | CallStart | CallArguments | CallEnd
