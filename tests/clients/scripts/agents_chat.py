"""openai-agents and pydantic-ai on Chat Completions and Responses."""

import asyncio

import agents
import pydantic
from openai import AsyncOpenAI
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from scenes import MODEL, URL, act, scene

agents.set_tracing_disabled(True)


class Author(pydantic.BaseModel):
    name: str
    age: int


def agents_model(api="chat"):
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    chosen = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
    return chosen(model=MODEL, openai_client=client)


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


def run_with_tool(api):
    cities = []

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        cities.append(city)
        return "21 degrees"

    agent = agents.Agent(name="weather", model=agents_model(api), tools=[weather])
    return [asyncio.run(agents.Runner.run(agent, "What is the weather in Paris?")).final_output, cities]


@scene
def agents_tools():
    return run_with_tool("chat")


@scene
def agents_structured():
    agent = agents.Agent(name="author", model=agents_model(), output_type=Author)
    return asyncio.run(agents.Runner.run(agent, "Who wrote the first program?")).final_output.model_dump()


@scene
def agents_on_responses():
    agent = agents.Agent(name="plain", model=agents_model("responses"))
    return asyncio.run(agents.Runner.run(agent, "Say hello.")).final_output


@scene
def agents_tools_on_responses():
    return run_with_tool("responses")


@scene
def agents_streamed_on_responses():
    async def run():
        agent = agents.Agent(name="plain", model=agents_model("responses"))
        result = agents.Runner.run_streamed(agent, "Say hello.")
        return [[event.type async for event in result.stream_events()][-1], result.final_output]

    return asyncio.run(run())


@scene
def pydantic_tools():
    agent = Agent(pydantic_model())

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"In {city} it is 21 degrees."

    return agent.run_sync("What is the weather in Paris?").output


@scene
def pydantic_structured():
    question = "Who wrote the first program?"
    native = Agent(pydantic_model(), output_type=NativeOutput(Author)).run_sync(question)
    prompted = Agent(pydantic_model(), output_type=PromptedOutput(Author)).run_sync(question)
    by_tool = Agent(pydantic_model(), output_type=Author).run_sync("Which author is final?")
    return [each.output.model_dump() for each in (native, prompted, by_tool)]


act()
