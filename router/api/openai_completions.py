"""POST /v1/completions: from a body to prompts that can run, and their answers.

Owns the dialect of the answers; that of the question is in `completion_prompt.py`.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from replicas.protocol.frames import TokenLogprobs
from router.answers.parts import Part, Text
from router.api.answer_usage import AnswerUsage
from router.api.api_request import ApiRequest, OutputWishes, Prompt, make_prompt
from router.api.asked import Asked
from router.api.body_weight import is_light_completion
from router.api.completion_prompt import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    check_completion,
    check_prompt,
    check_tokens,
    prompts_of,
)
from router.api.context import ApiContext
from router.api.json_body import decode_body, encode_json
from router.api.openai_caching import keep_seconds
from router.api.openai_logprobs import finite
from router.api.openai_usage import usage_of
from router.api.prepared import EncodedPrompt, PreparedRequest
from router.api.sampling import TokenRules, sampling_params
from router.api.sse import COMMENT, DONE, ChunkWriter
from router.errors import about_model
from router.keeping import Keep
from router.prompt.catalog import ServedModel

_decoder = msgspec.json.Decoder(CompletionRequest)
_fields_decoder = msgspec.msgpack.Decoder(CompletionRequest)

_Encoded = tuple[list[int], str]
"""Token ids, and the text that the answer begins with."""


async def prepare_completion(context: ApiContext, asked: Asked) -> ApiRequest:
    """Raises InvalidRequest, UnknownModel or RouterBusy."""
    if is_light_completion(asked.body):
        request = decode_body(_decoder, asked.body)
        model = context.catalog.get(request.model)
        with about_model(request.model):
            check_completion(request, context.config.max_choices)
            encoded = _encode(model, request, prompts_of(request.prompt, context.config.max_prompts))
    else:
        prepared = await context.offload.prepare("completion", asked.body, asked.address)
        assert isinstance(prepared, PreparedRequest)
        request = _fields_decoder.decode(prepared.fields)
        model = context.catalog.get(request.model)
        encoded = _unpack(prepared.prompts)
    with about_model(request.model):
        prompts = await _make_prompts(context, request, model, encoded)
    writer = _CompletionWriter(context, request, model, prompts)
    return ApiRequest(model, prompts, bool(request.stream), writer)


async def _encode(
    model: ServedModel, request: CompletionRequest, prompts: list[str | list[Any]]
) -> AsyncIterator[_Encoded]:
    for prompt in prompts:
        check_prompt(model, prompt)
        if isinstance(prompt, str):
            token_ids = await model.tokenizer.encode_async(prompt, add_special_tokens=True)
            echo = prompt if request.echo else ""
        else:
            token_ids = prompt
            echo = model.tokenizer.decode(prompt) if request.echo else ""
        check_tokens(token_ids)
        yield token_ids, echo


async def _unpack(prompts: list[EncodedPrompt]) -> AsyncIterator[_Encoded]:
    for prompt in prompts:
        yield prompt.ids(), prompt.echo


async def _make_prompts(
    context: ApiContext, request: CompletionRequest, model: ServedModel, encoded: AsyncIterator[_Encoded]
) -> list[Prompt]:
    seed = context.rng.getrandbits(64) if request.seed is None else request.seed
    num_choices = request.n or 1
    prompts: list[Prompt] = []
    rules = TokenRules.of(request, model)
    wishes = OutputWishes(is_kept=not request.stream)
    keeps = [Keep(s) for s in keep_seconds(request.prompt_cache_retention, request.prompt_cache_options)]
    work = context.turns.long_work()
    async for token_ids, echo in encoded:
        first_index = len(prompts) * num_choices
        sampling = sampling_params(
            request,
            model,
            rules,
            num_prompt_tokens=len(token_ids),
            max_tokens=_max_tokens(request, model, len(token_ids)),
            num_logprobs=request.logprobs,
            seed=seed + first_index,
            prompt_parameter="prompt",
        )
        prompt = make_prompt(
            context, model, request, token_ids, sampling, wishes, keeps=keeps, first_index=first_index
        )
        prompt.echo = echo
        prompts.append(prompt)
        await work.give_way()
    return prompts


def _max_tokens(request: CompletionRequest, model: ServedModel, num_prompt_tokens: int) -> int | None:
    if request.max_tokens is not None:
        return request.max_tokens
    room = model.card.context_length - num_prompt_tokens
    return min(DEFAULT_MAX_TOKENS, room) if room > 0 else None


class _CompletionWriter:
    keep_alive = COMMENT

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

    def part(self, prompt: Prompt, choice: int, part: Part, logprobs: Sequence[TokenLogprobs]) -> bytes:
        assert type(part) is Text  # nothing is parsed
        index, text = prompt.first_index + choice, part.text
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

    def end(self, usage: AnswerUsage) -> bytes:
        return self._writer.usage(usage_of(usage)) + DONE

    def whole(self, usage: AnswerUsage) -> bytes:
        choices = [
            {
                "index": prompt.first_index + choice,
                "text": prompt.echo + output.text,
                "logprobs": self._logprobs(prompt.first_index + choice, output.logprobs)
                if self._with_logprobs
                else None,
                "finish_reason": output.finish_reason,
            }
            for prompt in self._prompts
            for choice, output in enumerate(prompt.outputs)
        ]
        return encode_json({**self._head, "choices": choices, "usage": usage_of(usage)})

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
