"""Bodies on their way to a server, and what is read of answers."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.openai_engine.bodies import (
    AnswerReader,
    EventSplitter,
    Read,
    body_to_send,
    data_of,
)
from replicas.protocol.frames import BodyForm, FinishReason


def encoded(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize("form", BodyForm)
def test_a_body_passes_as_it_is(form: BodyForm) -> None:
    body = b'{"model": "m",  "odd": [1, 2.50], "stream": true, "stream_options": {"include_usage": true}}'
    sent = body_to_send(form, body, "m")
    assert (sent.content, sent.streams, sent.hides_usage) == (body, True, False)


def test_a_stream_is_asked_for_its_usage() -> None:
    sent = body_to_send(BodyForm.CHAT, encoded(model="m", stream=True, stream_options={"odd": 1}), "m")
    assert json.loads(sent.content)["stream_options"] == {"odd": 1, "include_usage": True}
    assert sent.hides_usage
    assert not body_to_send(BodyForm.MESSAGES, encoded(model="m", stream=True), "m").hides_usage


def test_the_model_gets_its_servers_name() -> None:
    assert json.loads(body_to_send(BodyForm.CHAT, encoded(model="ours", n=2), "theirs").content) == {
        "model": "theirs",
        "n": 2,
    }


@pytest.mark.parametrize("body", [b"[1]", b"{", b'"text"'])
def test_what_is_no_body_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        body_to_send(BodyForm.CHAT, body, "m")


def test_openais_usage_is_read() -> None:
    reader = AnswerReader()
    said = reader.take(
        encoded(
            choices=[{"index": 0, "finish_reason": "length", "message": {"content": "x"}}],
            usage={
                "prompt_tokens": 20,
                "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 16},
            },
        )
    )
    assert reader.read == Read(20, 16, 3, FinishReason.LENGTH)
    assert not said.is_only_usage
    assert AnswerReader().take(encoded(choices=[], usage={"prompt_tokens": 1})).is_only_usage


def test_anthropics_stream_is_read() -> None:
    reader = AnswerReader()
    usage = {"input_tokens": 4, "cache_read_input_tokens": 10, "cache_creation_input_tokens": 6}
    reader.take(encoded(type="message_start", message={"usage": {**usage, "output_tokens": 1}}))
    reader.take(encoded(type="content_block_delta", delta={"type": "text_delta", "text": "x"}))
    reader.take(encoded(type="message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 7}))
    assert reader.read == Read(20, 10, 7, FinishReason.STOP)


def test_llama_cpps_timings_are_read() -> None:
    reader = AnswerReader()
    reader.take(encoded(choices=[], timings={"cache_n": 30, "prompt_n": 2}))
    assert (reader.read.num_prompt_tokens, reader.read.num_cached_tokens) == (32, 30)
    assert reader.read.prompt_seconds is None
    for told, seconds in ((250.0, 0.25), (-1.0, 0.25), (1e300, 0.25)):
        reader.take(encoded(choices=[], timings={"prompt_ms": told}))
        assert reader.read.prompt_seconds == seconds


def test_what_is_not_told_is_unknown() -> None:
    reader = AnswerReader()
    reader.take(encoded(choices=[{"finish_reason": "stop"}], usage={"prompt_tokens": 5}))
    assert reader.read.num_cached_tokens is None


def test_an_error_in_a_stream_is_read() -> None:
    for error in ("overheated", {"message": "overheated", "code": 500}):
        reader = AnswerReader()
        reader.take(encoded(error=error))
        assert reader.read.problem == "overheated"


@given(
    st.lists(st.sampled_from([b'data: {"a":1}', b": comment", b"event: x\ndata: {}", b"data: [DONE]"])),
    st.data(),
)
def test_events_come_whole_however_they_are_cut(events: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(event + b"\n\n" for event in events)
    places = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    splitter = EventSplitter()
    found: list[bytes] = []
    for start, end in zip([0, *places], [*places, len(stream)], strict=True):
        found += splitter.add(stream[start:end])
    assert found == [event + b"\n\n" for event in events]
    assert not splitter.has_rest


def test_comments_are_no_data() -> None:
    assert data_of(b'event: x\ndata: {"a":1}\n\n') == b'{"a":1}'
    assert data_of(b"data: [DONE]\r\n\r\n") == b"[DONE]"
    assert data_of(b'data: {"a":\ndata: 1}\n\n') == b'{"a":\n1}'
    assert data_of(b": comment\n\n") is None
