"""Bodies of the five dialects that generate: questions, options, conversations, and fields with wrong values.

Owns what is sent. The answers are the model's script's, or arbitrary words by the seed.
"""

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from replicas.media.probes import probe_png
from tests.oracle.cluster import SEEING, TALKING
from tests.oracle.questions import FIELDS, RULES, WRONG_VALUES

Body = dict[str, Any]

SEED = 7
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
AUTHOR = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LONG = "The handbook says that every door is closed at night and opened in the morning. " * 40
PICTURES = [
    base64.b64encode(probe_png(width, 56, colour)).decode()
    for width, colour in ((84, b"\xff\0\0"), (112, b"\0\0\xff"))
]
PICTURE_URL = f"data:image/png;base64,{PICTURES[0]}"


class Asked(NamedTuple):
    label: str
    path: str
    body: Body


class Dialect(NamedTuple):
    """`body` makes one of a question and options; `options` and `conversations` are this dialect's own."""

    name: str
    path: str
    stream_path: str | None
    body: Callable[..., Body]
    options: Mapping[str, Body]
    conversations: Mapping[str, Body]
    wrong: Mapping[str, Body]

    def asked(self) -> Iterator[Asked]:
        for question in [*RULES, "Anything else?"]:
            for label, more in {"plain": {}, "tools": self.options["tools"]}.items():
                yield from self._both_ways(f"question/{question}/{label}", self.body(question, **more))
        for label, more in self.options.items():
            yield from self._both_ways(f"option/{label}", self.body("Count to nine.", **more))
            yield from self._both_ways(f"arbitrary/{label}", self.body("Anything else?", **more))
        for label, body in self.conversations.items():
            yield from self._both_ways(f"conversation/{label}", body)
        for label, body in self.wrong.items():
            yield Asked(f"wrong/{label}", self.path, body)
        for field in FIELDS.split():
            yield Asked(f"field/{field}", self.path, {**self.body("Say hello."), field: "x"})
        for field in WRONG_VALUES.split():
            for value in (-1, 1e9, [], [{"x": 1}], {"a": 1}, True, None, ""):
                body = {**self.body("Say hello."), field: value}
                yield Asked(f"value/{field}/{value!r}", self.path, body)

    def _both_ways(self, label: str, body: Body) -> Iterator[Asked]:
        yield Asked(f"{label}/whole", self.path, body)
        streamed = {**body, "stream": True} if self.stream_path is None else body
        yield Asked(f"{label}/stream", self.stream_path or self.path, streamed)


# -- OpenAI's chats -----------------------------------------------------------------------------------------


def _tool(name: str = "weather", **more: Any) -> Body:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **more}}


def _chat(question: str, **more: Any) -> Body:
    messages = [{"role": "user", "content": question}]
    return {"model": TALKING, "messages": messages, "max_tokens": 40, "seed": SEED, **more}


def _messages(*messages: Body, **more: Any) -> Body:
    return {**_chat("", **more), "messages": list(messages)}


def _said(role: str, content: Any, **more: Any) -> Body:
    return {"role": role, "content": content, **more}


_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}
_STRICT = {"name": "author", "schema": AUTHOR, "strict": True}

