"""LangChain's ChatAnthropic on Messages."""

import functools
import operator

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from scenes import MODEL, URL, act, raised, scene


def model(name=MODEL, **more):
    return ChatAnthropic(model=name, base_url=URL, api_key="none", max_retries=0, max_tokens=200, **more)


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"In {city} it is 21 degrees."


@scene
def plain():
    answer = model().invoke("Say hello.")
    return {"text": answer.text, "usage": answer.usage_metadata}


@scene
def streamed():
    whole = functools.reduce(operator.add, model().stream("Say hello."))
    return {"text": whole.text, "usage": whole.usage_metadata}


@scene
def tools():
    bound = model().bind_tools([weather])
    said = [HumanMessage("What is the weather in Paris?")]
    said.append(bound.invoke(said))
    calls = [[call["name"], call["args"]] for call in said[-1].tool_calls]
    said.append(weather.invoke(said[-1].tool_calls[0]))
    streamed = functools.reduce(operator.add, bound.stream("What is the weather in Paris and Rome?"))
    return {
        "calls": calls,
        "streamed": [[call["name"], call["args"]] for call in streamed.tool_calls],
        "text": bound.invoke(said).text,
    }


@scene
def cached():
    rules = {
        "type": "text",
        "text": "Rules for all, the same. " * 200,
        "cache_control": {"type": "ephemeral"},
    }
    said = [SystemMessage([rules]), HumanMessage("Say hello.")]
    return [model().invoke(said).usage_metadata for _ in range(2)]


@scene
def refused():
    return raised(lambda: model("absent").invoke("Say hello."))


act()
