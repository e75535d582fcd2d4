"""Messages of external processing beside the bytes of the official bindings, and answers as they pass."""

import json
from typing import Any

import pytest

from router.picker import ext_proc_pb2 as pb
from router.picker.answer_reader import MOST_LINE_BYTES, AnswerFacts, AnswerReader
from router.picker.messages import (
    FIRST_BYTES,
    MOST_ENDPOINTS,
    MOST_HEAD_BYTES,
    MOST_HEADERS,
    SUBSET,
    SUBSET_NAMESPACE,
    Body,
    BodyMode,
    Head,
    Message,
    Trailers,
    decode,
    destined,
    destined_buffered,
    go_on,
    immediate,
    same_piece,
)
from tests.router.picker.gateway import field

HEAD = (
    "12620a600a0f0a073a6d6574686f641a04504f53540a1c0a053a706174681a132f76312f636f6d706c6574696f6e733f"
    "783d310a200a0c436f6e74656e742d547970651a106170706c69636174696f6e2f6a736f6e0a0d0a05782d6f6c641204"
    "74657874428e010a770a14656e766f792e6c622e7375627365745f68696e74125f0a0e0a016e120911000000000000f8"
    "3f0a4d0a25782d676174657761792d64657374696e6174696f6e2d656e64706f696e742d737562736574122432220a0f"
    "1a0d31302e302e302e313a383030300a0f1a0d31302e302e302e323a383030300a130a056f74686572120a0a080a0161"
    "12031a01624a0f0a0178120a0a080a016112031a01625a0408041002"
)
SUBSET_AS_TEXT = (
    "1202180142630a610a14656e766f792e6c622e7375627365745f68696e7412490a470a25782d676174657761792d6465"
    "7374696e6174696f6e2d656e64706f696e742d737562736574121e1a1c31302e302e302e313a383030302c2031302e30"
    "2e302e323a38303030"
)
BODY = "22100a0c7b226122203a205b315d7d201001"
DESTINED = (
    "0a540a52124e0a330a2f0a1e782d676174657761792d64657374696e6174696f6e2d656e64706f696e741a0d31302e30"
    "2e302e313a3830303018020a170a130a0e636f6e74656e742d6c656e6774681a01391802280142430a410a08656e766f"
    "792e6c6212352a330a310a1e782d676174657761792d64657374696e6174696f6e2d656e64706f696e74120f1a0d3130"
    "2e302e302e313a38303030"
)
BUFFERED = (
    "1a610a5f124e0a330a2f0a1e782d676174657761792d64657374696e6174696f6e2d656e64706f696e741a0d31302e30"
    "2e302e313a3830303018020a170a130a0e636f6e74656e742d6c656e6774681a013918021a0b0a097b2261223a203132"
    "7d280142430a410a08656e766f792e6c6212352a330a310a1e782d676174657761792d64657374696e6174696f6e2d65"
    "6e64706f696e74120f1a0d31302e302e302e313a38303030"
)
PIECE = "1a130a111a0f1a0d0a097b2261223a2031327d1001"
IMMEDIATE = "3a210a0308f70312160a140a100a0b72657472792d61667465721a013118021a026e6f"

ENDPOINT = "10.0.0.1:8000"
LENGTH = [(b"content-length", b"9")]
BOTH = frozenset({ENDPOINT, "10.0.0.2:8000"})


def test_a_head_with_its_subset_and_the_modes() -> None:
    message = decode(bytes.fromhex(HEAD))
    assert message == Message(
        Head(
            [
                (b":method", b"POST"),
                (b":path", b"/v1/completions?x=1"),
                (b"content-type", b"application/json"),
                (b"x-old", b"text"),
            ],
            is_last=False,
        ),
        is_response=False,
        subset=BOTH,
        request_mode=BodyMode.FULL_DUPLEX,
        response_mode=BodyMode.BUFFERED,
    )


def test_a_subset_may_be_one_text() -> None:
    message = decode(bytes.fromhex(SUBSET_AS_TEXT))
    assert message.subset == BOTH and message.part == Head([], is_last=True)