_SAMPLED: Mapping[str, Body] = {
    "sampling": {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1},
    "bias": {"logit_bias": {"100": 5, "101": -100}},
    "stop": {"stop": ["five", "never"]},
    "stop with it": {"stop": "five", "include_stop_str_in_output": True},
    "stop token": {"stop_token_ids": [2]},
    "two choices": {"n": 2},
    "four choices": {"n": 4, "temperature": 1.0},
    "one token": {"max_tokens": 1},
    "no end": {"ignore_eos": True, "max_tokens": 20},
    "at least": {"min_tokens": 15},
    "user": {"user": "ann"},
    "user, again": {"safety_identifier": "bob"},
    "key": {"prompt_cache_key": "k"},
    "salt": {"cache_salt": "s"},
    "retention": {"prompt_cache_retention": "24h"},
    "ttl": {"prompt_cache_options": {"ttl": "5m"}},
    "prewarm": {"prompt_cache_options": {"prewarm": True}},
    "timeout": {"timeout": 30},
    "priority": {"priority": 3},
    "special": {"skip_special_tokens": False},
    "regex": {"guided_regex": "[a-c]{5}"},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "grammar": {"guided_grammar": 'start: "a" "b"+ "c"'},
    "json": {"guided_json": AUTHOR},
    "truncated": {"truncate_prompt_tokens": 10},
    "token ids": {"return_token_ids": True},
}
_USAGE = {"stream_options": {"include_usage": True}}
_CHAT_OPTIONS: Mapping[str, Body] = {
    "tools": {"tools": [_tool(), _tool("nothing", description="Does nothing.")]},
    "tool required": {"tools": [_tool()], "tool_choice": "required"},
    "tool none": {"tools": [_tool()], "tool_choice": "none"},
    "tool named": {
        "tools": [_tool(strict=True)],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    },
    "tools one by one": {"tools": [_tool()], "parallel_tool_calls": False},
    "functions": {"functions": [{"name": "weather", "parameters": CITY}]},
    "usage": _USAGE,
    "usage all along": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "json object": {"response_format": {"type": "json_object"}},
    "json schema": {"response_format": {"type": "json_schema", "json_schema": _STRICT}},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "logprobs, ids": {"logprobs": True, "return_tokens_as_token_ids": True},
    "two with logprobs": {"n": 2, "logprobs": True, **_USAGE},
    "not thinking": {"enable_thinking": False},
    "kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "no reasoning": {"include_reasoning": False},
    "effort": {"reasoning_effort": "low"},
    "no generation prompt": {"add_generation_prompt": False},
    "metadata": {"metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
    "unknown": {"something_new": {"deep": 1}},
    "compared": {"prompt_cache_options": {"comparison_response_id": "chatcmpl-000000000000000000000000"}},
    **_SAMPLED,
}
_CHAT_CONVERSATIONS: Mapping[str, Body] = {
    "system": _messages(_said("system", LONG), _said("user", "Say hello.")),
    "developer": _messages(_said("developer", "Be kind."), _said("user", "Say hello.")),
    "second turn": _messages(
        _said("user", "Say hello."),
        _said("assistant", "Hello there, my friend!"),
        _said("user", "21 degrees"),
    ),
    "result": _messages(
        _said("user", "What is the weather in Paris?"),
        _said("assistant", None, tool_calls=[_CALL]),
        _said("tool", "5 degrees", tool_call_id="call_1"),
        tools=[_tool()],
    ),
    "reasoning comes back": _messages(
        _said("user", "What is the sky like?"),
        _said("assistant", "It is blue.", reasoning_content="They ask about the sky."),
        _said("user", "Count to nine."),
    ),
    "parts": _messages(_said("user", [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello."}])),
    "goes on": _messages(
        _said("user", "Say hello."),
        _said("assistant", "Hello th"),
        continue_final_message=True,
        add_generation_prompt=False,
    ),
    "breakpoint": _messages(
        _said("system", [{"type": "text", "text": LONG, "prompt_cache_breakpoint": {"mode": "explicit"}}]),
        _said("user", "Say hello."),
    ),
    "picture": {
        **_messages(
            _said(
                "user",
                [{"type": "text", "text": "Say "}, {"type": "image_url", "image_url": {"url": PICTURE_URL}}],
            )
        ),
        "model": SEEING,
    },
    "pictures": {
        **_messages(
            _said(
                "user",
                [
                    *(
                        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{each}"}}
                        for each in PICTURES
                    ),
                    {"type": "text", "text": "Say hello."},
                ],
            )
        ),
        "model": SEEING,
    },
}
_CHAT_WRONG: Mapping[str, Body] = {
    "no model": {"messages": [_said("user", "Hi")]},
    "other model": {**_chat("Hi"), "model": "nobody"},
    "no messages": {"model": TALKING},
    "empty messages": _messages(),
    "role": _messages(_said("king", "Hi")),
    "content": _messages(_said("user", 5)),
    "part": _messages(_said("user", [{"type": "video", "video": "x"}])),
    "picture here": _messages(_said("user", [{"type": "image_url", "image_url": {"url": PICTURE_URL}}])),
    "picture by address": {
        **_messages(
            _said("user", [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}])
        ),
        "model": SEEING,
    },
    "broken picture": {
        **_messages(
            _said("user", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])
        ),
        "model": SEEING,
    },
    "result without call": _messages(_said("user", "Hi"), _said("tool", "x", tool_call_id="call_9")),
    "tool without name": _chat("Hi", tools=[{"type": "function", "function": {}}]),
    "tool of another kind": _chat("Hi", tools=[{"type": "custom", "custom": {"name": "x"}}]),
    "tool not offered": _chat(
        "Hi", tools=[_tool()], tool_choice={"type": "function", "function": {"name": "b"}}
    ),
    "same tools": _chat("Hi", tools=[_tool(), _tool()]),
    "schema": _chat("Hi", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}),
    "schema that nothing meets": _chat("Hi", guided_json={"type": "string", "pattern": "("}),
    "regex": _chat("Hi", guided_regex="("),
    "grammar": _chat("Hi", guided_grammar="start: ???"),
    "two formats": _chat("Hi", guided_regex="a", guided_choice=["b"]),
    "too long": _chat("word " * 140_000),
    "too many tokens": _chat("Hi", max_tokens=200_000),
    "five stops": _chat("Hi", stop=["a", "b", "c", "d", "e"]),
    "many choices": _chat("Hi", n=17),
    "cache": _chat("Hi", cache="cache_000000000000000000000000"),
    "top logprobs alone": _chat("Hi", top_logprobs=2),
    "deep": _chat("Hi", metadata=json.loads("[" * 500 + "]" * 500)),
}


# -- OpenAI's completions -----------------------------------------------------------------------------------


def _completion(prompt: Any, **more: Any) -> Body:
    return {"model": TALKING, "prompt": prompt, "max_tokens": 24, "seed": SEED, **more}


_COMPLETION_OPTIONS: Mapping[str, Body] = {
    "tools": {"echo": True},
    "echo and nothing": {"echo": True, "max_tokens": 0},
    "logprobs": {"logprobs": 2},
    "logprobs of none": {"logprobs": 0},
    "usage": _USAGE,
    "usage all along": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "json schema": {"response_format": {"type": "json_schema", "json_schema": _STRICT}},
    "no special tokens": {"add_special_tokens": False},
    **_SAMPLED,
}
_COMPLETION_CONVERSATIONS: Mapping[str, Body] = {
    "token ids": _completion([100, 101, 102, 103]),
    "several": _completion(["Say hello.", "Count to nine."]),
    "several, twice": _completion(["Say hello.", "Anything"], n=2, **_USAGE),
    "lists of ids": _completion([[100, 101], [102, 103, 104]]),
    "long": _completion(LONG),
}
_COMPLETION_WRONG: Mapping[str, Body] = {
    "no prompt": {"model": TALKING},
    "empty": _completion(""),
    "empty list": _completion([]),
    "ids out of range": _completion([1_000_000]),
    "mixed": _completion(["a", 5]),
    "other model": {**_completion("a"), "model": "nobody"},
    "too long": _completion("word " * 140_000),
    "many prompts": _completion(["a"] * 129),
}


# -- Anthropic's messages -----------------------------------------------------------------------------------


def _message(question: str, **more: Any) -> Body:
    messages = [{"role": "user", "content": question}]
    return {"model": TALKING, "max_tokens": 40, "messages": messages, "seed": SEED, **more}


def _turns(*messages: Body, **more: Any) -> Body:
    return {**_message("", **more), "messages": list(messages)}


_A_TOOL = {"name": "weather", "description": "The weather.", "input_schema": CITY}
_MARK = {"type": "ephemeral"}
_USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}}
_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURES[0]}}
_MESSAGE_OPTIONS: Mapping[str, Body] = {
    "tools": {"tools": [_A_TOOL]},
    "tool any": {"tools": [_A_TOOL], "tool_choice": {"type": "any"}},
    "tool named": {"tools": [_A_TOOL], "tool_choice": {"type": "tool", "name": "weather"}},
    "tool none": {"tools": [_A_TOOL], "tool_choice": {"type": "none"}},
    "one by one": {"tools": [_A_TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    "tools of theirs": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
    "thinking omitted": {"thinking": {"type": "adaptive", "display": "omitted"}},
    "stops": {"stop_sequences": ["five", "never"]},
    "sampling": {"temperature": 0.5, "top_p": 0.9, "top_k": 40},
    "user": {"metadata": {"user_id": "ann"}},
    "format": {"output_config": {"format": {"type": "json_schema", "schema": AUTHOR}}},
    "mark at the top": {"cache_control": _MARK},
    "system": {"system": "Be kind."},
    "system, marked": {"system": [{"type": "text", "text": LONG, "cache_control": {**_MARK, "ttl": "1h"}}]},
    "billing": {"system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}]},
    "no tokens": {"max_tokens": 0},
    "one token": {"max_tokens": 1},
    "key": {"prompt_cache_key": "k", "cache_salt": "s", "prompt_cache_retention": "24h"},
    "diagnostics": {"diagnostics": {"previous_message_id": "msg_000000000000000000000000"}},
    "hints": {"service_tier": "auto", "betas": ["x"], "context_management": {"edits": []}},
}
_MESSAGE_CONVERSATIONS: Mapping[str, Body] = {
    "second turn": _turns(
        _said("user", "Say hello."),
        _said("assistant", "Hello there, my friend!"),
        _said("user", "21 degrees"),
    ),
    "result": _turns(
        _said("user", "What is the weather in Paris?"),
        _said("assistant", [_USE]),
        _said("user", [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "5 degrees"}]),
        tools=[_A_TOOL],
    ),
    "result that is an error": _turns(
        _said("user", "What is the weather in Paris?"),
        _said("assistant", [{"type": "text", "text": "I look."}, _USE]),
        _said(
            "user",
            [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "5 degrees", "is_error": True}],
        ),
    ),
    "thinking comes back": _turns(
        _said("user", "What is the sky like?"),
        _said(
            "assistant",
            [
                {"type": "thinking", "thinking": "They ask about the sky.", "signature": "x"},
                {"type": "text", "text": "It is blue."},
            ],
        ),
        _said("user", "Count to nine."),
    ),
    "goes on": _turns(_said("user", "Say hello."), _said("assistant", "Hello th")),
    "system in between": _turns(
        _said("user", "Hi"), _said("system", "Be kind."), _said("user", "Say hello.")
    ),
    "marks": _turns(
        _said(
            "user",
            [{"type": "text", "text": LONG, "cache_control": _MARK}, {"type": "text", "text": "Say hello."}],
        )
    ),
    "document": _turns(
        _said(
            "user",
            [
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": LONG}},
                {"type": "text", "text": "Say hello."},
            ],
        )
    ),
    "picture": {**_turns(_said("user", [_IMAGE, {"type": "text", "text": "Say hello."}])), "model": SEEING},
}
_MESSAGE_WRONG: Mapping[str, Body] = {
    "no model": {"max_tokens": 5, "messages": [_said("user", "Hi")]},
    "no max_tokens": {"model": TALKING, "messages": [_said("user", "Hi")]},
    "other model": {**_message("Hi"), "model": "nobody"},
    "empty messages": _turns(),
    "role": _turns(_said("king", "Hi")),
    "part": _turns(_said("user", [{"type": "video"}])),
    "picture here": _turns(_said("user", [_IMAGE])),
    "result without call": _turns(
        _said("user", [{"type": "tool_result", "tool_use_id": "toolu_9", "content": "x"}])
    ),
    "five marks": _turns(_said("user", [{"type": "text", "text": "a", "cache_control": _MARK}] * 5)),
    "marks in the wrong order": _turns(
        _said(
            "user",
            [
                {"type": "text", "text": "a", "cache_control": _MARK},
                {"type": "text", "text": "b", "cache_control": {**_MARK, "ttl": "1h"}},
            ],
        )
    ),
    "budget": _message("Hi", thinking={"type": "enabled", "budget_tokens": 5}),
    "tool without schema": _message("Hi", tools=[{"name": "x"}]),
    "thread": _message("Hi", thread={"id": "x"}),
    "too long": _message("word " * 140_000),
}


# -- OpenAI's Responses -------------------------------------------------------------------------------------


def _response(question: Any, **more: Any) -> Body:
    return {"model": TALKING, "input": question, "max_output_tokens": 40, "seed": SEED, **more}


_R_TOOL = {"type": "function", "name": "weather", "parameters": CITY}
_R_CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Paris"}'}
_R_RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "5 degrees"}
_R_FORMAT = {"type": "json_schema", "name": "author", "schema": AUTHOR, "strict": True}
_RESPONSE_OPTIONS: Mapping[str, Body] = {
    "tools": {"tools": [_R_TOOL]},
    "tool required": {"tools": [_R_TOOL], "tool_choice": "required"},
    "tool named": {"tools": [_R_TOOL], "tool_choice": {"type": "function", "name": "weather"}},
    "tools of theirs": {"tools": [{"type": "web_search"}, {"type": "custom", "name": "x"}]},
    "one by one": {"tools": [_R_TOOL], "parallel_tool_calls": False},
    "instructions": {"instructions": "Be kind."},
    "not stored": {"store": False},
    "format": {"text": {"format": _R_FORMAT, "verbosity": "low"}},
    "object": {"text": {"format": {"type": "json_object"}}},
    "effort": {"reasoning": {"effort": "none", "summary": "auto"}},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "packed reasoning": {"include": ["reasoning.encrypted_content"], "store": False},
    "metadata": {"metadata": {"a": "b"}, "user": "ann", "service_tier": "auto"},
    "key": {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "cache_salt": "s"},
    "prewarm": {"prompt_cache_options": {"prewarm": True}},
    "one token": {"max_output_tokens": 1},
    "sampling": {"temperature": 0.5, "top_p": 0.9, "truncation": "auto", "max_tool_calls": 3},
    "compared": {"prompt_cache_options": {"comparison_response_id": "resp_000000000000000000000000"}},
}
_RESPONSE_CONVERSATIONS: Mapping[str, Body] = {
    "items": _response([_said("system", LONG), _said("user", "Say hello.")]),
    "result": _response(
        [_said("user", "What is the weather in Paris?"), _R_CALL, _R_RESULT], tools=[_R_TOOL]
    ),
    "reasoning comes back": _response(
        [
            _said("user", "What is the sky like?"),
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "They ask about the sky."}],
            },
            _said("assistant", [{"type": "output_text", "text": "It is blue."}]),
            _said("user", [{"type": "input_text", "text": "Count to nine."}]),
        ]
    ),
    "skipped": _response([{"type": "web_search_call", "id": "ws_1"}, _said("user", "Say hello.")]),
    "picture": {
        **_response(
            [
                _said(
                    "user",
                    [
                        {"type": "input_image", "image_url": PICTURE_URL},
                        {"type": "input_text", "text": "Say hello."},
                    ],
                )
            ]
        ),
        "model": SEEING,
    },
}
_RESPONSE_WRONG: Mapping[str, Body] = {
    "no model": {"input": "Hi"},
    "no input": {"model": TALKING},
    "other model": {**_response("Hi"), "model": "nobody"},
    "item": _response([{"type": "nonsense"}]),
    "reference": _response([{"type": "item_reference", "id": "msg_000000000000000000000000"}]),
    "previous": _response("Hi", previous_response_id="resp_000000000000000000000000"),
    "background": _response("Hi", background=True),
    "result without call": _response([_R_RESULT]),
    "misspelt tool": _response("Hi", tools=[{"type": "funktion", "name": "x", "parameters": CITY}]),
    "include": _response("Hi", include=["nonsense"]),
    "format": _response("Hi", text={"format": {"type": "nonsense"}}),
    "too long": _response("word " * 140_000),
}


