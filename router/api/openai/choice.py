"""Fields that vLLM and SGLang add to choices, for chats and plain completions.

Owns why an answer stopped, and its tokens.
"""

from collections.abc import Sequence
from typing import Any

from router.api.api_request import Prompt
from router.api.choice_output import ChoiceOutput
from router.api.sampling import GenerationFields


def stop_fields(request: GenerationFields, output: ChoiceOutput) -> dict[str, Any]:
    """`matched_stop` is the stop string or the token that ended the choice; `stop_reason` as well, but not
    for a token that ends every answer of the model."""
    matched = output.stop_string if output.stop_string is not None else output.stop_token_id
    is_asked = matched is not None and (isinstance(matched, str) or matched in (request.stop_token_ids or ()))
    return {"stop_reason": matched if is_asked else None, "matched_stop": matched}


class TokenIds:
    """Token ids of each choice that a stream has yet to write."""

    def __init__(self, num_choices: int) -> None:
        self._num_named = [0] * num_choices

    def new(self, index: int, output: ChoiceOutput) -> Sequence[int]:
        start = self._num_named[index]
        self._num_named[index] = len(output.token_ids)
        return output.token_ids[start:]


def usage_so_far(prompts: Sequence[Prompt], *, num_unsaid_tokens: int = 0) -> dict[str, Any]:
    """`num_unsaid_tokens` have come, and no chunk has shown them yet."""
    num_prompt_tokens = sum(prompt.usage_or_bare().num_prompt_tokens for prompt in prompts)
    num_output_tokens = sum(output.num_said_tokens for prompt in prompts for output in prompt.outputs)
    num_output_tokens -= num_unsaid_tokens
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }
