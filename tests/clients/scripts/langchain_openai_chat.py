"""LangChain's ChatOpenAI on Chat Completions."""

import functools
import operator

import pydantic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from scenes import MODEL, URL, act, raised, scene


def model(**more):
    return ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_retries=0, **more)


@scene
def plain():
    answer = model().invoke("Say hello.")
    return {"text": answer.content, "usage": answer.usage_metadata, "response": answer.response_metadata}


@scene
def streamed():
    chunks = list(model(stream_usage=True).stream("Say hello."))
    return {
        "text": "".join(chunk.content for chunk in chunks),
        "usage": [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata],
    }


@scene
def cached():
    text = "Rules, all the same rules. " * 200 + "Say hello."
    return [model(max_tokens=1).invoke(text).usage_metadata for _ in range(2)]


@scene
def refused():
    return raised(lambda: ChatOpenAI(model="absent", base_url=f"{URL}/v1", api_key="none").invoke("Hello."))


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"In {city} it is 21 degrees."


class Author(pydantic.BaseModel):
    """Who wrote something."""

    name: str
    age: int


@scene
def tools():
    def called(text, **more):
        calls = model().bind_tools([weather], **more).invoke(text).tool_calls
        return [[call["name"], call["args"]] for call in calls]

    paris = "What is the weather in Paris?"
    both = "What is the weather in Paris and Rome?"
    chunks = list(model().bind_tools([weather]).stream(both))
    return {
        "auto": called(paris),
        "any": called(paris, tool_choice="any"),
        "named": called(paris, tool_choice="weather"),
        "streamed": [
            [call["name"], call["args"]] for call in functools.reduce(operator.add, chunks).tool_calls
        ],
    }


@scene
def second_turn():
    bound = model().bind_tools([weather])
    said = [HumanMessage("What is the weather in Paris?")]
    said.append(bound.invoke(said))
    said.append(weather.invoke(said[-1].tool_calls[0]))
    return bound.invoke(said).content


@scene
def structured():
    question = "Who wrote the first program?"
    methods = ("json_schema", "json_mode")
    return [
        model().with_structured_output(Author, method=method).invoke(question).model_dump()
        for method in methods
    ]


@scene
def responses():
    answer = model(use_responses_api=True).invoke("Say hello.")
    return [answer.text, answer.usage_metadata["total_tokens"]]


act()
