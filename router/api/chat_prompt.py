"""A chat's request and its prompt: fields, limits, messages as templates expect them, the text.

Owns what a chat may look like. Runs wherever there is a tokenizer and a template: beside the event loop for
small bodies, in a process of its own for large ones.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from router.api.openai_shared import check_range, unsupported
from router.api.sampling import (
    GenerationFields,
    check_fields,
    check_text_length,
    most_tokens,
    too_many_tokens,
)
from router.errors import ContextLengthExceeded, InvalidRequest
from router.prompt.template import RESERVED_NAMES, TemplateError
from router.prompt.text_model import TextModel
from router.prompt.tokenizer import Tokenizer
from router.routing.bucket import BUCKET_TOKENS

ROLES = frozenset({"developer", "system", "user", "assistant", "tool", "function"})
MAX_TOP_LOGPROBS = 20

LONG_HEAD_CHARACTERS = BUCKET_TOKENS * 8
"""A head of this many characters is taken to have more tokens than a bucket looks at."""


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


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The prompt's text, and the messages as they stand in it."""

    text: str
    messages: Sequence[Mapping[str, Any]]
    is_quoted: bool


def render_chat(
    model: TextModel, request: "ChatRequest | ChatPrompt", *, is_bounded: bool = False
) -> RenderedChat:
    """Raises InvalidRequest, and TooMuchWork if it is to be bounded and is not. Special tokens that stand in
    what the client sent remain text."""
    arguments = request.chat_template_kwargs or {}
    for name in arguments:
        if name in RESERVED_NAMES:
            raise InvalidRequest(
                f"Invalid 'chat_template_kwargs': '{name}' has its own field.",
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
        render = model.template.render_bounded if is_bounded else model.template.render
        text = render(
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


def encode_chat(model: TextModel, chat: RenderedChat) -> list[int]:
    """Raises ContextLengthExceeded, before all is encoded, for what is far too long."""
    check_text_length(model, chat.text, "messages")
    token_ids = model.tokenizer.encode_within(most_tokens(model), chat.text, is_quoted=chat.is_quoted)
    if token_ids is None:
        raise too_many_tokens(model, "messages")
    return token_ids


def check_chat(request: ChatRequest, max_choices: int) -> None:
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


def _check_number(model: TextModel, request: ChatRequest | ChatPrompt) -> None:
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


def num_stable_tokens(tokenizer: Tokenizer, chat: RenderedChat) -> int | None:
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
