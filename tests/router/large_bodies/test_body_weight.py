"""What is prepared on the event loop is bounded in bytes and in values, whatever its shape."""

import json

import pytest

from router.large_bodies.body_weight import (
    MOST_BYTES,
    MOST_VALUES,
    SMALL_BYTES,
    TINY_BYTES,
    is_light,
    is_light_chat,
    is_light_completion,
)


def _chat(content: str, **fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()


def test_long_honest_texts_are_light_however_many_commas_and_quotes_they_hold() -> None:
    assert is_light_chat(_chat('x = ["a", {"b": 1}], "\\\\"\n' * 2000))


@pytest.mark.parametrize("value", ["[]", "{}", "1", '""', "[[1]]", '{"a":1}', "null", '"\\\\"', '"\\""'])
def test_many_values_are_not(value: str) -> None:
    body = b'{"messages":[' + b",".join([value.encode()] * (MOST_VALUES + 1)) + b"]}"
    assert len(body) > SMALL_BYTES
    assert not is_light_chat(body)


def test_quotes_in_strings_hide_no_values() -> None:
    for text in ('"', "\\", '\\"', '"\\'):
        few = _chat(text * 2000, tools=[1])
        assert is_light_chat(few)
        assert not is_light_chat(_chat(text * 2000, tools=[1] * MOST_VALUES))


def test_token_ids_are_cheap_and_nested_lists_are_not() -> None:
    assert is_light_completion(json.dumps({"prompt": [1000] * 30_000}).encode())
    assert not is_light_completion(json.dumps({"prompt": [[1]] * (MOST_VALUES + 1)}).encode())


@pytest.mark.parametrize("number", ["1e300", "1E300", "1e+300", "12.5e280"])
def test_many_powers_of_ten_are_not_light_anywhere(number: str) -> None:
    body = f'{{"prompt": [{", ".join([number] * 600)}]}}'.encode()
    assert TINY_BYTES < len(body) <= SMALL_BYTES
    for weighs in (is_light, is_light_chat, is_light_completion):
        assert not weighs(body)
        assert weighs(body.replace(number.encode(), b"1e3"))


def test_what_is_long_is_never_light() -> None:
    for weighs in (is_light, is_light_chat, is_light_completion):
        assert not weighs(b"a" * (MOST_BYTES + 1))
