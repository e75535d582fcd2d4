"""Each way of breaking a prompt is named by the field that was broken, from the first token that differs."""

from random import Random

import pytest

from router.explain.places import Place, place_of_token
from tests.router.explain.broken_prompts import NAMESPACE_WAYS, TEXT_WAYS, BrokenPrompt, broken
from tests.router.explain.conversations import DIALECTS, catalog, num_common, rendered

TEMPLATES = ("qwen3", "qwen35", "llama31")


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
    for template in TEMPLATES:
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
