"""Gemini's body of a generateContent → a ChatRequest.

Owns the limits of its fields and what its contents become as messages: consecutive contents of the model are
one message, since a streamed answer comes back as one for each chunk, and each result of a function is one.
Pure: it also runs in the process that prepares large bodies.
"""

import json
import re
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from router.answers.wishes import FormatKind, OutputFormat, ToolChoice, ToolMode
from router.api.caching import keep_seconds
from router.api.chat_request import ChatRequest, KeepThrough
from router.api.gemini.fields import (
    Content,
    CountTokens,
    FunctionCall,
    FunctionDeclaration,
    FunctionResponse,
    GenerateContent,
    GenerationConfig,
    Part,
    Tool,
    ToolConfig,
)
from router.api.gemini.names import FieldsReader
from router.api.gemini.schemas import json_schema
from router.api.gemini.tables import COUNT, GENERATE
from router.api.images import Images, content_of
from router.api.json_body import (
    check_range,
    check_salt,
    check_timeout,
    invalid,
    read_arguments,
    unsupported,
    wrong_type,
)
from router.api.sampling import MAX_INTEGER, check_stop_strings
from router.errors import InvalidRequest, about_model
from router.prompt.unread import unread

CONTENTS = "contents"
MODELS = "models/"
MAX_STOP_SEQUENCES = 5
MAX_LOGPROBS = 20
JSON_TYPE = "application/json"
ENUM_TYPE = "text/x.enum"
ANY_JSON = {"type": ["object", "array"]}
"""Form of a JSON answer without a schema."""

_ROLES = ("user", "model", "function")
_FUNCTION_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:\-]{0,127}")
_OTHER_ALPHABET = str.maketrans("-_", "+/")
_SILENT = ("executable_code", "code_execution_result", "tool_call", "tool_response")
"""Parts of tools that run at Google, which say nothing to a model here."""
_MEDIA = ("inline_data", "file_data", *_SILENT)
_MODES = {
    None: ToolMode.AUTO,
    "MODE_UNSPECIFIED": ToolMode.AUTO,
    "AUTO": ToolMode.AUTO,
    "VALIDATED": ToolMode.AUTO,
    "ANY": ToolMode.REQUIRED,
    "NONE": ToolMode.NONE,
}

_reader = FieldsReader(GenerateContent)
_count_reader = FieldsReader(CountTokens)

Item = TypeVar("Item")


def read_gemini(body: bytes, max_choices: int) -> ChatRequest:
    """Raises InvalidRequest that names what is wrong where."""
    asked, unknown = GENERATE.read(_reader.respelt(body))
    with about_model(asked.model):
        config = asked.generation_config or GenerationConfig()
        _check(asked, config, max_choices)
        return _bounded_request(asked, config, unknown)


def read_counted(body: bytes) -> ChatRequest:
    """Read a body of countTokens. Raises InvalidRequest."""
    asked, unknown = COUNT.read(_count_reader.respelt(body))
    with about_model(asked.model):
        inner = asked.generate_content_request or asked
        inner.model = asked.model
        if inner.cached_content is not None:
            raise unsupported("cachedContent", "Tokens are counted of what is sent, without 'cachedContent'.")
        return _bounded_request(inner, inner.generation_config or GenerationConfig(), unknown)


def _bounded_request(asked: GenerateContent, config: GenerationConfig, unknown: list[str]) -> ChatRequest:
    try:
        return _request(asked, config, unknown)
    except RecursionError as error:
        raise InvalidRequest("The request is nested too deeply.", parameter=CONTENTS) from error


