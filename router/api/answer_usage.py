"""AnswerUsage: what an answer has cost, over all prompts and choices of the request, in no dialect's words.

Plain data, and the sums that several dialects report.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from replicas.protocol.frames import PromptUsage
from replicas.protocol.prefix_leases import PrefixLease


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """`leases` are those that were asked for, prompt by prompt; the tokens of reasoning are among the
    output's. All counts are exact.
    """

    prompts: Sequence[PromptUsage]
    leases: Sequence[Sequence[PrefixLease]]
    num_output_tokens: int
    num_reasoning_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(prompt.num_prompt_tokens for prompt in self.prompts)

    @property
    def num_cached_tokens(self) -> int:
        return sum(prompt.num_cached_tokens for prompt in self.prompts)

    @property
    def num_written_tokens(self) -> int:
        return sum(prompt.num_written_tokens for prompt in self.prompts)
