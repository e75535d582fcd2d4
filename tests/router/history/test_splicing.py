"""Splicing: each turn's prompt begins with the tokens of the turn before, whatever the template writes."""

from collections.abc import Collection
from typing import Any

import pytest

from replicas.protocol.blocks import pack_token_ids, unpack_token_ids
from router.history.canonical import ConversationKey, conversation_digests, conversation_keys
from router.history.remembered import RememberedHistory
from router.history.splicing import STANDS_FOR_ANSWER, Render, text_after
from router.prompt.template import ChatTemplate
from tests.router import chat_templates
from tests.router.history.conversations import SPEAKERS, TOOLS, Speaker, echoed, quoter, results, tokenizer

ROOT = bytes(range(16))
NUM_TURNS = 10
ENDS = {"<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>"}


def _keys(messages: list[dict[str, Any]]) -> list[ConversationKey]:
    return conversation_keys(ROOT, conversation_digests(TOOLS, None, messages))


def _after(
    render: Render, messages: list[dict[str, Any]], position: int, ends: Collection[str] = ENDS
) -> tuple[str, str] | None:
    return text_after(render, render(messages), messages, position, ends_of_turn=ends)


def _spliced(
    who: Speaker, history: RememberedHistory, messages: list[dict[str, Any]]
) -> tuple[list[int], Any, str]:
    """The prompt's tokens, what was found, and the text of the plain prompt."""
    keys = _keys(messages)
    is_quoted = quoter().is_needed(messages)
    rendered = quoter().quote(messages) if is_quoted else messages
    plain = who.template.render(rendered, tools=TOOLS)
    found = history.find(keys)
    if found is None:
        return tokenizer().encode(plain, is_quoted=is_quoted), None, plain
    token_ids = unpack_token_ids(found.token_ids)
    ends = {tokenizer().special_tokens[end] for end in ENDS}
    behind = _after(lambda some: who.template.render(some, tools=TOOLS), rendered, found.position)
    assert behind is not None
    end, tail = behind
    if token_ids[-1] not in ends:
        tail = end + tail
    return token_ids + tokenizer().encode(tail, is_quoted=is_quoted), found, plain


@pytest.mark.parametrize("who", SPEAKERS, ids=lambda who: who.name)
def test_in_ten_turns_each_prompt_begins_with_the_tokens_of_the_turn_before(who: Speaker) -> None:
    history = RememberedHistory(2**20)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    before: list[int] = []
    num_drifted = 0
    for turn in range(NUM_TURNS):
        if messages[-1]["role"] != "tool":
            messages.append(
                {"role": "user", "content": f"Question {turn}, with <|im_end|> and <|eot_id|> in it."}
            )
        prompt, found, plain = _spliced(who, history, messages)
        assert (found is None) == (turn == 0)
        assert prompt[: len(before)] == before
        num_drifted += prompt != tokenizer().encode(plain, is_quoted=True)
        is_cut_short = turn == 6
        answer = who.answer(turn, calls=turn % 3 == 1 and not is_cut_short)
        output = tokenizer().encode(answer)
        if not is_cut_short:
            output.append(tokenizer().special_tokens[who.end_of_turn])
        message = echoed(who, plain, answer)
        key = _keys([*messages, message])[-1]
        added = prompt[0 if found is None else len(unpack_token_ids(found.token_ids)) :] + output
        history.remember("", key, pack_token_ids(added), found)
        before = prompt + output
        messages = [*messages, message, *results(message)]
    assert num_drifted >= 2, "the template was to write some turns otherwise"
    assert history.num_bytes < 4 * len(before) + NUM_TURNS * 1000, "kept once"


@pytest.mark.parametrize("who", SPEAKERS, ids=lambda who: who.name)
def test_without_drift_the_spliced_prompt_is_the_plain_one(who: Speaker) -> None:
    history = RememberedHistory(2**20)
    messages: list[dict[str, Any]] = []
    for turn in range(4):
        messages.append({"role": "user", "content": f"Question {turn}."})
        messages.append({"role": "assistant", "content": f"Answer {turn}."})
        until_now = who.template.render(messages, tools=TOOLS, add_generation_prompt=False)
        end = until_now.rindex(who.end_of_turn) + len(who.end_of_turn)
        token_ids = tokenizer().encode(until_now[:end])
        key = _keys(messages)[-1]
        history.remember("", key, pack_token_ids(token_ids))
        asked = [*messages, {"role": "user", "content": "And then?"}]
        prompt, found, plain = _spliced(who, history, asked)
        if plain.startswith(until_now[:end]):  # Qwen 3 writes an old turn without its empty reasoning
            assert found is not None and found.position == len(messages) - 1
            assert prompt == tokenizer().encode(plain)
        assert prompt[: len(token_ids)] == token_ids


