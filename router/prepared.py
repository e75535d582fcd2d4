"""Data that travels between a router and the process that prepares large bodies.

Owns the shapes. A job is followed by its body as the client sent it; token ids come back packed.
"""

import struct
from typing import NewType

import msgspec

from replicas.protocol.blocks import unpack_token_ids
from router.answers.grammar_check import ANY_TEXT, CheckedGrammar
from router.errors import ContextLengthExceeded, Excess, InvalidRequest, RouterError, UnknownModel
from router.explain.outline import PromptOutline
from router.keeping import LeaseRequest
from router.prompt.images import PromptImage

Digest = NewType("Digest", bytes)
"""Digest of a model's tokenizer files."""


LOAD, PREPARE, GRAMMAR = b"L", b"P", b"G"
"""Kinds of messages, by their first byte."""

LENGTH = struct.Struct("<Q")
"""A message's length, in bytes."""


class Bounds(msgspec.Struct, frozen=True):
    """Bounds on preparing one body: processor time, wall time, and memory beyond what is shared. 8 MiB of
    ordinary text need a few tenths of each."""

    cpu_seconds: float = 10.0
    seconds: float = 60.0
    num_bytes: int = 384 * 2**20

    def of_grammar(self) -> "Bounds":
        """The worst that can be followed takes two seconds and 100 MiB."""
        return Bounds(self.cpu_seconds / 2, self.seconds, self.num_bytes // 2)

    def __str__(self) -> str:
        return f"{self.cpu_seconds:g} s of processor time or {self.num_bytes // 2**20} MiB of memory"


class ModelWindow(msgspec.Struct, frozen=True):
    """A name that can be asked for: whose text side it has, and what bounds its prompts."""

    digest: Digest
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    is_adapter: bool = False
    image_rule: str = ""


class PrepareJob(msgspec.Struct, frozen=True):
    """`kind` is a key of `router.api.preparing.KINDS`."""

    kind: str
    max_choices: int
    max_prompts: int
    has_history: bool
    models: dict[str, ModelWindow]


class LoadTextSide(msgspec.Struct, frozen=True):
    digest: Digest
    files: dict[str, bytes]


class EncodedTail(msgspec.Struct, frozen=True):
    """The template's text after the answer at `position`: the token that ends its turn, and the packed tokens
    of the rest."""

    position: int
    end: int
    token_ids: bytes


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
    """`echo` is the prompt's text, where the answer is to begin with it. `keeps` are the wishes that the
    prompt's beginning stay cached, `grammar` is what the answer is held to. `history` is there if the
    conversation may go on from its tokens."""

    token_ids: bytes
    echo: str = ""
    num_stable_tokens: int | None = None
    keeps: list[LeaseRequest] = []
    starts_in_reasoning: bool = False
    grammar: CheckedGrammar = ANY_TEXT
    history: EncodedHistory | None = None
    outline: PromptOutline | None = None
    images: list[PromptImage] = []

    def ids(self) -> list[int]:
        return unpack_token_ids(self.token_ids)


class PreparedRequest(msgspec.Struct, frozen=True, tag=True):
    """`fields` are those of the request that say how to continue its prompts, as MessagePack.
    `unknown_fields` are a completion's; a conversation has its own in `fields`."""

    fields: bytes
    prompts: list[EncodedPrompt]
    unknown_fields: list[str] = []


class WrittenAnswer(msgspec.Struct, frozen=True, tag=True):
    """The whole answer, as JSON."""

    body: bytes


class RefusedRequest(msgspec.Struct, frozen=True, tag=True):
    """A RouterError; `kind` is the name of its class."""

    kind: str
    message: str
    parameter: str | None = None
    code: str | None = None
    model: str | None = None
    excess: Excess | None = None

    @classmethod
    def of(cls, error: RouterError) -> "RefusedRequest":
        kind = type(error).__name__
        if isinstance(error, InvalidRequest):
            excess = error.excess if isinstance(error, ContextLengthExceeded) else None
            return cls(kind, error.message, error.parameter, error.code, error.model, excess)
        return cls(kind, error.message, model=error.model)

    def error(self) -> RouterError:
        error = self._error()
        error.model = self.model
        return error

    def _error(self) -> RouterError:
        match self.kind:
            case ContextLengthExceeded.__name__:
                return ContextLengthExceeded(self.message, parameter=self.parameter, excess=self.excess)
            case UnknownModel.__name__:
                return UnknownModel(self.message)
            case _:
                return InvalidRequest(self.message, parameter=self.parameter, code=self.code)


class CrashedJob(msgspec.Struct, frozen=True, tag=True):
    """Our own mistake; for the router's log."""

    traceback: str


Outcome = PreparedRequest | WrittenAnswer | RefusedRequest | CrashedJob

GrammarOutcome = CheckedGrammar | RefusedRequest | CrashedJob
