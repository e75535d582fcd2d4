"""LangChain's ChatOpenAI on Chat Completions."""

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


act()
