"""OpenAI's body of a chat → a ChatRequest.

Owns the body's fields, their limits, and the forms that messages and tools may have. Pure: it also runs in
the process that prepares large bodies.
"""

import json
from typing import Any

import msgspec

from router.answers.wishes import FormatKind, OutputFormat, ToolChoice, ToolMode
from router.api.chat_request import ChatRequest, KeepThrough
from router.api.json_body import check_range, decode_body, unsupported
from router.api.openai_caching import keep_seconds
from router.api.sampling import GenerationFields, check_fields
from router.errors import InvalidRequest, about_model

ROLES = frozenset({"developer", "system", "user", "assistant", "tool", "function"})
MAX_TOP_LOGPROBS = 20


class ChatBody(GenerationFields, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    tool_choice: Any = None
    function_call: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None


class TokenizedChat(ChatBody, kw_only=True):
    """What /tokenize is asked; with one model it need not be named."""

    model: str = ""


_FIELDS = tuple(name for name in GenerationFields.__struct_fields__ if name != "max_tokens")
_decoder = msgspec.json.Decoder(ChatBody)
_tokenized_decoder = msgspec.json.Decoder(TokenizedChat)


def read_chat(body: bytes, max_choices: int) -> ChatRequest:
    """Raises InvalidRequest that names what is wrong where."""
    chat = decode_body(_decoder, body)
    with about_model(chat.model):
        _check(chat, max_choices)
        return _request(chat)


def read_tokenized_chat(body: bytes) -> ChatRequest:
    """Raises InvalidRequest."""
    return _request(decode_body(_tokenized_decoder, body))


def _request(chat: ChatBody) -> ChatRequest:
    tools = chat.tools or [{"type": "function", "function": function} for function in chat.functions or ()]
    return ChatRequest(
        **{name: getattr(chat, name) for name in _FIELDS},
        max_tokens=chat.max_completion_tokens or chat.max_tokens,
        messages=[_message(position, message) for position, message in enumerate(chat.messages)],
        tools=tools,
        tool_choice=_tool_choice(chat),
        output_format=None if chat.response_format is None else _output_format(chat.response_format),
        template_arguments=chat.chat_template_kwargs or {},
        add_generation_prompt=chat.add_generation_prompt is not False,
        num_logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        keeps=[
            KeepThrough(seconds)
            for seconds in keep_seconds(chat.prompt_cache_retention, chat.prompt_cache_options)
        ],
    )


def _check(chat: ChatBody, max_choices: int) -> None:
    check_fields(chat, max_choices)
    check_range("top_logprobs", chat.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if chat.top_logprobs is not None and not chat.logprobs:
        raise InvalidRequest(
            "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.",
            parameter="top_logprobs",
        )
    if chat.max_completion_tokens is not None and chat.max_completion_tokens < 1:
        raise InvalidRequest(
            f"Invalid value for 'max_completion_tokens': {chat.max_completion_tokens} is below 1.",
            parameter="max_completion_tokens",
        )


def _tool_choice(chat: ChatBody) -> ToolChoice:
    parallel = chat.parallel_tool_calls is not False
    parameter = "tool_choice"
    asked = chat.tool_choice
    if asked is None and chat.function_call is not None:
        parameter, asked = "function_call", chat.function_call
        if isinstance(asked, dict):
            asked = {"type": "function", "function": asked}
    match asked:
        case None | "auto":
            return ToolChoice(parallel=parallel)
        case "none":
            return ToolChoice(ToolMode.NONE)
        case "required":
            return ToolChoice(ToolMode.REQUIRED, parallel=parallel)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice(ToolMode.REQUIRED, (name,), parallel=parallel)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)},
        }:
            return ToolChoice(ToolMode(mode), _allowed_names(tools), parallel=parallel)
    raise InvalidRequest(
        f"Invalid value for '{parameter}': it is 'none', 'auto', 'required', a function to call or the tools"
        " that are allowed.",
        parameter=parameter,
    )


def _allowed_names(tools: list[Any]) -> tuple[str, ...]:
    names: list[str] = []
    for number, tool in enumerate(tools):
        match tool:
            case {"type": "function", "function": {"name": str(name)}}:
                names.append(name)
            case _:
                path = f"tool_choice.allowed_tools.tools[{number}]"
                raise InvalidRequest(f"Invalid value for '{path}': expected a function.", parameter=path)
    return tuple(names)


def _output_format(asked: dict[str, Any]) -> OutputFormat | None:
    match asked:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return OutputFormat(FormatKind.JSON_OBJECT)
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return OutputFormat(FormatKind.JSON_SCHEMA, schema)
        case {"type": "json_schema"}:
            raise InvalidRequest(
                "Missing required parameter: 'response_format.json_schema.schema'.",
                parameter="response_format.json_schema.schema",
                code="missing_required_parameter",
            )
    raise unsupported(
        "response_format", "Response formats that are supported: 'text', 'json_object' and 'json_schema'."
    )


def _message(position: int, message: dict[str, Any]) -> dict[str, Any]:
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
