"""Fields that vLLM and SGLang add to choices, for chats and plain completions.

Owns why an answer stopped, and its tokens.
"""

from collections.abc import Sequence

from msgspec import Struct

from router.api.api_request import Prompt
from router.api.choice_output import ChoiceOutput
from router.api.openai.usage import TokensSoFar
from router.api.sampling import GenerationFields
from router.shared.answer_types import Count

Stop = str | int | None


class AnswerHead(Struct, kw_only=True):
    """Beginning of OpenAI's answers."""

    id: str
    object: str
    created: Count
    model: str
    system_fingerprint: str


def stop_fields(request: GenerationFields, output: ChoiceOutput) -> dict[str, Stop]:
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


def usage_so_far(prompts: Sequence[Prompt], *, num_unsaid_tokens: int = 0) -> TokensSoFar:
    """`num_unsaid_tokens` have come, and no chunk has shown them yet."""
    num_prompt_tokens = sum(prompt.usage_or_bare().num_prompt_tokens for prompt in prompts)
    num_output_tokens = sum(output.num_said_tokens for prompt in prompts for output in prompt.outputs)
    num_output_tokens -= num_unsaid_tokens
    return TokensSoFar(num_prompt_tokens, num_output_tokens, num_prompt_tokens + num_output_tokens)
