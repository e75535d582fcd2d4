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
    SentBody,
    body_to_send,
    data_of,
)
from replicas.protocol.frames import BodyForm, FinishReason, PromptUsage, RequestKey, TokenDelta
from replicas.protocol.wire import checked_delta, decode_loose_delta, encode


def encoded(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def reading() -> AnswerReader:
    return AnswerReader(SentBody(BodyForm.CHAT, b"", streams=True, hides_usage=True))


def event(**fields: Any) -> bytes:
    return b"data: " + encoded(**fields) + b"\n\n"


@pytest.mark.parametrize("form", BodyForm)
def test_the_values_of_a_body_pass_as_they_are(form: BodyForm) -> None:
    body = b'{"model":"m","odd":[1, 2.50],"stream":true,"stream_options":{"include_usage": true}}'
    sent = body_to_send(form, body, "m")
    assert (sent.content, sent.streams, sent.hides_usage) == (body, True, False)


SERVERS_WORDS = {"kv_transfer_params": {"remote_host": "10.0.0.1"}, "ec_transfer_params": {"a": 1}}


@pytest.mark.parametrize("form", BodyForm)
def test_nothing_goes_to_a_server_that_is_for_servers_alone(form: BodyForm) -> None:
    body = body_to_send(form, encoded(odd=1, vllm_xargs={"kv_transfer_params": "x"}, **SERVERS_WORDS), "m")
    assert json.loads(body.content) == {"odd": 1, "model": "m"}


def test_words_of_servers_to_each_other_are_taken_out_of_answers() -> None:
    said = {"choices": [{"text": "x", "finish_reason": "stop"}], "id": "a"}
    reader = AnswerReader(SentBody(BodyForm.COMPLETION, b"", streams=False))
    content, _ = reader.whole(encoded(**said, **SERVERS_WORDS))
    assert json.loads(content) == said and reader.has_ended
    as_it_was = encoded(**said, kv_transfer_params=None) + b"\n"
    assert reader.whole(as_it_was)[0] == as_it_was
    message = {"type": "message_start", "message": {"id": "a", **SERVERS_WORDS}}
    for last in (b"data: %b", b"event: x\r\ndata:%b"):
        sent = last % encoded(**said, **SERVERS_WORDS) + b"\n\n"
        content, num_tokens = reading().event(sent)
        assert (json.loads(data_of(content) or b""), num_tokens) == (said, 1)
        assert content.partition(b"data:")[0] == last.partition(b"data:")[0]
    in_two = b'data: {"choices":[],\ndata: "kv_transfer_params": {"a": 1}}\n\n'
    for sent, kept in ((event(**message), {**message, "message": {"id": "a"}}), (in_two, {"choices": []})):
        assert json.loads(data_of(reading().event(sent)[0]) or b"") == kept


LENGTH = {"max_completion_tokens": 5}
BOTH = {**LENGTH, "max_tokens": 5}


@pytest.mark.parametrize(
    ("refused", "words", "sent", "then"),
    [
        ((), "'max_tokens' is not supported. Use 'max_completion_tokens'", BOTH, LENGTH),
        ((), "max_completion_tokens: extra inputs are not permitted", BOTH, {"max_tokens": 5}),
        ((), "temperature is too high", BOTH, None),
        ((), "Invalid max_tokens value: it is 1 to 8192", BOTH, None),
        (("max_tokens",), "max_tokens is unknown", LENGTH, None),
        (("max_completion_tokens",), "max_tokens is too large", {"max_tokens": 5}, None),
    ],
)
def test_a_chats_length_has_both_names_where_a_server_takes_both(
    refused: tuple[str, ...], words: str, sent: dict[str, int], then: dict[str, int] | None
) -> None:
    body = body_to_send(BodyForm.CHAT, encoded(**LENGTH), "m", refused=refused)
    assert json.loads(body.content) == {**sent, "model": "m"}
    field = body.refused_in(words)
    assert (field is None) == (then is None)
    if field is not None:
        again = body.without(field)
        assert json.loads(again.content) == {**(then or {}), "model": "m"}
        assert again.refused_in(words) is None  # a bound is left
    assert body_to_send(BodyForm.MESSAGES, encoded(max_tokens=5), "m").added == ()


@pytest.mark.parametrize("form", BodyForm)
def test_the_salt_is_ours_and_no_words_of_a_refusal_take_it_away(form: BodyForm) -> None:
    sent = body_to_send(form, encoded(cache_salt="the client's"), "m", salt="ours")
    assert json.loads(sent.content)["cache_salt"] == "ours"
    assert sent.refused_in("cannot read https://a/cache_salt.png") is None


@pytest.mark.parametrize(
    ("asked", "told", "most"),
    [
        ({"max_tokens": 3}, {"completion_tokens": 2**32 - 1}, 3),
        ({"max_completion_tokens": 3, "n": 2}, {"completion_tokens": 2**32 - 1}, 6),
        ({}, {"completion_tokens": 2**32 - 1}, 300),
        ({}, {"completion_tokens": 900, "completion_tokens_details": {"reasoning_tokens": 880}}, 900),
        ({}, {"completion_tokens": 2**31, "completion_tokens_details": {"reasoning_tokens": 2**31}}, 2**18),
    ],
)
def test_no_more_tokens_are_believed_than_were_asked_for_or_came(
    asked: dict[str, int], told: dict[str, Any], most: int
) -> None:
    sent = body_to_send(BodyForm.CHAT, encoded(**asked), "m")
    said = encoded(choices=[{"message": {"content": "x"}, "finish_reason": "stop"}], usage=told)
    whole, streamed = AnswerReader(sent), AnswerReader(sent)
    assert 0 < whole.whole(said)[1] <= most
    streamed.event(b"data: " + said + b"\n\n")
    assert 0 < (streamed.read.num_output_tokens or 0) <= most
    if told["completion_tokens"] == 900:
        assert whole.read.num_output_tokens == 900


def said_in(form: BodyForm, index: int, text: str, **more: Any) -> bytes:
    if form is BodyForm.MESSAGES:
        return event(type="content_block_delta", index=index, delta={"type": "text_delta", "text": text})
    said = {"text": text} if form is BodyForm.COMPLETION else {"delta": {"content": text}}
    return event(id="x", choices=[{"index": index, **said, "finish_reason": None, **more}])


@pytest.mark.parametrize("form", BodyForm)
def test_a_stream_with_all_its_tokens_is_given_the_end_that_is_missing(form: BodyForm) -> None:
    num_choices = 1 if form is BodyForm.MESSAGES else 2
    reader = AnswerReader(SentBody(form, b"", streams=True, max_tokens=2, num_choices=num_choices))
    pieces = [(index, word) for word in ("a", "b") for index in range(num_choices)]
    for index, word in pieces:
        assert reader.missing_end() == b""
        reader.event(said_in(form, index, word))
    end = [data_of(each) for each in EventSplitter().add(reader.missing_end())]
    assert reader.read.finish is FinishReason.LENGTH
    if form is BodyForm.MESSAGES:
        said = [json.loads(each or b"") for each in end]
        assert [each["type"] for each in said] == ["content_block_stop", "message_delta", "message_stop"]
        assert said[1]["delta"]["stop_reason"] == "max_tokens"
    else:
        assert end[1] == b"[DONE]"
        last = json.loads(end[0] or b"")
        assert last["id"] == "x"
        assert [(each["index"], each["finish_reason"]) for each in last["choices"]] == [
            (0, "length"),
            (1, "length"),
        ]
    failed = AnswerReader(SentBody(form, b"", streams=True, max_tokens=1))
    failed.event(said_in(form, 0, "a"))
    failed.event(event(error={"message": "out of memory"}))
    assert failed.missing_end() == b""


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
    reader = reading()
    answer = encoded(
        id="theirs",
        choices=[{"index": 0, "finish_reason": "length", "message": {"content": "x"}}],
        usage={
            "prompt_tokens": 20,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
    )
    assert reader.whole(answer) == (answer, 3)
    assert reader.read == Read(20, 16, 3, FinishReason.LENGTH, answer_id="theirs")


def test_anthropics_stream_is_read() -> None:
    reader = reading()
    usage = {"input_tokens": 4, "cache_read_input_tokens": 10, "cache_creation_input_tokens": 6}
    reader.event(event(type="message_start", message={"id": "a", "usage": {**usage, "output_tokens": 1}}))
    said = event(type="content_block_delta", delta={"type": "text_delta", "text": "x"})
    assert reader.event(said) == (said, 1)
    reader.event(event(type="message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 7}))
    assert reader.read == Read(20, 10, 7, FinishReason.STOP, answer_id="a")


def test_llama_cpps_timings_are_read() -> None:
    reader = reading()
    reader.event(event(choices=[], timings={"cache_n": 30, "prompt_n": 2}))
    assert (reader.read.num_prompt_tokens, reader.read.num_cached_tokens) == (32, 30)
    assert reader.read.prompt_seconds is None
    for told, seconds in ((250.0, 0.25), (-1.0, 0.25), (1e300, 0.25), ("3", 0.25)):
        reader.event(event(choices=[], timings={"prompt_ms": told}))
        assert reader.read.prompt_seconds == seconds


@pytest.mark.parametrize("told", [None, "5", [5], True, 5.5, -5, 10**30, {"cached_tokens": 5}])
def test_what_is_not_told_is_unknown(told: object) -> None:
    reader = reading()
    usage = {"prompt_tokens": told, "prompt_tokens_details": {"cached_tokens": told}, "input_tokens": told}
    reader.event(event(choices=[{"finish_reason": "stop"}], usage=usage, id=told))
    reader.event(event(choices=[], usage=told, timings=told))
    assert (reader.read.num_prompt_tokens, reader.read.num_cached_tokens) == (None, None)
    assert reader.has_ended and reader.read.answer_id in ("", told)


def test_an_answer_without_end_is_none() -> None:
    reader = reading()
    assert reader.event(event(choices=[{"delta": {"content": "x"}}]))[1] == 1
    refusal = reader.refusal(lambda content: content)
    assert refusal is not None and "has no end" in refusal.message and refusal.error is None


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "usage",
                    "error",
                    "delta",
                    "index",
                    "finish_reason",
                    "id",
                    "type",
                    "object",
                    "message",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=4), st.sampled_from(BodyForm))
def test_nothing_that_a_server_says_is_too_odd(said: list[Any], form: BodyForm) -> None:
    """What is told of it can be sent on."""
    sent = SentBody(form, b"", streams=True)
    reader, whole = AnswerReader(sent), AnswerReader(sent)
    for each in said:
        reader.event(b"data: " + json.dumps(each).encode() + b"\n\n")
        whole.whole(json.dumps(each).encode())
    for read in (reader, whole):
        usage = PromptUsage(0, None, 0, answer_id=read.read.answer_id)
        refusal = read.refusal(lambda content: content)
        delta = TokenDelta(RequestKey(1, 0), usage=usage, refusal=refusal)
        assert checked_delta(decode_loose_delta(encode(delta))) == delta


@given(
    st.lists(st.sampled_from([b'data: {"a":1}', b": comment", b"event: x\ndata: {}", b"data: [DONE]"])),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.data(),
)
def test_events_come_whole_however_they_are_cut(
    events: list[bytes], line_end: bytes, data: st.DataObject
) -> None:
    stream = b"".join(event + b"\n\n" for event in events).replace(b"\n", line_end)
    places = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    splitter = EventSplitter()
    found: list[bytes] = []
    for start, end in zip([0, *places], [*places, len(stream)], strict=True):
        found += splitter.add(stream[start:end])
    assert [data_of(each) for each in found] == [data_of(each) for each in events]
    assert b"".join(found).strip() == stream.strip() and not splitter.rest


def test_comments_are_no_data() -> None:
    assert data_of(b'event: x\ndata: {"a":1}\n\n') == b'{"a":1}'
    assert data_of(b"data: [DONE]\r\n\r\n") == b"[DONE]"
    assert data_of(b'data: {"a":\ndata: 1}\n\n') == b'{"a":\n1}'
    assert data_of(b": comment\n\n") is None
