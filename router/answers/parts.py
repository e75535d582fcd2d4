"""Parts: what an answer consists of, in the order in which the model says it.

Plain data. Every dialect writes these out in its own frames; none adds to them.
"""

from typing import NamedTuple


class Text(NamedTuple):
    """More of the answer's text."""

    text: str


class Reasoning(NamedTuple):
    """More of what the model thinks before it answers."""

    text: str


class CallStart(NamedTuple):
    """The model calls a tool. `position` counts the calls of this answer from 0."""

    position: int
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments, which joined are a JSON object as the model has written it."""

    position: int
    text: str


class CallEnd(NamedTuple):
    """Nothing more of this call. It comes before anything else does, also where the arguments broke off."""

    position: int


Part = Text | Reasoning | CallStart | CallArguments | CallEnd
