"""openai-agents and pydantic-ai on Chat Completions."""

import asyncio

import agents
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from scenes import MODEL, URL, act, scene

agents.set_tracing_disabled(True)


def agents_model():
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    return agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)


def pydantic_model():
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))


@scene
def agents_plain():
    agent = agents.Agent(name="plain", model=agents_model())
    return asyncio.run(agents.Runner.run(agent, "Say hello.")).final_output


@scene
def agents_streamed():
    async def run():
        result = agents.Runner.run_streamed(agents.Agent(name="plain", model=agents_model()), "Say hello.")
        kinds = {event.type async for event in result.stream_events()}
        return [result.final_output, sorted(kinds)]

    return asyncio.run(run())


@scene
def pydantic_plain():
    result = Agent(pydantic_model()).run_sync("Say hello.")
    return [result.output, result.usage.output_tokens]


@scene
def pydantic_streamed():
    async def run():
        async with Agent(pydantic_model()).run_stream("Say hello.") as result:
            return [piece async for piece in result.stream_text(delta=True)]

    return "".join(asyncio.run(run()))


act()