# -- Gemini's contents --------------------------------------------------------------------------------------


def _gemini(question: str, **more: Any) -> Body:
    config = {"maxOutputTokens": 40, "seed": SEED, **more.pop("generationConfig", {})}
    contents = [{"role": "user", "parts": [{"text": question}]}]
    return {"contents": contents, "generationConfig": config, **more}


def _contents(*contents: tuple[str, Sequence[Body]], **more: Any) -> Body:
    return {**_gemini("", **more), "contents": [{"role": role, "parts": parts} for role, parts in contents]}


_G_TOOL = {
    "functionDeclarations": [
        {
            "name": "weather",
            "parameters": {
                "type": "OBJECT",
                "properties": {"city": {"type": "STRING"}},
                "required": ["city"],
            },
        }
    ]
}
_G_AUTHOR = {"type": "OBJECT", "properties": {"name": {"type": "STRING"}, "age": {"type": "INTEGER"}}}


def _config(**more: Any) -> Body:
    return {"generationConfig": more}


def _calling(**more: Any) -> Body:
    return {"tools": [_G_TOOL], "toolConfig": {"functionCallingConfig": more}}


_GEMINI_OPTIONS: Mapping[str, Body] = {
    "tools": {"tools": [_G_TOOL]},
    "tool any": _calling(mode="ANY"),
    "tool named": _calling(mode="ANY", allowedFunctionNames=["weather"]),
    "tool none": _calling(mode="NONE"),
    "json schema of tools": {
        "tools": [{"functionDeclarations": [{"name": "a", "parametersJsonSchema": CITY}]}]
    },
    "system": {"systemInstruction": {"parts": [{"text": "Be kind."}]}},
    "snake": {"system_instruction": {"parts": [{"text": "Be kind."}]}},
    "sampling": _config(temperature=0.5, topP=0.9, topK=40, presencePenalty=0.5, frequencyPenalty=0.1),
    "stops": _config(stopSequences=["five", "never"]),
    "candidates": _config(candidateCount=2),
    "logprobs": _config(responseLogprobs=True, logprobs=2),
    "json": _config(responseMimeType="application/json"),
    "schema": _config(responseMimeType="application/json", responseSchema=_G_AUTHOR),
    "json schema": _config(responseMimeType="application/json", responseJsonSchema=AUTHOR),
    "thoughts": _config(thinkingConfig={"includeThoughts": True}),
    "no thoughts": _config(thinkingConfig={"thinkingBudget": 0}),
    "one token": _config(maxOutputTokens=1),
    "key": {"prompt_cache_key": "k", "cache_salt": "s", "prompt_cache_retention": "24h"},
    "hints": {"safetySettings": [], "labels": {"a": "b"}},
}
_G_CALL: Body = {"functionCall": {"name": "weather", "args": {"city": "Paris"}}}
_G_RESULT: Body = {"functionResponse": {"name": "weather", "response": {"result": "5 degrees"}}}
_GEMINI_CONVERSATIONS: Mapping[str, Body] = {
    "second turn": _contents(
        ("user", [{"text": "Say hello."}]),
        ("model", [{"text": "Hello there, my friend!"}]),
        ("user", [{"text": "21 degrees"}]),
    ),
    "result": _contents(
        ("user", [{"text": "What is the weather in Paris?"}]),
        ("model", [_G_CALL]),
        ("user", [_G_RESULT]),
        tools=[_G_TOOL],
    ),
    "thought comes back": _contents(
        ("user", [{"text": "What is the sky like?"}]),
        ("model", [{"text": "They ask about the sky.", "thought": True}, {"text": "It is blue."}]),
        ("user", [{"text": "Count to nine."}]),
    ),
}
_GEMINI_WRONG: Mapping[str, Body] = {
    "nothing": {},
    "empty": {"contents": []},
    "role": _contents(("king", [{"text": "Hi"}])),
    "part": _contents(("user", [{"fileData": {"fileUri": "x"}}])),
    "picture here": _contents(("user", [{"inlineData": {"mimeType": "image/png", "data": PICTURES[0]}}])),
    "tools of theirs": _gemini("Hi", tools=[{"googleSearch": {}}]),
    "cache": _gemini("Hi", cachedContent="cachedContents/cache_000000000000000000000000"),
    "too long": _gemini("word " * 140_000),
}

_GEMINI_PATH = f"/v1beta/models/{TALKING}"
DIALECTS = (
    Dialect("chat", "/v1/chat/completions", None, _chat, _CHAT_OPTIONS, _CHAT_CONVERSATIONS, _CHAT_WRONG),
    Dialect(
        "completions",
        "/v1/completions",
        None,
        _completion,
        _COMPLETION_OPTIONS,
        _COMPLETION_CONVERSATIONS,
        _COMPLETION_WRONG,
    ),
    Dialect(
        "messages", "/v1/messages", None, _message, _MESSAGE_OPTIONS, _MESSAGE_CONVERSATIONS, _MESSAGE_WRONG
    ),
    Dialect(
        "responses",
        "/v1/responses",
        None,
        _response,
        _RESPONSE_OPTIONS,
        _RESPONSE_CONVERSATIONS,
        _RESPONSE_WRONG,
    ),
    Dialect(
        "gemini",
        f"{_GEMINI_PATH}:generateContent",
        f"{_GEMINI_PATH}:streamGenerateContent?alt=sse",
        _gemini,
        _GEMINI_OPTIONS,
        _GEMINI_CONVERSATIONS,
        _GEMINI_WRONG,
    ),
)
