"""Conversations with tools, random but for their seed, as bodies of every dialect; and the text that a
model's chat template makes of them."""

import copy
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from router.api import dialects
from router.api.chat_prompt import RenderedChat, render_chat
from router.explain.leaves import Path
from router.prompt.catalog import ModelCatalog
from router.prompt.quoting import unquote
from tests.router import chat_templates, tiny_model

TEMPLATES = {
    "qwen25": chat_templates.QWEN_25,
    "qwen3": chat_templates.QWEN_3,
    "qwen35": chat_templates.QWEN_35,
    "hermes": chat_templates.HERMES,
    "llama31": chat_templates.LLAMA_31,
    "deepseek": chat_templates.DEEPSEEK_R1,
    "glm": chat_templates.GLM_45,
    "plain": chat_templates.PLAIN,
}
DIALECTS = ("chat", "messages", "responses", "gemini")

WORDS = (
    "the a of to in is on at city weather file read write path list user name date time unit find where"
    ' string number object Paris Århus naïve 東京 "quoted" it\'s back\\slash new\nline {json}'
    " [1,2] <b> tab\there"
    " description properties required enum true null 42 3.5"
).split(" ")


@dataclass
class Turn:
    """What the user says; what the assistant answers; its calls, with arguments and results."""

    question: str
    answer: str = ""
    calls: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)


@dataclass
class Conversation:
    system: str
    tools: list[dict[str, Any]]
    turns: list[Turn]


def text(rng: Random, most: int = 40) -> str:
    """Short ones often, equal ones often enough."""
    if rng.random() < 0.2:
        return rng.choice(
            ["ok", "Yes.", "a", "City name", "The name of the city to look up.", "continue", "  hm "]
        )
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most))) or "x"


def value(rng: Random) -> Any:
    return rng.choice(
        [text(rng, 4), rng.randint(0, 99999), rng.random() < 0.5, [text(rng, 2), rng.randint(0, 9)]]
    )


def tool(rng: Random, number: int) -> dict[str, Any]:
    names = rng.sample(
        ["city", "unit", "path", "query", "n", "limit", "start_line", "id", "type"], k=rng.randint(1, 4)
    )
    properties: dict[str, Any] = {}
    for name in names:
        properties[name] = {"type": rng.choice(["string", "number", "boolean"]), "description": text(rng, 12)}
        if rng.random() < 0.2:
            properties[name]["enum"] = [text(rng, 1), "celsius", "fahrenheit"]
        if rng.random() < 0.2:
            del properties[name]["description"]
    return {
        "name": f"{rng.choice(['get', 'read', 'do'])}_{rng.choice(['weather', 'file', 'it'])}_{number}",
        "description": text(rng, 60),
        "parameters": {"type": "object", "properties": properties, "required": names[:1]},
    }


def conversation(rng: Random, *, num_tools: int | None = None, num_turns: int | None = None) -> Conversation:
    tools = [tool(rng, n) for n in range(rng.randint(0, 6) if num_tools is None else num_tools)]
    made = Conversation(text(rng, 80), tools, [])
    if tools and rng.random() < 0.3:
        made.system += " " + tools[0]["description"]
    for _ in range(rng.randint(1, 6) if num_turns is None else num_turns):
        turn = Turn(text(rng), text(rng))
        if tools and rng.random() < 0.7:
            arguments = {
                name: value(rng) for name in rng.sample(["city", "n", "text", "x"], k=rng.randint(1, 3))
            }
            turn.calls.append((rng.choice(tools)["name"], arguments, text(rng, 100)))
        made.turns.append(turn)
    made.turns.append(Turn(text(rng)))
    return made


def as_chat(c: Conversation) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": c.system}]
    number = 0
    for turn in c.turns:
        messages.append({"role": "user", "content": [{"type": "text", "text": turn.question}]})
        for name, arguments, result in turn.calls:
            number += 1
            call = {"name": name, "arguments": json.dumps(arguments)}
            calls = [{"id": f"call_{number}", "type": "function", "function": call}]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": result})
        if turn.answer:
            messages.append({"role": "assistant", "content": turn.answer})
    body: dict[str, Any] = {"model": "tiny", "messages": messages}
    if c.tools:
        body["tools"] = [{"type": "function", "function": copy.deepcopy(one)} for one in c.tools]
    return body


def as_messages(c: Conversation) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    number = 0
    for turn in c.turns:
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": turn.question}]})
        results = []
        answer: list[dict[str, Any]] = [{"type": "text", "text": turn.answer}] if turn.answer else []
        for name, arguments, result in turn.calls:
            number += 1
            call_id = f"toolu_{number:020}"
            answer.append(
                {"type": "tool_use", "id": call_id, "name": name, "input": copy.deepcopy(arguments)}
            )
            results.append({"type": "tool_result", "tool_use_id": call_id, "content": result})
        if answer:
            messages.append({"role": "assistant", "content": answer})
    messages[0]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    tools = [
        {"name": t["name"], "description": t["description"], "input_schema": copy.deepcopy(t["parameters"])}
        for t in c.tools
    ]
    system = [{"type": "text", "text": c.system, "cache_control": {"type": "ephemeral"}}]
    body = {"model": "tiny", "max_tokens": 20, "system": system, "messages": messages}
    return {**body, "tools": tools} if tools else body


