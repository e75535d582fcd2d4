"""POST /v1/chat/completions: its fields, its prompt, its answers.

Owns the dialect. Knows nothing of HTTP, of routing or of how text becomes tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from replicas.protocol.frames import TokenLogprobs
from router.api.answer import Answer, Prompt, finite, make_prompt
from router.api.context import ApiContext
from router.api.openai_shared import check_range, decode_body, encode_json, unsupported
from router.api.sampling import (
    GenerationFields,
    check_fields,
    check_text_length,
    sampling_params,
    stop_strings,
)
from router.api.sse import DONE, ChunkWriter
from router.errors import ContextLengthExceeded, InvalidRequest
from router.prompt.catalog import ServedModel
from router.prompt.template import RESERVED_NAMES, TemplateError
from router.prompt.tokenizer import Tokenizer
from router.routing.bucket import BUCKET_TOKENS

ROLES = frozenset({"developer", "system", "user", "assistant", "tool", "function"})
MAX_TOP_LOGPROBS = 20

LONG_HEAD_CHARACTERS = BUCKET_TOKENS * 8
"""A head of so many characters is taken to have more tokens than a bucket looks at."""


class ChatPrompt(msgspec.Struct, kw_only=True):
    """The fields that make the prompt; /tokenize has them as well."""

    model: str | None = None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    functions: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class ChatRequest(GenerationFields, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    functions: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    function_call: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(ChatRequest)


async def prepare_chat(context: ApiContext, body: bytes) -> Answer:
    """Raises InvalidRequest or UnknownModel."""
    request = decode_body(_decoder, body)
    model = context.catalog.get(request.model)
    _check(request, context.config.max_choices)
    stop = stop_strings(request.stop)
    chat = render_chat(model, request)
    check_text_length(model, chat.text, "messages")
    token_ids = await model.tokenizer.encode_async(chat.text, is_quoted=chat.is_quoted)
    sampling = sampling_params(
        request,
        model,
        num_prompt_tokens=len(token_ids),
        max_tokens=request.max_completion_tokens or request.max_tokens,
        num_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        seed=context.rng.getrandbits(64) if request.seed is None else request.seed,
        prompt_parameter="messages",
    )
    prompt = make_prompt(
        model,
        token_ids,
        sampling,
        num_choices=request.n or 1,
        first_index=0,
        stop=stop,
        salt=request.cache_salt,
        prompt_cache_key=request.prompt_cache_key,
        priority=context.priority(request.priority),
        user=context.catalog.user_tag(request.end_user),
        num_stable_tokens=_num_stable_tokens(model.tokenizer, chat),
    )
    dialect = _ChatDialect(context, request, model, prompt)
    return Answer(model, [prompt], bool(request.stream), dialect)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The prompt's text, and the messages as they stand in it."""

    text: str
    messages: Sequence[Mapping[str, Any]]
    is_quoted: bool


def render_chat(model: ServedModel, request: "ChatRequest | ChatPrompt") -> RenderedChat:
    """Raises InvalidRequest. Special tokens that stand in what the client sent remain text."""
    arguments = request.chat_template_kwargs or {}
    for name in arguments:
        if name in RESERVED_NAMES:
            raise InvalidRequest(
                f"Invalid 'chat_template_kwargs': '{name}' is set by a field of its own.",
                parameter="chat_template_kwargs",
            )
    tools = request.tools or [
        {"type": "function", "function": function} for function in request.functions or ()
    ]
    _check_number(model, request)
    messages = [_message(position, message) for position, message in enumerate(request.messages)]
    if not messages:
        raise InvalidRequest("Invalid 'messages': at least one message is needed.", parameter="messages")
    sent = [messages, tools, arguments]
    try:
        is_quoted = model.quoter.is_needed(sent)
        if is_quoted:
            messages, tools, arguments = model.quoter.quote(sent)
        text = model.template.render(
            messages,
            tools=tools or None,
            add_generation_prompt=request.add_generation_prompt is not False,
            arguments=arguments,
        )
    except TemplateError as error:
        raise InvalidRequest(f"{error}", parameter="messages") from error
    except RecursionError as error:
        raise InvalidRequest("The messages are nested too deeply.", parameter="messages") from error
    return RenderedChat(text, messages, is_quoted)


