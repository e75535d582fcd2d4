"""Google's own library on Gemini's API."""

import asyncio
import enum

import pydantic
from google import genai
from google.genai import errors, types
from scenes import MODEL, URL, act, scene

client = genai.Client(api_key="none", http_options={"base_url": URL})
models = client.models


class Author(pydantic.BaseModel):
    name: str
    age: int


class Answer(enum.Enum):
    HELLO = "Hello there, my friend!"
    NO = "no"


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    return f"{len(city) + 16} degrees"


def generate(text, **config):
    return models.generate_content(
        model=MODEL, contents=text, config=types.GenerateContentConfig(**config) if config else None
    )


def usage_of(answer):
    return answer.usage_metadata.model_dump(exclude_none=True, mode="json")


@scene
def plain():
    answer = generate("Say hello.", system_instruction="Be kind.", temperature=0.5, top_k=3)
    [candidate] = answer.candidates
    return {
        "text": answer.text,
        "finish": candidate.finish_reason,
        "usage": usage_of(answer),
        "model": answer.model_version,
        "id": answer.response_id,
    }


@scene
def streamed():
    chunks = list(models.generate_content_stream(model=MODEL, contents="Say hello."))
    return {
        "text": "".join(chunk.text for chunk in chunks),
        "num": len(chunks),
        "finish": chunks[-1].candidates[0].finish_reason,
        "usage": usage_of(chunks[-1]),
    }


@scene
def asynchronous():
    async def run():
        answer = await client.aio.models.generate_content(model=MODEL, contents="Say hello.")
        stream = await client.aio.models.generate_content_stream(model=MODEL, contents="Say hello.")
        return [answer.text, "".join([chunk.text async for chunk in stream])]

    return asyncio.run(run())


@scene
def chatted():
    chat = client.chats.create(model=MODEL)
    first = chat.send_message("Say hello.").text
    second = "".join(chunk.text for chunk in chat.send_message_stream("Count to nine."))
    last = chat.send_message("Say hello.")
    return {"texts": [first, second, last.text], "cached": last.usage_metadata.cached_content_token_count}


@scene
def thoughts():
    thinking = types.ThinkingConfig(include_thoughts=True)
    parts = generate("What is the sky like?", thinking_config=thinking).candidates[0].content.parts
    hidden = generate("What is the sky like?")
    return {
        "parts": [[part.thought, part.text] for part in parts],
        "hidden": hidden.text,
        "num": hidden.usage_metadata.thoughts_token_count,
    }


@scene
def called():
    off = types.AutomaticFunctionCallingConfig(disable=True)
    answer = generate("What is the weather in Paris?", tools=[weather], automatic_function_calling=off)
    stream = models.generate_content_stream(
        model=MODEL,
        contents="What is the weather in Paris?",
        config=types.GenerateContentConfig(tools=[weather], automatic_function_calling=off),
    )
    calls = [call for chunk in stream for call in chunk.function_calls or ()]
    return [[call.name, call.args] for call in [*answer.function_calls, *calls]]


@scene
def called_by_itself():
    answer = generate("What is the weather in Paris?", tools=[weather])
    return [answer.text, len(answer.automatic_function_calling_history)]


@scene
def formatted():
    as_author = generate(
        "Who wrote the first program?", response_mime_type="application/json", response_schema=Author
    )
    as_schema = generate(
        "Who wrote the first program?",
        response_mime_type="application/json",
        response_json_schema=Author.model_json_schema(),
    )
    return [as_author.parsed.model_dump(), as_schema.parsed]


@scene
def counted():
    answer = models.count_tokens(model=MODEL, contents="Say hello.")
    return [answer.total_tokens, generate("Say hello.").usage_metadata.prompt_token_count]


@scene
def listed():
    return [[model.name for model in models.list()], models.get(model=MODEL).input_token_limit]


@scene
def cached():
    text = "All of the same rules. " * 100
    config = types.CreateCachedContentConfig(contents=text, display_name="rules", ttl="60s")
    made = client.caches.create(model=MODEL, config=config)
    answer = generate("Say hello.", cached_content=made.name)
    longer = client.caches.update(name=made.name, config=types.UpdateCachedContentConfig(ttl="120s"))
    listed = [[each.name, each.display_name] for each in client.caches.list()]
    read = client.caches.get(name=made.name)
    client.caches.delete(name=made.name)
    try:
        client.caches.get(name=made.name)
    except errors.ClientError as error:
        gone = [error.code, error.status]
    return {
        "text": answer.text,
        "usage": usage_of(answer),
        "size": made.usage_metadata.total_token_count,
        "more": (longer.expire_time - made.expire_time).total_seconds(),
        "same": read == longer,
        "listed": [made.name, "rules"] in listed,
        "gone": gone,
    }


@scene
def refused():
    told = []
    for call in (
        lambda: models.generate_content(model="absent", contents="x"),
        lambda: list(models.generate_content_stream(model="absent", contents="x")),
        lambda: generate("x", temperature=3.0),
    ):
        try:
            call()
        except errors.ClientError as error:
            told.append([error.code, error.status, error.message])
    return told


act()
