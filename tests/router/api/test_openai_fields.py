"""Fields of vLLM's and SGLang's clients, and what they add to answers: honoured, or refused by name."""

from typing import Any

import httpx

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


async def whole(http: httpx.AsyncClient, route: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


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


async def test_a_top_p_of_zero_takes_the_likeliest(server: HttpServer, http: httpx.AsyncClient) -> None:
    server.dispatcher.script = says([END])
    await whole(http, "/v1/completions", PLAIN | {"top_p": 0})
    sampling = server.dispatcher.generations[0].sampling
    assert (sampling.top_p, sampling.top_k) == (1.0, 1)


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
