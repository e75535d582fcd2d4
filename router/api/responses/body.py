"""The body of OpenAI's Responses → a ChatRequest.

Owns the body's fields, their limits, and what of them an answer repeats. Pure: it also runs in the process
that prepares large bodies.
"""

from typing import Annotated, Any

import msgspec

from router.answers.wishes import FormatKind, OutputFormat
from router.api.caching import compared_id, keeps_of
from router.api.chat_request import ChatRequest, KeepThrough
from router.api.field_table import FieldRefusal, FieldTable
from router.api.json_body import check_range, encode_json, invalid, missing, unsupported
from router.api.peer_fields import OPENAI_HINTS, Names, PeerFields, idle_at, moved, refused_fields
from router.api.reasoning_effort import reasoning_arguments
from router.api.responses.input import Conversation
from router.api.responses.tools import offered_tools, tool_choice
from router.api.sampling import GenerationFields, check_fields, stream_options_table
from router.api.structured_outputs import output_format_of
from router.errors import InvalidRequest, about_model

MAX_TOP_LOGPROBS = 20
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_ECHOED_BYTES = 128 * 2**10
"""For each of tools, instructions, a format and a choice: longer ones are left out of the answer, whose
stream has them three times."""

PLAIN_TEXT = {"type": "text"}

ENCRYPTED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = frozenset(
    {
        ENCRYPTED_REASONING,
        LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
VERBOSITIES = ("low", "medium", "high")
SUMMARIES = ("auto", "concise", "detailed", "none")
TRUNCATIONS = ("auto", "disabled")
SERVICE_TIERS = ("auto", "default", "fast", "flex", "priority", "scale")


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextWishes(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(PeerFields, kw_only=True):
    input: str | list[Any] | None = None
    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextWishes | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    service_tier: str | None = None
    previous_response_id: str | None = None
    enable_response_messages: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Repeated(msgspec.Struct, kw_only=True):
    """Fields of the question that each response repeats."""

    background: bool = False
    instructions: Any
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    prompt_cache_options: dict[str, str | None] | None
    prompt_cache_retention: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str = "default"
    text: dict[str, Any]
    tool_choice: Any
    tools: Annotated[Any, msgspec.Meta(extra_json_schema={"type": "array"})]
    top_logprobs: int
    truncation: str
    user: str | None


class Echo(msgspec.Struct, frozen=True):
    """Facts of the question for the answer's writer. `fields` are the response's fields that repeat it, as
    JSON without brackets. `spaces` map a function's name for the model to its namespace and name there."""

    fields: bytes
    spaces: dict[str, tuple[str, str]]
    packs_reasoning: bool
    is_stored: bool
    wants_diagnostics: bool


_FIELDS = tuple(name for name in GenerationFields.__struct_fields__ if name != "max_tokens")
_NAMES = Names("max_output_tokens", response_format="text.format", thinking="reasoning.effort")
_NOT_SERVED = FieldRefusal("'{name}' is not supported.")
RESPONSE = FieldTable(
    ResponsesBody,
    hints=OPENAI_HINTS | {"agent_reference", "betas", "context_management", "stream_obfuscation"},
    refused={
        **refused_fields(ResponsesBody, _NAMES),
        "best_of": FieldRefusal("'{name}' is not supported.", idle_at(1)),
        "conversation": FieldRefusal(
            "There are no stored conversations here; 'previous_response_id' continues a response.", (None,)
        ),
        **dict.fromkeys(("continue_final_message", "echo", "suffix"), _NOT_SERVED),
        **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), _NOT_SERVED),
        "add_generation_prompt": _NOT_SERVED._replace(idle=idle_at(True)),
        "function_call": moved("tool_choice"),
        "functions": moved("tools"),
        "logprobs": FieldRefusal("'{name}' is not supported: 'include' asks for them, with 'top_logprobs'."),
        "max_completion_tokens": moved("max_output_tokens"),
        "max_tokens": moved("max_output_tokens"),
        "messages": moved("input"),
        "previous_input_messages": FieldRefusal("'previous_response_id' continues a response.", (None,)),
        "prompt": FieldRefusal(
            "There are no prompt templates here; send 'instructions' and 'input'.", (None,)
        ),
        "reasoning_effort": moved("reasoning.effort"),
        "response_format": moved("text.format"),
        "system": moved("instructions"),
    },
    inner={
        "stream_options": stream_options_table,
        "reasoning": FieldTable(Reasoning),
        "text": FieldTable(TextWishes),
    },
)


def read_response(body: bytes, max_choices: int) -> ChatRequest:
    """Raises InvalidRequest that names what is wrong where."""
    asked, unknown = RESPONSE.read(body)
    with about_model(asked.model):
        _check(asked)
        return _request(asked, unknown)


def _request(asked: ResponsesBody, unknown: list[str]) -> ChatRequest:
    items = asked.input if isinstance(asked.input, list) else ()
    offered = offered_tools(asked.tools or [], items)
    parallel = asked.parallel_tool_calls is not False
    conversation = Conversation(offered.names)
    if asked.instructions:
        conversation.add("instructions", {"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        conversation.add("input", {"role": "user", "content": asked.input})
    for position, item in enumerate(items):
        conversation.add(f"input[{position}]", item)
    options = asked.prompt_cache_options
    keeps = keeps_of(asked.prompt_cache_retention, options, conversation.breakpoints)
    effort = asked.reasoning.effort if asked.reasoning is not None else None
    include = asked.include or ()
    return ChatRequest(
        **{name: getattr(asked, name) for name in _FIELDS},
        max_tokens=asked.max_output_tokens,
        messages=conversation.messages,
        images=conversation.images.images,
        tools=offered.tools,
        tool_choice=tool_choice(asked.tool_choice, offered, parallel=parallel),
        output_format=_output_format(asked),
        template_arguments={
            **reasoning_arguments("reasoning.effort", effort),
            **(asked.chat_template_kwargs or {}),
        },
        num_logprobs=(asked.top_logprobs or 0) if LOGPROBS in include else None,
        keeps=[KeepThrough(seconds, position) for seconds, position in keeps],
        only_prompt=options is not None and bool(options.prewarm),
        compared_id=compared_id(options),
        messages_field="input",
        unknown_fields=unknown + offered.unknown_kinds,
        tool_parameter="tools",  # those of other kinds are among them, so their numbers are others
        answers=Echo(
            fields=encode_json(_repeated(asked))[1:-1],
            spaces={name: spaced for spaced, name in offered.names.items()},
            packs_reasoning=ENCRYPTED_REASONING in include,
            is_stored=asked.store is not False,
            wants_diagnostics=options is not None and options.comparison_response_id is not None,
        ),
    )


def _check(asked: ResponsesBody) -> None:
    if asked.cache is not None:
        raise unsupported("cache", "Named caches are beginnings of chats and completions, not of responses.")
    if asked.enable_response_messages:
        raise unsupported(
            "enable_response_messages", "Responses do not tell the tokens of their prompts; '/tokenize' does."
        )
    if asked.include_reasoning is False:
        raise unsupported("include_reasoning", "Responses always have their reasoning.")
    if asked.background:
        raise unsupported("background", "Responses in the background are not supported.")
    if asked.previous_response_id is not None:  # it has been looked up, and the input is all there
        raise InvalidRequest(
            "The field 'previous_response_id' must be written without escapes.",
            parameter="previous_response_id",
        )
    if asked.input is None:
        raise missing("input")
    check_fields(asked, max_choices=1)
    check_range("top_logprobs", asked.top_logprobs, 0, MAX_TOP_LOGPROBS)
    for name in ("max_output_tokens", "max_tool_calls"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            raise invalid(name, f"{value} is below 1.")
    _check_words(asked)
    _check_metadata(asked.metadata or {})


def _check_words(asked: ResponsesBody) -> None:
    reasoning, text = asked.reasoning or Reasoning(), asked.text or TextWishes()
    for parameter, value, known in (
        ("reasoning.summary", reasoning.summary, SUMMARIES),
        ("reasoning.generate_summary", reasoning.generate_summary, SUMMARIES),
        ("text.verbosity", text.verbosity, VERBOSITIES),
        ("truncation", asked.truncation, TRUNCATIONS),
        ("service_tier", asked.service_tier, SERVICE_TIERS),
    ):
        if value is not None and value not in known:
            raise unsupported(parameter, f"Invalid value for '{parameter}': it is one of {', '.join(known)}.")
    for number, name in enumerate(asked.include or ()):
        if name not in INCLUDABLE:
            path = f"include[{number}]"
            raise invalid(path, f"'{name[:60]}'. Supported are {', '.join(sorted(INCLUDABLE))}.")


def _check_metadata(metadata: dict[str, Any]) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(
            f"Invalid 'metadata': at most {MAX_METADATA} keys are allowed.", parameter="metadata"
        )
    for key, value in metadata.items():
        path = f"metadata.{key[:MAX_METADATA_KEY]}"
        if len(key) > MAX_METADATA_KEY:
            raise InvalidRequest(
                f"Invalid key in 'metadata': it has more than {MAX_METADATA_KEY} characters.", parameter=path
            )
        if not isinstance(value, str) or len(value) > MAX_METADATA_VALUE:
            raise invalid(path, f"expected text of at most {MAX_METADATA_VALUE} characters.")


def _output_format(asked: ResponsesBody) -> OutputFormat | None:
    wished = output_format_of(asked)
    named = _text_format(asked.text)
    if wished is not None and named is not None:
        raise InvalidRequest(
            f"Only one of 'text.format' and '{wished.parameter}' is allowed.", parameter=wished.parameter
        )
    return wished or named


def _text_format(text: TextWishes | None) -> OutputFormat | None:
    match None if text is None else text.format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return OutputFormat(FormatKind.JSON_OBJECT, parameter="text.format")
        case {"type": "json_schema", "schema": (dict() | bool()) as schema}:
            return OutputFormat(FormatKind.JSON_SCHEMA, schema, parameter="text.format.schema")
        case {"type": "json_schema"}:
            raise missing("text.format.schema")
    raise unsupported(
        "text.format", "Formats of text that are supported: 'text', 'json_object' and 'json_schema'."
    )


def _repeated(asked: ResponsesBody) -> Repeated:
    reasoning, wishes = asked.reasoning or Reasoning(), asked.text or TextWishes()
    options = asked.prompt_cache_options
    text = {"format": _small_enough(wishes.format or PLAIN_TEXT, PLAIN_TEXT)}
    if wishes.verbosity is not None:
        text["verbosity"] = wishes.verbosity
    return Repeated(
        instructions=_small_enough(asked.instructions, None),
        max_output_tokens=asked.max_output_tokens,
        max_tool_calls=asked.max_tool_calls,
        metadata=asked.metadata or {},
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        prompt_cache_key=asked.prompt_cache_key,
        prompt_cache_options=None
        if options is None
        else {
            "mode": options.mode or "implicit",
            "ttl": options.ttl or "30m",
            "comparison_response_id": options.comparison_response_id,
        },
        prompt_cache_retention=asked.prompt_cache_retention,
        reasoning={"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        safety_identifier=asked.safety_identifier,
        text=text,
        tool_choice="auto" if asked.tool_choice is None else _small_enough(asked.tool_choice, "auto"),
        tools=_small_enough(asked.tools or [], []),
        top_logprobs=asked.top_logprobs or 0,
        truncation=asked.truncation or "disabled",
        user=asked.user,
    )


def _small_enough(value: Any, otherwise: Any) -> Any:
    written = encode_json(value)
    return msgspec.Raw(written) if len(written) <= MAX_ECHOED_BYTES else otherwise