def as_responses(c: Conversation) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    number = 0
    for turn in c.turns:
        said = [{"type": "input_text", "text": turn.question}]
        items.append({"type": "message", "role": "user", "content": said})
        for name, arguments, result in turn.calls:
            number += 1
            call = {"type": "function_call", "call_id": f"call_{number}", "name": name}
            items.append({**call, "arguments": json.dumps(arguments)})
            items.append({"type": "function_call_output", "call_id": f"call_{number}", "output": result})
        if turn.answer:
            said = [{"type": "output_text", "text": turn.answer}]
            items.append({"type": "message", "id": f"msg_{number}", "role": "assistant", "content": said})
    body: dict[str, Any] = {"model": "tiny", "instructions": c.system, "input": items}
    if c.tools:
        body["tools"] = [{"type": "function", **copy.deepcopy(one)} for one in c.tools]
    return body


def as_gemini(c: Conversation) -> dict[str, Any]:
    contents: list[dict[str, Any]] = []
    for turn in c.turns:
        contents.append({"role": "user", "parts": [{"text": turn.question}]})
        for name, arguments, result in turn.calls:
            call = {"functionCall": {"name": name, "args": copy.deepcopy(arguments)}}
            contents.append({"role": "model", "parts": [call]})
            response = {"functionResponse": {"name": name, "response": {"output": result}}}
            contents.append({"role": "user", "parts": [response]})
        if turn.answer:
            contents.append({"role": "model", "parts": [{"text": turn.answer}]})
    body: dict[str, Any] = {
        "model": "models/tiny",
        "systemInstruction": {"parts": [{"text": c.system}]},
        "contents": contents,
    }
    if c.tools:
        declared = [
            {
                "name": t["name"],
                "description": t["description"],
                "parametersJsonSchema": copy.deepcopy(t["parameters"]),
            }
            for t in c.tools
        ]
        body["tools"] = [{"functionDeclarations": declared}]
    return body


AS: dict[str, Callable[[Conversation], dict[str, Any]]] = {
    "chat": as_chat,
    "messages": as_messages,
    "responses": as_responses,
    "gemini": as_gemini,
}


@functools.cache
def catalog(template: str) -> ModelCatalog:
    made = ModelCatalog(tiny_model.SECRET)
    made.add(tiny_model.card(context_length=1_000_000), tiny_model.bundle(TEMPLATES[template]))
    return made


def rendered(dialect: str, body: dict[str, Any], template: str) -> RenderedChat:
    request = dialects.DIALECTS[dialect].read(json.dumps(body).encode(), 8)
    return render_chat(catalog(template).get(request.model), request)


def prompt_text(dialect: str, body: dict[str, Any], template: str) -> str:
    chat = rendered(dialect, body, template)
    return unquote(chat.text) if chat.is_quoted else chat.text


TEXT_FIELDS = frozenset({"text", "content", "description", "output", "instructions", "system", "arguments"})


def written_places(body: Any, path: Path = ()) -> Iterator[Path]:
    """Paths of what a client writes and a prompt has: texts, arguments of calls, and names of parameters.
    Found by what the fields are called, and by nothing of how they are looked for in prompts."""
    if isinstance(body, dict):
        for name, item in body.items():
            if name in ("parameters", "input_schema", "parametersJsonSchema", "input", "args") and isinstance(
                item, dict
            ):
                yield from _everything((*path, name), item)
            elif name == "arguments" and isinstance(item, str):
                yield from _everything((*path, name), json.loads(item))
            elif name in TEXT_FIELDS and isinstance(item, str) and item:
                yield (*path, name)
            elif name not in ("cache_control", "name", "id"):
                yield from written_places(item, (*path, name))
    elif isinstance(body, list):
        for number, item in enumerate(body):
            yield from written_places(item, (*path, number))


def _everything(path: Path, item: Any) -> Iterator[Path]:
    if isinstance(item, dict):
        for name, inner in item.items():
            yield (*path, f"key:{name}")
            yield from _everything((*path, name), inner)
    elif isinstance(item, list):
        for number, inner in enumerate(item):
            yield from _everything((*path, number), inner)
    else:
        yield path


def changed(body: dict[str, Any], path: Path, rng: Random) -> dict[str, Any]:
    """The same with one character, number or name of a key another one."""
    made: dict[str, Any] = copy.deepcopy(body)
    _change_in(made, path, rng)
    return made


def _change_in(holder: Any, path: Path, rng: Random) -> None:
    step, *rest = path
    if isinstance(step, str) and step.startswith("key:"):
        name = step.removeprefix("key:")
        items = [(other_text(key, rng) if key == name else key, item) for key, item in holder.items()]
        holder.clear()
        holder.update(items)
    elif not rest:
        holder[step] = other(holder[step], rng)
    elif step == "arguments" and isinstance(holder[step], str):
        read = {"arguments": json.loads(holder[step])}
        _change_in(read, path, rng)
        holder[step] = json.dumps(read["arguments"])
    else:
        _change_in(holder[step], tuple(rest), rng)


def other(value: Any, rng: Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.randint(1, 50)
    return other_text(value, rng)


def other_text(text: str, rng: Random) -> str:
    """One character is another one, or one more, or one less."""
    if not text:
        return "q"
    at = rng.randrange(len(text))
    character = rng.choice([c for c in "qzkXJ74é" if c != text[at]])
    match rng.randrange(3):
        case 0:
            return text[:at] + character + text[at:]
        case 1 if len(text) > 1:
            return text[:at] + text[at + 1 :]
        case _:
            return text[:at] + character + text[at + 1 :]


def num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many characters, or tokens, two prompts have in common at their beginnings."""
    both = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(both) if a != b), min(len(one), len(other)))
