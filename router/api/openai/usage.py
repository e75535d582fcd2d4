"""OpenAI's `usage`, with what it does not know in fields of our own.

Owns its shape, for chats and plain completions, and that of the prompt's details, which Responses share.
"""

from typing import Any

from router.api.answer_usage import AnswerUsage
from router.api.openai.caching import lease_details


def usage_of(usage: AnswerUsage) -> dict[str, Any]:
    num_prompt_tokens = usage.num_prompt_tokens
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": prompt_details(usage),
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
    }


def prompt_details(usage: AnswerUsage) -> dict[str, Any]:
    """The cache's share of it is always there, and exact."""
    total = usage.total()
    return {
        "cached_tokens": total.num_cached_tokens,
        "cache_write_tokens": total.num_written_tokens,
        "cross_user_cached_tokens": total.num_cross_user_tokens,
        "device_cached_tokens": total.num_device_tokens,
        "host_cached_tokens": total.num_host_tokens,
        "disk_cached_tokens": total.num_disk_tokens,
        "pulled_cached_tokens": total.num_pulled_tokens,
        **lease_details(list(zip(usage.leases, usage.prompts, strict=True))),
    }
