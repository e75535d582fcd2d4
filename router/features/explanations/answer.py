"""CacheExplanation: an explanation as clients read it.

Owns its shape in JSON.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from replicas.protocol.status import Unit
from router.explain.explanation import (
    Earlier,
    Explanation,
    Outcome,
    ProgramTurn,
    PromptExplanation,
    SplitChoice,
)
from router.shared.answer_types import Count, TierTokens


class CauseSpan(Struct):
    cause: str
    start: Count
    end: Count
    replica: str | None
    at: float | None


class NearestPrompt(Struct):
    request_id: str | None
    answer_id: str | None
    seconds_before: float
    prompt_tokens: Count
    common_tokens: Count | None
    diverges_at: Count | None
    changed: Sequence[str]


class PlaceOfCause(Struct):
    path: str | None
    kind: str
    is_certain: bool
    sentence: str | None


class ExplainedProgram(Struct):
    source: str
    field: str
    session: str
    agent: str | None
    is_side_call: bool
    turn: Count
    home: str | None
    tokens_beyond_room: Count
    waited_seconds: float
    programs_admitted: Count


class ExplainedSplit(Struct):
    is_split: bool
    prefiller: str
    decoder: str
    split_tokens: Count
    split_ms: float
    alone_ms: float


class ExplainedPrompt(Struct):
    outcome: Outcome
    cause: str
    replica: str | None
    prompt_tokens: Count
    block_size: Count
    cached_tokens: Count | None
    cached_tokens_by_tier: TierTokens | None
    lost_tokens: Count
    lost_ms: float | None
    spans: list[CauseSpan]
    nearest: NearestPrompt | None
    place: PlaceOfCause | None
    program: ExplainedProgram | None
    split: ExplainedSplit | None


class CacheExplanation(Struct, kw_only=True):
    object: Literal["cache.explanation"] = "cache.explanation"
    request_id: str
    answer_id: str | None
    created_at: float
    model: str | None
    route: str
    error: str | None
    unit: Unit
    prompts: list[ExplainedPrompt]


def answer_of(explanation: Explanation) -> CacheExplanation:
    return CacheExplanation(
        request_id=explanation.request_id,
        answer_id=explanation.answer_id,
        created_at=round(explanation.at, 3),
        model=explanation.model,
        route=explanation.route,
        error=explanation.error,
        unit=explanation.unit,
        prompts=[_prompt(prompt, explanation.at) for prompt in explanation.prompts],
    )


def _prompt(prompt: PromptExplanation, at: float) -> ExplainedPrompt:
    return ExplainedPrompt(
        prompt.outcome,
        prompt.cause,
        prompt.replica_id,
        prompt.num_prompt_tokens,
        prompt.block_size,
        prompt.num_cached_tokens,
        None if prompt.num_cached_tokens is None else TierTokens(*prompt.num_tier_tokens),
        prompt.num_lost_tokens,
        prompt.lost_ms,
        [CauseSpan(*span) for span in prompt.spans],
        None if prompt.earlier is None else _nearest(prompt.earlier, at),
        None if prompt.path is None else _place(prompt),
        None if prompt.program is None else _program(prompt.program),
        None if prompt.split is None else split_of(prompt.split),
    )


def split_of(choice: SplitChoice) -> ExplainedSplit:
    return ExplainedSplit(
        choice.is_split,
        choice.prefiller,
        choice.decoder,
        choice.num_split_tokens,
        round(1e3 * choice.split_seconds, 3),
        round(1e3 * choice.alone_seconds, 3),
    )


def _program(turn: ProgramTurn) -> ExplainedProgram:
    return ExplainedProgram(
        turn.source,
        turn.field,
        turn.session,
        turn.agent or None,
        turn.is_side,
        turn.num_turns,
        turn.home,
        turn.num_beyond,
        turn.waited_seconds,
        turn.num_admitted,
    )


def _place(prompt: PromptExplanation) -> PlaceOfCause:
    return PlaceOfCause(prompt.path or None, prompt.place_kind or "", prompt.is_certain, prompt.sentence)


def _nearest(earlier: Earlier, at: float) -> NearestPrompt:
    request_id, answer_id, *_ = *earlier.ids, None, None
    return NearestPrompt(
        request_id,
        answer_id,
        round(max(0.0, at - earlier.at), 3),
        earlier.num_tokens,
        earlier.num_common_tokens,
        earlier.diverges_at,
        earlier.changed,
    )
