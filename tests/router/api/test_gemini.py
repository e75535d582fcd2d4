"""generateContent, streamGenerateContent, countTokens and the models, in Gemini's words over real sockets."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from router.errors import GenerationFailed, Overloaded
from router.generation import Generation
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import Step, in_batches, says
from tests.router.thinking_model import CALL, MODEL, OTHER, THINKS, catalog, token_ids

ANSWER = THINKS + "Let me see 👩‍👩‍👧.\n" + CALL + "\n" + OTHER
WEATHER = {"name": "weather", "parameters": {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}}}
TOOLS = [{"functionDeclarations": [WEATHER, {"name": "time"}]}]
CONTENTS = [{"role": "user", "parts": [{"text": "How is the weather?"}]}]
GENERATE = f"/v1beta/models/{MODEL}:generateContent"
STREAM = f"/v1beta/models/{MODEL}:streamGenerateContent?alt=sse"


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with http_server(catalog=catalog()) as running:
        yield running


async def whole(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post(GENERATE, json={"contents": CONTENTS} | fields)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


async def events(http: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await http.post(STREAM, json={"contents": CONTENTS} | fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = answer.text.split("\n\n")
    assert frames[-1] == "" and all(frame.startswith("data: ") for frame in frames[:-1])
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]


def plain(answer: dict[str, Any]) -> list[list[Any]]:
    """Each candidate's text, thoughts, calls without their ids, and reason."""
    return [_joined([candidate]) for candidate in answer["candidates"]]


def joined(chunks: Sequence[dict[str, Any]]) -> list[list[Any]]:
    return [_joined([candidate for chunk in chunks for candidate in chunk["candidates"]])]


def _joined(candidates: Sequence[dict[str, Any]]) -> list[Any]:
    text, thoughts, calls, reasons = "", "", [], []
    for candidate in candidates:
        assert candidate["content"]["role"] == "model"
        assert candidate["content"]["parts"]
        for part in candidate["content"]["parts"]:
            if "functionCall" in part:
                assert part["functionCall"]["id"].startswith("call_")
                calls.append([part["functionCall"]["name"], part["functionCall"]["args"]])
            elif part.get("thought"):
                thoughts += part["text"]
            else:
                text += part["text"]
        if "finishReason" in candidate:
            reasons.append(candidate["finishReason"])
    (reason,) = reasons
    return [text, thoughts, calls, reason]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
async def test_a_stream_joined_is_the_whole_answer_under_every_cut(
    server: HttpServer, http: httpx.AsyncClient, size: int
) -> None:
    tokens = token_ids(ANSWER)
    config = {"thinkingConfig": {"includeThoughts": True}}
    server.dispatcher.script = in_batches(tokens, [1])
    expected = await whole(http, tools=TOOLS, generationConfig=config)
    server.dispatcher.script = in_batches(tokens, [size])
    chunks = await events(http, tools=TOOLS, generationConfig=config)
    assert joined(chunks) == plain(expected)
    assert chunks[-1]["usageMetadata"] == expected["usageMetadata"]
    assert all("usageMetadata" not in chunk for chunk in chunks[:-1])
    assert len({(chunk["responseId"], chunk["modelVersion"]) for chunk in chunks}) == 1


async def test_a_failure_in_the_middle_ends_the_stream_in_gemini_s_shape(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    tokens = token_ids("Yes.")

    def breaks(generation: Generation) -> Sequence[Step]:
        return [*says(tokens)(generation)[:2], GenerationFailed("A replica died.")]

    server.dispatcher.script = breaks
    *_, last = await events(http)
    assert last == {
        "error": {
            "code": 500,
            "message": "A replica died.",
            "status": "INTERNAL",
            "details": [
                {
                    "@type": "type.googleapis.com/google.rpc.ErrorInfo",
                    "reason": "GENERATION_FAILED",
                    "domain": "kvasir",
                }
            ],
        }
    }
    server.dispatcher.script = lambda generation: [Overloaded("Later.", retry_after_seconds=3.0)]
    answer = await http.post(GENERATE, json={"contents": CONTENTS})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert answer.json()["error"]["status"] == "RESOURCE_EXHAUSTED"
