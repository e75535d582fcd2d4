"""Images in bodies of every dialect: which are taken, and which are refused with which words.

And usage in every dialect: tokens of images, and what an engine does not say, which is left out and never 0.
"""

import base64
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from replicas.media.probes import probe_png
from replicas.protocol.blocks import ImageTokens
from replicas.protocol.frames import PromptUsage
from replicas.protocol.image_rules import CellRule, TileRule, written_rule
from replicas.protocol.images import media_digest
from replicas.protocol.media import MAX_IMAGES, MAX_MEDIA_BYTES
from router.api.answer_usage import AnswerUsage
from router.api.anthropic.body import read_message
from router.api.anthropic.caching import usage_of as anthropic_usage
from router.api.chat_request import ChatRequest
from router.api.gemini.answers import usage_of as gemini_usage
from router.api.gemini.body import read_gemini
from router.api.openai.chat_body import read_chat
from router.api.openai.usage import usage_of as openai_usage
from router.api.responses.body import read_response
from router.errors import InvalidRequest
from router.prompt.images import SentImage, Shown, show

RED, BLUE = (probe_png(12, 7, colour) for colour in (b"\xff\0\0", b"\0\0\xff"))
RULE = CellRule(placeholder=9, cell=4, min_pixels=16, max_pixels=16 * 1000)


def coded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def openai_part(content: bytes, **changes: Any) -> dict[str, Any]:
    url = f"data:image/png;base64,{coded(content)}"
    return {"type": "image_url", "image_url": {"url": url, **changes}}


def anthropic_part(content: bytes, **changes: Any) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": coded(content), **changes}
    return {"type": "image", "source": source}


def gemini_part(content: bytes, **changes: Any) -> dict[str, Any]:
    return {"inlineData": {"mimeType": "image/png", "data": coded(content), **changes}}


