"""generateContent, streamGenerateContent, countTokens and the models, in Gemini's words over real sockets."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from replicas.protocol.frames import FinishReason, RequestKey, TokenDelta
from router.errors import GenerationFailed, Overloaded
from router.generation import Generation
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import Script, Step, says
from tests.router.thinking_model import MODEL, catalog, token_ids

THINKS = "<think>\nShe wants the weather.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Århus"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
ANSWER = THINKS + "Let me see 👩‍👩‍👧.\n" + CALL + "\n" + OTHER
TOOLS = [
    {
        "functionDeclarations": [
            {
                "name": "weather",
                "description": "Of a city.",
                "parameters": {
                    "type": "OBJECT",
                    "properties": {"city": {"type": "STRING", "nullable": True}},
                },
            },
            {"name": "time"},
        ]
    }
]
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


def cut(pieces: Sequence[Sequence[int]]) -> Script:
    """An answer whose tokens come in these pieces."""

    def script(generation: Generation) -> Sequence[Step]:
        first = says([0])(generation)[0]
        assert isinstance(first, list)
        last = len(pieces) - 1
        return [
            [
                TokenDelta(
                    RequestKey(1, 0),
                    tuple(piece),
                    finish_reason=FinishReason.STOP if number == last else None,
                    usage=first[0].usage if number == 0 else None,
                )
            ]
            for number, piece in enumerate(pieces)
        ]

    return script


def plain(answer: dict[str, Any]) -> list[list[Any]]:
    """Each candidate's text, thoughts, calls without their ids, and reason."""
    return [_joined([candidate]) for candidate in answer["candidates"]]


def joined(chunks: Sequence[dict[str, Any]], num_candidates: int = 1) -> list[list[Any]]:
    candidates = [candidate for chunk in chunks for candidate in chunk["candidates"]]
    return [_joined([each for each in candidates if each["index"] == i]) for i in range(num_candidates)]


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


