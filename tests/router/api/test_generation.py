"""The real OpenAI client against the routes that generate."""

import httpx
import pytest
from openai import APIError, AsyncOpenAI

from replicas.protocol.blocks import hash_blocks
from replicas.protocol.frames import NO_USER, FinishReason
from router.api.choice_output import MOST_HELD
from router.errors import GenerationFailed
from router.prompt.tokenizer import Tokenizer
from tests.router import tiny_model
from tests.router.http_server import HttpServer
from tests.router.scripted_dispatch import says

TOKENIZER = Tokenizer(tiny_model.bundle())
HELLO = [{"role": "user", "content": "Hello"}]
END = tiny_model.END_OF_TURN
ANSWER = "Héllo 👩‍👩‍👧, the quick 日本 fox"


def _tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text)


async def test_a_chat_is_answered_with_text_reason_and_exact_usage(
    server: HttpServer, openai: AsyncOpenAI
) -> None:
    answer = _tokens(ANSWER)
    server.dispatcher.script = says(
        [*answer, END], num_cached_tokens=16, num_written_tokens=3, num_cross_user_tokens=12
    )
    completion = await openai.chat.completions.create(model="tiny", messages=HELLO)
    choice = completion.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (
        ANSWER,
        "assistant",
        "stop",
    )
    num_prompt_tokens = len(_tokens("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"))
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt_tokens, len(answer) + 1)
    assert usage.total_tokens == num_prompt_tokens + len(answer) + 1
    assert usage.prompt_tokens_details.cached_tokens == 16
    assert usage.prompt_tokens_details.cache_write_tokens == 3
    assert usage.prompt_tokens_details.cross_user_cached_tokens == 12
    assert server.is_idle


async def test_a_stream_says_the_same_as_the_whole_answer(server: HttpServer, openai: AsyncOpenAI) -> None:
    server.dispatcher.script = says([*_tokens(ANSWER), END])
    stream = await openai.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == ANSWER
    assert not any("\ufffd" in text for text in texts)
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(_tokens(ANSWER)) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


async def test_a_long_whole_answer_is_the_text_of_all_its_tokens(
    server: HttpServer, openai: AsyncOpenAI
) -> None:
    text = ANSWER * 25
    server.dispatcher.script = says([*_tokens(text), END])
    assert len(_tokens(text)) > MOST_HELD
    completion = await openai.chat.completions.create(model="tiny", messages=HELLO)
    assert completion.choices[0].message.content == text
    assert completion.usage.completion_tokens == len(_tokens(text)) + 1


async def test_a_stream_without_include_usage_says_none_and_ends_with_done(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(_tokens("Hello"), finish=FinishReason.LENGTH)
    answer = await http.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "stream": True}
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "usage" not in answer.text
    assert '"finish_reason":"length"' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_headers_tell_where_the_request_went(server: HttpServer, http: httpx.AsyncClient) -> None:
    server.dispatcher.script = says([END])
    for stream in (False, True):
        body = {"model": "tiny", "messages": HELLO, "stream": stream}
        answer = await http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.headers["x-kvasir-replica"] == "replica-7"
        assert answer.headers["x-kvasir-overlap-tokens"] == "32"
        assert answer.headers["x-kvasir-reason"] == "overlap"
        answer = await http.post("/v1/chat/completions", json=body, headers={"x-request-id": "a b"})
        assert answer.headers["x-request-id"] != "a b"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_tokens_ends_the_choice_and_the_engine_is_told(
    server: HttpServer, openai: AsyncOpenAI, stream: bool
) -> None:
    letters = [_tokens(letter)[0] for letter in "say STOP never"]
    server.dispatcher.script = says(letters)
    answer = await openai.chat.completions.create(
        model="tiny", messages=HELLO, stop=["STOP", "unseen"], stream=stream
    )
    if stream:
        chunks = [chunk async for chunk in answer]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert answer.usage.completion_tokens == len("say STOP")
    assert (text, reason) == ("say ", "stop")
    assert server.dispatcher.aborted == [0]


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_told_apart_and_the_prompt_is_counted_once(
    server: HttpServer, openai: AsyncOpenAI, stream: bool
) -> None:
    server.dispatcher.script = says(_tokens("Hello"), finish=FinishReason.LENGTH)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = await openai.chat.completions.create(model="tiny", messages=HELLO, n=3, stream=stream, **options)
    texts = ["", "", ""]
    if stream:
        async for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
            usage = chunk.usage
    else:
        for choice in answer.choices:
            texts[choice.index] += choice.message.content
        usage = answer.usage
    assert texts == ["Hello"] * 3
    assert usage.completion_tokens == 3 * len(_tokens("Hello"))
    assert usage.prompt_tokens == len(server.dispatcher.generations[0].token_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_come_with_every_token(server: HttpServer, openai: AsyncOpenAI, stream: bool) -> None:
    tokens = _tokens("日本 x")
    server.dispatcher.script = says(tokens)
    answer = await openai.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=2, stream=stream
    )
    if stream:
        chunks = [chunk async for chunk in answer]
        content = [
            token
            for chunk in chunks
            if chunk.choices[0].logprobs
            for token in chunk.choices[0].logprobs.content
        ]
    else:
        content = answer.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in content) == "日本 x".encode()
    assert [len(token.top_logprobs) for token in content] == [2] * len(tokens)
    assert content[0].logprob == -0.5