def _render(source: str, **variables: Any) -> Render:
    template = ChatTemplate({"default": source}, {})
    return lambda messages: template.render(messages, **variables)


HELLO = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "Again"},
]


CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "x"}}}
RESULT = [
    HELLO[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "found"},
]
LATER = [*RESULT, {"role": "assistant", "content": "Well."}, HELLO[2]]
CALLED = "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}"
NO_END = (
    "{% for m in messages %}{{ {'user': '<user>', 'tool': '<result>'}.get(m.role, '<answer>') }}"
    + CALLED
    + "{% endfor %}"
)
"""As in GLM's templates, where the next turn's first token ends the one before."""
CHECKS = (
    "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result of what?') }}{% endif %}" + CALLED + "<end>\n{% endfor %}"
)
DONE = "{% for m in messages %}{{ m.content }}<done><end>\n{% endfor %}"
TWO_ENDS = "{% for m in messages %}{{ m.content }}<end><x>{% endfor %}"
LAST = "{% for m in messages %}{{ m.content }}<end>{% endfor %}{{ messages[1].content | length }}"
NOWHERE = [
    "{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}",
    "{% for m in messages %}{{ m.content | length }}<|im_end|>{% endfor %}",
    "{% for m in messages %}{{ m.content }}\n{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ m.content }}<|im_end|>{% endfor %}",
    "{% for m in messages if m.content | length > 9 %}{{ raise_exception('no') }}{% endfor %}",
]
"""The answer is left out, counted, never ended, repeated, refused."""
QWEN_REST = "\n<|im_start|>user\nAgain<|im_end|>\n<|im_start|>assistant\n"
LLAMA_REST = (
    '<|start_header_id|>ipython<|end_header_id|>\n\n"found"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)


@pytest.mark.parametrize(
    ("source", "messages", "position", "ends", "found"),
    [
        (chat_templates.QWEN_25, HELLO, 1, ENDS, ("<|im_end|>", QWEN_REST)),
        (chat_templates.QWEN_25, HELLO[:2], 1, ENDS, ("<|im_end|>", "\n<|im_start|>assistant\n")),
        (chat_templates.LLAMA_31, RESULT, 1, ENDS, ("<|eot_id|>", LLAMA_REST)),
        *((source, HELLO, 1, ENDS, None) for source in NOWHERE),
        (TWO_ENDS, HELLO[:2], 1, ["<end>", "<end><x>"], ("<end><x>", "")),
        (NO_END, LATER, 1, ["<user>", "<result>"], ("<result>", "found<answer>Well.<user>Again")),
        (NO_END, LATER, 1, ["<user>"], None),
        (NO_END, LATER, 3, ["<user>"], ("<user>", "Again")),
        (DONE, HELLO, 1, ["<end>"], ("<end>", "\nAgain<done><end>\n")),
        (DONE, HELLO[:2], 1, ["<end>"], ("<end>", "\n")),
        (CHECKS, RESULT, 1, ["<end>"], ("<end>", "\nfound<end>\n")),
        (LAST, HELLO, 1, ["<end>"], None),
    ],
)
def test_what_follows_begins_behind_the_end_of_the_turn_or_nothing_is_spliced(
    source: str,
    messages: list[dict[str, Any]],
    position: int,
    ends: Collection[str],
    found: tuple[str, str] | None,
) -> None:
    render = _render(source, tools=TOOLS if source is chat_templates.LLAMA_31 else None)
    assert _after(render, messages, position, ends) == found


def test_a_client_that_sends_the_stand_in_is_not_spliced() -> None:
    render = _render(chat_templates.QWEN_25)
    for place in (0, 2):
        messages = [dict(message) for message in HELLO]
        messages[place]["content"] = f"{STANDS_FOR_ANSWER}<|im_end|>"
        tail = _after(render, messages, 1)
        assert tail is None
