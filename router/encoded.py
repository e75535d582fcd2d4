"""Encoded prompts: tokens, and what is known of them besides. Plain data, with token ids packed."""

from collections.abc import Callable

import msgspec

from replicas.protocol.blocks import unpack_token_ids
from router.answers.grammar_check import ANY_TEXT, CheckedGrammar
from router.explain.outline import PromptOutline
from router.keeping import LeaseRequest
from router.prompt.images import PromptImage


class EncodedTail(msgspec.Struct, frozen=True):
    """The template's text after the answer at `position`: the token that ends its turn, and the packed tokens
    of the rest."""

    position: int
    end: int
    token_ids: bytes


TailOf = Callable[[int], EncodedTail | None]
"""Returns the prompt after the answer at a position; None if unknown."""


class EncodedHistory(msgspec.Struct, frozen=True):
    """By what a conversation is known again: see `router.history.canonical`. `last_answer` is the position of
    its last message that is an answer; `tail` is what stands behind that one, where it has been asked for.
    `answers` are the positions of all of them, `thoughts` are of those that came with reasoning."""

    digests: list[bytes]
    last_answer: int | None = None
    tail: EncodedTail | None = None
    thoughts: dict[int, bytes] = {}
    answers: list[int] = []


class EncodedPrompt(msgspec.Struct, frozen=True):
    """`echo` is the prompt's text, where the answer is to begin with it. `num_head_tokens` stand before the
    first user message. `keeps` are the wishes that the prompt's beginning stay cached, `grammar` is what the
    answer is held to. `history` is there if the conversation may go on from its tokens."""

    token_ids: bytes
    echo: str = ""
    num_stable_tokens: int | None = None
    num_head_tokens: int | None = None
    keeps: list[LeaseRequest] = []
    starts_in_reasoning: bool = False
    grammar: CheckedGrammar = ANY_TEXT
    history: EncodedHistory | None = None
    outline: PromptOutline | None = None
    images: list[PromptImage] = []

    def ids(self) -> list[int]:
        return unpack_token_ids(self.token_ids)
