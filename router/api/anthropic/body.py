"""Anthropic's body of a message → a ChatRequest.

Owns the body's fields and limits; its messages are read in `turns.py`. Pure: it also runs in the
process that prepares large bodies. Tools that run at Anthropic are not offered to the model.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from router.answers.wishes import FormatKind, OutputFormat, ToolChoice, ToolMode
from router.api.anthropic.caching import MarkPosition, Marks
from router.api.anthropic.errors import NO_THREADS
from router.api.anthropic.turns import Turns
from router.api.caching import keep_seconds
from router.api.chat_request import ChatRequest, KeepThrough
from router.api.field_table import MOST_NAMED, FieldRefusal, FieldTable
from router.api.json_body import check_range, missing
from router.api.peer_fields import PEER_HINTS, Names, PeerFields, idle_at, moved, refused_fields
from router.api.sampling import GenerationFields, check_fields, check_stop_strings, stream_options_table
from router.errors import InvalidRequest, about_model

MAX_STOP_SEQUENCES = 64
"""Each is looked for in every piece of text."""

MIN_THINKING_TOKENS = 1024

_SERVER_TOOL = re.compile(r"[a-z_]+_\d{8}|mcp_toolset")
"""The type of one that runs at Anthropic, or in its clients: it has the date of its version."""
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


class Diagnostics(msgspec.Struct):
    """None as the id asks for nothing yet: it is the first turn."""

    previous_message_id: str | None = None


class MessagesBody(GenerationFields, kw_only=True):
    """With the fields of our own that OpenAI's routes have as well."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    """The older place of `output_config.format`."""
    metadata: dict[str, Any] | None = None
    cache_control: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    thread: Any = None
    diagnostics: Diagnostics | None = None


class ShownAnswer(msgspec.Struct, frozen=True):
    """Facts of the question for the answer's writer: how many leases are the client's marks, and whether the
    words of thinking are omitted."""

    num_marks: int
    omits_thinking: bool
    has_diagnostics: bool = False


_OTHERS = (
    "stop",
    "n",
    "stream_options",
    "user",
    "safety_identifier",
    "cache",
    "max_tokens",
)
_FIELDS = tuple(name for name in GenerationFields.__struct_fields__ if name not in _OTHERS)
_NOT_SERVED = FieldRefusal("This is not supported in messages", (None,), None)
_OF_CHATS = FieldRefusal("This is not supported in messages", code=None)
_FORMATS = (
    "response_format",
    *(name for name in PeerFields.__struct_fields__ if name not in _FIELDS + _OTHERS),
)
MESSAGE = FieldTable(
    MessagesBody,
    hints=PEER_HINTS
    | {"anthropic_beta", "anthropic_version", "betas", "container", "context_management", "inference_geo"}
    | {"mcp_servers", "service_tier", "speed", "store", "user_profile_id"},
    refused={
        **refused_fields(MessagesBody, Names(stop="stop_sequences", response_format="output_config.format")),
        **dict.fromkeys(_FORMATS, moved("output_config.format")),
        **dict.fromkeys(("best_of", "n"), _NOT_SERVED._replace(idle=idle_at(1))),
        **dict.fromkeys(("cache", "stop"), _NOT_SERVED),
        **dict.fromkeys(("continue_final_message", "echo", "logprobs", "suffix", "top_logprobs"), _OF_CHATS),
        **dict.fromkeys(
            ("add_generation_prompt", "include_reasoning"), _OF_CHATS._replace(idle=idle_at(True))
        ),
        **dict.fromkeys(("function_call", "functions"), moved("tools")),
        **dict.fromkeys(("input", "prompt"), moved("messages")),
        **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), moved("max_tokens")),
        **dict.fromkeys(("reasoning", "reasoning_effort", "enable_thinking", "think"), moved("thinking")),
        **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), _OF_CHATS),
        "instructions": moved("system"),
        "parallel_tool_calls": moved("tool_choice.disable_parallel_tool_use")._replace(idle=idle_at(True)),
        "thread": _NOT_SERVED._replace(code=NO_THREADS),
    },
    inner={"stream_options": stream_options_table},
)


def read_message(body: bytes, max_choices: int) -> ChatRequest:
    """Raises InvalidRequest that names what is wrong where."""
    asked, unknown = MESSAGE.read(body)
    with about_model(asked.model):
        if asked.max_tokens is None:
            raise missing("max_tokens")
        request = _request(asked, unknown)
        if asked.max_tokens == 0:
            _check_only_prompt(asked, request)
        check_fields(request, max_choices, max_stop_strings=MAX_STOP_SEQUENCES)
        return request


def read_counted_message(body: bytes) -> ChatRequest:
    """Read a message for counting; only the prompt matters. Raises InvalidRequest."""
    asked, unknown = MESSAGE.read(body)
    with about_model(asked.model):
        return _request(asked, unknown)