def responses_part(content: bytes, **changes: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": f"data:image/png;base64,{coded(content)}", **changes}


def read(reader: Callable[[bytes, int], ChatRequest], body: Mapping[str, Any]) -> ChatRequest:
    return reader(json.dumps(body).encode(), 4)


def by_openai(*parts: Any) -> ChatRequest:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return read(read_chat, {"model": "m", "messages": [{"role": "user", "content": content}]})


def by_anthropic(*parts: Any) -> ChatRequest:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": content}]}
    return read(read_message, body)


def by_gemini(*parts: Any) -> ChatRequest:
    content = [{"text": part} if isinstance(part, str) else part for part in parts]
    return read(read_gemini, {"model": "m", "contents": [{"role": "user", "parts": content}]})


def by_responses(*parts: Any) -> ChatRequest:
    content = [{"type": "input_text", "text": part} if isinstance(part, str) else part for part in parts]
    return read(read_response, {"model": "m", "input": [{"role": "user", "content": content}]})


DIALECTS: Mapping[str, tuple[Any, Any, str]] = {
    "openai": (by_openai, openai_part, "messages[0].content[1].image_url"),
    "anthropic": (by_anthropic, anthropic_part, "messages[0].content[1]"),
    "gemini": (by_gemini, gemini_part, "contents[0].parts[1].inlineData"),
    "responses": (by_responses, responses_part, "input[0].content[1].image_url"),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_texts_and_images_become_parts_in_their_order(dialect: str) -> None:
    body, part, path = DIALECTS[dialect]
    request = body("before", part(RED), "between", part(BLUE))
    (message,) = request.messages
    assert message["content"] == [
        {"type": "text", "text": "before"},
        {"type": "image", "digest": media_digest(RED).hex()},
        {"type": "text", "text": "between"},
        {"type": "image", "digest": media_digest(BLUE).hex()},
    ]
    first, second = request.images
    assert (first.content, first.digest, first.width, first.height) == (RED, media_digest(RED), 12, 7)
    assert (first.path, second.content) == (path, BLUE)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_message_of_text_stays_a_text(dialect: str) -> None:
    body, _, _ = DIALECTS[dialect]
    request = body("before", "after")
    assert request.messages[0]["content"] == "before\nafter" and request.images == []


def test_images_of_geminis_results_come_before_those_of_the_question_beside_them() -> None:
    result = {"name": "look", "response": {"output": "seen"}, "parts": [gemini_part(RED)]}
    parts = [gemini_part(BLUE), {"text": "and?"}, {"functionResponse": result}]
    request = read(
        read_gemini,
        {
            "model": "m",
            "contents": [
                {"role": "model", "parts": [{"functionCall": {"name": "look"}}]},
                {"parts": parts},
            ],
        },
    )
    assert [message["role"] for message in request.messages] == ["assistant", "tool", "user"]
    told = [part.get("digest") or part["text"] for part in request.messages[1]["content"]]
    assert told == ["seen", media_digest(RED).hex()]
    assert [(image.content, image.path) for image in request.images] == [
        (RED, "contents[1].parts[2].functionResponse.parts[0].inlineData"),
        (BLUE, "contents[1].parts[0].inlineData"),
    ]


@pytest.mark.parametrize(
    ("num_cached", "details"),
    [
        (0, [("TEXT", 0)]),
        (16, [("TEXT", 10), ("IMAGE", 6)]),
        (32, [("TEXT", 12), ("IMAGE", 20)]),
        (48, [("TEXT", 25), ("IMAGE", 23)]),
    ],
)
def test_geminis_usage_tells_tokens_of_images_from_those_of_text(
    num_cached: int, details: list[tuple[str, int]]
) -> None:
    spans = (ImageTokens(b"", 10, 20), ImageTokens(b"", 32, 3))
    usage = AnswerUsage([PromptUsage(60, num_cached, 0)], [()], 5, media=[spans])
    written = gemini_usage(usage)
    told = [
        [(each.modality, each.token_count) for each in each_field]
        for each_field in (written.prompt_tokens_details, written.cache_tokens_details)
    ]
    assert told == [[("TEXT", 37), ("IMAGE", 23)], details]


def test_no_image_stands_in_instructions() -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(read_chat, {"model": "m", "messages": [{"role": "system", "content": [openai_part(RED)]}]})
    assert refused.value.parameter == "messages[0].content[0].type"


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a.png",
        "http://127.0.0.1:6379/",
        "file:///etc/passwd",
        "/etc/passwd",
        "data:image/png," + coded(RED),
        "data:image/png;base64" + coded(RED),
        "data:text/html;base64," + coded(RED),
        "data:;base64," + coded(RED),
        "data:image/png;base64,",
        "data:image/png;base64,AAAA",
        "data:image/png;base64," + coded(RED)[:-1],
        "data:image/png;base64," + coded(RED) + "=",
        "data:image/png;base64,\v" + coded(RED),
        "data:image/png;base64,\n" + coded(RED)[:-1],
        "data:image/png;base64,ü" + coded(RED),
        "data:image/png;base64," + coded(RED[:20]),
        "data:image/png;base64," + coded(b"<svg></svg>"),
        "",
    ],
)
def test_what_is_no_image_in_its_body_is_refused_by_its_path(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        by_openai("x", openai_part(RED, url=url))
    assert refused.value.parameter == "messages[0].content[1].image_url"
    assert len(refused.value.message) < 500


@pytest.mark.parametrize("length", [60, 61, 62])
def test_base64_need_not_be_filled_up(length: int) -> None:
    content = RED + bytes(length)
    data = coded(content).rstrip("=")
    for asked in (
        by_openai(openai_part(RED, url=f"data:image/png;base64,{data}")),
        by_gemini(gemini_part(RED, data=data)),
    ):
        (image,) = asked.images
        assert image.content == content


def test_texts_beside_an_image_are_as_far_apart_as_without_one() -> None:
    (message,) = by_anthropic({"type": "text", "text": "One."}, {"type": "text", "text": "Two."}).messages
    assert message["content"] == "One.\nTwo."
    for asked in (
        by_anthropic({"type": "text", "text": "One."}, {"type": "text", "text": "Two."}, anthropic_part(RED)),
        by_openai("One.", "Two.", openai_part(RED)),
    ):
        (message,) = asked.messages
        assert message["content"][0] == {"type": "text", "text": "One.\nTwo."}
        assert [part["type"] for part in message["content"]] == ["text", "image"]


@pytest.mark.parametrize("end", ["\n", "\r\n", " ", "\t\f"])
def test_base64_may_be_broken_into_lines(end: str) -> None:
    lines = end + "".join(coded(RED)[at : at + 76] + end for at in range(0, len(coded(RED)), 76))
    (sent,) = by_openai(openai_part(RED)).images
    for asked in (
        by_openai(openai_part(RED, url=f"data:image/png;base64,{lines}")),
        by_anthropic(anthropic_part(RED, data=lines)),
        by_gemini(gemini_part(RED, data=lines)),
    ):
        (image,) = asked.images
        assert (image.content, image.digest) == (RED, sent.digest)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        *((by_openai, {"type": "image_url", "image_url": value}) for value in (None, 5, [], {"url": 5}, {})),
        (by_anthropic, {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}),
        (by_anthropic, {"type": "image", "source": {"type": "file", "file_id": "f"}}),
        *((by_anthropic, {"type": "image", **source}) for source in ({}, {"source": None})),
        *((by_anthropic, anthropic_part(RED, media_type=kind)) for kind in ("application/pdf", None)),
        *((by_anthropic, anthropic_part(RED, data=data)) for data in (None, 5)),
        (by_gemini, {"fileData": {"fileUri": "gs://a/b", "mimeType": "image/png"}}),
        (by_gemini, {"inlineData": 5}),
        (by_gemini, gemini_part(RED, mimeType="audio/wav")),
        (by_gemini, gemini_part(RED, data=None)),
        (by_responses, {"type": "input_image", "file_id": "file-1"}),
    ],
)
def test_other_sources_are_refused(body: Callable[..., ChatRequest], part: Any) -> None:
    with pytest.raises(InvalidRequest):
        body(part)