async def test_the_prompt_is_hashed_in_its_namespace_and_the_rest_is_passed_on(
    server: HttpServer, openai: AsyncOpenAI
) -> None:
    server.dispatcher.script = says([END])
    await openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 4}],
        max_completion_tokens=7,
        temperature=0,
        seed=-1,
        logit_bias={"5": -3},
        prompt_cache_key="k",
        extra_body={"cache_salt": "s", "top_k": 4, "min_p": 0.1, "stop_token_ids": [9], "unknown": {"x": 1}},
    )
    generation = server.dispatcher.generations[0]
    model = tiny_model.catalog().get("tiny")
    assert generation.submit.root == model.root(None, "s")
    assert generation.block_hashes == hash_blocks(generation.submit.root, generation.token_ids, 16)
    sampling = generation.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (7, 0.0, 2**64 - 1)
    assert (sampling.top_k, sampling.min_p, sampling.logit_bias) == (4, 0.1, ((5, -3.0),))
    assert sampling.stop_token_ids == (9,)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat", "completions"])
@pytest.mark.parametrize("num_cross_user_tokens", [0, 16])
async def test_every_kind_of_answer_says_how_much_another_user_had_computed(
    server: HttpServer, openai: AsyncOpenAI, route: str, stream: bool, num_cross_user_tokens: int
) -> None:
    server.dispatcher.script = says([END], num_cached_tokens=32, num_cross_user_tokens=num_cross_user_tokens)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    if route == "chat":
        answer = await openai.chat.completions.create(model="tiny", messages=HELLO, n=2, **options)
    else:
        answer = await openai.completions.create(model="tiny", prompt=["a", "b"], n=2, **options)
    usage = [chunk async for chunk in answer][-1].usage if stream else answer.usage
    num_prompts = 1 if route == "chat" else 2
    details = usage.prompt_tokens_details
    assert details.cached_tokens == num_prompts * 32
    assert details.cross_user_cached_tokens == num_prompts * num_cross_user_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat", "completions"])
@pytest.mark.parametrize(("slower", "disk"), [(0, 0), (24, 0), (24, 10), (32, 32)])
async def test_every_kind_of_answer_says_from_which_tiers_the_cached_tokens_came(
    server: HttpServer, openai: AsyncOpenAI, route: str, stream: bool, slower: int, disk: int
) -> None:
    server.dispatcher.script = says(
        [END],
        num_cached_tokens=32,
        num_slower_tier_tokens=slower,
        num_disk_tokens=disk,
        num_pulled_tokens=slower - disk,
    )
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    if route == "chat":
        answer = await openai.chat.completions.create(model="tiny", messages=HELLO, n=2, **options)
    else:
        answer = await openai.completions.create(model="tiny", prompt=["a", "b"], n=2, **options)
    usage = [chunk async for chunk in answer][-1].usage if stream else answer.usage
    num_prompts = 1 if route == "chat" else 2
    details = usage.prompt_tokens_details
    by_tier = (details.device_cached_tokens, details.host_cached_tokens, details.disk_cached_tokens)
    assert by_tier == (num_prompts * (32 - slower), num_prompts * (slower - disk), num_prompts * disk)
    assert sum(by_tier) == details.cached_tokens == num_prompts * 32
    assert details.pulled_cached_tokens == details.host_cached_tokens