def _check(request: ChatRequest, max_choices: int) -> None:
    check_fields(request, max_choices)
    check_range("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest(
            "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.",
            parameter="top_logprobs",
        )
    if request.max_completion_tokens is not None and request.max_completion_tokens < 1:
        raise InvalidRequest(
            f"Invalid value for 'max_completion_tokens': {request.max_completion_tokens} is below 1.",
            parameter="max_completion_tokens",
        )
    if request.response_format is not None and request.response_format.get("type") != "text":
        raise unsupported("response_format", "Only the response format 'text' is supported.")
    for parameter, choice in (("tool_choice", request.tool_choice), ("function_call", request.function_call)):
        if choice not in (None, "none", "auto"):
            raise unsupported(parameter, f"Only 'none' and 'auto' are supported for '{parameter}'.")


def _check_number(model: ServedModel, request: ChatRequest | ChatPrompt) -> None:
    """Each message, tool and call takes a token at least: what cannot fit is not even rendered."""
    calls = (message.get("tool_calls") for message in request.messages)
    number = len(request.messages) + len(request.tools or ()) + len(request.functions or ())
    number += sum(len(some) for some in calls if isinstance(some, list))
    if number > model.card.context_length:
        raise ContextLengthExceeded(
            f"This model's context holds {model.card.context_length} tokens, too few for {number} messages,"
            " tools and tool calls.",
            parameter="messages",
        )


def _message(position: int, message: dict[str, Any]) -> Mapping[str, Any]:
    """The message as templates expect it. Raises InvalidRequest that names what is wrong where."""
    role = message.get("role")
    if role not in ROLES:
        raise _wrong_role(position, role)
    content = message.get("content")
    if isinstance(content, list):
        message = {**message, "content": _joined_parts(position, content)}
    elif content is None:
        if role != "assistant":
            raise InvalidRequest(
                f"Missing required parameter: 'messages[{position}].content'.",
                parameter=f"messages[{position}].content",
                code="missing_required_parameter",
            )
        message = {**message, "content": message.get("refusal") or ""}
    elif not isinstance(content, str):
        raise InvalidRequest(
            f"Invalid type for 'messages[{position}].content': expected text or a list of parts.",
            parameter=f"messages[{position}].content",
            code="invalid_type",
        )
    if message.get("tool_calls"):
        message = {**message, "tool_calls": _tool_calls(position, message["tool_calls"])}
    return message


def _wrong_role(position: int, role: Any) -> InvalidRequest:
    path = f"messages[{position}].role"
    if role is None:
        return InvalidRequest(
            f"Missing required parameter: '{path}'.", parameter=path, code="missing_required_parameter"
        )
    if not isinstance(role, str):
        return InvalidRequest(
            f"Invalid type for '{path}': expected text.", parameter=path, code="invalid_type"
        )
    return InvalidRequest(
        f"Invalid value for '{path}': '{role[:40]}'. Supported are {', '.join(sorted(ROLES))}.",
        parameter=path,
    )


def _joined_parts(position: int, parts: list[Any]) -> str:
    texts: list[str] = []
    for number, part in enumerate(parts):
        path = f"messages[{position}].content[{number}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise InvalidRequest(
                f"Invalid type for '{path}': expected an object.", parameter=path, code="invalid_type"
            )
        kind = part.get("type")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise unsupported(f"{path}.type", f"This model reads text only; '{path}' is '{kind!s:.40}'.")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise InvalidRequest(
                f"Invalid type for '{path}.text': expected text.",
                parameter=f"{path}.text",
                code="invalid_type",
            )
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(position: int, calls: Any) -> list[Any]:
    """Arguments travel as JSON in a string; templates write objects out themselves."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        path = f"messages[{position}].tool_calls"
        raise InvalidRequest(
            f"Invalid type for '{path}': expected a list of objects.", parameter=path, code="invalid_type"
        )
    return [_tool_call(call) for call in calls]


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _num_stable_tokens(tokenizer: Tokenizer, chat: RenderedChat) -> int | None:
    """Tokens of what later turns will repeat (tools, system, first user message), if they are few."""
    for message in chat.messages:
        if message["role"] == "user":
            content = message["content"]
            start = chat.text.find(content.strip(), 0, LONG_HEAD_CHARACTERS)
            end = start + len(content)
            if start < 0 or end > LONG_HEAD_CHARACTERS:
                return None
            return tokenizer.num_tokens_through(chat.text, end, is_quoted=chat.is_quoted)
    return None


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
