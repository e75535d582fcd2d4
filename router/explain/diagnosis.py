"""Diagnosis: what two vendors' own fields say of a prompt beside one earlier request that the client names.

Owns these fields' values. Both name one class of reason, the first that stands in the prompt.
"""

from typing import Literal, NamedTuple

from msgspec import UNSET, Struct, UnsetType

from router.explain.explanation import changes
from router.explain.nearest import Nearest, PromptFacts, RememberedPrompt
from router.shared.answer_types import Count

OPENAI_REASONS = {
    "model": "model_changed",
    "adapter": "model_changed",
    "model_version": "model_changed",
    "cache_salt": "prompt_cache_key_changed",
    "template_arguments": "reasoning_effort_changed",
    "tools": "tools_changed",
    "tool_keys": "tools_changed",
    "system": "input_changed",
    "messages": "input_changed",
    "template": "input_changed",
    "output_format": "text_format_changed",
}
ANTHROPIC_REASONS = {
    "model": "model_changed",
    "adapter": "model_changed",
    "model_version": "model_changed",
    "tools": "tools_changed",
    "tool_keys": "tools_changed",
    "system": "system_changed",
    "messages": "messages_changed",
}
"""Anything else is `unavailable`: another parameter differs."""


class Diagnosis(NamedTuple):
    """`change` is the first thing that is other than in the named request, None if this prompt goes on from
    it. `num_reusable_tokens` are those of the named prompt that could be read again if nothing had changed,
    `num_missed_tokens` those of them that cannot. Without `is_found` nothing is known of it."""

    is_found: bool
    change: str | None = None
    num_reusable_tokens: int = 0
    num_missed_tokens: int = 0


NOT_FOUND = Diagnosis(is_found=False)


def diagnosis(facts: PromptFacts, earlier: RememberedPrompt, compared: Nearest) -> Diagnosis:
    num_common = compared.num_common_tokens
    if num_common is not None and not compared.goes_on:
        return Diagnosis(True, None, earlier.num_tokens, 0)
    found = changes(facts, compared)
    num_missed = earlier.num_tokens - (num_common or 0)
    return Diagnosis(True, found[0] if found else "messages", earlier.num_tokens, num_missed)


class CacheDiagnostics(Struct):
    """OpenAI's field."""

    type: Literal["cache_hit", "cache_miss", "comparison_response_not_found", "unavailable"]
    reason: str | UnsetType = UNSET
    comparison_reusable_tokens: Count | UnsetType = UNSET
    cache_missed_tokens: Count | UnsetType = UNSET


class CacheMissReason(Struct):
    type: str
    cache_missed_input_tokens: Count | UnsetType = UNSET


class MessageDiagnostics(Struct):
    """Anthropic's field."""

    cache_miss_reason: CacheMissReason | None


def openai_diagnostics(found: Diagnosis | None) -> CacheDiagnostics:
    if found is None:
        return CacheDiagnostics("unavailable")
    if not found.is_found:
        return CacheDiagnostics("comparison_response_not_found")
    if found.change is None:
        return CacheDiagnostics("cache_hit")
    reason = OPENAI_REASONS[found.change]
    return CacheDiagnostics("cache_miss", reason, found.num_reusable_tokens, found.num_missed_tokens)


def anthropic_diagnostics(found: Diagnosis | None) -> MessageDiagnostics:
    """Compare with the earlier request that this one names."""
    if found is None:
        return MessageDiagnostics(CacheMissReason("unavailable"))
    if not found.is_found:
        return MessageDiagnostics(CacheMissReason("previous_message_not_found"))
    if found.change is None:
        return MessageDiagnostics(None)
    reason = ANTHROPIC_REASONS.get(found.change)
    if reason is None:
        return MessageDiagnostics(CacheMissReason("unavailable"))
    return MessageDiagnostics(CacheMissReason(reason, found.num_missed_tokens))