async def test_a_user_is_known_by_either_field_and_to_nobody_by_name(
    server: HttpServer, openai: AsyncOpenAI
) -> None:
    server.dispatcher.script = says([END])
    ask = openai.chat.completions.create
    await ask(model="tiny", messages=HELLO, user="ada")
    await ask(model="tiny", messages=HELLO, safety_identifier="ada", user="somebody else")
    await openai.completions.create(model="tiny", prompt=["a", "b"], user="ada")
    await ask(model="tiny", messages=HELLO, user="bob")
    await ask(model="tiny", messages=HELLO)
    tag = tiny_model.catalog().user_tag
    users = [generation.submit.user for generation in server.dispatcher.generations]
    assert users == [*[tag("ada")] * 4, tag("bob"), NO_USER]
    roots = {generation.submit.root for generation in server.dispatcher.generations}
    assert len(roots) == 1  # users are counted apart, not kept apart


@pytest.mark.parametrize("field", ["user", "safety_identifier"])
async def test_a_user_that_is_no_text_is_refused_by_the_fields_name(
    http: httpx.AsyncClient, field: str
) -> None:
    answer = await http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO, field: 7})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_adapter_is_asked_for_by_name_and_has_blocks_and_bucket_of_its_own(
    server: HttpServer, openai: AsyncOpenAI, stream: bool
) -> None:
    server.dispatcher.script = says([END])
    for name in ("tiny", "tiny-sql"):
        for create, prompt in (
            (openai.chat.completions.create, {"messages": HELLO}),
            (openai.completions.create, {"prompt": "Hello"}),
        ):
            answer = await create(model=name, stream=stream, **prompt)
            assert {chunk.model async for chunk in answer} == {name} if stream else answer.model == name
    generations = server.dispatcher.generations
    plain, adapted = generations[:2], generations[2:]
    assert {(generation.model, generation.adapter) for generation in plain} == {("tiny", None)}
    assert {(generation.model, generation.adapter) for generation in adapted} == {
        ("tiny", tiny_model.ADAPTER)
    }
    assert [generation.token_ids for generation in plain] == [generation.token_ids for generation in adapted]
    assert {generation.submit.root for generation in adapted} == {tiny_model.catalog().get("tiny-sql").root()}
    assert all(own.bucket != other.bucket for own, other in zip(plain, adapted, strict=True))


async def test_a_conversation_keeps_its_bucket_as_it_grows_unless_the_key_differs(
    server: HttpServer, openai: AsyncOpenAI
) -> None:
    server.dispatcher.script = says([END])
    grown = [*HELLO, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "And?"}]
    for messages, key in ((HELLO, "a"), (grown, "a"), (HELLO, "b")):
        await openai.chat.completions.create(model="tiny", messages=messages, prompt_cache_key=key)
    first, second, third = (generation.bucket for generation in server.dispatcher.generations)
    assert first == second != third


async def test_conversations_of_one_short_system_prompt_share_its_bucket_unless_they_have_a_key(
    server: HttpServer, openai: AsyncOpenAI
) -> None:
    """The second asks what its system prompt has a part of."""
    server.dispatcher.script = says([END])

    async def ask(system: str, text: str, **fields: str) -> tuple[bytes, bytes | None]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        await openai.chat.completions.create(model="tiny", messages=messages, **fields)
        generation = server.dispatcher.generations[-1]
        return generation.bucket, generation.head_bucket

    brief = "You are a helpful assistant of a bank, and answer in one sentence."
    asked = [await ask(brief, text) for text in ("Hello there", "a bank", "One two")]
    assert len({bucket for bucket, _ in asked}) == 3
    assert len({head for _, head in asked}) == 1 and asked[0][1] is not None
    assert (await ask(brief.replace("bank", "shop"), "Hello there"))[1] not in (None, asked[0][1])
    assert (await ask(brief, "Hello there", prompt_cache_key="mine"))[1] is None
    assert (await ask(brief * 9, "Hello there"))[1] is None
    assert (await ask("", "Hello there"))[1] is None


