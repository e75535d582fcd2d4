"""POST /v1/chat/completions: from a body to a prompt that can run, and its answers.

Owns the dialect of the answers; that of the question is in `chat_prompt.py`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from replicas.protocol.frames import TokenLogprobs
from router.api.api_request import ApiRequest, Prompt, finite, make_prompt
from router.api.body_weight import is_light_chat
from router.api.chat_prompt import ChatRequest, check_chat, num_stable_tokens, render_chat
from router.api.context import ApiContext
from router.api.openai_shared import decode_body, encode_json
from router.api.prepared import PreparedRequest
from router.api.sampling import TokenRules, check_text_length, sampling_params
from router.api.sse import DONE, ChunkWriter
from router.errors import about_model
from router.prompt.catalog import ServedModel
from router.prompt.engines import TooMuchWork

_decoder = msgspec.json.Decoder(ChatRequest)
_fields_decoder = msgspec.msgpack.Decoder(ChatRequest)


async def prepare_chat(context: ApiContext, body: bytes, address: str | None) -> ApiRequest:
    """Raises InvalidRequest, UnknownModel or RouterBusy."""
    if is_light_chat(body):
        try:
            request, token_ids, num_stable = await _encode(context, body)
        except TooMuchWork:
            request, token_ids, num_stable = await _offload(context, body, address)
    else:
        request, token_ids, num_stable = await _offload(context, body, address)
    with about_model(request.model):
        return _answer(context, request, token_ids, num_stable)


def _answer(
    context: ApiContext, request: ChatRequest, token_ids: list[int], num_stable_tokens: int | None
) -> ApiRequest:
    model = context.catalog.get(request.model)
    sampling = sampling_params(
        request,
        model,
        TokenRules.of(request, model),
        num_prompt_tokens=len(token_ids),
        max_tokens=request.max_completion_tokens or request.max_tokens,
        num_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        seed=context.rng.getrandbits(64) if request.seed is None else request.seed,
        prompt_parameter="messages",
    )
    prompt = make_prompt(context, model, request, token_ids, sampling, num_stable_tokens=num_stable_tokens)
    dialect = _ChatDialect(context, request, model, prompt)
    return ApiRequest(model, [prompt], bool(request.stream), dialect)


async def _encode(context: ApiContext, body: bytes) -> tuple[ChatRequest, list[int], int | None]:
    """Here and now; only what is long and new is encoded in a thread. Raises TooMuchWork."""
    request = decode_body(_decoder, body)
    model = context.catalog.get(request.model)
    with about_model(request.model):
        check_chat(request, context.config.max_choices)
        chat = render_chat(model, request, is_bounded=True)
        check_text_length(model, chat.text, "messages")
        token_ids = await model.tokenizer.encode_async(chat.text, is_quoted=chat.is_quoted)
    return request, token_ids, num_stable_tokens(model.tokenizer, chat)


async def _offload(
    context: ApiContext, body: bytes, address: str | None
) -> tuple[ChatRequest, list[int], int | None]:
    prepared = await context.offload.prepare("chat", body, address)
    assert isinstance(prepared, PreparedRequest)
    (prompt,) = prepared.prompts
    return _fields_decoder.decode(prepared.fields), prompt.ids(), prompt.num_stable_tokens


class _ChatDialect:
    def __init__(self, context: ApiContext, request: ChatRequest, model: ServedModel, prompt: Prompt) -> None:
        self._model = model
        self._prompt = prompt
        self._with_logprobs = bool(request.logprobs)
        self._head = {
            "id": context.new_id("chatcmpl-"),
            "object": "chat.completion.chunk" if request.stream else "chat.completion",
            "created": int(context.wall_clock()),
            "model": model.name,
            "system_fingerprint": model.system_fingerprint,
        }
        if request.stream:
            options = request.stream_options
            self._writer = ChunkWriter(
                self._head,
                text_open=b'"delta":{"content":',
                text_close=b"}",
                with_usage=options is not None and bool(options.include_usage),
            )
            self._prefixes = [self._writer.prefix(choice) for choice in range(len(prompt.outputs))]

    def open(self, prompt: Prompt, choice: int) -> bytes:
        return self._writer.choice(
            {
                "index": choice,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        )

    def text(self, prompt: Prompt, choice: int, text: str, logprobs: Sequence[TokenLogprobs]) -> bytes:
        if not self._with_logprobs:
            return self._writer.text(self._prefixes[choice], text)
        return self._writer.text(self._prefixes[choice], text, self._logprobs(logprobs))

    def close(self, prompt: Prompt, choice: int) -> bytes:
        reason = prompt.outputs[choice].finish_reason
        return self._writer.choice({"index": choice, "delta": {}, "logprobs": None, "finish_reason": reason})

    def end(self, usage: dict[str, Any]) -> bytes:
        return self._writer.usage(usage) + DONE

    def whole(self, usage: dict[str, Any]) -> bytes:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(output.parts), "refusal": None},
                "logprobs": self._logprobs(output.logprobs) if self._with_logprobs else None,
                "finish_reason": output.finish_reason,
            }
            for index, output in enumerate(self._prompt.outputs)
        ]
        return encode_json({**self._head, "choices": choices, "usage": usage})

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = [
            {
                **self._token(token.token_id, token.logprob),
                "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in token.top],
            }
            for token in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self._model.tokenizer.token_text(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}
