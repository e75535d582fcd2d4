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
    """More of a call's arguments, which joined are the JSON object that the model has written."""

    position: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """Nothing more of this call. It comes before anything else does.

    A call is whole if its arguments joined are a JSON object. One that broke off, or that the model has
    written badly, is none that a client may run.
    """

    position: int
    is_whole: bool = True


Part = Text | Reasoning | CallStart | CallArguments | CallEnd
