"""Ten turns with reasoning and a tool call in each, by every API, as its own library keeps a conversation.

Of each answer: the tokens of its prompt, of itself, and those of the prompt that were cached.
"""

import anthropic
import openai
from google import genai
from google.genai import types
from scenes import MODEL, URL, act, scene

NUM_TURNS = 10
QUESTION = "Think about the weather in Oslo"
RESULT = "5 degrees"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DESCRIPTION = "The weather in a city."

openai_client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


def rules(api):
    """Of its own, or one API would find what another one has said."""
    return f"Asked by {api}. " + "Of all that is asked, think first. " * 20


def question(number):
    return f"{number}: {QUESTION}"


@scene
def chat():
    """Reasoning is not sent back, as most clients do not."""
    tool = {
        "type": "function",
        "function": {"name": "weather", "description": DESCRIPTION, "parameters": SCHEMA},
    }
    said = [{"role": "system", "content": rules("chat")}]
    usages = []

    def answer():
        made = openai_client.chat.completions.create(model=MODEL, messages=said, tools=[tool])
        usage, message = made.usage, made.choices[0].message
        usages.append(
            [usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens]
        )
        calls = [call.model_dump() for call in message.tool_calls or ()]
        told = {"tool_calls": calls} if calls else {}
        said.append({"role": "assistant", "content": message.content, **told})
        return calls

    for number in range(NUM_TURNS):
        said.append({"role": "user", "content": question(number)})
        [call] = answer()
        said.append({"role": "tool", "tool_call_id": call["id"], "content": RESULT})
        assert not answer()
    return usages


def by_responses(is_stored):
    tool = {
        "type": "function",
        "name": "weather",
        "description": DESCRIPTION,
        "parameters": SCHEMA,
        "strict": False,
    }
    said, usages, last = [], [], None

    def answer(item):
        nonlocal said, last
        said = [item] if is_stored else [*said, item]
        made = openai_client.responses.create(
            model=MODEL,
            instructions=rules(f"responses, stored: {is_stored}"),
            input=said,
            tools=[tool],
            store=is_stored,
            previous_response_id=last if is_stored else openai.omit,
        )
        last = made.id
        said = [*said, *made.output]
        usage = made.usage
        usages.append([usage.input_tokens, usage.output_tokens, usage.input_tokens_details.cached_tokens])
        return [item for item in made.output if item.type == "function_call"]

    for number in range(NUM_TURNS):
        [call] = answer({"role": "user", "content": question(number)})
        assert not answer({"type": "function_call_output", "call_id": call.call_id, "output": RESULT})
    return usages


@scene
def responses_echoed():
    return by_responses(is_stored=False)


@scene
def responses_stored():
    return by_responses(is_stored=True)


@scene
def messages():
    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    tool = {"name": "weather", "description": DESCRIPTION, "input_schema": SCHEMA}
    said, usages = [], []

    def answer(content):
        said.append({"role": "user", "content": content})
        made = client.messages.create(
            model=MODEL,
            system=rules("messages"),
            messages=said,
            tools=[tool],
            max_tokens=2000,
            thinking={"type": "enabled", "budget_tokens": 1024},
        )
        said.append({"role": "assistant", "content": made.content})
        usage = made.usage
        cached = usage.cache_read_input_tokens
        usages.append(
            [usage.input_tokens + usage.cache_creation_input_tokens + cached, usage.output_tokens, cached]
        )
        return [block for block in made.content if block.type == "tool_use"]

    for number in range(NUM_TURNS):
        [call] = answer(question(number))
        assert not answer([{"type": "tool_result", "tool_use_id": call.id, "content": RESULT}])
    return usages


@scene
def gemini():
    client = genai.Client(api_key="none", http_options=types.HttpOptions(base_url=URL))
    tool = types.FunctionDeclaration(name="weather", description=DESCRIPTION, parameters_json_schema=SCHEMA)
    config = types.GenerateContentConfig(
        system_instruction=rules("gemini"),
        tools=[types.Tool(function_declarations=[tool])],
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        thinking_config=types.ThinkingConfig(include_thoughts=True),
    )
    said, usages = [], []

    def answer(part):
        said.append(types.Content(role="user", parts=[part]))
        made = client.models.generate_content(model=MODEL, contents=said, config=config)
        said.append(made.candidates[0].content)
        usage = made.usage_metadata
        prompt = usage.prompt_token_count
        usages.append([prompt, usage.total_token_count - prompt, usage.cached_content_token_count or 0])
        return made.function_calls or []

    for number in range(NUM_TURNS):
        [call] = answer(types.Part(text=question(number)))
        result = types.FunctionResponse(id=call.id, name=call.name, response={"result": RESULT})
        assert not answer(types.Part(function_response=result))
    return usages


act()
