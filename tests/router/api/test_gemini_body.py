"""What Gemini's bodies become: messages, tools, formats; in either spelling, and from any JSON at all."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.answers.wishes import FormatKind, OutputFormat, ToolChoice, ToolMode
from router.api.chat_request import ChatRequest
from router.api.gemini.body import read_counted, read_gemini
from router.api.gemini.fields import GenerateContent
from router.api.gemini.paths import ModelMethod, model_method, with_path_fields
from router.api.gemini.schemas import json_schema
from router.errors import RouterError


def read(**fields: Any) -> ChatRequest:
    return read_gemini(json.dumps({"model": "models/m", **fields}).encode(), 8)


def said(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "parts": list(parts)}


def test_a_conversation_becomes_messages_as_templates_expect_them() -> None:
    request = read(
        systemInstruction={"parts": [{"text": "Be brief."}, {"text": "Be kind."}]},
        contents=[
            {"parts": {"text": "Weather?"}},
            said("model", {"text": "Hm.", "thought": True}, {"text": "I lo"}),
            said(
                "model",
                {"text": "ok."},
                {"functionCall": {"name": "look", "args": {"city": "Århus"}}},
                {"functionCall": {"name": "look", "args": {"city": "Rome"}, "id": "c9"}},
            ),
            said(
                "user",
                {"functionResponse": {"name": "look", "response": {"result": "wet"}}},
                {"functionResponse": {"name": "look", "response": {"output": "dry"}, "id": "c9"}},
                {"text": "And now?"},
            ),
        ],
    )
    assert request.model == "m"
    assert request.messages == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": "look", "arguments": {"city": city}},
                }
                for call_id, city in (("call_0", "Århus"), ("c9", "Rome"))
            ],
        },
        {"role": "tool", "name": "look", "content": '{"result": "wet"}', "tool_call_id": "call_0"},
        {"role": "tool", "name": "look", "content": "dry", "tool_call_id": "c9"},
        {"role": "user", "content": "And now?"},
    ]


def test_both_spellings_of_a_field_say_the_same() -> None:
    contents = [
        said("user", {"text": "Hello"}),
        said("model", {"functionCall": {"name": "f", "args": {"max_output_tokens": {"top_k": 1}}}}),
        said("function", {"functionResponse": {"name": "f", "response": {"tool_config": 1}}}),
    ]
    schema = {"type": "OBJECT", "properties": {"top_p": {"type": "STRING", "maxLength": "3"}}}
    camel = {
        "contents": contents,
        "systemInstruction": {"parts": [{"text": "Brief."}]},
        "tools": [{"functionDeclarations": [{"name": "f", "parameters": schema}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
        "generationConfig": {
            **{"maxOutputTokens": 3, "topK": 4.0, "topP": 0.5, "temperature": 0.25, "seed": 7},
            **{"presencePenalty": 0.5, "frequencyPenalty": -0.5, "stopSequences": ["a"]},
            "thinkingConfig": {"includeThoughts": True},
        },
        "cacheSalt": "s",
    }
    text = json.dumps(camel)
    for name, other in (
        ("systemInstruction", "system_instruction"),
        ("functionDeclarations", "function_declarations"),
        ("functionCallingConfig", "function_calling_config"),
        ("allowedFunctionNames", "allowed_function_names"),
        ("toolConfig", "tool_config"),
        ("functionCall", "function_call"),
        ("functionResponse", "function_response"),
        ("generationConfig", "generation_config"),
        ("maxOutputTokens", "max_output_tokens"),
        ("maxLength", "max_length"),
        ("thinkingConfig", "thinking_config"),
        ("includeThoughts", "include_thoughts"),
        ("topK", "top_k"),
        ("presencePenalty", "presence_penalty"),
        ("cacheSalt", "cache_salt"),
    ):
        assert f'"{name}"' in text
        text = text.replace(f'"{name}"', f'"{other}"')
    request = read(**camel)
    assert read(**json.loads(text)) == request
    assert request.tool_choice == ToolChoice(ToolMode.REQUIRED, ("f",))
    assert request.messages[2]["tool_calls"][0]["function"]["arguments"] == {
        "max_output_tokens": {"top_k": 1}
    }
    assert request.messages[3]["content"] == '{"tool_config": 1}'
    assert request.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"top_p": {"type": "string", "maxLength": 3}},
    }
    assert (request.max_tokens, request.top_k, request.cache_salt) == (3, 4, "s")
    assert (request.top_p, request.temperature, request.seed, request.stop) == (0.5, 0.25, 7, ["a"])
    assert (request.presence_penalty, request.frequency_penalty) == (0.5, -0.5)
    assert request.answers == {"thoughts": True}


def test_gemini_s_schemas_become_json_schemas() -> None:
    schema = {
        "type": "OBJECT",
        "propertyOrdering": ["b", "a"],
        "required": ["a"],
        "properties": {
            "a": {"type": "ARRAY", "items": {"type": "INTEGER", "format": "int32"}, "minItems": "1"},
            "b": {"type": "STRING", "format": "enum", "enum": ["x", "y"], "nullable": True},
            "c": {"any_of": [{"type": "NUMBER"}, {"type": "BOOLEAN"}], "nullable": True},
            "type": {"type": "TYPE_UNSPECIFIED"},
        },
    }
    made = json_schema(schema, "s")
    assert made == {
        "type": "object",
        "required": ["a"],
        "properties": {
            "b": {"type": ["string", "null"], "enum": ["x", "y", None]},
            "a": {"type": "array", "items": {"type": "integer", "format": "int32"}, "minItems": 1},
            "c": {"anyOf": [{"type": "number"}, {"type": "boolean"}, {"type": "null"}]},
            "type": {},
        },
    }
    assert list(made["properties"])[:2] == ["b", "a"]
    assert json_schema(made, "s") == made


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"responseMimeType": "text/plain"}, None),
        (
            {"responseMimeType": "application/json", "responseSchema": {"type": "STRING"}},
            OutputFormat(
                FormatKind.JSON_SCHEMA, {"type": "string"}, parameter="generationConfig.responseSchema"
            ),
        ),
        (
            {"responseMimeType": "application/json", "responseJsonSchema": {"const": 1}},
            OutputFormat(
                FormatKind.JSON_SCHEMA, {"const": 1}, parameter="generationConfig.responseJsonSchema"
            ),
        ),
        (
            {"responseMimeType": "application/json"},
            OutputFormat(
                FormatKind.JSON_SCHEMA,
                {"type": ["object", "array"]},
                parameter="generationConfig.responseSchema",
            ),
        ),
        (
            {"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING", "enum": ["a", "b"]}},
            OutputFormat(FormatKind.CHOICE, choices=("a", "b"), parameter="generationConfig.responseSchema"),
        ),
    ],
)
def test_what_an_answer_must_be(config: dict[str, Any], expected: OutputFormat | None) -> None:
    assert read(contents=[said("user", {"text": "x"})], generationConfig=config).output_format == expected


def test_no_budget_for_thinking_turns_it_off() -> None:
    def arguments(config: dict[str, Any]) -> dict[str, Any]:
        return read(contents=[], generationConfig={"thinkingConfig": config}).template_arguments

    assert arguments({"thinkingBudget": 0}) == {"enable_thinking": False}
    assert arguments({"thinkingBudget": -1}) == arguments({}) == {}


def test_a_path_says_model_and_method() -> None:
    assert model_method("/v1beta/models/org/name:7b:generateContent") == ("org/name:7b", "generateContent")
    assert model_method("/explain/v1/models/m:countTokens") == ("m", "countTokens")
    for other in (
        "/v1/models/name:7b",
        "/v1beta/models/:generateContent",
        "/v1beta/models/m:generateContent/",
    ):
        assert model_method(other) is None


@given(st.dictionaries(st.text(), st.integers() | st.text()), st.text(alphabet=" \n\t", max_size=2))
def test_the_path_counts_whatever_a_body_says(fields: dict[str, Any], space: str) -> None:
    body = f"{space}{json.dumps(fields).replace('{', '{' + space, 1)}{space}".encode()
    changed = json.loads(with_path_fields(body, ModelMethod('a"b', "streamGenerateContent")))
    assert changed == {**fields, "model": 'a"b', "stream": True}


@given(st.binary(max_size=40).map(lambda raw: b"{" + raw + b"}") | st.binary(max_size=40))
def test_the_path_s_fields_make_no_json_of_what_is_none(body: bytes) -> None:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        with pytest.raises((ValueError, RecursionError)):
            msgspec.json.decode(with_path_fields(body, ModelMethod("m", "generateContent")))


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        *GenerateContent.__struct_encode_fields__,
        *GenerateContent.__struct_fields__,
        *("parts", "role", "text", "thought", "functionCall", "function_response", "name", "args", "id"),
        *(
            "response",
            "functionDeclarations",
            "parameters",
            "type",
            "properties",
            "items",
            "enum",
            "nullable",
        ),
        *("responseSchema", "response_mime_type", "maxOutputTokens", "stopSequences", "thinkingConfig"),
        *("functionCallingConfig", "mode", "allowedFunctionNames", "anyOf", "minItems", "propertyOrdering"),
        *("generateContentRequest", "topK", "logprobs", "responseLogprobs"),
    ]
)
WORDS = st.sampled_from(["OBJECT", "STRING", "application/json", "text/x.enum", "ANY", "model", "user", "f"])
SHAPED = st.recursive(
    LEAVES | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=25,
)
PARTS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("text", "functionCall", "functionResponse"), SHAPED)
)
BODIES = st.fixed_dictionaries(
    {"model": st.just("m"), "contents": st.lists(st.fixed_dictionaries({"parts": st.lists(PARTS)})) | SHAPED},
    optional={
        "tools": st.lists(st.dictionaries(NAMES, SHAPED, max_size=2), max_size=2),
        "generationConfig": st.dictionaries(NAMES, SHAPED, max_size=4),
        "systemInstruction": SHAPED,
        "toolConfig": SHAPED,
    },
)


@given(JSON | SHAPED | BODIES)
def test_nothing_but_a_refusal_comes_of_any_json(body: Any) -> None:
    raw = json.dumps(body).encode()
    for reads in (lambda: read_gemini(raw, 8), lambda: read_counted(raw)):
        try:
            request = reads()
        except RouterError:
            continue
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=ChatRequest) is not None
        for message in request.messages:
            assert isinstance(message["content"], str)


@pytest.mark.parametrize(
    "deep",
    [
        '{"contents": [], "tools": [{"functionDeclarations": [{"name": "f", "parameters": DEEP}]}]}',
        '{"contents": [{"parts": [{"functionResponse": {"name": "f", "response": DEEP}}]}]}',
        '{"generationConfig": {"responseMimeType": "application/json", "response_schema": DEEP}}',
    ],
)
@pytest.mark.parametrize("depth", [100, 400, 800, 5000])
def test_what_nests_deeply_is_read_or_refused(deep: str, depth: int) -> None:
    inner = '{"items": ' * depth + "{}" + "}" * depth
    try:
        read_gemini(deep.replace("DEEP", inner).encode(), 8)
    except RouterError:
        assert depth > 100
