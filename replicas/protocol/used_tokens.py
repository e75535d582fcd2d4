"""UsedTokens: what an answer of a server says it has used, in the words of each dialect.

Pure. Replicas read answers that they relay, and routers those of servers behind a gateway.
"""

from dataclasses import dataclass

import msgspec

MOST_TOKENS = 2**32 - 1


class Cached(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """OpenAI's names for chats and completions, those for Responses, and Anthropic's."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Cached | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: Cached | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


@dataclass(slots=True)
class UsedTokens:
    """By the server's count; None is not told."""

    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None

    def take(self, usage: Usage) -> None:
        """Later events say more, or the same."""
        prompt, rest = believed(usage.prompt_tokens), believed(usage.input_tokens)
        read, written = believed(usage.cache_read_input_tokens), believed(usage.cache_creation_input_tokens)
        if prompt is not None:
            self.num_prompt_tokens = prompt
        elif rest is not None:
            self.num_prompt_tokens = rest + (read or 0) + (written or 0)
        for details in (usage.prompt_tokens_details, usage.input_tokens_details):
            if details is not None and (cached := believed(details.cached_tokens)) is not None:
                self.num_cached_tokens = cached
        if read is not None:
            self.num_cached_tokens = read
        for output in (believed(usage.completion_tokens), believed(usage.output_tokens)):
            if output is not None:
                self.num_output_tokens = output


def believed(num_tokens: int | None) -> int | None:
    """Return a number of tokens, or None for one that no server can mean."""
    return num_tokens if num_tokens is not None and 0 <= num_tokens <= MOST_TOKENS else None