def _request(asked: GenerateContent, config: GenerationConfig, unknown: list[str]) -> ChatRequest:
    thinking = config.thinking_config
    arguments: dict[str, Any] = {}
    if thinking is not None and thinking.thinking_budget is not None:
        parameter = "generationConfig.thinkingConfig.thinkingBudget"
        check_range(parameter, thinking.thinking_budget, -1, MAX_INTEGER)
        if thinking.thinking_budget == 0:
            arguments["enable_thinking"] = False
    tools = _tools(asked)
    messages = _GeminiMessages()
    return ChatRequest(
        model=asked.model.removeprefix(MODELS),
        stream=asked.stream,
        messages=messages.read(asked),
        images=messages.images.images,
        messages_field=CONTENTS,
        tool_parameter="tools",
        tools=tools,
        tool_choice=_tool_choice(asked.tool_config, tools),
        output_format=_output_format(config),
        template_arguments=arguments,
        add_generation_prompt=asked.add_generation_prompt,
        answers={"thoughts": thinking is not None and bool(thinking.include_thoughts)},
        n=config.candidate_count,
        stop=config.stop_sequences,
        max_tokens=config.max_output_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=None if config.top_k is None else int(config.top_k),
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        seed=config.seed,
        num_logprobs=(config.logprobs or 0) if config.response_logprobs else None,
        keeps=[
            KeepThrough(seconds)
            for seconds in keep_seconds(asked.prompt_cache_retention, asked.prompt_cache_options)
        ],
        only_prompt=asked.prompt_cache_options is not None and bool(asked.prompt_cache_options.prewarm),
        prompt_cache_key=asked.prompt_cache_key,
        cache_salt=asked.cache_salt,
        priority=asked.priority,
        timeout=asked.timeout,
        unknown_fields=unknown,
    )


def _check(asked: GenerateContent, config: GenerationConfig, max_choices: int) -> None:
    for name, value, low, high in (
        ("candidateCount", config.candidate_count, 1, max_choices),
        ("temperature", config.temperature, 0.0, 2.0),
        ("topP", config.top_p, 0.0, 1.0),
        ("topK", config.top_k, -1, MAX_INTEGER),
        ("maxOutputTokens", config.max_output_tokens, 1, MAX_INTEGER),
        ("presencePenalty", config.presence_penalty, -2.0, 2.0),
        ("frequencyPenalty", config.frequency_penalty, -2.0, 2.0),
        ("logprobs", config.logprobs, 0, MAX_LOGPROBS),
    ):
        check_range(f"generationConfig.{name}", value, low, high)
    if config.top_p == 0.0:
        raise invalid("generationConfig.topP", "it must be above 0.")
    if config.top_k is not None and config.top_k != int(config.top_k):
        raise invalid("generationConfig.topK", "it is a count.")
    if config.logprobs is not None and not config.response_logprobs:
        raise InvalidRequest(
            "'generationConfig.logprobs' is only allowed with 'generationConfig.responseLogprobs'.",
            parameter="generationConfig.logprobs",
        )
    check_stop_strings("generationConfig.stopSequences", config.stop_sequences or (), MAX_STOP_SEQUENCES)
    for modality in config.response_modalities or ():
        if modality.upper() != "TEXT":
            raise unsupported("generationConfig.responseModalities", "This model answers with text only.")
    for name, wish in (("speechConfig", config.speech_config), ("imageConfig", config.image_config)):
        if wish is not None:
            raise unsupported(f"generationConfig.{name}", "This model answers with text only.")
    check_range("priority", asked.priority, -MAX_INTEGER, MAX_INTEGER)
    check_salt(asked.cache_salt)
    check_timeout(asked.timeout)
    if asked.cached_content is not None:
        raise InvalidRequest(
            "The field 'cachedContent' must be written without escapes.", parameter="cachedContent"
        )


