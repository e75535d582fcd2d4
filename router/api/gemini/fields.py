"""The fields of Gemini's requests.

Plain data. Where a list of objects belongs there may be one object, as Google's own examples have it.
"""

from typing import Any

from msgspec import Raw, Struct, field

from router.api.caching import PromptCacheOptions


class FunctionCall(Struct, rename="camel", kw_only=True):
    name: str
    id: str | None = None
    args: Any = None


class FunctionResponse(Struct, rename="camel", kw_only=True):
    name: str
    id: str | None = None
    response: Any = None
    parts: list[Any] | None = None


class Part(Struct, rename="camel", kw_only=True):
    """One of these; `thought` says that the text is reasoning."""

    text: str | None = None
    thought: bool | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    inline_data: Any = None
    file_data: Any = None
    executable_code: Any = None
    code_execution_result: Any = None
    tool_call: Any = None
    tool_response: Any = None
    audio_transcription: Any = None


class Content(Struct, rename="camel", kw_only=True):
    role: str | None = None
    parts: list[Part] | Part | None = None


class FunctionDeclaration(Struct, rename="camel", kw_only=True):
    """`parameters` are in Gemini's own dialect of schemas, `parameters_json_schema` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: Any = None


class Tool(Struct, rename="camel", kw_only=True, forbid_unknown_fields=True):
    """Functions. Other tools run at Google and are not served."""

    function_declarations: list[FunctionDeclaration] | FunctionDeclaration | None = None
    google_search: Any = None
    google_search_retrieval: Any = None
    google_maps: Any = None
    code_execution: Any = None
    url_context: Any = None
    file_search: Any = None
    computer_use: Any = None
    retrieval: Any = None
    mcp_servers: Any = None


class FunctionCallingConfig(Struct, rename="camel", kw_only=True):
    mode: str | None = None
    allowed_function_names: list[str] | None = None


class ToolConfig(Struct, rename="camel", kw_only=True):
    function_calling_config: FunctionCallingConfig | None = None


class ThinkingConfig(Struct, rename="camel", kw_only=True):
    include_thoughts: bool | None = None
    thinking_budget: int | None = None


class GenerationConfig(Struct, rename="camel", kw_only=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    candidate_count: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: Any = None
    response_logprobs: bool | None = None
    logprobs: int | None = None
    thinking_config: ThinkingConfig | None = None
    response_modalities: list[str] | None = None
    speech_config: Any = None
    image_config: Any = None


class GenerateContent(Struct, rename="camel", kw_only=True):
    """`model` and `stream` stand in the path, and are put here by the router. From `prompt_cache_key` on the
    fields are those of every dialect; `add_generation_prompt` is for what is computed to be kept."""

    model: str = ""
    stream: bool = False
    contents: list[Content] | Content | None = None
    system_instruction: Content | None = None
    tools: list[Tool] | Tool | None = None
    tool_config: ToolConfig | None = None
    generation_config: GenerationConfig | None = None
    cached_content: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    add_generation_prompt: bool = True


class CountTokens(GenerateContent, kw_only=True, rename="camel"):
    """Either the fields of a request, or a request in a field of its own."""

    generate_content_request: GenerateContent | None = None


class NewCachedContent(Struct, rename="camel", kw_only=True):
    """Body that creates a cache; its content stays JSON. One of `ttl` ("3600s") and `expire_time`."""

    model: str
    contents: Raw = field(default_factory=Raw)
    system_instruction: Raw = field(default_factory=Raw)
    tools: Raw = field(default_factory=Raw)
    tool_config: Raw = field(default_factory=Raw)
    ttl: str | None = None
    expire_time: str | None = None
    display_name: str | None = None
    kms_key_name: str | None = None
    cache_salt: str | None = None


class CachedContentChange(Struct, rename="camel", kw_only=True):
    ttl: str | None = None
    expire_time: str | None = None
    display_name: str | None = None
