"""A plain completion's request and its prompts: fields, limits, the four forms of a prompt.

Owns what such a request may look like. Runs beside the event loop and elsewhere, as `chat_prompt.py` does.
"""

from typing import Any

from router.api.field_table import NOTHING, FieldRefusal, FieldTable
from router.api.json_body import check_range, unsupported, wrong_type
from router.api.peer_fields import OPENAI_HINTS, OPENROUTER_HINTS, PeerFields, moved, refused_fields
from router.api.sampling import (
    check_fields,
    check_prompt_length,
    check_token_ids,
    stream_options_table,
)
from router.errors import InvalidRequest
from router.prompt.text_model import TextModel

MAX_LOGPROBS = 5
DEFAULT_MAX_TOKENS = 16


class CompletionRequest(PeerFields, kw_only=True):
    """With `max_tokens` 0, or to be prewarmed, the prompt is computed and nothing is said."""

    prompt: str | list[Any]
    add_special_tokens: bool | None = None
    response_format: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def only_prompt(self) -> bool:
        options = self.prompt_cache_options
        return self.max_tokens == 0 or (options is not None and bool(options.prewarm))


_OF_CHATS = FieldRefusal("'{name}' is not supported in completions, whose prompt has no template.", (None,))
_TOOLS = FieldRefusal("'{name}' is not supported in completions.", (*NOTHING, "none", "auto"))
COMPLETION = FieldTable(
    CompletionRequest,
    hints=OPENAI_HINTS | OPENROUTER_HINTS,
    refused={
        **refused_fields(CompletionRequest),
        **dict.fromkeys(("chat_template_kwargs", "enable_thinking", "reasoning_effort"), _OF_CHATS),
        **dict.fromkeys(("reasoning", "think", "thinking"), _OF_CHATS),
        **dict.fromkeys(("function_call", "functions", "tool_choice", "tools"), _TOOLS),
        **dict.fromkeys(("input", "messages"), moved("prompt")),
        **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), moved("max_tokens")),
        "top_logprobs": moved("logprobs"),
    },
    inner={"stream_options": stream_options_table},
)


def check_completion(request: CompletionRequest, max_choices: int) -> None:
    check_fields(request, max_choices, least_tokens=0)
    check_range("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    if request.echo and request.logprobs is not None:
        raise unsupported(
            "echo",
            "'echo' together with 'logprobs' is not supported: the log-probabilities of a prompt's tokens are"
            " not computed.",
        )
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
        raise wrong_type("prompt", "text, a list of texts, token ids or a list of these")
    return prompt


def check_token_prompt(model: TextModel, request: CompletionRequest, prompt: list[Any]) -> None:
    if request.truncate_prompt_tokens is None:
        check_prompt_length(model.card.context_length, len(prompt), "prompt")
    check_token_ids(prompt, model, "prompt")


def echo_of(model: TextModel, request: CompletionRequest, prompt: str | list[Any]) -> str:
    """Return the text that the answer is to begin with."""
    if not request.echo:
        return ""
    return prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt)
