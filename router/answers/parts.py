"""Parts: what an answer consists of, in the order in which the model says it.

Plain data, of a kind that is quickly made: there is one for each token. Every dialect writes these out in its
own frames; none adds to them.
"""

import msgspec


class Text(msgspec.Struct, frozen=True, gc=False):
    """More of the answer's text."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """More of what the model thinks before it answers."""

    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """The model calls a tool. `position` counts the calls of this answer from 0."""

    position: int
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments, which joined are a JSON object as the model has written it."""

    position: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """Nothing more of this call. It comes before anything else does, also where the arguments broke off."""

    position: int


Part = Text | Reasoning | CallStart | CallArguments | CallEnd
