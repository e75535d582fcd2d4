"""OpenAI's body of a chat → a ChatRequest.

Owns the body's fields and their limits. Pure: it also runs in the process that prepares large bodies.
"""

from typing import Any

import msgspec

from router.answers.wishes import ToolChoice
from router.api.caching import compared_id, keeps_of
from router.api.chat_request import ChatRequest, KeepThrough
from router.api.field_table import FieldRefusal, FieldTable
from router.api.json_body import check_range, invalid, unsupported
from router.api.openai.messages import read_messages
from router.api.openai.tools import ToolFields, tool_choice_of, tools_of
from router.api.peer_fields import OPENAI_HINTS, OPENROUTER_HINTS, PeerFields, idle_at, moved, refused_fields
from router.api.reasoning_effort import reasoning_arguments, thinking_arguments
from router.api.sampling import GenerationFields, check_fields, stream_options_table
from router.api.structured_outputs import output_format_of
from router.errors import InvalidRequest, about_model

MAX_TOP_LOGPROBS = 20


class ChatBody(PeerFields, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    tool_choice: Any = None
    function_call: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    include_reasoning: bool | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Any = None


class TokenizedChat(ChatBody, kw_only=True):
    """Body of /tokenize; with one model it need not be named."""

    model: str = ""


_FIELDS = GenerationFields.__struct_fields__
"""The first fields of a body."""

_SYSTEM = FieldRefusal("'{name}' is not supported in chats: it is a message with the role 'system'.")
_OF_RESPONSES = FieldRefusal("'{name}' is a field of Responses.")
_REFUSED = {
    **refused_fields(ChatBody),
    "background": _OF_RESPONSES,
    "best_of": FieldRefusal("'{name}' is not supported.", idle_at(1)),
    "conversation": _OF_RESPONSES,
    "include": _OF_RESPONSES,
    "input": moved("messages"),
    "instructions": _SYSTEM,
    "max_output_tokens": moved("max_completion_tokens"),
    "plugins": FieldRefusal("'{name}' is not supported."),
    "previous_response_id": _OF_RESPONSES,
    "prompt": moved("messages"),
    "reasoning": moved("reasoning_effort"),
    "suffix": FieldRefusal("'{name}' is not supported."),
    "system": _SYSTEM,
    "text": moved("response_format"),
}
CHAT = FieldTable(
    ChatBody,
    hints=OPENAI_HINTS | OPENROUTER_HINTS,
    refused=_REFUSED,
    inner={"stream_options": stream_options_table},
)
_TOKENIZED = FieldTable(
    TokenizedChat,
    hints=OPENAI_HINTS | OPENROUTER_HINTS | {"return_token_strs"},
    refused=_REFUSED,
    inner={"stream_options": stream_options_table},
)


def read_chat(body: bytes, max_choices: int) -> ChatRequest:
    """Raises InvalidRequest that names what is wrong where."""
    chat, unknown = CHAT.read(body)
    with about_model(chat.model):
        _check(chat, max_choices)
        return _request(chat, unknown)


def read_tokenized_chat(body: bytes) -> ChatRequest:
    """Raises InvalidRequest."""
    return _request(*_TOKENIZED.read(body))


def _request(chat: ChatBody, unknown: list[str]) -> ChatRequest:
    tools, tool_choice = _tools(chat)
    messages, breakpoints, images = read_messages(chat.messages)
    keeps = keeps_of(chat.prompt_cache_retention, chat.prompt_cache_options, breakpoints)
    given: dict[str, Any] = dict(zip(_FIELDS, msgspec.structs.astuple(chat), strict=False))
    given["max_tokens"] = chat.max_completion_tokens or chat.max_tokens
    return ChatRequest(
        **given,
        messages=messages,
        images=images,
        tools=tools,
        tool_choice=tool_choice,
        output_format=output_format_of(chat, chat.response_format),
        template_arguments=_template_arguments(chat),
        add_generation_prompt=_adds_generation_prompt(chat),
        continue_final_message=bool(chat.continue_final_message),
        num_logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        keeps=[KeepThrough(seconds, position) for seconds, position in keeps],
        only_prompt=chat.prompt_cache_options is not None and bool(chat.prompt_cache_options.prewarm),
        tool_parameter="functions[{}].parameters" if chat.functions else "tools[{}].function.parameters",
        compared_id=compared_id(chat.prompt_cache_options),
        unknown_fields=unknown,
        answers={"functions": bool(chat.functions), "reasoning": chat.include_reasoning is not False},
    )


def _tools(chat: ChatBody) -> tuple[list[dict[str, Any]], ToolChoice]:
    parallel = chat.parallel_tool_calls is not False
    has_tools = chat.tools or chat.functions
    if not has_tools and chat.tool_choice is None and chat.function_call is None:
        return [], ToolChoice(parallel=parallel)
    asked = ToolFields(chat.tools, chat.functions, chat.tool_choice, chat.function_call, parallel)
    tools = tools_of(asked)
    return tools, tool_choice_of(asked, tools)


def _adds_generation_prompt(chat: ChatBody) -> bool:
    if not chat.continue_final_message:
        return chat.add_generation_prompt is not False
    if chat.add_generation_prompt:
        raise InvalidRequest(
            "Only one of 'continue_final_message' and 'add_generation_prompt' can be true.",
            parameter="continue_final_message",
        )
    return False


def _template_arguments(chat: ChatBody) -> dict[str, Any]:
    """Merge template arguments; the client's explicit ones win."""
    given = chat.chat_template_kwargs or {}
    if chat.reasoning_effort is None and chat.enable_thinking is None and chat.thinking is None:
        return given
    arguments = reasoning_arguments("reasoning_effort", chat.reasoning_effort)
    return {**arguments, **thinking_arguments(chat.enable_thinking, chat.thinking), **given}


def _check(chat: ChatBody, max_choices: int) -> None:
    check_fields(chat, max_choices)
    if chat.echo:
        raise unsupported("echo", "'echo' is not supported in chats; 'continue_final_message' is.")
    if chat.add_special_tokens:
        raise unsupported("add_special_tokens", "Chats have the special tokens that their template writes.")
    if chat.modalities is not None and chat.modalities != ["text"]:
        raise unsupported("modalities", "Answers are text: 'modalities' can only be ['text'].")
    check_range("top_logprobs", chat.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if chat.top_logprobs is not None and not chat.logprobs:
        raise InvalidRequest(
            "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.",
            parameter="top_logprobs",
        )
    if chat.max_completion_tokens is not None and chat.max_completion_tokens < 1:
        raise invalid("max_completion_tokens", f"{chat.max_completion_tokens} is below 1.")
