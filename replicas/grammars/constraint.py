"""Constraint: the grammar of one choice's tokens, for a scheduler.

Owns the contract between the follower of a grammar and the server of requests. Pure.
"""

from typing import Protocol

from replicas.engine import EngineRequest
from replicas.protocol.frames import RefusalCode


class ConstraintFailed(Exception):
    """The choice cannot be held to its grammar, or no longer. `message` is fit for the client."""

    def __init__(self, message: str, code: RefusalCode = RefusalCode.INVALID_REQUEST) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class ConstraintExhausted(Exception):
    """The choice has come to where llguidance follows its grammar no further: its answer is cut off there."""


class Constraint(Protocol):
    """One choice's state in its grammar, its resumed output included."""

    def is_ready(self) -> bool:
        """Whether the next tokens are known, as always after the first time. Raises ConstraintFailed and
        ConstraintExhausted."""

    def allowed(self) -> list[int]:
        """Return the tokens that may come next; never none. Only for one that is ready."""

    def consume(self, token_id: int) -> bool:
        """Take the choice's next token. Returns whether the answer is complete, because only its end can
        follow. Raises ConstraintFailed, or ConstraintExhausted without taking it."""

    def end(self) -> None:
        """End the choice. Idempotent."""


class Constraints(Protocol):
    """Holds requests to their grammars."""

    def begin(self, request: EngineRequest) -> Constraint:
        """Begin a request's constraint, which becomes ready elsewhere. Raises RequestRefused."""

    def wait(self, seconds: float) -> None:
        """Wait until a constraint has become ready, at most `seconds`."""

    def close(self) -> None:
        """Stop; nothing begins afterwards."""