def _request(asked: MessagesBody, unknown: list[str]) -> ChatRequest:
    _check(asked)
    marks = Marks()
    tools = _tools(asked.tools or (), marks, unknown)
    turns = Turns(marks)
    turns.system(asked.system, has_tools=bool(tools))
    for position, message in enumerate(asked.messages):
        turns.message(position, message)
    turns.finish()
    tools = _changed(tools, turns.tool_changes, unknown)
    if turns.messages and _is_empty(turns.messages[-1]):
        turns.messages.pop()
    if not asked.messages or not turns.messages:
        raise InvalidRequest("at least one message is required", parameter="messages")
    is_begun = turns.messages[-1]["role"] == asked.messages[-1]["role"] == "assistant"
    keeps = marks.keeps(asked.cache_control)
    num_marks = len(keeps)
    keeps += map(KeepThrough, keep_seconds(asked.prompt_cache_retention, asked.prompt_cache_options))
    return ChatRequest(
        **{name: getattr(asked, name) for name in _FIELDS},
        max_tokens=asked.max_tokens or None,
        cut_to_context=True,
        tool_parameter="tools",  # those of other kinds are among them, so their numbers are others
        only_prompt=asked.max_tokens == 0,
        stop=asked.stop_sequences,
        user=_user(asked.metadata),
        messages=turns.messages,
        images=turns.images.images,
        tools=tools,
        tool_choice=_tool_choice(asked.tool_choice, tools),
        output_format=_output_format(asked),
        template_arguments={"enable_thinking": _thinks(asked), **(asked.chat_template_kwargs or {})},
        add_generation_prompt=not is_begun,
        continue_final_message=is_begun,
        keeps=keeps,
        unknown_fields=unknown,
        answers=msgspec.to_builtins(
            ShownAnswer(
                num_marks,
                (asked.thinking or {}).get("display") == "omitted",
                asked.diagnostics is not None,
            )
        ),
        compared_id=None if asked.diagnostics is None else asked.diagnostics.previous_message_id,
    )


def _is_empty(message: dict[str, Any]) -> bool:
    """Whether an assistant's message has nothing to continue."""
    return message["role"] == "assistant" and not message["content"].strip()


def _check(asked: MessagesBody) -> None:
    check_range("temperature", asked.temperature, 0.0, 1.0)
    check_stop_strings("stop_sequences", asked.stop_sequences or (), MAX_STOP_SEQUENCES)
    if asked.max_tokens is not None and asked.max_tokens < 0:
        raise InvalidRequest("Input should be greater than or equal to 0", parameter="max_tokens")


def _check_only_prompt(asked: MessagesBody, request: ChatRequest) -> None:
    """Nothing is answered: what asks for some form of answer is a mistake."""
    wrong = {
        "stream": bool(asked.stream),
        "thinking": _thinks(asked),
        "output_config.format": request.output_format is not None,
        "tool_choice": request.tool_choice.mode is ToolMode.REQUIRED,
    }
    for field, is_wrong in wrong.items():
        if is_wrong:
            raise InvalidRequest("This cannot be used when `max_tokens` is 0", parameter=field)


def _tools(asked: Sequence[dict[str, Any]], marks: Marks, unknown: list[str]) -> list[dict[str, Any]]:
    """Return the tools to offer to the model: the client's own. Unknown types go to `unknown`."""
    tools: list[dict[str, Any]] = []
    names: set[str] = set()
    for position, tool in enumerate(asked):
        path = f"tools[{position}]"
        marks.block(path, tool, MarkPosition(-1))
        read = _tool(path, tool, unknown)
        if read is None:
            continue
        if read["function"]["name"] in names:
            raise InvalidRequest("Tool names must be unique.", parameter="tools")
        names.add(read["function"]["name"])
        tools.append(read)
    return tools


def _changed(
    tools: list[dict[str, Any]], changes: Sequence[tuple[str, Any]], unknown: list[str]
) -> list[dict[str, Any]]:
    """Return the tools after those that the conversation has added and removed. A reference to a tool of
    Anthropic's, or to none, changes nothing."""
    if not changes:
        return tools
    offered = {tool["function"]["name"]: tool for tool in tools}
    removed: set[str] = set()
    for path, block in changes:
        match block:
            case {
                "type": "tool_addition",
                "tool": {"type": "tool_definition", "definition": dict(definition)},
            }:
                tool = _tool(f"{path}.tool.definition", definition, unknown)
                if tool is not None:
                    name = tool["function"]["name"]
                    offered[name] = tool
                    removed.discard(name)
            case {"type": "tool_addition", "tool": {"type": "tool_reference", "name": str(name)}}:
                removed.discard(name)
            case {"type": "tool_removal", "tool": {"type": "tool_reference", "name": str(name)}}:
                removed.add(name)
            case {"tool": {"type": "mcp_tool_reference" | "mcp_toolset_reference"}}:
                pass
            case _:
                raise InvalidRequest(
                    "Input should be a 'tool_reference' with a name or a 'tool_definition'",
                    parameter=f"{path}.tool",
                )
    return [tool for name, tool in offered.items() if name not in removed]


