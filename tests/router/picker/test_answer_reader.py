"""What a server's answer says of itself, in every dialect, however its bytes are cut."""

import json
from typing import Any

import pytest

from router.picker.answer_reader import MOST_LINE_BYTES, AnswerFacts, AnswerReader

CHAT_USAGE = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 32}}
RESPONSE_USAGE = {"input_tokens": 40, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 32}}
MESSAGE_USAGE = {"input_tokens": 8, "output_tokens": 3, "cache_read_input_tokens": 32}
FACTS = AnswerFacts("answer-1", 40, 32, 3)


DONE = b"data: [DONE]\n\n"


def sse(*events: dict[str, Any], end: str = "\n\n") -> bytes:
    return "".join(f"event: some\ndata: {json.dumps(event)}{end}" for event in events).encode()


CHAT = sse(
    {"id": "answer-1", "choices": [{"delta": {"content": "\u2028 a"}}], "usage": None},
    {"id": "answer-1", "choices": [{"delta": {"content": 'the "usage":{"prompt_tokens":9} of it'}}]},
    {"id": "answer-1", "choices": [], "usage": CHAT_USAGE},
)
MESSAGES = sse(
    {"type": "message_start", "message": {"id": "answer-1", "usage": {**MESSAGE_USAGE, "output_tokens": 0}}},
    {"type": "content_block_delta", "delta": {"text": "a"}},
    {"type": "message_delta", "usage": MESSAGE_USAGE},
)
RESPONSES = sse(
    {"type": "response.created", "response": {"id": "answer-1", "usage": None}},
    {"type": "response.output_text.delta", "item_id": "item", "delta": "a"},
    {"type": "response.completed", "response": {"id": "answer-1", "usage": RESPONSE_USAGE}},
)


def read(body: bytes, size: int, *, is_stream: bool) -> AnswerFacts:
    reader = AnswerReader(is_stream=is_stream)
    for start in range(0, len(body), size):
        reader.feed(body[start : start + size])
    return reader.facts()


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
@pytest.mark.parametrize(
    "body", [CHAT + b"data: [DONE]\n\n", MESSAGES, RESPONSES, CHAT.replace(b"\n", b"\r\n")]
)
def test_streams(body: bytes, size: int) -> None:
    assert read(body, size, is_stream=True) == FACTS


@pytest.mark.parametrize("size", [5, 10_000])
@pytest.mark.parametrize("usage", [CHAT_USAGE, RESPONSE_USAGE, MESSAGE_USAGE])
def test_whole_answers(usage: dict[str, Any], size: int) -> None:
    body = json.dumps({"id": "answer-1", "choices": [{"text": "a"}], "usage": usage}).encode()
    assert read(body, size, is_stream=False) == FACTS


def test_a_server_that_does_not_say_what_was_cached() -> None:
    usage = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": None}
    body = json.dumps({"id": "answer-1", "usage": usage}).encode()
    assert read(body, 100, is_stream=False) == AnswerFacts("answer-1", 40, None, 3)


def test_without_a_usage_events_are_counted() -> None:
    body = sse(*[{"id": "answer-1", "choices": []}] * 5) + b"data: [DONE]\n\n"
    assert read(body, 30, is_stream=True) == AnswerFacts("answer-1", None, None, 5)


@pytest.mark.parametrize("body", [b"data: {nonsense}\n\n", b'data: {"usage": 7}\n\n', b"\xff" * 40])
def test_nonsense_says_nothing(body: bytes) -> None:
    for is_stream in (True, False):
        facts = read(body, 9, is_stream=is_stream)
        assert facts[:3] == (None, None, None)


def test_a_line_without_end_is_not_kept_and_the_next_is_read() -> None:
    body = b"data: {" + b"x" * (MOST_LINE_BYTES + 10) + b"\n" + CHAT
    reader = AnswerReader(is_stream=True)
    for start in range(0, len(body), 50_000):
        reader.feed(body[start : start + 50_000])
        assert len(reader._rest) <= MOST_LINE_BYTES
    assert reader.facts() == FACTS
