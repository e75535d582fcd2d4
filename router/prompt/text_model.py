"""TextModel: the part of a model for checking, rendering and encoding a prompt.

Two classes implement it: a router's ServedModel, and the model in the process that prepares large bodies.
"""

from collections.abc import Sequence
from typing import Protocol

from router.answers.formats import AnswerFormat
from router.prompt.quoting import Quoter
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer


class Window(Protocol):
    """The part of a model's card that bounds prompts."""

    @property
    def context_length(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> Sequence[int]: ...
    @property
    def image_rule(self) -> str: ...
    @property
    def takes_bodies(self) -> Sequence[str]: ...


class TextModel(Protocol):
    @property
    def card(self) -> Window: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def template(self) -> ChatTemplate: ...
    @property
    def quoter(self) -> Quoter: ...
    @property
    def answer_format(self) -> AnswerFormat: ...


class TextModels(Protocol):
    """By the name that a client asks for."""

    def get(self, name: str) -> TextModel: ...

    def names(self) -> Sequence[str]: ...