def _tool(path: str, tool: dict[str, Any], unknown: list[str]) -> dict[str, Any] | None:
    """Read a tool of the client's own. None for others, whose unknown types go to `unknown`."""
    if not _is_own(tool, path, unknown):
        return None
    name, schema, description = tool.get("name"), tool.get("input_schema"), tool.get("description")
    for field, value in (("name", name), ("input_schema", schema)):
        if value is None:
            raise missing(f"{path}.{field}")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise InvalidRequest(
            f"String should match pattern '^{_TOOL_NAME.pattern}$'", parameter=f"{path}.name"
        )
    if not isinstance(schema, dict):
        raise InvalidRequest("Input should be an object", parameter=f"{path}.input_schema")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest("Input should be text", parameter=f"{path}.description")
    function: dict[str, Any] = {} if description is None else {"description": description}
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": {"name": name, **function, "parameters": schema}}


def _is_own(tool: dict[str, Any], path: str, unknown: list[str]) -> bool:
    """Raises InvalidRequest for one whose type is misspelt: what has a schema is the client's."""
    kind = tool.get("type")
    if kind in (None, "custom"):
        return True
    if not isinstance(kind, str) or tool.get("input_schema") is not None:
        raise InvalidRequest("Input should be 'custom' where there is a schema", parameter=f"{path}.type")
    if _SERVER_TOOL.fullmatch(kind) is None and len(unknown) < MOST_NAMED:
        unknown.append(f"tools.{kind}")
    return False


def _tool_choice(asked: dict[str, Any] | None, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    if asked is None:
        return ToolChoice()
    parallel = asked.get("disable_parallel_tool_use") is not True
    match asked:
        case {"type": "auto"}:
            return ToolChoice(parallel=parallel)
        case {"type": "none"}:
            return ToolChoice(ToolMode.NONE)
        case {"type": "any"} if tools:
            return ToolChoice(ToolMode.REQUIRED, parallel=parallel)
        case {"type": "tool", "name": str(name)}:
            if all(tool["function"]["name"] != name for tool in tools):
                raise InvalidRequest(
                    f"Tool '{name[:128]}' not found in provided tools", parameter="tool_choice"
                )
            return ToolChoice(ToolMode.REQUIRED, (name,), parallel=parallel)
        case {"type": "any"}:
            raise InvalidRequest(
                "It needs tools that the model can be offered: those of the client", parameter="tool_choice"
            )
        case {"type": "tool"}:
            raise missing("tool_choice.name")
    raise InvalidRequest("Input should be 'auto', 'any', 'tool' or 'none'", parameter="tool_choice.type")


def _output_format(asked: MessagesBody) -> OutputFormat | None:
    parameter, wanted = "output_config.format", (asked.output_config or {}).get("format")
    if wanted is None:
        parameter, wanted = "output_format", asked.output_format
    match wanted:
        case None:
            return None
        case {"type": "json_schema", "schema": dict(schema)}:
            return OutputFormat(FormatKind.JSON_SCHEMA, schema, parameter=f"{parameter}.schema")
    raise InvalidRequest("Input should be a 'json_schema' with its schema", parameter=parameter)


def _thinks(asked: MessagesBody) -> bool:
    """A client that does not say so expects no block of thinking before the text."""
    match asked.thinking:
        case None | {"type": "disabled"}:
            return False
        case {"type": "enabled", "budget_tokens": int(budget)}:
            if budget < MIN_THINKING_TOKENS:
                raise InvalidRequest(
                    f"Input should be greater than or equal to {MIN_THINKING_TOKENS}",
                    parameter="thinking.enabled.budget_tokens",
                )
            if asked.max_tokens and budget >= asked.max_tokens:
                raise InvalidRequest(
                    "`max_tokens` must be greater than `thinking.budget_tokens`", parameter="max_tokens"
                )
            return True
        case {"type": "enabled"}:
            raise InvalidRequest("Input should be an integer", parameter="thinking.enabled.budget_tokens")
        case {"type": "adaptive" | "between_tools"}:
            return True
    raise InvalidRequest("Input should be 'enabled', 'disabled' or 'adaptive'", parameter="thinking.type")


def _user(metadata: dict[str, Any] | None) -> str | None:
    user = (metadata or {}).get("user_id")
    if user is not None and not isinstance(user, str):
        raise InvalidRequest("Input should be text", parameter="metadata.user_id")
    return user
