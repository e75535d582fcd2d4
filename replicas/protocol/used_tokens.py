"""UsedTokens: what an answer of a server says it has used, in the words of each dialect.

Pure. Replicas read answers that they relay, and routers those of servers behind a gateway.
"""

from dataclasses import dataclass

MOST_TOKENS = 2**32 - 1


@dataclass(slots=True)
class UsedTokens:
    """By the server's count; None is not told."""

    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None

    def take(self, usage: object) -> None:
        """Read OpenAI's names for chats and completions, those for Responses, and Anthropic's; rerankers may
        tell one number for all. Later events say more, or the same; what cannot be read is not told."""
        if not isinstance(usage, dict):
            return
        prompt, rest = believed(usage.get("prompt_tokens")), believed(usage.get("input_tokens"))
        read = believed(usage.get("cache_read_input_tokens"))
        written = believed(usage.get("cache_creation_input_tokens"))
        if prompt is not None:
            self.num_prompt_tokens = prompt
        elif rest is not None:
            self.num_prompt_tokens = rest + (read or 0) + (written or 0)
        elif self.num_prompt_tokens is None and self.num_output_tokens is None:
            self.num_prompt_tokens = believed(usage.get("total_tokens"))
        for details in (usage.get("prompt_tokens_details"), usage.get("input_tokens_details")):
            cached = believed(details.get("cached_tokens")) if isinstance(details, dict) else None
            if cached is not None:
                self.num_cached_tokens = cached
        if read is not None:
            self.num_cached_tokens = read
        for output in (believed(usage.get("completion_tokens")), believed(usage.get("output_tokens"))):
            if output is not None:
                self.num_output_tokens = output


def believed(num_tokens: object) -> int | None:
    """Return a number of tokens, or None for what is none, or what no server can mean."""
    if isinstance(num_tokens, float) and num_tokens.is_integer():
        num_tokens = int(num_tokens)
    if not isinstance(num_tokens, int) or isinstance(num_tokens, bool):
        return None
    return num_tokens if 0 <= num_tokens <= MOST_TOKENS else None
