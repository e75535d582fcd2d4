"""A plain completion's request and its prompts: fields, limits, the four forms of a prompt.

Owns what such a request may look like. Runs beside the event loop and elsewhere, as `chat_prompt.py` does.
"""

from typing import Any

from router.api.json_body import check_range, unsupported
from router.api.sampling import (
    GenerationFields,
    check_fields,
    check_prompt_length,
    check_text_length,
    check_token_ids,
)
from router.errors import InvalidRequest
from router.prompt.text_model import TextModel

MAX_LOGPROBS = 5
DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None


def check_completion(request: CompletionRequest, max_choices: int) -> None:
    check_fields(request, max_choices)
    check_range("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    if request.echo and request.logprobs is not None:
        raise unsupported("echo", "'echo' together with 'logprobs' is not supported.")
    if request.suffix:
        raise unsupported("suffix", "'suffix' is not supported.")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of", "'best_of' is not supported.")


def prompts_of(prompt: str | list[Any], max_prompts: int) -> list[str | list[Any]]:
    """The four forms of a prompt as a list of prompts, each a text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("Invalid 'prompt': it is empty.", parameter="prompt")
    if not isinstance(prompt[0], str | list):
        return [prompt]
    if len(prompt) > max_prompts:
        raise InvalidRequest(
            f"Invalid 'prompt': {len(prompt)} prompts, but at most {max_prompts} are allowed.",
            parameter="prompt",
        )
    kind = type(prompt[0])
    if not all(type(item) is kind for item in prompt):
        raise InvalidRequest(
            "Invalid type for 'prompt': expected text, a list of texts, token ids or a list of these.",
            parameter="prompt",
            code="invalid_type",
        )
    return prompt


def check_prompt(model: TextModel, prompt: str | list[Any]) -> None:
    """What can be told before it is encoded."""
    if isinstance(prompt, str):
        check_text_length(model, prompt, "prompt")
    else:
        check_prompt_length(model.card.context_length, len(prompt), "prompt")
        check_token_ids(prompt, model, "prompt")


def check_tokens(token_ids: list[int]) -> None:
    if not token_ids:
        raise InvalidRequest("Invalid 'prompt': it has no tokens.", parameter="prompt")
