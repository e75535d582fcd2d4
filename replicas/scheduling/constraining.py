"""Requests whose output follows a grammar, in a scheduler.

Owns which of them wait for their grammar, and the answer for those whose grammar fails.
"""

from collections.abc import Iterable

from replicas.engine import EngineRequest, RequestRefused
from replicas.grammars.constraint import Constraint, ConstraintExhausted, ConstraintFailed, Constraints
from replicas.protocol.frames import FinishReason, PromptUsage, Refusal, RefusalCode, RequestKey, TokenDelta
from replicas.scheduling.request import Request


def constrain(request: EngineRequest, constraints: Constraints | None) -> Constraint | None:
    """Return the request's grammar, if it has one. Raises RequestRefused."""
    if not request.sampling.grammar:
        return None
    if constraints is None:
        raise RequestRefused(RefusalCode.INVALID_REQUEST, "this engine cannot hold its output to a grammar")
    return constraints.begin(request)


def take_unheld(waiting: Iterable[Request]) -> list[tuple[Request, TokenDelta]]:
    """Return the requests whose grammar failed, with their last deltas. Notes those whose grammar is
    ready."""
    unheld: list[tuple[Request, TokenDelta]] = []
    for request in waiting:
        if request.constraint is None or not request.awaits_grammar:
            continue
        try:
            request.awaits_grammar = not request.constraint.is_ready()
        except (ConstraintFailed, ConstraintExhausted) as failed:
            unheld.append((request, last_delta(request.key, failed)))
    return unheld


def last_delta(
    key: RequestKey, failed: ConstraintFailed | ConstraintExhausted, usage: PromptUsage | None = None
) -> TokenDelta:
    """Return the last one of a request that cannot be held to its grammar, or no longer."""
    if isinstance(failed, ConstraintExhausted):
        return TokenDelta(key, finish_reason=FinishReason.LENGTH, usage=usage)
    return TokenDelta(key, finish_reason=FinishReason.ERROR, refusal=Refusal(failed.code, failed.message))