class _GeminiMessages:
    """Contents as messages, with ids for calls that have none: templates pair results with calls by them."""

    def __init__(self) -> None:
        self.images = Images()
        self._messages: list[dict[str, Any]] = []
        self._num_calls = 0
        self._unanswered: dict[str, deque[str]] = {}

    def read(self, asked: GenerateContent) -> list[dict[str, Any]]:
        """Raises InvalidRequest."""
        if asked.system_instruction is not None:
            parts = _listed(asked.system_instruction.parts)
            texts = [_text(part, f"systemInstruction.parts[{i}]") for i, part in enumerate(parts)]
            self._messages.append({"role": "system", "content": "\n".join(texts)})
        for position, content in enumerate(_listed(asked.contents)):
            self._add(content, f"{CONTENTS}[{position}]")
        return self._messages

    def _add(self, content: Content, path: str) -> None:
        role = content.role or "user"
        if role not in _ROLES:
            raise invalid(f"{path}.role", f"'{role[:40]}'. Supported are {', '.join(_ROLES)}.")
        add = self._add_answer if role == "model" else self._add_question
        add(_listed(content.parts), f"{path}.parts")

    def _add_answer(self, parts: Sequence[Part], path: str) -> None:
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != "assistant":
            last = {"role": "assistant", "content": ""}
            self._messages.append(last)
        for number, part in enumerate(parts):
            if part.function_call is not None:
                last.setdefault("tool_calls", []).append(self._call(part.function_call, f"{path}[{number}]"))
            elif part.inline_data is not None or part.file_data is not None:
                last["content"] += _transcript(part) or unread(part.inline_data or part.file_data)
            elif _is_silent(part):
                continue
            elif part.thought:
                text = _text(part, f"{path}[{number}]")
                last["reasoning_content"] = last.get("reasoning_content", "") + text
            else:
                last["content"] += _text(part, f"{path}[{number}]")

    def _call(self, call: FunctionCall, path: str) -> dict[str, Any]:
        call_id = call.id or f"call_{self._num_calls}"
        self._num_calls += 1
        self._unanswered.setdefault(call.name, deque()).append(call_id)
        arguments = read_arguments(call.args)
        if arguments is None:
            raise wrong_type(f"{path}.functionCall.args", "an object")
        function = {"name": call.name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    def _add_question(self, parts: Sequence[Part], path: str) -> None:
        results: list[tuple[Part, str]] = []
        words: list[tuple[Part, str]] = []
        for number, part in enumerate(parts):
            if not _is_silent(part):
                (words if part.function_response is None else results).append((part, f"{path}[{number}]"))
        for part, place in results:  # the prompt has them first, and images are in its order
            assert part.function_response is not None
            self._messages.append(self._result(part.function_response, place))
        pieces = [self._piece(part, place) for part, place in words]
        if pieces or not parts:
            self._messages.append({"role": "user", "content": content_of(pieces)})

    def _piece(self, part: Part, path: str) -> str | dict[str, Any]:
        """Return a text, or an image as a part of a message."""
        if part.inline_data is None:
            return _text(part, path)
        return self._image(part.inline_data, f"{path}.inlineData")

    def _image(self, inline_data: Any, path: str) -> dict[str, Any]:
        given = inline_data if isinstance(inline_data, dict) else {}
        media_type = given.get("mimeType", given.get("mime_type"))
        data = given.get("data")
        if isinstance(data, str):  # as Google's clients write it: RFC 4648's other alphabet is allowed
            data = data.translate(_OTHER_ALPHABET)
        return self.images.add_base64(path, media_type, data)

    def _result(self, result: FunctionResponse, path: str) -> dict[str, Any]:
        waiting = self._unanswered.get(result.name)
        call_id = result.id
        if waiting and (call_id is None or call_id in waiting):
            call_id = call_id or waiting[0]
            waiting.remove(call_id)
        text = _result_text(result.response)
        pieces: list[str | dict[str, Any]] = [text] if text or not result.parts else []
        for number, part in enumerate(result.parts or ()):
            pieces.append(self._found(part, f"{path}.functionResponse.parts[{number}]"))
        message = {"role": "tool", "name": result.name, "content": content_of(pieces)}
        return message if call_id is None else {**message, "tool_call_id": call_id}

    def _found(self, part: Any, path: str) -> str | dict[str, Any]:
        """Return a text or an image of a result, or words for what else it has, which is written in either
        spelling."""
        given = part if isinstance(part, dict) else {}
        if isinstance(given.get("text"), str):
            return str(given["text"])
        names = ("inlineData", "inline_data", "fileData", "file_data")
        media = next((given[name] for name in names if given.get(name) is not None), part)
        try:
            return self._image(media, f"{path}.inlineData")
        except InvalidRequest:
            return unread(media)


def _is_silent(part: Part) -> bool:
    return not part.text and any(getattr(part, name) is not None for name in _SILENT)


def _transcript(part: Part) -> str:
    match part.audio_transcription:
        case {"text": str(text)}:
            return text
    return ""


def _result_text(response: Any) -> str:
    """A function's output is what stands in `output`, or all of it."""
    if isinstance(response, dict) and "output" in response and "error" not in response:
        response = response["output"]
    if response is None:
        return ""
    return response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)


def _text(part: Part, path: str) -> str:
    for name in _MEDIA:
        if getattr(part, name) is not None:
            shown = "".join([name.split("_")[0], *(word.capitalize() for word in name.split("_")[1:])])
            raise unsupported(f"{path}.{shown}", f"Text and images are read here; '{path}' has '{shown}'.")
    if part.function_call is not None or part.function_response is not None:
        raise InvalidRequest(
            f"Invalid '{path}': calls stand in contents of the model, their results in those of the user.",
            parameter=path,
        )
    return part.text or _transcript(part)


