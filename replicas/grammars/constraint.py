"""Constraint: what one choice's tokens are held to, as a scheduler sees it.

Owns the contract between what follows a grammar and what serves requests. Pure.
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
        """Whether it is known what may come next, as it is at any time after the first. Raises
        ConstraintFailed and ConstraintExhausted.
        """

    def allowed(self) -> list[int]:
        """The tokens that may come next; never none. Only for one that is ready."""

    def consume(self, token_id: int) -> bool:
        """Take the choice's next token: whether the answer is complete with it, since nothing can follow
        but its end. Raises ConstraintFailed, and ConstraintExhausted, with which it is not taken.
        """

    def end(self) -> None:
        """The choice is over, in whatever way. Idempotent."""


class Constraints(Protocol):
    """Holds requests to their grammars."""

    def begin(self, request: EngineRequest) -> Constraint:
        """Raises RequestRefused. What takes time goes on elsewhere until the constraint is ready."""

    def wait(self, seconds: float) -> None:
        """Until a constraint has become ready, at most so long."""

    def close(self) -> None:
        """Nothing begins afterwards."""
