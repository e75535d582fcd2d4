"""Conversation keys: alike for what a client may send back of an answer, others for everything else."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.history.canonical import (
    KEY_BYTES,
    ConversationKey,
    canonical,
    conversation_digests,
    conversation_keys,
    key_after,
    message_digest,
)

ROOT = b"r" * 16
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def _call(arguments: Any, **others: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}, **others}


def _answer(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "Well.", **fields}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
contents = st.none() | st.text(max_size=8) | st.lists(st.text(max_size=4) | values, max_size=2)
calls = st.lists(st.builds(_call, values | st.dictionaries(st.text(max_size=3), values)), max_size=2)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": contents},
    optional={"name": st.text(max_size=3), "tool_calls": calls | values, "function_call": values},
)


def _keys(
    root: bytes, tools: list[Any] | None, arguments: dict[str, Any] | None, messages: list[Any]
) -> list[ConversationKey]:
    return conversation_keys(root, conversation_digests(tools, arguments, messages))


def test_what_clients_change_of_an_answer_does_not_count() -> None:
    same = [
        _answer(),
        _answer(content="\n Well.\n"),
        _answer(reasoning_content="Hm.", id="1", refusal=None, tool_calls=[]),
        _answer(content=[{"type": "text", "text": "Well."}], tool_calls=None),
    ]
    assert len({canonical(message) for message in same}) == 1
    same = [
        _answer(tool_calls=[_call('{"a": 1.50, "b": "\\u00e9"}', id="call-1")]),
        _answer(tool_calls=[_call('{"b":"é","a":1.5}')]),
        _answer(tool_calls=[_call({"b": "é", "a": 1.5}, id="x", index=0)]),
        _answer(function_call={"name": "f", "arguments": '{"b": "é", "a": 1.5}'}),
    ]
    assert len({canonical(message) for message in same}) == 1
    empty = [_answer(tool_calls=[_call(arguments)]) for arguments in ("", "{}", {}, None)]
    assert len({canonical(message) for message in empty}) == 1
    results = [{"role": "tool", "content": "7", "tool_call_id": name} for name in "ab"]
    assert len({canonical(message) for message in results}) == 1


def test_whatever_else_differs_is_another_message() -> None:
    others = [
        _answer(),
        _answer(content="Well"),
        _answer(content="We ll."),
        _answer(tool_calls=[_call({})]),
        _answer(tool_calls=[_call({}), _call({})]),
        _answer(tool_calls=[_call({"a": 1})]),
        _answer(tool_calls=[_call({"a": "1"})]),
        _answer(tool_calls=[_call('{"a": 1')]),
        {"role": "user", "content": "Well."},
        {"role": "user", "content": " Well."},
        {"role": "user", "content": "Well.", "name": "Ada"},
        {"role": "system", "content": "Well."},
    ]
    assert len({canonical(message) for message in others}) == len(others)


def test_keys_roll_on_from_the_root_the_tools_and_the_arguments() -> None:
    hello = [{"role": "user", "content": "Hello"}, _answer()]
    keys = _keys(ROOT, TOOLS, {"enable_thinking": True}, hello)
    assert [len(key) for key in keys] == [KEY_BYTES] * 2
    assert key_after(ROOT, keys[0], message_digest(_answer(content="Well. "))) == keys[1]
    others = [
        _keys(b"s" * 16, TOOLS, {"enable_thinking": True}, hello),
        _keys(ROOT, None, {"enable_thinking": True}, hello),
        _keys(ROOT, TOOLS, None, hello),
        _keys(ROOT, TOOLS, {"enable_thinking": True}, hello[::-1]),
    ]
    assert len({key for some in (keys, *others) for key in some}) == 10
    assert _keys(ROOT, [], {}, hello) == _keys(ROOT, None, None, hello)


@given(st.lists(messages, max_size=4), st.lists(messages, max_size=2))
def test_a_beginning_has_the_keys_that_it_has_alone(
    some: list[dict[str, Any]], more: list[dict[str, Any]]
) -> None:
    keys = _keys(ROOT, TOOLS, None, some)
    assert _keys(ROOT, TOOLS, None, some + more)[: len(some)] == keys
    assert len(set(keys)) == len(keys)


@given(st.dictionaries(st.text(max_size=3), values), st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_arguments_written_out_anew_are_the_same(
    arguments: dict[str, Any], is_ascii: bool, indent: int | str | None
) -> None:
    written = json.dumps(arguments, ensure_ascii=is_ascii, indent=indent)
    again = json.dumps(dict(reversed(json.loads(written).items())))
    messages = [_answer(tool_calls=[_call(some)]) for some in (written, again, json.loads(written))]
    assert len({canonical(message) for message in messages}) == 1


def test_halves_of_surrogate_pairs_and_long_integers_are_no_errors() -> None:
    odd = [{"role": "user", "content": "\ud800"}, _answer(tool_calls=[_call({"a": 10**30, "\udfff": 1})])]
    odd.append(_answer(tool_calls=[_call("\udfff"), 7, {"function": 3}], content={"\ud800": 10**30}))
    assert len(set(_keys(ROOT, TOOLS, {"a": "\ud800"}, odd))) == 3
