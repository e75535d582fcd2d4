"""LeaseRequest: a client's request that the beginning of a prompt stay cached, common to all dialects.

Owns the conversion to leases for a replica, and of the outcome for the client.
"""

from collections.abc import Sequence
from typing import NamedTuple

from replicas.protocol.frames import PromptUsage
from replicas.protocol.prefix_leases import MAX_LEASES, LeaseAnswer, PrefixLease

GRANTED = "granted"
NO_ANSWER = "no_answer"
"""Reason if a replica reports nothing about leases."""


class LeaseRequest(NamedTuple):
    """The prompt's leading `num_tokens`, or all of them, for `seconds` after each use."""

    seconds: int
    num_tokens: int | None = None


class LeaseResult(NamedTuple):
    """Outcome of one lease request: tokens and seconds, or why not."""

    seconds: int
    num_tokens: int
    refused: str | None


def leases_of(
    keeps: Sequence[LeaseRequest], num_prompt_tokens: int, block_size: int
) -> tuple[PrefixLease, ...]:
    """Convert to leases on whole blocks; less than one is requested as one, and refused as too short."""
    leases: list[PrefixLease] = []
    for keep in keeps[:MAX_LEASES]:
        wanted = num_prompt_tokens if keep.num_tokens is None else keep.num_tokens
        num_blocks = min(wanted, num_prompt_tokens) // block_size
        leases.append(PrefixLease(max(1, num_blocks), keep.seconds))
    return tuple(leases)


def kept_of(leases: Sequence[PrefixLease], usage: PromptUsage) -> list[LeaseResult]:
    """One for each lease that was asked for."""
    if not leases:
        return []
    answers: list[LeaseAnswer | None] = [*usage.leases[: len(leases)]]
    answers += [None] * (len(leases) - len(answers))
    return [
        LeaseResult(0, 0, NO_ANSWER)
        if answer is None
        else LeaseResult(
            answer.seconds, answer.num_tokens, None if answer.refusal is None else answer.refusal.value
        )
        for answer in answers
    ]
