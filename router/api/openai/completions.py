"""POST /v1/completions: from a body to prompts that can run, and their answers.

Owns the dialect of the answers; that of the question is in `completion_prompt.py`.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from replicas.protocol.frames import BodyForm, TokenLogprobs
from router.answers.parts import Part, Text
from router.api.answer_usage import AnswerUsage
from router.api.api_request import ApiRequest, OutputWishes, Prompt, make_prompt
from router.api.caching import keeps_of
from router.api.choice_output import ChoiceOutput
from router.api.completion_prompt import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
)
from router.api.context import ApiContext
from router.api.json_body import encode_json
from router.api.logprobs import finite, token_name
from router.api.openai.choice import AnswerHead, Stop, TokenIds, stop_fields, usage_so_far
from router.api.openai.usage import OpenAiUsage, usage_of
from router.api.prepare import PreparedCompletion, prepared_completion
from router.api.prepare_in_worker import received_completion
from router.api.prepare_on_loop import OnLoop
from router.api.relayed import relay
from router.api.sampling import TokenRules, default_max_tokens, sampling_params
from router.api.sse import COMMENT, DONE, ChunkWriter
from router.caller import Caller
from router.errors import about_model
from router.keeping import LeaseRequest
from router.large_bodies.body_weight import is_light_completion
from router.large_bodies.jobs import PreparedRequest
from router.prompt.catalog import ServedModel
from router.prompt.engines import TooMuchWork
from router.shared.answer_types import Count


async def prepare_completion(context: ApiContext, asked: ApiRequest) -> None:
    """Raises InvalidRequest, UnknownModel or RouterBusy."""
    prepared = await _prepared(context, asked)
    request = prepared.request
    context.unknown_fields.count("completion", prepared.unknown_fields)
    model = context.catalog.get(request.model).bounded(asked.caller.max_context)
    with about_model(request.model):
        prompts = await _make_prompts(context, asked.caller, model, prepared)
    asked.writer = _CompletionWriter(context, request, model, prompts)
    asked.model, asked.asked_model = model, request.model
    asked.prompts, asked.stream = prompts, bool(request.stream)
    if model.card.takes_bodies:
        relay(context, asked, model, BodyForm.COMPLETION, request, prepared.sent)


async def _prepared(context: ApiContext, asked: ApiRequest) -> PreparedCompletion:
    if is_light_completion(asked.body):
        with contextlib.suppress(TooMuchWork):
            return await prepared_completion(OnLoop(context, asked), asked.body)
    sent = await context.worker.prepare("completion", asked.body, asked.address, asked.caller.max_context)
    assert isinstance(sent, PreparedRequest)
    return received_completion(sent)


async def _make_prompts(
    context: ApiContext,
    caller: Caller,
    model: ServedModel,
    prepared: PreparedCompletion,
) -> list[Prompt]:
    request, grammar = prepared.request, prepared.grammar
    seed = context.rng.getrandbits(64) if request.seed is None else request.seed
    num_choices = request.n or 1
    prompts: list[Prompt] = []
    rules = TokenRules.of(request, model)
    wishes = OutputWishes(
        is_silent=request.only_prompt, is_kept=not request.stream or bool(request.return_token_ids)
    )
    wanted = keeps_of(request.prompt_cache_retention, request.prompt_cache_options)
    keeps = [LeaseRequest(seconds) for seconds, _ in wanted]
    work = context.turns.long_work()
    for token_ids, echo in prepared.prompts:
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
            grammar=grammar,
        )
        prompt = make_prompt(
            context,
            caller,
            model,
            request,
            token_ids,
            sampling,
            wishes,
            keeps=keeps,
            first_index=first_index,
            grammar_seconds=0.0 if prompts else grammar.seconds,
        )
        prompt.echo = echo
        prompts.append(prompt)
        await work.give_way()
    return prompts


def _max_tokens(request: CompletionRequest, model: ServedModel, num_prompt_tokens: int) -> int | None:
    if request.only_prompt:
        return 1
    if request.max_tokens is not None:
        return request.max_tokens
    room = model.card.context_length - num_prompt_tokens
    return min(DEFAULT_MAX_TOKENS, default_max_tokens(model, room)) if room > 0 else None


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[Count]


class CompletionChoice(Struct, kw_only=True):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: Stop | UnsetType = UNSET
    matched_stop: Stop | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET


class Completion(AnswerHead, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: OpenAiUsage


class _CompletionWriter:
    keep_alive = COMMENT

    def __init__(
        self, context: ApiContext, request: CompletionRequest, model: ServedModel, prompts: list[Prompt]
    ) -> None:
        self._tokenizer = model.tokenizer
        self._request = request
        self._prompts = prompts
        self._with_logprobs = request.logprobs is not None
        self.answer_id = context.new_id("cmpl-")
        self._head: dict[str, Any] = {
            "id": self.answer_id,
            "object": "text_completion",
            "created": int(context.wall_clock()),
            "model": model.name,
            "system_fingerprint": model.system_fingerprint,
        }
        num_choices = sum(len(prompt.outputs) for prompt in prompts)
        self._num_characters = [0] * num_choices
        if request.stream:
            options = request.stream_options
            with_usage = options is not None and bool(options.include_usage)
            self._writer = ChunkWriter(
                self._head, text_open=b'"text":', text_close=b"", with_usage=with_usage
            )
            self._counts = with_usage and options is not None and bool(options.continuous_usage_stats)
            self._prefixes = [self._writer.prefix(index) for index in range(num_choices)]
            self._token_ids = TokenIds(num_choices) if request.return_token_ids else None

    def open(self, prompt: Prompt, choice: int) -> bytes:
        index = prompt.first_index + choice
        if self._token_ids is not None:
            token_ids = prompt.generation.token_ids
            return self._choice(index, prompt.echo, prompt_token_ids=token_ids, token_ids=[])
        return self._writer.text(self._prefixes[index], prompt.echo) if prompt.echo else b""

    def part(self, prompt: Prompt, choice: int, part: Part, logprobs: Sequence[TokenLogprobs]) -> bytes:
        assert type(part) is Text  # nothing is parsed
        index = prompt.first_index + choice
        return self._writer.text(
            self._prefixes[index],
            part.text,
            self._logprobs(index, logprobs) if self._with_logprobs else None,
            token_ids=self._new_ids(index, prompt.outputs[choice]),
            closing=self._closing() if self._counts else None,
        )

    def close(self, prompt: Prompt, choice: int) -> bytes:
        index, output = prompt.first_index + choice, prompt.outputs[choice]
        stop, token_ids = stop_fields(self._request, output), self._new_ids(index, output)
        return self._choice(index, "", finish_reason=output.finish_reason, token_ids=token_ids, **stop)

    def end(self, usage: AnswerUsage) -> bytes:
        return self._writer.usage(usage_of(usage)) + DONE

    def whole(self, usage: AnswerUsage) -> bytes:
        choices = [
            self._whole_choice(prompt, prompt.first_index + choice, output)
            for prompt in self._prompts
            for choice, output in enumerate(prompt.outputs)
        ]
        return encode_json(Completion(**self._head, choices=choices, usage=usage_of(usage)))

    def _whole_choice(self, prompt: Prompt, index: int, output: ChoiceOutput) -> CompletionChoice:
        with_ids = self._request.return_token_ids
        return CompletionChoice(
            index=index,
            text=prompt.echo + output.text,
            logprobs=self._logprobs(index, output.logprobs) if self._with_logprobs else None,
            finish_reason=output.finish_reason,
            prompt_token_ids=prompt.generation.token_ids if with_ids else UNSET,
            token_ids=output.token_ids if with_ids else UNSET,
            **stop_fields(self._request, output),
        )

    def _choice(self, index: int, text: str, **more: Any) -> bytes:
        chunk = CompletionChoice(index=index, text=text, **more)
        return self._writer.choice(chunk, closing=self._closing() if self._counts else None)

    def _new_ids(self, index: int, output: ChoiceOutput) -> Sequence[int] | UnsetType:
        return UNSET if self._token_ids is None else self._token_ids.new(index, output)

    def _closing(self) -> bytes:
        return self._writer.closing(usage=usage_so_far(self._prompts))

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Offsets count characters of the tokens' own texts from the start of the choice."""
        tokens: list[str] = []
        offsets: list[int] = []
        for token in logprobs:
            text = self._name(token.token_id)
            tokens.append(text)
            offsets.append(self._num_characters[index])
            self._num_characters[index] += len(text)
        own = [finite(token.logprob) for token in logprobs]
        return CompletionLogprobs(tokens, own, [self._top(token) for token in logprobs], offsets)

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        """Return the likeliest ones, and the token itself where it is none of them."""
        top = {self._name(token_id): finite(logprob) for token_id, logprob in token.top}
        top.setdefault(self._name(token.token_id), finite(token.logprob))
        return top

    def _name(self, token_id: int) -> str:
        as_ids = bool(self._request.return_tokens_as_token_ids)
        return token_name(self._tokenizer, token_id, as_ids=as_ids)
