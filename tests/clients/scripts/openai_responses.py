"""OpenAI's own library on Responses, in whichever version is installed."""

import json

import openai
import pydantic
from scenes import MODEL, URL, act, raised, scene

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
responses = client.responses

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class Author(pydantic.BaseModel):
    name: str
    age: int


def calls_of(response):
    calls = [item for item in response.output if item.type == "function_call"]
    return [[call.name, json.loads(call.arguments), bool(call.call_id)] for call in calls]


@scene
def plain():
    answer = responses.create(model=MODEL, input="Say hello.", instructions="Be kind.")
    return {**answer.model_dump(mode="json"), "text": answer.output_text}


@scene
def streamed():
    events = list(responses.create(model=MODEL, input="Say hello.", stream=True))
    last = events[-1]
    return {
        "kinds": [event.type for event in events if event.type != "response.output_text.delta"],
        "text": "".join(event.delta for event in events if event.type == "response.output_text.delta"),
        "numbers": [event.sequence_number for event in events] == list(range(len(events))),
        "final": last.response.output_text,
        "usage": last.response.usage.model_dump(),
    }


@scene
def by_the_stream_helper():
    with responses.stream(model=MODEL, input="What is the weather in Paris?", tools=[WEATHER]) as stream:
        kinds = {event.type for event in stream}
        return {"kinds": sorted(kinds), "calls": calls_of(stream.get_final_response())}


@scene
def tools():
    def ask(text, **more):
        return calls_of(responses.create(model=MODEL, input=text, tools=[WEATHER], **more))

    paris, both = "What is the weather in Paris?", "What is the weather in Paris and Rome?"
    return {
        "auto": ask(paris),
        "required": ask(paris, tool_choice="required"),
        "named": ask(paris, tool_choice={"type": "function", "name": "weather"}),
        "parallel": ask(both),
    }


def second_turn_of(rules, is_stored):
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    more = {"model": MODEL, "instructions": rules * 50, "tools": [WEATHER], "store": is_stored}
    first = responses.create(input=question, **more)
    [call] = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    if is_stored:
        second = responses.create(input=[result], previous_response_id=first.id, **more)
    else:
        second = responses.create(input=[*question, *first.output, result], **more)
    usage = first.usage
    return {
        "text": second.output_text,
        "total": usage.total_tokens,
        "cached": second.usage.input_tokens_details.cached_tokens,
    }


@scene
def second_turn():
    return second_turn_of("Be kind. ", is_stored=False)


@scene
def second_turn_by_id():
    return second_turn_of("Be brief. ", is_stored=True)


@scene
def stored():
    made = responses.create(model=MODEL, input="Say hello.")
    found = responses.retrieve(made.id).output_text
    responses.delete(made.id)
    return [found, raised(lambda: responses.retrieve(made.id))["name"]]


@scene
def reasoning():
    answer = responses.create(model=MODEL, input="What is the sky like?")
    kinds = [item.type for item in answer.output]
    return [kinds, answer.output_text, answer.usage.output_tokens_details.reasoning_tokens]


@scene
def structured():
    answer = responses.parse(model=MODEL, input="Who wrote the first program?", text_format=Author)
    return answer.output_parsed.model_dump()


@scene
def refusals():
    return {
        "model": raised(lambda: responses.create(model="absent", input="Say hello.")),
        "previous": raised(
            lambda: responses.create(model=MODEL, input="Say hello.", previous_response_id="resp_absent")
        ),
        "range": raised(lambda: responses.create(model=MODEL, input="Say hello.", temperature=9)),
    }


act()
