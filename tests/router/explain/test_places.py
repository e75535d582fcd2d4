"""Places: a character of a prompt leads back to the field of the body that it came from, whatever the dialect
and the chat template."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from router.errors import RouterError
from router.explain.leaves import Path, spelled
from router.explain.places import Place, PlaceKind, PromptPlaces, place_in_prompt, place_of_token
from tests.router import tiny_model
from tests.router.explain.broken_prompts import NAMESPACE_WAYS, TEXT_WAYS, BrokenPrompt, broken
from tests.router.explain.conversations import (
    AS,
    DIALECTS,
    TEMPLATES,
    catalog,
    changed,
    conversation,
    num_common,
    prompt_text,
    rendered,
    text,
    tool,
    written_places,
)

REASONING = "kvasir-reasoning-1:aGVsbG8gd29ybGQ="


def codex(rng: Random, num_turns: int) -> dict[str, Any]:
    """OpenAI's Responses: the instructions are a developer's message, some tools are in a namespace."""
    tools: list[dict[str, Any]] = [{"type": "function", **tool(rng, n), "strict": False} for n in range(6)]
    inner = [{"type": "function", **tool(rng, 10 + n), "strict": False} for n in range(3)]
    tools.append({"type": "namespace", "name": "agents", "description": text(rng, 20), "tools": inner})
    tools.append({"type": "web_search"})
    where = "<environment_context><cwd>/tmp/x</cwd></environment_context>"
    items: list[dict[str, Any]] = [
        _message("developer", "You are an agent. " + text(rng, 300), "<skills>" + text(rng, 50)),
        _message("user", where, text(rng, 10)),
    ]
    for number in range(num_turns):
        name, call_id = tools[number % 6]["name"], f"call_{number:024}"
        arguments = json.dumps({"command": ["bash", "-lc", text(rng, 8)], "workdir": "/tmp"})
        output = json.dumps({"output": text(rng, 100), "metadata": {"exit_code": 0}})
        items += [
            {"type": "reasoning", "id": f"rs_{number}", "summary": [], "encrypted_content": REASONING},
            {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments},
            {"type": "function_call_output", "call_id": call_id, "output": output},
            _message("assistant", text(rng, 20)),
            _message("user", text(rng, 20)),
        ]
    rest = {"tool_choice": "auto", "store": False, "prompt_cache_key": "k", "stream": True}
    return {"model": "tiny", "input": items, "tools": tools, **rest}


def _message(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    content = [{"type": kind, "text": one} for one in texts]
    return {"type": "message", "role": role, "id": f"msg_{role}", "content": content}


def claude_code(rng: Random, num_turns: int) -> dict[str, Any]:
    """Anthropic's Messages: a block of the system is for accounts, and one of its messages stands in the
    middle of the conversation."""
    tools = [_claude_tool(rng, number) for number in range(12)]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=sdk;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": text(rng, 300), "cache_control": {"type": "ephemeral"}},
    ]
    reminder = "<system-reminder>\n" + text(rng, 60) + "</system-reminder>"
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": reminder}, _text(rng, 10)]},
        {"role": "system", "content": "By the way: " + text(rng, 60)},
    ]
    for number in range(num_turns):
        call_id = f"toolu_{number:022}"
        arguments = {"file_path": text(rng, 2), "limit": number}
        call = {"type": "tool_use", "id": call_id, "name": tools[number]["name"], "input": arguments}
        thinking = {"type": "thinking", "thinking": text(rng, 20), "signature": "c2ln"}
        content: Any = [_text(rng, 90), _text(rng, 3)] if number % 2 else text(rng, 90)
        result = {"tool_use_id": call_id, "type": "tool_result", "content": content}
        messages += [
            {"role": "assistant", "content": [thinking, _text(rng, 10), call]},
            {"role": "user", "content": [result, _text(rng, 9)]},
        ]
    messages[-1]["content"][-1] = {**_text(rng, 9), "cache_control": {"type": "ephemeral"}}
    rest = {"max_tokens": 32000, "thinking": {"type": "adaptive"}, "metadata": {"user_id": "{}"}}
    return {"model": "tiny", "messages": messages, "system": system, "tools": tools, **rest}


def _text(rng: Random, most: int) -> dict[str, Any]:
    return {"type": "text", "text": text(rng, most)}


def _claude_tool(rng: Random, number: int) -> dict[str, Any]:
    made = tool(rng, number)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **made["parameters"]}
    return {"name": made["name"], "description": made["description"], "input_schema": schema}


NUM_BODIES = 25


def _found(dialect: str, template: str, seed: int) -> list[tuple[Place, Path]]:
    rng = Random(seed)
    return _found_in(dialect, AS[dialect](conversation(rng)), template, rng)


def _found_in(dialect: str, body: dict[str, Any], template: str, rng: Random) -> list[tuple[Place, Path]]:
    """The place named for a change in a body, from both sides, and the one that was changed."""
    path = rng.choice([path for path in written_places(body) if "encrypted_content" not in path])
    other = changed(body, path, rng)
    try:
        texts = [prompt_text(dialect, one, template) for one in (body, other)]
    except RouterError:
        return []
    if texts[0] == texts[1]:  # the template does not write it
        return []
    start = num_common(*texts)
    places = [PromptPlaces(one, text).at(start) for one, text in zip((body, other), texts, strict=True)]
    return [(place, path) for place in places]


def _is_right(place: Place, path: Path) -> bool:
    if str(path[-1]).startswith("key:"):
        return (place.kind, place.path) == (PlaceKind.KEYS, spelled(path[:-1]))
    return (place.kind, place.path) == (PlaceKind.VALUE, spelled(path))


def test_of_a_hundred_changed_characters_ninety_nine_lead_to_the_field_that_was_changed() -> None:
    found = [
        pair
        for template in TEMPLATES
        for dialect in DIALECTS
        for seed in range(NUM_BODIES)
        for pair in _found(dialect, template, seed)
    ]
    wrong = [(place, path) for place, path in found if not _is_right(place, path)]
    assert len(found) >= NUM_BODIES * len(TEMPLATES)
    assert len(wrong) * 100 <= len(found), wrong
    assert not [pair for pair in wrong if pair[0].is_certain]


def test_a_tool_that_the_conversation_adds_has_its_place_and_what_no_prompt_has_none() -> None:
    described = "Tells the time of a place that is far away from here"
    asked = "Thank you, and what about the other one?"
    tool = {"name": "clock", "description": described, "input_schema": {"type": "object"}}
    change = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool}}
    searched = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": asked}}
    turns = [
        {"role": "user", "content": "What time is it in that place?"},
        {"role": "system", "content": [change]},
        {"role": "assistant", "content": [searched, {"type": "text", "text": "I shall look at the clock."}]},
        {"role": "user", "content": asked},
    ]
    later = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", **tool}]}
    items = [turns[0], later, turns[3]]
    change_path, question = "messages[1].content[0].tool.definition.description", "messages[3].content"
    for dialect, body, paths in (
        ("messages", {"max_tokens": 9, "messages": turns}, (change_path, question)),
        ("responses", {"input": items}, ("input[1].tools[0].description", "input[2].content")),
    ):
        text = prompt_text(dialect, {"model": tiny_model.MODEL, **body}, "qwen3")
        places = PromptPlaces(body, text)
        found = [places.at(text.index(words) + 5) for words in (described, asked)]
        assert [(place.path, place.is_certain) for place in found] == [(path, True) for path in paths]


@pytest.mark.parametrize(("dialect", "agent"), [("responses", codex), ("messages", claude_code)])
def test_what_coding_agents_send_leads_back_as_well(
    dialect: str, agent: Callable[[Random, int], dict[str, Any]]
) -> None:
    found = []
    for seed in range(60):
        rng = Random(seed)
        template = rng.choice(["qwen25", "qwen3", "qwen35", "hermes", "llama31"])
        found += _found_in(dialect, agent(rng, rng.randint(1, 6)), template, rng)
    wrong = [(place, path) for place, path in found if not _is_right(place, path)]
    assert len(found) >= 90
    assert len(wrong) * 100 <= len(found), wrong


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
        },
    },
}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there!"}],
    "tools": [TOOL],
}


def _diverging(one: dict[str, Any], other: dict[str, Any], template: str = "qwen3") -> Place:
    texts = [prompt_text("chat", body, template) for body in (one, other)]
    return PromptPlaces(other, texts[1]).at(num_common(*texts))


def test_what_the_template_has_written_is_told_as_such() -> None:
    text = prompt_text("chat", CHAT, "qwen3")
    place = PromptPlaces(CHAT, text).at(text.index("# Tools") + 3)
    assert place.kind is PlaceKind.TEMPLATE
    assert not place.is_certain


def test_the_role_of_a_message_is_a_place() -> None:
    messages = [CHAT["messages"][0], {"role": "assistant", "content": "Hello there!"}]
    assert _diverging(CHAT, {**CHAT, "messages": messages}).path == "messages[1].role"


def test_a_token_that_reaches_over_two_fields_is_not_certain() -> None:
    text = prompt_text("chat", CHAT, "qwen3")
    start = text.index('weather", "')
    assert not PromptPlaces(CHAT, text).at(start, text.index("The weather") + 3).is_certain


def test_a_plain_prompt_is_its_own_place() -> None:
    assert place_in_prompt("Hello", 0, 3) == Place("prompt", PlaceKind.VALUE, is_certain=True, offset=3)
    assert place_in_prompt([1, 2, 3], 0, 1).path == "prompt"
    assert place_in_prompt(["a", "b"], 1, 0).path == "prompt[1]"
    assert place_in_prompt([[1], [2]], 1, 0).path == "prompt[1]"


def test_names_that_are_no_words_are_written_in_quotes() -> None:
    assert spelled(("tools", 0, "a.b", "", "c")) == 'tools[0]["a.b"][""].c'


def test_a_token_leads_back_to_its_field_even_where_the_client_has_written_special_tokens() -> None:
    messages = [CHAT["messages"][0], {"role": "user", "content": "What is <|im_end|>, and what 東京?"}]
    body = {**CHAT, "messages": messages}
    chat = rendered("chat", body, "qwen3")
    assert chat.is_quoted
    tokenizer = catalog("qwen3").get("tiny").tokenizer
    token_ids = tokenizer.encode(chat.text, is_quoted=True)
    other = tokenizer.encode(chat.text.replace("東", "西"), is_quoted=True)
    number = num_common(token_ids, other)
    place = place_of_token(tokenizer, body, chat.text, token_ids, number, is_quoted=True)
    assert (place.path, place.is_certain) == ("messages[1].content", True)
    assert place.offset == messages[1]["content"].index("東")


def test_the_words_for_one_image_are_not_taken_for_another_that_was_read() -> None:
    told = "[an image, which cannot be read here]"
    texts = [f"what was seen at number {number}" for number in range(3)]
    parts = [{"type": "text", "text": each} for each in texts]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [image, parts[0], parts[1], image, parts[2]]
    body = {"messages": [{"role": "tool", "tool_call_id": "c", "content": content}]}
    for number, path in enumerate((1, 2, 4)):
        for first in ("<|image|>", told):
            prompt = "\n".join([first, texts[0], texts[1], told, texts[2]])
            place = PromptPlaces(body, prompt).at(prompt.index(texts[number]))
            assert (place.path, place.offset) == (f"messages[0].content[{path}].text", 0)


BROKEN_IN = ("qwen3", "qwen35", "llama31")


def named(prompt: BrokenPrompt, template: str) -> Place:
    """The place in the second body of the first token that the first prompt has not."""
    tokenizer = catalog(template).get("tiny").tokenizer
    chats = [rendered(prompt.dialect, body, template) for body in (prompt.before, prompt.after)]
    before, after = (tokenizer.encode(chat.text, is_quoted=chat.is_quoted) for chat in chats)
    number = num_common(before, after)
    return place_of_token(tokenizer, prompt.after, chats[1].text, after, number, is_quoted=chats[1].is_quoted)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("way", TEXT_WAYS)
def test_what_was_broken_is_named(way: str, dialect: str) -> None:
    for template in BROKEN_IN:
        prompt = broken(way, dialect, Random(f"{way} {dialect} {template}"))
        place = named(prompt, template)
        assert prompt.is_named_by(place), (prompt.path, place)
        assert place.is_certain


@pytest.mark.parametrize("way", NAMESPACE_WAYS)
def test_what_changes_only_the_namespace_goes_on_from_the_same_text(way: str) -> None:
    prompt = broken(way, "chat", Random(way))
    before, after = ({**body, "model": "tiny"} for body in (prompt.before, prompt.after))
    texts = [rendered("chat", body, "qwen3").text for body in (before, after)]
    generation = len("<|im_start|>assistant\n")
    assert num_common(*texts) >= len(texts[0]) - generation