def _tools(asked: GenerateContent) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    names: set[str] = set()
    for position, tool in enumerate(_listed(asked.tools)):
        path = f"tools[{position}]"
        _check_is_ours(tool, path)
        for number, declared in enumerate(_listed(tool.function_declarations)):
            _check_name(declared.name, names, f"{path}.functionDeclarations[{number}].name")
            names.add(declared.name)
            function = _function(declared, f"{path}.functionDeclarations[{number}]")
            tools.append({"type": "function", "function": function})
    return tools


def _check_name(name: str, taken: Collection[str], parameter: str) -> None:
    if _FUNCTION_NAME.fullmatch(name) is None:
        raise invalid(
            parameter,
            "a name begins with a letter or '_', and has up to 128 letters, digits, '_', '.', ':' and '-'.",
        )
    if name in taken:
        raise invalid(parameter, f"there is a function '{name}' before.")


def _check_is_ours(tool: Tool, path: str) -> None:
    for name, value in zip(tool.__struct_encode_fields__, _values(tool), strict=True):
        if value is not None and name != "functionDeclarations":
            raise unsupported(f"{path}.{name}", f"There is no '{name}' here: tools are functions.")


def _values(tool: Tool) -> list[Any]:
    return [getattr(tool, name) for name in tool.__struct_fields__]


def _function(declared: FunctionDeclaration, path: str) -> dict[str, Any]:
    parameters = declared.parameters_json_schema
    if parameters is None:
        parameters = json_schema(declared.parameters or {"type": "object"}, f"{path}.parameters")
    elif not isinstance(parameters, dict):
        raise wrong_type(f"{path}.parametersJsonSchema", "an object")
    function: dict[str, Any] = {"name": declared.name}
    if declared.description is not None:
        function["description"] = declared.description
    return {**function, "parameters": parameters}


def _tool_choice(config: ToolConfig | None, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    calling = None if config is None else config.function_calling_config
    if calling is None:
        return ToolChoice()
    path = "toolConfig.functionCallingConfig"
    if calling.mode not in _MODES:
        raise invalid(f"{path}.mode", f"'{calling.mode!s:.40}'. Supported are AUTO, ANY and NONE.")
    allowed = calling.allowed_function_names or []
    declared = {tool["function"]["name"] for tool in tools}
    for number, name in enumerate(allowed):
        if name not in declared:
            where = f"{path}.allowedFunctionNames[{number}]"
            raise invalid(where, f"no function '{name[:60]}' is declared.")
    return ToolChoice(_MODES[calling.mode], tuple(allowed))


def _output_format(config: GenerationConfig) -> OutputFormat | None:
    parameter = "generationConfig.responseMimeType"
    schema = _response_schema(config)
    match config.response_mime_type:
        case None | "" | "text/plain":
            if schema is not None:
                raise InvalidRequest(
                    f"A response schema needs '{parameter}' to be '{JSON_TYPE}'.", parameter=parameter
                )
            return None
        case "application/json":
            return OutputFormat(
                FormatKind.JSON_SCHEMA,
                ANY_JSON if schema is None else schema,
                parameter=_schema_field(config),
            )
        case "text/x.enum":
            choices = schema.get("enum") if isinstance(schema, dict) else None
            if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
                raise InvalidRequest(
                    f"The type '{ENUM_TYPE}' needs a schema that names the texts in 'enum'.",
                    parameter=_schema_field(config),
                )
            return OutputFormat(FormatKind.CHOICE, choices=tuple(choices), parameter=_schema_field(config))
    raise unsupported(parameter, f"Supported are 'text/plain', '{JSON_TYPE}' and '{ENUM_TYPE}'.")


def _response_schema(config: GenerationConfig) -> Any:
    if config.response_json_schema is not None:
        if not isinstance(config.response_json_schema, dict | bool):
            raise wrong_type("generationConfig.responseJsonSchema", "a schema")
        return config.response_json_schema
    if config.response_schema is None:
        return None
    return json_schema(config.response_schema, "generationConfig.responseSchema")


def _schema_field(config: GenerationConfig) -> str:
    is_json = config.response_json_schema is not None
    return f"generationConfig.{'responseJsonSchema' if is_json else 'responseSchema'}"


def _listed(value: list[Item] | Item | None) -> list[Item]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