async def test_without_max_tokens_a_chat_may_fill_the_context(
    server: HttpServer, openai: AsyncOpenAI
) -> None:
    server.dispatcher.script = says([END])
    await openai.chat.completions.create(model="tiny", messages=HELLO)
    generation = server.dispatcher.generations[0]
    assert generation.sampling.max_tokens + len(generation.token_ids) == tiny_model.CONTEXT_LENGTH


async def test_text_parts_are_joined_and_tool_arguments_reach_the_template_as_objects(
    server: HttpServer, openai: AsyncOpenAI
) -> None:
    server.dispatcher.script = says([END])
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    tool = {"type": "function", "function": {"name": "get", "parameters": {}}}
    await openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": parts}], tools=[tool]
    )
    text = TOKENIZER.decode(server.dispatcher.generations[0].token_ids)
    assert "user\none\ntwo<|im_end|>" in text
    assert '{"type": "function", "function": {"name": "get"' in text


async def test_a_failure_in_mid_stream_ends_it_with_an_error_and_no_done(
    server: HttpServer, openai: AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    def script(generation: object) -> list[object]:
        return [*says(_tokens("Hello"))(generation)[:2], GenerationFailed("It broke.")]  # type: ignore[arg-type]

    server.dispatcher.script = script  # type: ignore[assignment]
    with pytest.raises(APIError, match="It broke"):
        async for _ in await openai.chat.completions.create(model="tiny", messages=HELLO, stream=True):
            pass
    answer = await http.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "stream": True}
    )
    assert answer.text.rstrip().splitlines()[-1].startswith('data: {"error":{"message":"It broke."')
    assert "[DONE]" not in answer.text
    assert server.is_idle


async def test_several_prompts_come_back_in_order_with_their_choices(
    server: HttpServer, openai: AsyncOpenAI
) -> None:
    server.dispatcher.script = says(_tokens("!"), num_cached_tokens=2)
    prompts = ["Hello", "The quick"]
    completion = await openai.completions.create(model="tiny", prompt=prompts, n=2, echo=True)
    assert [(choice.index, choice.text) for choice in completion.choices] == [
        (0, "Hello!"), (1, "Hello!"), (2, "The quick!"), (3, "The quick!")
    ]  # fmt: skip
    assert completion.usage.prompt_tokens == sum(len(_tokens(prompt)) for prompt in prompts)
    assert completion.usage.prompt_tokens_details.cached_tokens == 4
    assert completion.usage.completion_tokens == 4
    assert server.is_idle


async def test_token_ids_are_prompts_too_alone_or_as_a_list(server: HttpServer, openai: AsyncOpenAI) -> None:
    server.dispatcher.script = says([END])
    await openai.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=3)
    await openai.completions.create(model="tiny", prompt=[[5, 6], [7]], max_tokens=3)
    prompts = [list(generation.token_ids) for generation in server.dispatcher.generations]
    assert prompts == [[5, 6, 7], [5, 6], [7]]


async def test_streamed_completions_carry_echo_text_logprobs_and_indexes(
    server: HttpServer, openai: AsyncOpenAI
) -> None:
    server.dispatcher.script = says(_tokens("Hi there"))
    texts = ["", ""]
    stream = await openai.completions.create(model="tiny", prompt=["a", "b"], echo=True, stream=True)
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["aHi there", "bHi there"]
    stream = await openai.completions.create(model="tiny", prompt="a", logprobs=1, stream=True)
    tokens = [
        token async for chunk in stream if (found := chunk.choices[0].logprobs) for token in found.tokens
    ]
    assert "".join(tokens) == "Hi there"


async def test_a_failing_prompt_fails_the_request_and_stops_the_others(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    def script(generation: object) -> list[object]:
        num_tokens = len(generation.token_ids)  # type: ignore[attr-defined]
        return [GenerationFailed("It broke.")] if num_tokens == 1 else ["never"]

    server.dispatcher.script = script  # type: ignore[assignment]
    answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": [[5, 6], [7]]})
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "It broke.")
    assert server.is_idle
