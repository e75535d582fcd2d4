"""OpenAI's own library on Chat Completions and Completions, in whichever version is installed."""

import asyncio

import openai
from scenes import MODEL, URL, act, raised, scene

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
chats = client.chat.completions


def asked(text):
    return [{"role": "user", "content": text}]


@scene
def version():
    return openai.__version__


@scene
def plain():
    answer = chats.create(model=MODEL, messages=asked("Say hello."))
    return {**answer.model_dump(), "request_id": answer._request_id}


@scene
def streamed():
    stream = chats.create(
        model=MODEL, messages=asked("Say hello."), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    return {
        "text": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "ids": sorted({chunk.id for chunk in chunks}),
        "finish": [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1],
        "usages": [chunk.usage.model_dump() for chunk in chunks if chunk.usage],
    }


@scene
def by_the_stream_helper():
    with chats.stream(model=MODEL, messages=asked("Say hello.")) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    return {"kinds": sorted(set(kinds)), "text": final.choices[0].message.content}


@scene
def asynchronous():
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as own:
            answers = await asyncio.gather(
                *(own.chat.completions.create(model=MODEL, messages=asked("Say hello.")) for _ in range(4))
            )
        return [answer.choices[0].message.content for answer in answers]

    return asyncio.run(ask())


@scene
def several():
    answer = chats.create(model=MODEL, messages=asked("Say hello."), n=3)
    return [[choice.index, choice.message.content] for choice in answer.choices]


@scene
def logprobs():
    answer = chats.create(model=MODEL, messages=asked("Say hello."), logprobs=True, top_logprobs=1)
    content = answer.choices[0].logprobs.content
    return {
        "joined": "".join(each.token for each in content),
        "tops": [len(each.top_logprobs) for each in content],
    }


@scene
def cut_short():
    by_length = chats.create(model=MODEL, messages=asked("Count to nine."), max_completion_tokens=4)
    by_word = chats.create(model=MODEL, messages=asked("Count to nine."), stop=[" four"])
    return [
        [each.choices[0].finish_reason, each.choices[0].message.content, each.usage.completion_tokens]
        for each in (by_length, by_word)
    ]


@scene
def cached():
    messages = [{"role": "system", "content": "All the same rules. " * 200}, *asked("Say hello.")]
    usages = [chats.create(model=MODEL, messages=messages, max_tokens=1).usage for _ in range(2)]
    return [[usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens] for usage in usages]


@scene
def in_words():
    answer = client.completions.create(model=MODEL, prompt="Count to nine.", max_tokens=50)
    stream = client.completions.create(model=MODEL, prompt="Count to nine.", max_tokens=50, stream=True)
    return [answer.choices[0].text, "".join(chunk.choices[0].text for chunk in stream)]


@scene
def models():
    return {"listed": [model.id for model in client.models.list()], "one": client.models.retrieve(MODEL).id}


@scene
def refusals():
    messages = asked("Say hello.")
    return {
        "model": raised(lambda: chats.create(model="absent", messages=messages)),
        "stream": raised(lambda: chats.create(model="absent", messages=messages, stream=True)),
        "range": raised(lambda: chats.create(model=MODEL, messages=messages, temperature=9)),
        "length": raised(lambda: chats.create(model=MODEL, messages=messages, max_tokens=10**6)),
    }


act()
