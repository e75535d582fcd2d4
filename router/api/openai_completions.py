"""POST /v1/completions: its fields, its prompts, its answers.

Owns the dialect. Knows nothing of chats, of HTTP or of routing.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from replicas.protocol.frames import TokenLogprobs
from router.api.answer import Answer, Prompt, finite, make_prompt
from router.api.context import ApiContext
from router.api.openai_shared import check_range, decode_body, encode_json, unsupported
from router.api.sampling import (
    GenerationFields,
    check_fields,
    check_prompt_length,
    check_text_length,
    check_token_ids,
    sampling_params,
    stop_strings,
)
from router.api.sse import DONE, ChunkWriter
from router.errors import InvalidRequest
from router.prompt.catalog import ServedModel

MAX_LOGPROBS = 5
DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None


_decoder = msgspec.json.Decoder(CompletionRequest)


async def prepare_completion(context: ApiContext, body: bytes) -> Answer:
    """Raises InvalidRequest or UnknownModel."""
    request = decode_body(_decoder, body)
    model = context.catalog.get(request.model)
    _check(request, context.config.max_choices)
    stop = stop_strings(request.stop)
    texts = _prompts(request.prompt, context.config.max_prompts)
    seed = context.rng.getrandbits(64) if request.seed is None else request.seed
    num_choices = request.n or 1
    prompts: list[Prompt] = []
    for number, prompt_text in enumerate(texts):
        token_ids = await _token_ids(model, prompt_text)
        sampling = sampling_params(
            request,
            model,
            num_prompt_tokens=len(token_ids),
            max_tokens=_max_tokens(request, model, len(token_ids)),
            num_logprobs=request.logprobs,
            seed=seed + number * num_choices,
            prompt_parameter="prompt",
        )
        prompt = make_prompt(
            model,
            token_ids,
            sampling,
            num_choices=num_choices,
            first_index=number * num_choices,
            stop=stop,
            salt=request.cache_salt,
            prompt_cache_key=request.prompt_cache_key,
            priority=context.priority(request.priority),
            user=context.catalog.user_tag(request.end_user),
        )
        if request.echo:
            prompt.echo = prompt_text if isinstance(prompt_text, str) else model.tokenizer.decode(token_ids)
        prompts.append(prompt)
    dialect = _CompletionDialect(context, request, model, prompts)
    return Answer(model, prompts, bool(request.stream), dialect)


def _check(request: CompletionRequest, max_choices: int) -> None:
    check_fields(request, max_choices)
    check_range("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    if request.echo and request.logprobs is not None:
        raise unsupported("echo", "'echo' together with 'logprobs' is not supported.")
    if request.suffix:
        raise unsupported("suffix", "'suffix' is not supported.")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of", "'best_of' is not supported.")


def _prompts(prompt: str | list[Any], max_prompts: int) -> list[str | list[Any]]:
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


async def _token_ids(model: ServedModel, prompt: str | list[Any]) -> list[int]:
    if isinstance(prompt, str):
        check_text_length(model, prompt, "prompt")
        token_ids = await model.tokenizer.encode_async(prompt, add_special_tokens=True)
    else:
        check_prompt_length(model.card.context_length, len(prompt), "prompt")
        token_ids = list(check_token_ids(prompt, model, "prompt"))
    if not token_ids:
        raise InvalidRequest("Invalid 'prompt': it has no tokens.", parameter="prompt")
    return token_ids


def _max_tokens(request: CompletionRequest, model: ServedModel, num_prompt_tokens: int) -> int | None:
    if request.max_tokens is not None:
        return request.max_tokens
    room = model.card.context_length - num_prompt_tokens
    return min(DEFAULT_MAX_TOKENS, room) if room > 0 else None


class _CompletionDialect:
    def __init__(
        self, context: ApiContext, request: CompletionRequest, model: ServedModel, prompts: list[Prompt]
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._with_logprobs = request.logprobs is not None
        self._head = {
            "id": context.new_id("cmpl-"),
            "object": "text_completion",
            "created": int(context.wall_clock()),
            "model": model.name,
            "system_fingerprint": model.system_fingerprint,
        }
        num_choices = sum(len(prompt.outputs) for prompt in prompts)
        self._num_characters = [0] * num_choices
        if request.stream:
            options = request.stream_options
            self._writer = ChunkWriter(
                self._head,
                text_open=b'"text":',
                text_close=b"",
                with_usage=options is not None and bool(options.include_usage),
            )
            self._prefixes = [self._writer.prefix(index) for index in range(num_choices)]

    def open(self, prompt: Prompt, choice: int) -> bytes:
        if not prompt.echo:
            return b""
        return self._writer.text(self._prefixes[prompt.first_index + choice], prompt.echo)

    def text(self, prompt: Prompt, choice: int, text: str, logprobs: Sequence[TokenLogprobs]) -> bytes:
        index = prompt.first_index + choice
        if not self._with_logprobs:
            return self._writer.text(self._prefixes[index], text)
        return self._writer.text(self._prefixes[index], text, self._logprobs(index, logprobs))

    def close(self, prompt: Prompt, choice: int) -> bytes:
        return self._writer.choice(
            {
                "index": prompt.first_index + choice,
                "text": "",
                "logprobs": None,
                "finish_reason": prompt.outputs[choice].finish_reason,
            }
        )

    def end(self, usage: dict[str, Any]) -> bytes:
        return self._writer.usage(usage) + DONE

    def whole(self, usage: dict[str, Any]) -> bytes:
        choices = [
            {
                "index": prompt.first_index + choice,
                "text": prompt.echo + "".join(output.parts),
                "logprobs": self._logprobs(prompt.first_index + choice, output.logprobs)
                if self._with_logprobs
                else None,
                "finish_reason": output.finish_reason,
            }
            for prompt in self._prompts
            for choice, output in enumerate(prompt.outputs)
        ]
        return encode_json({**self._head, "choices": choices, "usage": usage})

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Offsets count characters of the tokens' own texts from the start of the choice."""
        tokens: list[str] = []
        offsets: list[int] = []
        for token in logprobs:
            text = self._text(token.token_id)
            tokens.append(text)
            offsets.append(self._num_characters[index])
            self._num_characters[index] += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [finite(token.logprob) for token in logprobs],
            "top_logprobs": [
                {self._text(token_id): finite(logprob) for token_id, logprob in token.top}
                for token in logprobs
            ],
            "text_offset": offsets,
        }

    def _text(self, token_id: int) -> str:
        return self._model.tokenizer.token_text(token_id)[0]