def test_gemini_takes_the_alphabet_for_urls_too() -> None:
    content = RED + bytes(range(256))
    data = base64.urlsafe_b64encode(content).decode()
    assert "-" in data or "_" in data
    (image,) = by_gemini(gemini_part(content, data=data)).images
    assert image.content == content


def test_so_many_and_no_more() -> None:
    assert len(by_openai(*[openai_part(RED)] * MAX_IMAGES).images) == MAX_IMAGES
    with pytest.raises(InvalidRequest, match="at most 20 images"):
        by_openai(*[openai_part(RED)] * (MAX_IMAGES + 1))


def test_so_many_bytes_and_no_more() -> None:
    filled = RED + bytes(MAX_MEDIA_BYTES - len(RED))
    assert len(by_openai(openai_part(filled)).images[0].content) == MAX_MEDIA_BYTES
    for more in (1, 2, 3, 1000):
        with pytest.raises(InvalidRequest, match="at most 10,485,760 bytes"):
            by_openai(openai_part(filled + bytes(more)))


@pytest.mark.parametrize("seed", range(40))
def test_broken_files_and_texts_are_refused_or_read_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    content = bytearray(
        rng.choice([RED, b"\xff\xd8\xff\xe1" + rng.randbytes(90), b"GIF89a" + rng.randbytes(9)])
    )
    for _ in range(rng.randrange(1, 6)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    data = coded(bytes(content[: rng.randrange(len(content) + 1)]))
    if rng.random() < 0.3:
        place = rng.randrange(len(data) + 1)
        data = data[:place] + rng.choice(["=", "\0", "é", " ", "\ufffd"]) + data[place:]
    for body, part in (
        (by_openai, openai_part(RED, url=f"data:image/png;base64,{data}")),
        (by_anthropic, anthropic_part(RED, data=data)),
        (by_gemini, gemini_part(RED, data=data)),
    ):
        try:
            body(part)
        except InvalidRequest as error:
            assert error.parameter


def sent(content: bytes, width: int = 12, height: int = 8, path: str = "messages[0].content[0]") -> SentImage:
    (image,) = by_openai(openai_part(probe_png(width, height, content))).images
    return SentImage(image.content, image.digest, image.format, image.width, image.height, path)


def test_a_prompt_shows_the_tokens_of_its_images_and_knows_where_they_are() -> None:
    images = [sent(b"\1\2\3"), sent(b"\4\5\6", 4, 4)]
    shown = show([1, 9, 2, 9, 3], images, written_rule(RULE), "messages")
    assert shown.token_ids == [1, *[9] * 6, 2, 9, 3]
    assert [(image.start, image.length, image.content) for image in shown.images] == [
        (1, 6, images[0].content),
        (8, 1, images[1].content),
    ]
    assert [shown.moved(number) for number in range(6)] == [0, 1, 7, 8, 9, 10]


def test_a_prompt_without_images_is_as_it_is_whatever_the_model_reads() -> None:
    token_ids = [1, 9, 2]
    for rule in ("", written_rule(RULE)):
        shown = show(token_ids, [], rule, "messages")
        assert shown == Shown(token_ids) and shown.token_ids is token_ids
        assert shown.moved(2) == 2


@pytest.mark.parametrize("rule", ["", "[", '{"kind": "of another age"}', '{"kind": "cells"}'])
def test_a_model_of_text_takes_no_image_and_says_which(rule: str) -> None:
    with pytest.raises(InvalidRequest, match="reads text only") as refused:
        show([9], [sent(b"\1\2\3", path="contents[2].parts[1]")], rule, "contents")
    assert refused.value.parameter == "contents[2].parts[1]"


def test_a_template_that_shows_other_images_than_came_is_said() -> None:
    for token_ids in ([1, 2], [9, 9]):
        with pytest.raises(InvalidRequest, match="chat template does not show all images"):
            show(token_ids, [sent(b"\1\2\3")], written_rule(RULE), "messages")


def test_an_image_that_the_model_does_not_take_is_said_by_its_path() -> None:
    with pytest.raises(InvalidRequest) as refused:
        show([9], [sent(b"\1\2\3", 2000, 5)], written_rule(RULE), "messages")
    assert refused.value.parameter == "messages[0].content[0]"
    tiles = TileRule(9, 8, 4, 1, (((1,), (2,)), ((3,), (4,))), (5,), (6,), (7,))
    with pytest.raises(InvalidRequest):
        show([9], [sent(b"\1\2\3", 1, 1)], written_rule(tiles), "messages")


UNSAID = PromptUsage(40, None, 0)
SAID = PromptUsage(60, 32, 16)


@pytest.mark.parametrize("prompts", [[UNSAID], [SAID, UNSAID]])
def test_openai_leaves_it_out_and_so_for_several_prompts(prompts: list[PromptUsage]) -> None:
    usage = AnswerUsage(prompts, [()] * len(prompts), 5)
    assert msgspec.to_builtins(openai_usage(usage)) == {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": 5,
        "total_tokens": usage.num_prompt_tokens + 5,
        "prompt_tokens_details": {},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_anthropic_has_null() -> None:
    found: dict[str, Any] = msgspec.to_builtins(anthropic_usage(UNSAID, (), 16, 0))
    assert found.pop("input_tokens") == 40 and found.pop("output_tokens") == 0
    assert found == dict.fromkeys(
        ("cache_creation_input_tokens", "cache_read_input_tokens", "cache_creation")
    )


def test_gemini_leaves_it_out() -> None:
    found = msgspec.to_builtins(gemini_usage(AnswerUsage([UNSAID], [()], 5)))
    assert found["promptTokenCount"] == 40
    assert not {"cachedContentTokenCount", "cacheTokensDetails"} & found.keys()
