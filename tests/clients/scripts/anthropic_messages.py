"""Anthropic's own library on Messages."""

import asyncio

import anthropic
from scenes import MODEL, URL, act, raised, scene

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
messages = client.messages

WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PARIS, BOTH = "What is the weather in Paris?", "What is the weather in Paris and Rome?"


def asked(text):
    return {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": text}]}


def calls_of(message):
    return [[block.name, block.input] for block in message.content if block.type == "tool_use"]


@scene
def plain():
    answer = messages.create(**asked("Say hello."), system="Be kind.")
    return {**answer.model_dump(), "request_id": answer._request_id}


@scene
def streamed():
    events = list(messages.create(**asked("Say hello."), stream=True))
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    return {
        "kinds": [event.type for event in events if event.type != "content_block_delta"],
        "text": "".join(delta.text for delta in deltas if delta.type == "text_delta"),
    }


@scene
def by_the_stream_helper():
    with messages.stream(**asked("Say hello.")) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    return {"text": text, "final": final.model_dump()}


@scene
def asynchronous():
    async def ask():
        async with anthropic.AsyncAnthropic(base_url=URL, api_key="none") as own:
            return (await own.messages.create(**asked("Say hello."))).content[0].text

    return asyncio.run(ask())


@scene
def tools():
    def ask(text, **more):
        answer = messages.create(**asked(text), tools=[WEATHER], **more)
        return [calls_of(answer), answer.stop_reason]

    return {
        "auto": ask(PARIS),
        "any": ask(PARIS, tool_choice={"type": "any"}),
        "named": ask(PARIS, tool_choice={"type": "tool", "name": "weather"}),
        "parallel": ask(BOTH),
    }


@scene
def streamed_tools():
    with messages.stream(**asked(BOTH), tools=[WEATHER]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    return {"kinds": sorted(kinds), "calls": calls_of(final), "stop": final.stop_reason}


@scene
def second_turn():
    rules = [{"type": "text", "text": "Be kind. " * 50, "cache_control": {"type": "ephemeral"}}]
    said = asked(PARIS)["messages"]
    more = {"model": MODEL, "max_tokens": 200, "system": rules, "tools": [WEATHER]}
    first = messages.create(messages=said, **more)
    [call] = [block for block in first.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
    said = [*said, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = messages.create(messages=said, **more)
    return {"text": second.content[0].text, "usages": [each.usage.model_dump() for each in (first, second)]}


@scene
def thinking():
    more = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
    answer = messages.create(**{**asked("What is the sky like?"), **more})
    with messages.stream(**{**asked("What is the sky like?"), **more}) as stream:
        final = stream.get_final_message()
    return [
        [[block.type, getattr(block, "thinking", None) or block.text] for block in each.content]
        for each in (answer, final)
    ]


@scene
def thinking_second_turn():
    more = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000, "tools": [WEATHER]}
    said = asked("Think about the weather in Oslo")["messages"]
    first = messages.create(model=MODEL, messages=said, **more)
    [call] = [block for block in first.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
    said = [*said, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = messages.create(model=MODEL, messages=said, **more)
    usages = [each.usage for each in (first, second)]
    prompt = (
        usages[0].input_tokens + usages[0].cache_read_input_tokens + usages[0].cache_creation_input_tokens
    )
    return {
        "kinds": [block.type for block in first.content],
        "total": prompt + usages[0].output_tokens,
        "cached": usages[1].cache_read_input_tokens,
    }


@scene
def cached():
    text = {"type": "text", "text": "The same rules for all. " * 200}
    marked = [{**text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    usages = [messages.create(**asked("Say hello."), system=marked).usage for _ in range(2)]
    return [usage.model_dump() for usage in usages]


@scene
def counted():
    question = {"model": MODEL, "messages": asked(PARIS)["messages"], "tools": [WEATHER]}
    usage = messages.create(**question, max_tokens=1).usage
    cached = usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    return [messages.count_tokens(**question).input_tokens, usage.input_tokens + cached]


@scene
def models():
    return [[model.id for model in client.models.list()], client.models.retrieve(MODEL).id]


@scene
def refusals():
    marked = {"type": "text", "text": "Rule.", "cache_control": {"type": "ephemeral"}}
    return {
        "model": raised(lambda: messages.create(**{**asked("Say hello."), "model": "absent"})),
        "markers": raised(lambda: messages.create(**asked("Say hello."), system=[marked] * 5)),
        "tokens": raised(lambda: messages.create(**{**asked("Say hello."), "max_tokens": -1})),
        "stream": raised(
            lambda: list(messages.create(**{**asked("Say hello."), "model": "absent"}, stream=True))
        ),
    }


act()
