"""AnswerUsage: what an answer has cost, over all prompts and choices of the request, in no dialect's words.

Plain data, and the sums that several dialects report.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from replicas.protocol.blocks import ImageTokens
from replicas.protocol.frames import PromptUsage, num_cached_of
from replicas.protocol.prefix_leases import PrefixLease


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """`leases` are those that were asked for, and `media` where images stand, prompt by prompt; the tokens of
    reasoning are among the output's. All counts are exact; None of cached tokens is not known.
    """

    prompts: Sequence[PromptUsage]
    leases: Sequence[Sequence[PrefixLease]]
    num_output_tokens: int
    num_reasoning_tokens: int = 0
    media: Sequence[Sequence[ImageTokens]] = ()

    @property
    def num_prompt_tokens(self) -> int:
        return self.total().num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int | None:
        return self.total().num_cached_tokens

    @property
    def num_written_tokens(self) -> int:
        return self.total().num_written_tokens

    def image_tokens(self) -> tuple[int, int]:
        """Count the prompts' image tokens, and the cached ones among them."""
        num_tokens = num_cached = 0
        for spans, prompt in zip(self.media, self.prompts, strict=False):
            for span in spans:
                num_tokens += span.length
                num_cached += max(0, min(span.length, (prompt.num_cached_tokens or 0) - span.start))
        return num_tokens, num_cached

    def total(self) -> PromptUsage:
        """Return the tokens of all prompts together; leases are each prompt's own."""
        if len(self.prompts) == 1:  # nearly always
            return self.prompts[0]
        sums = {field: sum(getattr(prompt, field) for prompt in self.prompts) for field in _COUNTS}
        return PromptUsage(num_cached_tokens=num_cached_of(self.prompts), **sums)


_COUNTS = tuple(
    field
    for field in PromptUsage.__struct_fields__
    if field.startswith("num_") and field != "num_cached_tokens"
)
