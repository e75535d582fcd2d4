"""OpenAI's own library on Chat Completions with tools, formats and reasoning, in any of its versions."""

import json

import openai
import pydantic
from scenes import MODEL, URL, act, scene

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
chats = client.chat.completions

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
PARIS = "What is the weather in Paris?"
BOTH = "What is the weather in Paris and Rome?"
NAMED = {"type": "function", "function": {"name": "weather"}}


class Author(pydantic.BaseModel):
    name: str
    age: int


def asked(text):
    return [{"role": "user", "content": text}]


def calls_of(message):
    return [
        [call.type, call.function.name, json.loads(call.function.arguments)]
        for call in message.tool_calls or ()
    ]


def ask(text, **more):
    answer = chats.create(model=MODEL, messages=asked(text), tools=[WEATHER, TIME], **more)
    [choice] = answer.choices
    message = choice.message
    ids = [call.id for call in message.tool_calls or ()]
    return {
        "calls": calls_of(message),
        "ids": len(set(ids)),
        "finish": choice.finish_reason,
        "content": message.content,
    }


@scene
def called():
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    return {
        "auto": ask(PARIS),
        "required": ask(PARIS, tool_choice="required"),
        "named": ask(PARIS, tool_choice=NAMED),
        "allowed": ask(PARIS, tool_choice=allowed),
        "parallel": ask(BOTH),
    }


@scene
def not_called():
    return ask("Say hello.", tool_choice="none")


@scene
def streamed():
    stream = chats.create(model=MODEL, messages=asked(BOTH), tools=[WEATHER], stream=True)
    calls, finish = {}, None
    for chunk in stream:
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or ():
                known = calls.setdefault(call.index, {"id": "", "name": "", "pieces": []})
                known["id"] += call.id or ""
                known["name"] += call.function.name or ""
                known["pieces"].append(call.function.arguments or "")
    return {
        "calls": [[call["name"], json.loads("".join(call["pieces"]))] for _, call in sorted(calls.items())],
        "ids": len({call["id"] for call in calls.values()}),
        "pieces": [len(call["pieces"]) for call in calls.values()],
        "finish": finish,
    }


@scene
def streamed_by_the_helper():
    strict = {**WEATHER["function"], "strict": True}
    with chats.stream(
        model=MODEL, messages=asked(PARIS), tools=[{"type": "function", "function": strict}]
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    return {"kinds": sorted(kinds), "parsed": message.tool_calls[0].function.parsed_arguments}


@scene
def second_turn():
    """Each answer is echoed as the library gives it."""
    messages = [{"role": "system", "content": "Be kind. " * 50}, *asked(PARIS)]
    first = chats.create(model=MODEL, messages=messages, tools=[WEATHER])
    [call] = first.choices[0].message.tool_calls
    messages += [
        first.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"},
    ]
    second = chats.create(model=MODEL, messages=messages, tools=[WEATHER])
    messages += [second.choices[0].message, *asked("Say hello.")]
    third = chats.create(model=MODEL, messages=messages, tools=[WEATHER])
    usages = [each.usage for each in (first, second, third)]
    return {
        "texts": [each.choices[0].message.content for each in (second, third)],
        "totals": [usage.total_tokens for usage in usages],
        "cached": [usage.prompt_tokens_details.cached_tokens for usage in usages],
    }


@scene
def reasoning():
    def parts(delta):
        more = delta.model_extra or {}
        return delta.content or "", more.get("reasoning_content") or more.get("reasoning") or ""

    answer = chats.create(model=MODEL, messages=asked("What is the sky like?"))
    stream = chats.create(model=MODEL, messages=asked("What is the sky like?"), stream=True)
    pieces = [parts(chunk.choices[0].delta) for chunk in stream if chunk.choices]
    return {
        "whole": parts(answer.choices[0].message),
        "streamed": ["".join(texts) for texts in zip(*pieces, strict=True)],
        "tokens": answer.usage.completion_tokens_details.reasoning_tokens,
    }


@scene
def structured():
    question = asked("Who wrote the first program?")
    parsed = chats.parse(model=MODEL, messages=question, response_format=Author)
    plain = chats.create(model=MODEL, messages=question, response_format={"type": "json_object"})
    with chats.stream(model=MODEL, messages=question, response_format=Author) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    return [
        parsed.choices[0].message.parsed.model_dump(),
        json.loads(plain.choices[0].message.content),
        streamed.model_dump(),
    ]


@scene
def bad_schema():
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    try:
        chats.create(model=MODEL, messages=asked("Say hello."), response_format=broken)
    except openai.APIStatusError as error:
        return [type(error).__name__, error.param]
    return None


act()
