"""Data that travels between a router and its worker, the process beside its event loop.

Owns the shapes. A job is followed by its body as the client sent it.
"""

import struct
from collections.abc import Callable
from typing import NewType

import msgspec

from router.answers.grammar_check import CheckedGrammar
from router.encoded import EncodedPrompt
from router.errors import ContextLengthExceeded, Excess, InvalidRequest, RouterError, UnknownModel
from router.prompt.text_model import TextModels

Digest = NewType("Digest", bytes)
"""Digest of a model's tokenizer files."""


LOAD, WORK, WORK_OUT = b"L", b"W", b"G"
"""Messages, by their first byte: a model's files, a body, a grammar."""

GRAMMAR = "grammar"
"""Kind of the jobs that work out a grammar."""

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
    """A name that can be asked for: whose text side it has, and what bounds its prompts. `is_other_name` for
    all but a model's own."""

    digest: Digest
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    is_other_name: bool = False
    image_rule: str = ""
    takes_bodies: tuple[str, ...] = ()


class BodyJob(msgspec.Struct, frozen=True):
    """`kind` says how its body is worked on."""

    kind: str
    max_choices: int = 0
    max_prompts: int = 0
    has_history: bool = False
    pass_fields: tuple[str, ...] = ()
    models: dict[str, ModelWindow] = {}


class LoadTextSide(msgspec.Struct, frozen=True):
    digest: Digest
    files: dict[str, bytes]


class PreparedRequest(msgspec.Struct, frozen=True, tag=True):
    """`fields` are those of the request that say how to continue its prompts, as MessagePack.
    `unknown_fields` are a completion's; a conversation has its own in `fields`. `sent` is for a server that
    takes bodies."""

    fields: bytes
    prompts: list[EncodedPrompt]
    unknown_fields: list[str] = []
    sent: bytes = b""


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


Perform = Callable[[BodyJob, TextModels, bytes], "Outcome"]
"""Works on a body, given the models of its job. Must be a function of a module, which the worker imports."""

Outcome = PreparedRequest | WrittenAnswer | CheckedGrammar | RefusedRequest | CrashedJob
