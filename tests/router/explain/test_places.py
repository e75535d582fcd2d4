"""Places: a character of a prompt leads back to the field of the body that it came from, whatever the dialect
and the chat template."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from router.errors import RouterError
from router.explain.leaves import Path, spelled
from router.explain.places import Place, PlaceKind, PromptPlaces, place_in_prompt, place_of_token
from tests.router import tiny_model
from tests.router.explain.agent_bodies import claude_code, codex
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
    written_places,
)

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


def test_keys_in_another_order_are_told_by_their_object() -> None:
    function = TOOL["function"]
    assert isinstance(function, dict)
    properties = dict(reversed(function["parameters"]["properties"].items()))
    parameters = {"type": "object", "properties": properties}
    other = {**CHAT, "tools": [{**TOOL, "function": {**function, "parameters": parameters}}]}
    place = _diverging(CHAT, other)
    assert (place.kind, place.path, place.key) == (
        PlaceKind.KEYS,
        "tools[0].function.parameters.properties",
        "unit",
    )


def test_a_tool_more_is_told_by_the_list_of_tools_or_the_tool() -> None:
    place = _diverging(
        CHAT, {**CHAT, "tools": [TOOL, {**TOOL, "function": {**TOOL["function"], "name": "f"}}]}
    )  # type: ignore[dict-item]
    assert place.path in ("tools", "tools[1]")
    assert _diverging({**CHAT, "tools": [TOOL, TOOL]}, CHAT).path == "tools"


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
