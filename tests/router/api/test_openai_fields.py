"""Fields of vLLM's and SGLang's clients, and what they add to answers: honoured, or refused by name."""

import json
from typing import Any

import httpx
import pytest

from replicas.protocol.frames import FinishReason
from router.errors import GenerationFailed, Overloaded
from router.prompt.tokenizer import Tokenizer
from tests.router import tiny_model
from tests.router.http_server import HttpServer
from tests.router.scripted_dispatch import says

TOKENIZER = Tokenizer(tiny_model.bundle())
END = tiny_model.END_OF_TURN
HELLO = {"role": "user", "content": "Hello"}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [HELLO]}
PLAIN: dict[str, Any] = {"model": "tiny", "prompt": "Hello"}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN)]
SCHEMA = {"type": "object"}


def said(choice: dict[str, Any]) -> str:
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


async def whole(http: httpx.AsyncClient, route: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


async def chunks(http: httpx.AsyncClient, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await http.post(route, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": 3}, "structured_outputs"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "x"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 3]}}, "structured_outputs.choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": 3}, "guided_json"),
    ({"regex": ""}, "regex"),
    ({"ebnf": 3}, "ebnf"),
    ({"guided_regex": "a", "regex": "b"}, "regex"),
    ({"response_format": 3}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"safety_identifier": "x" * 129}, "safety_identifier"),
    ({"user": "x" * 4097}, "user"),
]
OF_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"echo": True}, "echo", "unsupported_value"),
    ({"add_special_tokens": True}, "add_special_tokens", "unsupported_value"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_value"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "unsupported_value"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "invalid_value",
    ),
    (
        {"continue_final_message": True, "messages": [{"role": "user", "content": " "}]},
        "messages",
        "invalid_value",
    ),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
]