def test_a_subset_may_be_empty_and_then_nothing_is_in_it() -> None:
    emptied = SUBSET_AS_TEXT.replace("31302e302e302e313a383030302c2031302e302e302e323a38303030", "20" * 28)
    assert decode(bytes.fromhex(emptied)).subset == frozenset()


def test_bodies_and_trailers_of_both_directions() -> None:
    assert decode(bytes.fromhex(BODY)) == Message(Body(b'{"a" : [1]} ', is_last=True), is_response=False)
    assert decode(bytes.fromhex("2a030a0178")) == Message(Body(b"x", is_last=False), is_response=True)
    assert decode(bytes.fromhex("3a0a0a080a060a01611a0162")) == Message(Trailers(), is_response=True)


@pytest.mark.parametrize("encoded", ["", "0801", "22ff", "22ffffffffffffffffffff01", "2001", "17", "09"])
def test_nonsense_is_refused(encoded: str) -> None:
    with pytest.raises(ValueError):
        decode(bytes.fromhex(encoded))


def subset(value: bytes) -> bytes:
    struct = field(1, field(1, SUBSET.encode()) + field(2, value))
    return field(8, field(1, field(1, SUBSET_NAMESPACE.encode()) + field(2, struct)))


EMPTY_HEAD = field(2, b"")
HEADER = field(1, field(1, b"x"))
NESTED = field(3, b"a")
for _ in range(3000):
    NESTED = field(6, field(1, NESTED))


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (field(2, field(1, HEADER * (MOST_HEADERS + 1))), f"more than {MOST_HEADERS} headers"),
        (field(2, field(1, field(1, field(3, bytes(FIRST_BYTES))))), f"more than {FIRST_BYTES} bytes"),
        (
            field(2, field(1, field(1, field(3, bytes(MOST_HEAD_BYTES))))),
            f"more than {MOST_HEAD_BYTES} bytes",
        ),
        (EMPTY_HEAD + field(4, b""), "two parts"),
        (EMPTY_HEAD + subset(field(3, b"," * MOST_ENDPOINTS)), f"more than {MOST_ENDPOINTS} endpoints"),
        (
            EMPTY_HEAD + subset(field(6, field(1, b"") * (MOST_ENDPOINTS + 1))),
            f"more than {MOST_ENDPOINTS} endpoints",
        ),
        (EMPTY_HEAD + subset(field(3, b"\xff")), "not of this protocol"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_message_is_refused_before_it_costs_more_than_a_gateways_do(encoded: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode(encoded)


def test_lists_of_lists_have_no_endpoints() -> None:
    assert decode(EMPTY_HEAD + subset(NESTED)).subset == frozenset()


def test_a_destination_is_in_a_header_and_in_the_metadata() -> None:
    head, piece = destined(ENDPOINT, LENGTH, b'{"a": 12}', ends=True)
    assert head.hex() == DESTINED
    assert piece.hex() == PIECE
    assert destined_buffered(ENDPOINT, LENGTH, b'{"a": 12}').hex() == BUFFERED


def test_an_answer_in_the_place_of_a_servers() -> None:
    assert immediate(503, [(b"retry-after", b"1")], b"no").hex() == IMMEDIATE


@pytest.mark.parametrize("size", [0, 1, 62_000, 62_001, 300_000])
def test_a_long_body_goes_in_pieces_of_which_the_last_ends_it(size: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    _, *pieces = destined(ENDPOINT, [], body, ends=True)
    read = []
    for piece in pieces:
        assert len(piece) < 2**16
        response = pb.Response.FromString(piece).request_body.response
        read.append(response.body_mutation.streamed_response)
    assert b"".join(each.body for each in read) == body
    assert [each.end_of_stream for each in read] == [False] * (len(read) - 1) + [True]


def test_with_trailers_no_piece_is_the_last() -> None:
    _, piece = destined(ENDPOINT, [], b"x", ends=False)
    assert piece.hex() == "1a090a071a051a030a0178"


def test_parts_of_an_answer_go_on_as_they_are() -> None:
    assert go_on(Message(Head([], is_last=False), is_response=True)).hex() == "1200"
    assert go_on(Message(Trailers(), is_response=False)).hex() == "2a00"
    piece = same_piece(Message(Body(b"x", is_last=True), is_response=True))
    assert piece.hex() == "220b0a091a071a050a01781001"


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
