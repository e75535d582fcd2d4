"""JSON schemas of the clients' routes' answers, by name.

Plain data. An object may have more fields than listed: Kvasir's own and vendors' additions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
ANYTHING: Schema = {}
OBJECT: Schema = {"type": "object"}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def a_list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def an_object(_optional: Sequence[str] = (), /, **fields: Schema) -> Schema:
    """All of the fields are there but the optional ones."""
    required = [name for name in fields if name not in _optional]
    return {"type": "object", "properties": fields, "required": required}


_USED = {
    **dict.fromkeys(
        (
            *("requests", "errors", "aborted", "prompt_tokens", "uncached_tokens", "cached_tokens"),
            *("cross_user_cached_tokens", "written_tokens", "output_tokens", "reasoning_tokens"),
        ),
        COUNT,
    ),
    "cached_tokens_by_tier": an_object(device=COUNT, host=COUNT, disk=COUNT),
    "written_tokens_by_ttl": an_object(
        **dict.fromkeys(("none", "5m", "30m", "1h", "12h", "24h"), COUNT),
    ),
    **dict.fromkeys(("cost", "cost_without_cache", "saved"), NUMBER),
}

_OPENAI = {
    "OpenAiError": an_object(
        error=an_object(
            message=TEXT, type=TEXT, param=maybe(TEXT), code=maybe({"type": ["string", "integer"]})
        )
    ),
    "OpenAiUsage": an_object(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=ref("OpenAiPromptDetails"),
        completion_tokens_details=an_object(reasoning_tokens=COUNT),
    ),
    "OpenAiPromptDetails": an_object(
        ("cache_leases", "evicted_early_tokens", "evicted_early_cause"),
        cached_tokens=COUNT,
        cache_write_tokens=COUNT,
        cross_user_cached_tokens=COUNT,
        device_cached_tokens=COUNT,
        host_cached_tokens=COUNT,
        disk_cached_tokens=COUNT,
        pulled_cached_tokens=COUNT,
        cache_leases=a_list(ref("LeaseOutcome")),
        evicted_early_tokens=COUNT,
        evicted_early_cause=maybe(TEXT),
    ),
    "LeaseOutcome": an_object(
        ("reason", "seconds", "tokens"),
        status=one_of("granted", "refused"),
        reason=TEXT,
        seconds=COUNT,
        tokens=COUNT,
    ),
    "ChatCompletion": an_object(
        id=TEXT,
        object=one_of("chat.completion"),
        created=COUNT,
        model=TEXT,
        system_fingerprint=TEXT,
        choices=a_list(
            an_object(
                index=COUNT,
                message=an_object(
                    ("reasoning_content", "tool_calls", "function_call"),
                    role=one_of("assistant"),
                    content=maybe(TEXT),
                    refusal=maybe(TEXT),
                    reasoning_content=TEXT,
                    tool_calls=a_list(
                        an_object(
                            id=TEXT,
                            type=one_of("function"),
                            function=an_object(name=TEXT, arguments=TEXT),
                        )
                    ),
                    function_call=an_object(name=TEXT, arguments=TEXT),
                ),
                logprobs=maybe(OBJECT),
                finish_reason=maybe(TEXT),
            )
        ),
        usage=ref("OpenAiUsage"),
    ),
    "Completion": an_object(
        id=TEXT,
        object=one_of("text_completion"),
        created=COUNT,
        model=TEXT,
        choices=a_list(an_object(index=COUNT, text=TEXT, logprobs=maybe(OBJECT), finish_reason=maybe(TEXT))),
        usage=ref("OpenAiUsage"),
    ),
    "Response": an_object(
        id=TEXT,
        object=one_of("response"),
        created_at=COUNT,
        model=TEXT,
        status=one_of("completed", "incomplete", "failed", "in_progress"),
        error=maybe(OBJECT),
        incomplete_details=maybe(OBJECT),
        output=a_list(an_object(id=TEXT, type=TEXT, status=TEXT)),
        usage=maybe(
            an_object(
                input_tokens=COUNT,
                input_tokens_details=ref("OpenAiPromptDetails"),
                output_tokens=COUNT,
                output_tokens_details=an_object(reasoning_tokens=COUNT),
                total_tokens=COUNT,
            )
        ),
        parallel_tool_calls=FLAG,
        tool_choice=ANYTHING,
        tools=a_list(ANYTHING),
    ),
}

_RESPONSES = {
    "ResponseItems": an_object(
        object=one_of("list"),
        data=a_list(an_object(id=TEXT, type=TEXT)),
        first_id=maybe(TEXT),
        last_id=maybe(TEXT),
        has_more=FLAG,
    ),
    "ResponseTokens": an_object(object=one_of("response.input_tokens"), input_tokens=COUNT),
    "DeletedResponse": an_object(id=TEXT, object=one_of("response"), deleted=FLAG),
}

_ANTHROPIC = {
    "AnthropicError": an_object(
        type=one_of("error"),
        error=an_object(("details",), type=TEXT, message=TEXT, details=an_object(error_code=TEXT)),
        request_id=maybe(TEXT),
    ),
    "Message": an_object(
        id=TEXT,
        type=one_of("message"),
        role=one_of("assistant"),
        model=TEXT,
        content=a_list(an_object(type=one_of("text", "thinking", "tool_use"))),
        stop_reason=maybe(TEXT),
        stop_sequence=maybe(TEXT),
        usage=an_object(
            input_tokens=COUNT,
            output_tokens=COUNT,
            cache_creation_input_tokens=COUNT,
            cache_read_input_tokens=COUNT,
            cache_creation=an_object(ephemeral_5m_input_tokens=COUNT, ephemeral_1h_input_tokens=COUNT),
        ),
    ),
    "MessageTokens": an_object(input_tokens=COUNT),
    "AnthropicModel": an_object(type=one_of("model"), id=TEXT, display_name=TEXT, created_at=TEXT),
    "AnthropicModels": an_object(
        data=a_list(ref("AnthropicModel")), has_more=FLAG, first_id=maybe(TEXT), last_id=maybe(TEXT)
    ),
}

_TOKENS_BY_MODALITY = a_list(an_object(modality=one_of("TEXT", "IMAGE"), tokenCount=COUNT))

_GEMINI = {
    "GeminiError": an_object(
        error=an_object(
            ("details",),
            code={"type": "integer"},
            message=TEXT,
            status=TEXT,
            details=a_list({**an_object(), "properties": {"@type": TEXT}, "required": ["@type"]}),
        )
    ),
    "GeneratedContent": an_object(
        candidates=a_list(
            an_object(
                ("avgLogprobs", "logprobsResult"),
                content=an_object(role=one_of("model"), parts=a_list(ref("AnsweredPart"))),
                finishReason=one_of("STOP", "MAX_TOKENS", "MALFORMED_FUNCTION_CALL"),
                index=COUNT,
                avgLogprobs=NUMBER,
                logprobsResult=OBJECT,
            )
        ),
        usageMetadata=an_object(
            promptTokenCount=COUNT,
            cachedContentTokenCount=COUNT,
            candidatesTokenCount=COUNT,
            thoughtsTokenCount=COUNT,
            totalTokenCount=COUNT,
            promptTokensDetails=_TOKENS_BY_MODALITY,
            cacheTokensDetails=_TOKENS_BY_MODALITY,
        ),
        modelVersion=TEXT,
        responseId=TEXT,
    ),
    "AnsweredPart": an_object(
        ("text", "thought", "functionCall"),
        text=TEXT,
        thought=FLAG,
        functionCall=an_object(id=TEXT, name=TEXT, args=OBJECT),
    ),
    "CountedTokens": an_object(totalTokens=COUNT, promptTokensDetails=_TOKENS_BY_MODALITY),
    "GeminiModel": an_object(
        name=TEXT,
        baseModelId=TEXT,
        version=TEXT,
        displayName=TEXT,
        inputTokenLimit=COUNT,
        outputTokenLimit=COUNT,
        supportedGenerationMethods=a_list(TEXT),
    ),
    "GeminiModels": an_object(models=a_list(ref("GeminiModel"))),
    "CachedContent": an_object(
        ("displayName",),
        name=TEXT,
        model=TEXT,
        displayName=TEXT,
        createTime=TEXT,
        updateTime=TEXT,
        expireTime=TEXT,
        usageMetadata=an_object(totalTokenCount=COUNT),
    ),
    "CachedContents": an_object(
        ("nextPageToken",), cachedContents=a_list(ref("CachedContent")), nextPageToken=TEXT
    ),
    "Nothing": {"type": "object", "maxProperties": 0},
}

_CONTROL = {
    "Model": an_object(
        id=TEXT,
        object=one_of("model"),
        created=COUNT,
        owned_by=TEXT,
        root=TEXT,
        parent=maybe(TEXT),
        max_model_len=COUNT,
    ),
    "AnyModel": {"anyOf": [{"allOf": [ref("Model"), ref("GeminiModel")]}, ref("AnthropicModel")]},
    "Models": an_object(object=one_of("list"), data=a_list(ref("Model")), models=a_list(ref("GeminiModel"))),
    "AnyModels": {"anyOf": [ref("Models"), ref("AnthropicModels")]},
    "Tokens": an_object(
        count=COUNT, max_model_len=COUNT, tokens=a_list(COUNT), token_strs=maybe(a_list(TEXT))
    ),
    "Text": an_object(prompt=TEXT),
    "Health": an_object(status=TEXT),
    "Version": an_object(version=TEXT),
    "UsageCounts": an_object(**_USED),
    "UsageBucket": an_object(
        start=COUNT,
        end=COUNT,
        tenant=TEXT,
        key_id=maybe(TEXT),
        model=maybe(TEXT),
        **_USED,
    ),
    "Usage": an_object(
        object=one_of("usage"),
        start=COUNT,
        end=COUNT,
        bucket=one_of("hour", "day"),
        tenant=maybe(TEXT),
        ratios=maybe({"type": "object", "additionalProperties": {"type": "number"}}),
        data=a_list(ref("UsageBucket")),
        total=ref("UsageCounts"),
    ),
    "CacheExplanation": an_object(
        object=one_of("cache.explanation"),
        request_id=TEXT,
        answer_id=maybe(TEXT),
        created_at={"type": "number"},
        model=maybe(TEXT),
        route=TEXT,
        error=maybe(TEXT),
        prompts=a_list(ref("PromptExplanation")),
    ),
    "PromptExplanation": an_object(
        outcome=one_of("hit", "partial", "miss"),
        cause=TEXT,
        replica=maybe(TEXT),
        prompt_tokens=COUNT,
        cached_tokens=COUNT,
        cached_tokens_by_tier=an_object(device=COUNT, host=COUNT, disk=COUNT),
        lost_tokens=COUNT,
        lost_ms=maybe({"type": "number"}),
        spans=a_list(
            an_object(cause=TEXT, start=COUNT, end=COUNT, replica=maybe(TEXT), at=maybe({"type": "number"}))
        ),
        nearest=maybe(
            an_object(
                request_id=maybe(TEXT),
                answer_id=maybe(TEXT),
                seconds_before={"type": "number"},
                prompt_tokens=COUNT,
                common_tokens=maybe(COUNT),
                diverges_at=maybe(COUNT),
                changed=a_list(TEXT),
            )
        ),
        place=maybe(
            an_object(path=maybe(TEXT), kind=TEXT, is_certain={"type": "boolean"}, sentence=maybe(TEXT))
        ),
    ),
    "Readiness": an_object(
        status=TEXT, num_replicas=COUNT, models={"type": "object", "additionalProperties": COUNT}
    ),
    "Cache": an_object(
        id=TEXT,
        object=one_of("cache"),
        name=maybe(TEXT),
        model=TEXT,
        kind=one_of("chat", "completion", "gemini"),
        tokens=COUNT,
        bytes=COUNT,
        created_at=COUNT,
        expires_at=COUNT,
        expires=TEXT,
        ttl=COUNT,
        lease=maybe(ref("LeaseOutcome")),
    ),
    "Caches": an_object(
        object=one_of("list"),
        data=a_list(ref("Cache")),
        first_id=maybe(TEXT),
        last_id=maybe(TEXT),
        has_more=FLAG,
    ),
    "DeletedCache": an_object(
        id=TEXT, object=one_of("cache.deleted"), deleted=FLAG, lease=one_of("ends_by_itself", "none")
    ),
    "Published": an_object(
        id=TEXT,
        object=one_of("published"),
        model=TEXT,
        name=maybe(TEXT),
        tokens=COUNT,
        created_at=COUNT,
    ),
    "PublishedList": an_object(object=one_of("list"), data=a_list(ref("Published"))),
    "DeletedPublished": an_object(id=TEXT, object=one_of("published.deleted"), deleted=FLAG),
    "Event": {
        **an_object(("event",), event=TEXT, data=TEXT),
        "description": "One of a stream's events. Between them may be comments and empty lines.",
    },
    "OpenApi": an_object(openapi=TEXT, info=OBJECT, paths=OBJECT, components=OBJECT),
}

ANSWERS: Mapping[str, Schema] = {**_OPENAI, **_RESPONSES, **_ANTHROPIC, **_GEMINI, **_CONTROL}
