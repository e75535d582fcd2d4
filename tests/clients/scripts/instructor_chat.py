"""instructor on Chat Completions and Responses: one scene for each of its ways to ask for an object."""

import instructor
import openai
import pydantic
from scenes import MODEL, URL, act, scene

IN_A_CALL = "Which author is final?"
IN_TEXT = "Who wrote the first program?"


class final_result(pydantic.BaseModel):
    """The library calls the tool by its name."""

    name: str
    age: int


def asked(mode: str, question: str) -> dict[str, object]:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    patched = instructor.from_openai(client, mode=instructor.Mode[mode])
    messages = [{"role": "user", "content": question}]
    found = patched.chat.completions.create(
        model=MODEL, response_model=final_result, max_retries=1, messages=messages
    )
    return found.model_dump()


@scene
def tools():
    return asked("TOOLS", IN_A_CALL)


@scene
def json():
    return asked("JSON", IN_TEXT)


@scene
def json_schema():
    return asked("JSON_SCHEMA", IN_TEXT)


@scene
def responses_tools():
    return asked("RESPONSES_TOOLS", IN_A_CALL)


act()
