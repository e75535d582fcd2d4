"""OpenAI's `usage`, with what it does not know in fields of our own.

Owns its shape, for chats and plain completions, and that of the prompt's details, which Responses share.
"""

from msgspec import UNSET, Struct, UnsetType

from router.api.answer_usage import AnswerUsage
from router.api.caching import LeaseOutcome, tell_leases
from router.shared.answer_types import Count


class TokensSoFar(Struct):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class PromptDetails(Struct):
    """The cache's share of a prompt is exact; it is left out if the engine does not say it."""

    cached_tokens: Count | UnsetType = UNSET
    cache_write_tokens: Count | UnsetType = UNSET
    cross_user_cached_tokens: Count | UnsetType = UNSET
    device_cached_tokens: Count | UnsetType = UNSET
    host_cached_tokens: Count | UnsetType = UNSET
    disk_cached_tokens: Count | UnsetType = UNSET
    pulled_cached_tokens: Count | UnsetType = UNSET
    split_tokens: Count | UnsetType = UNSET
    cache_leases: list[LeaseOutcome] | UnsetType = UNSET
    evicted_early_tokens: Count | UnsetType = UNSET
    evicted_early_cause: str | UnsetType | None = UNSET


class OutputDetails(Struct):
    reasoning_tokens: Count


class OpenAiUsage(TokensSoFar):
    prompt_tokens_details: PromptDetails
    completion_tokens_details: OutputDetails


def usage_of(usage: AnswerUsage) -> OpenAiUsage:
    num_prompt_tokens, num_output_tokens = usage.num_prompt_tokens, usage.num_output_tokens
    return OpenAiUsage(
        num_prompt_tokens,
        num_output_tokens,
        num_prompt_tokens + num_output_tokens,
        prompt_details(usage),
        OutputDetails(usage.num_reasoning_tokens),
    )


def prompt_details(usage: AnswerUsage) -> PromptDetails:
    total = usage.total()
    if total.num_cached_tokens is None:
        details = PromptDetails()
    else:
        details = PromptDetails(
            total.num_cached_tokens,
            total.num_written_tokens,
            total.num_cross_user_tokens,
            total.num_device_tokens,
            total.num_host_tokens,
            total.num_disk_tokens,
            total.num_pulled_tokens,
            total.num_split_tokens or UNSET,
        )
    tell_leases(details, usage.leases, usage.prompts)
    return details