async def test_what_would_change_an_answer_is_refused_by_its_name(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    cases = [
        (route, body | change, name, "unsupported_value")
        for route, body in ROUTES
        for change, name in REFUSED
    ]
    cases += [(route, body | change, name, None) for route, body in ROUTES for change, name in WRONG]
    cases += [(ROUTES[0][0], CHAT | change, name, code) for change, name, code in OF_CHATS]
    for route, body, name, code in cases:
        answer = await http.post(route, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, name), answer.text
        assert error["code"] == code or code is None
    assert server.dispatcher.generations == []
    assert server.is_idle


async def test_what_says_what_happens_anyway_is_no_wish(server: HttpServer, http: httpx.AsyncClient) -> None:
    server.dispatcher.script = says([END])
    idle = {
        "allowed_token_ids": None, "bad_words": [], "use_beam_search": False, "skip_special_tokens": True,
        "echo": False, "return_token_ids": False, "structured_outputs": None, "documents": [], "rid": "r1",
        "response_format": {"type": "text"}, "stop_regex": None, "safety_identifier": "x" * 128,
    }  # fmt: skip
    for route, body in ROUTES:
        assert "token_ids" not in (await whole(http, route, body | idle))["choices"][0]


@pytest.mark.parametrize(("route", "body"), ROUTES)
async def test_an_answer_says_what_stopped_it(
    server: HttpServer, http: httpx.AsyncClient, route: str, body: dict[str, Any]
) -> None:
    cat, dog = TOKENIZER.encode("cat")[0], TOKENIZER.encode("dog")[0]
    for tokens, finish, fields, expected in (
        ([cat, END], FinishReason.STOP, {}, (None, END)),
        ([cat, dog], FinishReason.STOP, {"stop_token_ids": [dog]}, (dog, dog)),
        ([cat, cat], FinishReason.LENGTH, {}, (None, None)),
        ([*TOKENIZER.encode("Hello world"), END], FinishReason.STOP, {"stop": ["wor"]}, ("wor", "wor")),
    ):
        server.dispatcher.script = says(tokens, finish=finish)
        choice = (await whole(http, route, body | fields))["choices"][0]
        assert (choice["stop_reason"], choice["matched_stop"]) == expected
        last = (await chunks(http, route, body | fields))[-1]["choices"][0]
        assert (last["stop_reason"], last["matched_stop"]) == expected
        assert last["logprobs"] is None and last["finish_reason"] == finish.value


@pytest.mark.parametrize(("route", "body"), ROUTES)
async def test_special_tokens_and_stop_strings_are_shown_to_who_asks(
    server: HttpServer, http: httpx.AsyncClient, route: str, body: dict[str, Any]
) -> None:
    answer = [*TOKENIZER.encode("Hello"), 1, *TOKENIZER.encode(" world"), END]
    for fields, text in (
        ({}, "Hello world"),
        ({"skip_special_tokens": False}, "Hello<|im_start|> world"),
        (
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            "Hello<|im_start|> world<|im_end|>",
        ),
        ({"stop": [" wor"], "include_stop_str_in_output": True}, "Hello wor"),
    ):
        server.dispatcher.script = says(answer)
        assert said((await whole(http, route, body | fields))["choices"][0]) == text
        streamed = await chunks(http, route, body | fields)
        pieces = [chunk["choices"][0] for chunk in streamed]
        joined = "".join(
            piece["text"] if "text" in piece else piece["delta"].get("content", "") for piece in pieces
        )
        assert joined == text


@pytest.mark.parametrize(("route", "body"), ROUTES)
async def test_tokens_are_named_to_who_asks_streamed_or_whole(
    server: HttpServer, http: httpx.AsyncClient, route: str, body: dict[str, Any]
) -> None:
    answer = [*TOKENIZER.encode("Héllo 日本 world"), END]
    server.dispatcher.script = says(answer)
    asked = body | {"return_token_ids": True, "n": 2}
    content = await whole(http, route, asked)
    prompt_ids = server.dispatcher.generations[0].token_ids
    assert [choice["token_ids"] for choice in content["choices"]] == [answer, answer]
    named = content if route.endswith("chat/completions") else content["choices"][1]
    assert named["prompt_token_ids"] == prompt_ids
    streamed: list[list[int]] = [[], []]
    for chunk in await chunks(http, route, asked):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice.get("token_ids", [])
    assert streamed == [answer, answer]
    first = (await chunks(http, route, asked))[0]
    assert (first if "prompt_token_ids" in first else first["choices"][0])["prompt_token_ids"] == prompt_ids


@pytest.mark.parametrize(("route", "body"), ROUTES)
async def test_every_chunk_counts_where_it_is_asked_to(
    server: HttpServer, http: httpx.AsyncClient, route: str, body: dict[str, Any]
) -> None:
    answer = [*TOKENIZER.encode("Hello, quick world"), END]
    server.dispatcher.script = says(answer)
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = await chunks(http, route, body | {"stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in streamed]
    assert counts == sorted(counts) and counts[-1] == len(answer)
    if "messages" in body:  # a chat's first chunk says who speaks, and nothing of the answer
        assert counts[0] == 0
    assert len({chunk["usage"]["prompt_tokens"] for chunk in streamed}) == 1
    assert all(chunk["usage"] is not None for chunk in streamed)
    plain = await chunks(http, route, body | {"stream_options": {"include_usage": True}})
    assert [chunk["usage"] is None for chunk in plain] == [True] * (len(plain) - 1) + [False]


@pytest.mark.parametrize(("route", "body"), ROUTES)
async def test_log_probabilities_leave_out_the_token_that_ends_the_answer(
    server: HttpServer, http: httpx.AsyncClient, route: str, body: dict[str, Any]
) -> None:
    answer = TOKENIZER.encode("Hello world")
    server.dispatcher.script = says([*answer, END])
    fields = {"logprobs": True, "top_logprobs": 1} if "messages" in body else {"logprobs": 1}

    def names(choice: dict[str, Any]) -> list[str]:
        logprobs = choice["logprobs"] or {}
        return [each["token"] for each in logprobs.get("content", [])] + logprobs.get("tokens", [])

    expected = [TOKENIZER.decode([token]) for token in answer]
    assert names((await whole(http, route, body | fields))["choices"][0]) == expected
    streamed = await chunks(http, route, body | fields)
    assert [name for chunk in streamed for name in names(chunk["choices"][0])] == expected
    by_id = await whole(http, route, body | fields | {"return_tokens_as_token_ids": True})
    assert names(by_id["choices"][0]) == [f"token_id:{token}" for token in answer]


async def test_the_sampled_token_is_among_the_likeliest_of_a_completion(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    answer = TOKENIZER.encode("Hello")
    server.dispatcher.script = says(answer, finish=FinishReason.LENGTH)
    for number in (0, 1, 2):
        logprobs = (await whole(http, "/v1/completions", PLAIN | {"logprobs": number}))["choices"][0][
            "logprobs"
        ]
        for token, logprob, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            assert top[token] == logprob
            assert max(1, number) <= len(top) <= number + 1


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"prompt_cache_options": {"prewarm": True}}])
async def test_a_completion_of_no_tokens_is_its_prompt(
    server: HttpServer, http: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    server.dispatcher.script = says(TOKENIZER.encode("Hello"))
    content = await whole(http, "/v1/completions", PLAIN | fields | {"echo": True})
    (choice,) = content["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")
    assert content["usage"]["completion_tokens"] == 0
    assert server.dispatcher.generations[0].sampling.max_tokens == 1


async def test_a_chat_that_is_prewarmed_says_nothing(server: HttpServer, http: httpx.AsyncClient) -> None:
    server.dispatcher.script = says([END])
    body = CHAT | {"prompt_cache_options": {"prewarm": True}, "logprobs": True}
    content = await whole(http, "/v1/chat/completions", body)
    (choice,) = content["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert choice["logprobs"]["content"] == []
    assert content["usage"]["completion_tokens"] == 0
    streamed = await chunks(http, "/v1/chat/completions", body)
    assert [chunk["choices"][0]["finish_reason"] for chunk in streamed] == [None, "length"]


async def test_only_a_part_of_a_prompt_is_taken_where_that_is_asked(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says([END])
    long = list(range(5, 105)) * 6
    for prompt, fields, kept in (
        ([5, 6, 7, 8], {"truncate_prompt_tokens": 2}, [7, 8]),
        ([5, 6, 7, 8], {"truncate_prompt_tokens": 9}, [5, 6, 7, 8]),
        ([5, 6, 7, 8], {"truncate_prompt_tokens": 2, "truncation_side": "left"}, [7, 8]),
        ([5, 6, 7, 8], {"truncate_prompt_tokens": 2, "truncation_side": "right"}, [5, 6]),
        ([5, 6, 7, 8], {"truncation_side": "right"}, [5, 6, 7, 8]),
        (long, {"truncate_prompt_tokens": -1, "max_tokens": 12}, long[-500:]),
    ):
        await whole(http, "/v1/completions", PLAIN | {"prompt": prompt} | fields)
        assert server.dispatcher.generations[-1].token_ids == kept
    await whole(http, "/v1/chat/completions", CHAT)
    every = server.dispatcher.generations[-1].token_ids
    large = {"truncate_prompt_tokens": 3, "prompt_cache_retention": "24h", "unknown": [0] * 10_000}
    for fields in (large | {"unknown": None}, large):
        await whole(http, "/v1/chat/completions", CHAT | fields)
        assert server.dispatcher.generations[-1].token_ids == every[-3:]
        await whole(http, "/v1/chat/completions", CHAT | fields | {"truncation_side": "right"})
        assert server.dispatcher.generations[-1].token_ids == every[:3]


async def test_a_last_message_is_continued(server: HttpServer, http: httpx.AsyncClient) -> None:
    server.dispatcher.script = says([END])
    for content in ("The capital is", "The capital is ", "  Paris", "<", "|", "end", "i\n"):
        messages = [HELLO, {"role": "assistant", "content": content}]
        body = {"model": "tiny", "messages": messages, "continue_final_message": True}
        await whole(http, "/v1/chat/completions", body)
        generation = server.dispatcher.generations[-1]
        assert TOKENIZER.decode(generation.token_ids).endswith(f"<|im_start|>assistant\n{content}")
        counted = await http.post("/tokenize", json=body)
        assert counted.json()["tokens"] == generation.token_ids


async def test_the_effort_of_reasoning_reaches_the_template(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says([END])
    for effort in ("none", "low", "max"):
        await whole(http, "/v1/chat/completions", CHAT | {"reasoning_effort": effort})


async def test_a_top_p_of_zero_takes_the_likeliest(server: HttpServer, http: httpx.AsyncClient) -> None:
    server.dispatcher.script = says([END])
    await whole(http, "/v1/completions", PLAIN | {"top_p": 0})
    sampling = server.dispatcher.generations[0].sampling
    assert (sampling.top_p, sampling.top_k) == (1.0, 1)


async def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(
    http: httpx.AsyncClient,
) -> None:
    long = "a " * 2000
    for route, body in (
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": long}]}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "a" * 10**6}]}),
        ("/v1/chat/completions", CHAT | {"messages": [HELLO] * 513}),
        ("/v1/chat/completions", CHAT | {"max_tokens": 512}),
        ("/v1/completions", PLAIN | {"prompt": long}),
        ("/v1/completions", PLAIN | {"prompt": [5] * 600}),
    ):
        error = (await http.post(route, json=body)).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("This model's maximum context length is 512 tokens. However, you")


async def test_every_answer_has_a_request_id_and_errors_say_whether_to_try_again(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    for path in ("/v1/models", "/v1/models/nobody", "/health", "/version", "/nowhere", "/v1/embeddings"):
        assert (await http.get(path)).headers["x-request-id"].startswith("req_"), path
        named = await http.get(path, headers={"x-request-id": "mine"})
        assert named.headers.get_list("x-request-id") == ["mine"]
    server.dispatcher.script = lambda generation: [Overloaded("Busy.", retry_after_seconds=0.25)]
    busy = await http.post("/v1/chat/completions", json=CHAT)
    retry = [busy.headers[name] for name in ("retry-after", "retry-after-ms", "x-should-retry")]
    assert retry == ["1", "250", "true"]
    server.dispatcher.script = lambda generation: [GenerationFailed("Broken.")]
    assert (await http.post("/v1/chat/completions", json=CHAT)).headers["x-should-retry"] == "false"
    server.dispatcher.script = says([END])
    for stream in (False, True):
        answer = await http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
        assert int(answer.headers["openai-processing-ms"]) >= 0


async def test_routes_that_other_servers_have_are_refused_with_a_reason(http: httpx.AsyncClient) -> None:
    passed = ("/v1/embeddings", "/v1/rerank", "/score", "/v1/audio/speech")
    for path in (*passed, "/v1/images/edits", "/tokenizer_info"):
        answer = await http.post(path, json={"model": "tiny", "input": "Hello"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "unknown_url")
        words = "a pool of engine openai whose servers do names it" if path in passed else "generate text"
        assert words in error["message"]
    for path in ("/v1/files", "/v1/batches/b", "/v1/messages/batches"):
        assert "no batches, files" in (await http.post(path, json={})).json()["error"]["message"]
    assert "generate text" not in (await http.get("/v1/embedding")).json()["error"]["message"]
    assert (await http.get("/load")).json() == {"server_load": 0}


async def test_a_prompt_that_is_cut_is_not_begun_with_remembered_tokens(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says([*TOKENIZER.encode("Hello world"), END])
    first = (await whole(http, "/v1/chat/completions", CHAT))["choices"][0]["message"]
    messages = [HELLO, {"role": "assistant", "content": first["content"]}]
    for fields, end in (
        ({"continue_final_message": True}, "assistant\nHello world"),
        ({"truncate_prompt_tokens": 4, "messages": [*messages, HELLO]}, "tant\n"),
    ):
        await whole(http, "/v1/chat/completions", CHAT | {"messages": messages} | fields)
        generation = server.dispatcher.generations[-1]
        assert TOKENIZER.decode(generation.token_ids).endswith(end)
        assert len(generation.token_ids) == fields.get("truncate_prompt_tokens", len(generation.token_ids))
