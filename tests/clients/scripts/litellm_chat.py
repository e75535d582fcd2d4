"""LiteLLM, as a client of OpenAI's API and of vLLM."""

import asyncio
import json

import litellm
import pydantic
from scenes import MODEL, URL, act, raised, scene

PROVIDERS = ("openai", "hosted_vllm")
KEYS = {"api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}


def asked(text):
    return [{"role": "user", "content": text}]


def complete(text, provider="openai", **more):
    return litellm.completion(model=f"{provider}/{MODEL}", messages=asked(text), **KEYS, **more)


@scene
def plain():
    answers = [complete("Say hello.", provider) for provider in PROVIDERS]
    return [[answer.choices[0].message.content, answer.usage.completion_tokens] for answer in answers]


@scene
def streamed():
    texts = []
    for provider in PROVIDERS:
        chunks = list(complete("Say hello.", provider, stream=True, stream_options={"include_usage": True}))
        built = litellm.stream_chunk_builder(chunks)
        texts.append([built.choices[0].message.content, built.usage.prompt_tokens > 0])
    return texts


@scene
def cached():
    text = "All of the same rules. " * 200 + "Say hello."
    usages = [complete(text, max_tokens=1).usage for _ in range(2)]
    return [[usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens] for usage in usages]


@scene
def refusals():
    return {
        "model": raised(
            lambda: litellm.completion(model="openai/absent", messages=asked("Say hello."), **KEYS)
        ),
        "length": raised(lambda: complete("Say hello.", max_tokens=10**6)),
    }


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def calls_of(answer):
    calls = answer.choices[0].message.tool_calls or ()
    return [[call.function.name, json.loads(call.function.arguments)] for call in calls]


@scene
def tools():
    both = "What is the weather in Paris and Rome?"
    chunks = list(complete(both, tools=[WEATHER], stream=True))
    return {
        "auto": calls_of(complete("What is the weather in Paris?", tools=[WEATHER])),
        "required": calls_of(
            complete("What is the weather in Paris?", tools=[WEATHER], tool_choice="required")
        ),
        "streamed": calls_of(litellm.stream_chunk_builder(chunks)),
    }


@scene
def structured():
    class Author(pydantic.BaseModel):
        name: str
        age: int

    answer = complete("Who wrote the first program?", response_format=Author)
    return json.loads(answer.choices[0].message.content)


@scene
def reasoning():
    message = complete("What is the sky like?", "hosted_vllm").choices[0].message
    return [message.content, message.reasoning_content]


@scene
def responses():
    answer = litellm.responses(model=f"openai/{MODEL}", input="Say hello.", **KEYS)
    return answer.output_text


@scene
def messages():
    return asyncio.run(
        litellm.anthropic.messages.acreate(
            model=f"anthropic/{MODEL}",
            messages=asked("Say hello."),
            max_tokens=100,
            api_base=URL,
            api_key="none",
        )
    )


act()