async def test_text_thoughts_and_calls_are_parts_and_usage_adds_up(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(token_ids(ANSWER), num_cached_tokens=16)
    thinking = {"thinkingConfig": {"includeThoughts": True}}
    answer = await whole(http, tools=TOOLS, generationConfig=thinking)
    (text, thoughts, calls, reason), *_ = plain(answer)
    assert (text, reason) == ("Let me see 👩‍👩‍👧.", "STOP")
    assert thoughts.strip() == "She wants the weather."
    assert calls == [["weather", {"city": "Århus"}], ["time", {}]]
    assert answer["modelVersion"] == MODEL and answer["responseId"]
    usage = answer["usageMetadata"]
    (generation,) = server.dispatcher.generations
    assert usage["promptTokenCount"] == len(generation.token_ids)
    assert usage["cachedContentTokenCount"] == 16
    assert usage["thoughtsTokenCount"] > 0
    assert usage["candidatesTokenCount"] + usage["thoughtsTokenCount"] == len(token_ids(ANSWER))
    assert usage["totalTokenCount"] == usage["promptTokenCount"] + len(token_ids(ANSWER))
    assert server.is_idle


async def test_thoughts_are_left_out_unless_they_are_asked_for(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(token_ids(THINKS + "Yes."))
    assert plain(await whole(http)) == [["Yes.", "", [], "STOP"]]
    assert joined(await events(http)) == [["Yes.", "", [], "STOP"]]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
async def test_a_stream_joined_is_the_whole_answer_under_every_cut(
    server: HttpServer, http: httpx.AsyncClient, size: int
) -> None:
    tokens = token_ids(ANSWER)
    config = {"thinkingConfig": {"includeThoughts": True}}
    server.dispatcher.script = says(tokens)
    expected = await whole(http, tools=TOOLS, generationConfig=config)
    server.dispatcher.script = cut([tokens[i : i + size] for i in range(0, len(tokens), size)])
    chunks = await events(http, tools=TOOLS, generationConfig=config)
    assert joined(chunks) == plain(expected)
    assert chunks[-1]["usageMetadata"] == expected["usageMetadata"]
    assert all("usageMetadata" not in chunk for chunk in chunks[:-1])
    assert len({(chunk["responseId"], chunk["modelVersion"]) for chunk in chunks}) == 1


async def test_several_candidates_end_together(server: HttpServer, http: httpx.AsyncClient) -> None:
    server.dispatcher.script = says(token_ids("Yes, 日本."))
    config = {"candidateCount": 2}
    expected = await whole(http, generationConfig=config)
    assert plain(expected) == [["Yes, 日本.", "", [], "STOP"]] * 2
    assert joined(await events(http, generationConfig=config), 2) == plain(expected)


async def test_an_answer_cut_in_a_call_says_which(server: HttpServer, http: httpx.AsyncClient) -> None:
    half = token_ids(CALL, end=False)[:-14]
    for finish, reason in (
        (FinishReason.LENGTH, "MAX_TOKENS"),
        (FinishReason.STOP, "MALFORMED_FUNCTION_CALL"),
    ):
        server.dispatcher.script = says(half, finish=finish)
        assert plain(await whole(http, tools=TOOLS)) == [["", "", [], reason]]
        assert joined(await events(http, tools=TOOLS)) == [["", "", [], reason]]


async def test_logprobs_stand_with_the_candidate(server: HttpServer, http: httpx.AsyncClient) -> None:
    tokens = token_ids(THINKS + "Yes.", end=False)
    server.dispatcher.script = says(token_ids(THINKS + "Yes."))
    config = {"responseLogprobs": True, "logprobs": 2}
    (candidate,) = (await whole(http, generationConfig=config))["candidates"]
    result = candidate["logprobsResult"]
    assert [token["tokenId"] for token in result["chosenCandidates"]] == tokens
    assert [len(top["candidates"]) for top in result["topCandidates"]] == [2] * len(tokens)
    assert candidate["avgLogprobs"] == -0.5
    streamed = [
        token["tokenId"]
        for chunk in await events(http, generationConfig=config)
        for each in chunk["candidates"]
        for token in each.get("logprobsResult", {"chosenCandidates": []})["chosenCandidates"]
    ]
    assert streamed == tokens


async def test_what_is_generated_follows_the_configuration(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(token_ids("Yes. No. Perhaps."))
    config = {
        "temperature": 0.5,
        "topP": 0.9,
        "topK": 40.0,
        "maxOutputTokens": 12,
        "seed": 7,
        "presencePenalty": 0.5,
        "frequency_penalty": -0.5,
        "stopSequences": ["No", "a", "b", "c", "d"],
    }
    answer = await whole(http, generationConfig=config)
    assert plain(answer)[0][0] == "Yes. "
    (generation,) = server.dispatcher.generations
    sampling = generation.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
    assert (sampling.max_tokens, sampling.seed) == (12, 7)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)


async def test_stop_sequences_count_from_the_answers_first_character(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(token_ids(THINKS + "It rains.\n\nA lot."))
    config = {"stopSequences": ["\n\n", "weather"], "thinkingConfig": {"includeThoughts": True}}
    expected = ["It rains.", "She wants the weather.", [], "STOP"]
    assert plain(await whole(http, generationConfig=config)) == [expected]
    assert joined(await events(http, generationConfig=config)) == [expected]


async def test_tokens_are_counted_as_generating_counts_them(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(token_ids("Yes."))
    body = {"contents": CONTENTS, "tools": TOOLS, "systemInstruction": {"parts": {"text": "Be brief. " * 20}}}
    num_tokens = (await whole(http, **body))["usageMetadata"]["promptTokenCount"]
    count = f"/v1/models/{MODEL}:countTokens"
    for asked in (body, {"generateContentRequest": {"model": f"models/{MODEL}", **body}}):
        answer = await http.post(count, json=asked)
        assert answer.status_code == 200 and answer.json()["totalTokens"] == num_tokens
    large = {"contents": CONTENTS, "generationConfig": {"stopSequences": ["x" * 100] * 400}}
    answer = await http.post(count, json=large)
    alone = await http.post(count, json={"contents": CONTENTS})
    assert answer.json() == alone.json()


async def test_a_large_body_is_prepared_as_a_small_one(server: HttpServer, http: httpx.AsyncClient) -> None:
    server.dispatcher.script = says(token_ids("Yes. No."))
    body = {
        "contents": CONTENTS,
        "tools": TOOLS,
        "generation_config": {"stopSequences": ["No"], "thinkingConfig": {"thinkingBudget": 0}},
    }
    small = await whole(http, **body)
    large = await whole(http, **body, safetySettings=[{"category": "x"}] * 20_000)
    assert plain(small) == plain(large) == [["Yes. ", "", [], "STOP"]]
    first, second = server.dispatcher.generations
    assert first.token_ids == second.token_ids and first.submit.sampling.max_tokens > 1


async def test_models_are_there_in_every_dialect(server: HttpServer, http: httpx.AsyncClient) -> None:
    ours = (await http.get("/v1beta/models")).json()
    both = (await http.get("/v1/models")).json()
    assert [model["name"] for model in ours["models"]] == [f"models/{MODEL}"]
    assert both["models"] == ours["models"]
    assert [model["id"] for model in both["data"]] == [MODEL]
    one = (await http.get(f"/v1beta/models/{MODEL}")).json()
    assert one == ours["models"][0]
    assert one.items() <= (await http.get(f"/v1/models/{MODEL}")).json().items()


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


RAW = [
    (b"", None),
    (b"{", None),
    (b"[]", None),
    (b"{}", "contents"),
    (b'{"contents": []}', "contents"),
    (b'{"contents": [{"parts": [{"text": "\xff"}]}]}', None),
    (b'{"contents": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "contents[0]"),
]

CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"contents": 3}, "contents"),
    ({"contents": [{"role": "wizard", "parts": [{"text": "x"}]}]}, "contents[0].role"),
    ({"contents": [{"parts": [{"text": 3}]}]}, "contents[0].parts[0].text"),
    ({"contents": [{"parts": [{"inlineData": {"data": "AA=="}}]}]}, "contents[0].parts[0].inlineData"),
    ({"contents": [{"parts": [{"file_data": {"fileUri": "x"}}]}]}, "contents[0].parts[0].fileData"),
    ({"contents": [{"parts": [{"functionCall": {"name": "x"}}]}]}, "contents[0].parts[0]"),
    (
        {"contents": [{"role": "model", "parts": [{"functionCall": {}}]}]},
        "contents[0].parts[0].functionCall.name",
    ),
    ({"systemInstruction": "x"}, "systemInstruction"),
    ({"tools": [{"googleSearch": {}}]}, "tools[0].googleSearch"),
    ({"tools": [{"functionDeclarations": [{"name": "a b"}]}]}, "tools[0].functionDeclarations[0].name"),
    ({"tools": [{"functionDeclarations": [{"name": "a"}] * 2}]}, "tools[0].functionDeclarations[1].name"),
    (
        {"tools": [{"functionDeclarations": [{"name": "a", "parameters": {"type": "ODD"}}]}]},
        "tools[0].functionDeclarations[0].parameters.type",
    ),
    (
        {"tools": [{"functionDeclarations": [{"name": "a", "parametersJsonSchema": 3}]}]},
        "tools[0].functionDeclarations[0].parametersJsonSchema",
    ),
    (
        {"toolConfig": {"functionCallingConfig": {"mode": "SOMETIMES"}}},
        "toolConfig.functionCallingConfig.mode",
    ),
    (
        {"tools": TOOLS, "toolConfig": {"functionCallingConfig": {"allowedFunctionNames": ["no"]}}},
        "toolConfig.functionCallingConfig.allowedFunctionNames[0]",
    ),
    ({"generationConfig": {"temperature": 3}}, "generationConfig.temperature"),
    ({"generationConfig": {"topP": 0}}, "generationConfig.topP"),
    ({"generationConfig": {"topK": 1.5}}, "generationConfig.topK"),
    ({"generationConfig": {"candidateCount": 0}}, "generationConfig.candidateCount"),
    ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens"),
    ({"generationConfig": {"stopSequences": ["a"] * 6}}, "generationConfig.stopSequences"),
    ({"generationConfig": {"stopSequences": [""]}}, "generationConfig.stopSequences"),
    ({"generationConfig": {"logprobs": 3}}, "generationConfig.logprobs"),
    ({"generationConfig": {"responseModalities": ["IMAGE"]}}, "generationConfig.responseModalities"),
    ({"generationConfig": {"speechConfig": {}}}, "generationConfig.speechConfig"),
    ({"generationConfig": {"responseSchema": {"type": "STRING"}}}, "generationConfig.responseMimeType"),
    ({"generationConfig": {"responseMimeType": "text/html"}}, "generationConfig.responseMimeType"),
    ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseSchema"),
    (
        {"generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": 3}},
        "generationConfig.responseJsonSchema",
    ),
    (
        {"generationConfig": {"thinkingConfig": {"thinkingBudget": -2}}},
        "generationConfig.thinkingConfig.thinkingBudget",
    ),
    ({"cacheSalt": "@"}, "cache_salt"),
    ({"promptCacheRetention": ""}, "prompt_cache_retention"),
]


def field_of(answer: httpx.Response) -> str | None:
    error = answer.json()["error"]
    assert (error["code"], answer.headers["content-type"]) == (answer.status_code, "application/json")
    for detail in error.get("details", ()):
        for violation in detail.get("fieldViolations", ()):
            assert violation["description"] == error["message"]
            return str(violation["field"])
    return None


async def test_bad_input_is_refused_in_gemini_s_shape_with_its_field(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    for raw, field in RAW:
        answer = await http.post(GENERATE, content=raw)
        assert (answer.status_code, field_of(answer)) == (400, field), raw[:60]
        assert answer.json()["error"]["status"] == "INVALID_ARGUMENT"
    for change, field in CHANGES:
        for path in (GENERATE, STREAM):
            answer = await http.post(path, json={"contents": CONTENTS} | change)
            assert (answer.status_code, field_of(answer)) == (400, field), change
    assert not server.dispatcher.generations
    assert server.is_idle


async def test_what_is_not_there_is_said_in_gemini_s_shape(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    body = {"contents": CONTENTS}
    for method, path, status in (
        ("POST", "/v1beta/models/nobody:generateContent", 404),
        ("POST", "/v1beta/models/org/no%2Fbody:generateContent", 404),
        ("POST", "/v1beta/models/nobody:countTokens", 404),
        ("GET", "/v1beta/models/nobody", 404),
        ("GET", GENERATE, 405),
        ("GET", f"/v1beta/models/{MODEL}:countTokens", 404),
        ("POST", f"/v1beta/models/{MODEL}:embedContent", 404),
        ("POST", "/v1beta/nothing", 404),
        ("POST", f"/v1beta/models/{MODEL}:streamGenerateContent", 400),
    ):
        answer = await http.request(method, path, json=body if method == "POST" else None)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, status), path
        assert error["status"] in ("NOT_FOUND", "UNIMPLEMENTED", "INVALID_ARGUMENT")
    keyed = await http.get("/v1/models/nobody", headers={"x-goog-api-key": "none"})
    assert keyed.json()["error"]["status"] == "NOT_FOUND"
    assert "type" in (await http.get("/v1/models/nobody")).json()["error"]


async def test_counting_refuses_what_generating_refuses(server: HttpServer, http: httpx.AsyncClient) -> None:
    body = {"contents": CONTENTS, "promptCacheRetention": ""}
    answer = await http.post(f"/v1beta/models/{MODEL}:countTokens", json=body)
    assert (answer.status_code, field_of(answer)) == (400, "prompt_cache_retention")
