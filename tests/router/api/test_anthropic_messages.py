"""Anthropic's Messages over HTTP: its events, answers, usage and errors, and what is marked to be cached."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anthropic
import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jiter import from_json

from replicas.protocol.frames import FinishReason, PromptUsage
from replicas.protocol.prefix_leases import PrefixLease
from router.api.anthropic.caching import usage_of
from router.errors import GenerationFailed, NoReplicaAvailable, Overloaded
from router.generation import Generation
from router.prompt.catalog import ModelCatalog
from tests.router import tiny_model
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import Step, in_batches, says
from tests.router.thinking_model import CALL, MODEL, OTHER, THINKS, catalog, token_ids

TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("weather", "time")]
ASKED: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 1000,
    "messages": [{"role": "user", "content": "How is the weather?"}],
}
MINUTES = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
VERSION = {"anthropic-version": "2023-06-01"}


async def whole(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/messages", json=ASKED | fields)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


async def events(http: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await http.post("/v1/messages", json=ASKED | fields | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for frame in answer.text.removesuffix("\n\n").split("\n\n"):
        named, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert named == f"event: {event['type']}"
        found.append(event)
    return found


def joined(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream, and that its events come in order."""
    first, *rest, delta, last = events
    assert (first["type"], delta["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    message: dict[str, Any] = first["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    block: dict[str, Any] | None = None
    arguments = ""
    for event in rest:
        assert event["index"] == len(message["content"])
        match event["type"]:
            case "content_block_start":
                assert block is None
                block, arguments = event["content_block"], ""
            case "content_block_delta":
                assert block is not None
                match event["delta"]:
                    case {"type": "text_delta", "text": text}:
                        block["text"] += text
                    case {"type": "thinking_delta", "thinking": text}:
                        block["thinking"] += text
                    case {"type": "signature_delta", "signature": text}:
                        block["signature"] += text
                    case {"type": "input_json_delta", "partial_json": text}:
                        arguments += text
                    case other:
                        raise AssertionError(other)
            case "content_block_stop":
                assert block is not None
                if block["type"] == "tool_use" and arguments:  # as Anthropic's SDK reads them
                    block["input"] = from_json(arguments.encode(), partial_mode=True)
                message["content"].append(block)
                block = None
    assert block is None
    return message | delta["delta"] | {"usage": message["usage"] | delta["usage"]}


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Without what is new each time; where it has to be something, that is checked."""
    assert message["id"].startswith("msg_")
    content = []
    for block in message["content"]:
        if block["type"] == "tool_use":
            assert block["id"].startswith("toolu_")
            block = {**block, "id": ""}
        if block["type"] == "thinking":
            assert block["signature"]
            block = {**block, "signature": ""}
        content.append(block)
    return {**message, "id": "", "content": content}


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with http_server(catalog=catalog()) as running:
        yield running


BEGUN = '<tool_call>\n{"name": "weather", "arguments": {"days": 12, "city": "År'
BROKEN = BEGUN.replace('"År', "Århus}}\n</tool_call>")
_pieces = st.sampled_from(
    ["The fox. ", "日本 ", "<tool_call>", "{", "\n", " ", CALL, OTHER, BEGUN, BROKEN, "STOP", "ST"]
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    thinks=st.booleans(),
    pieces=st.lists(_pieces, max_size=6),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    fields=st.sampled_from([{}, {"stop_sequences": ["STOP"]}, {"tools": TOOLS}])
    | st.just({"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
)
async def test_a_stream_joined_is_the_whole_answer_however_it_is_cut(
    server: HttpServer,
    http: httpx.AsyncClient,
    thinks: bool,
    pieces: list[str],
    cuts: list[int],
    finish: FinishReason,
    fields: dict[str, Any],
) -> None:
    ids = token_ids(THINKS * thinks + "".join(pieces), end=finish is FinishReason.STOP) or [300]
    server.dispatcher.script = in_batches(ids, [1], finish)
    expected = comparable(await whole(http, **fields))
    server.dispatcher.script = in_batches(ids, cuts, finish)
    again = comparable(await whole(http, **fields))
    streamed = comparable(joined(await events(http, **fields)))
    is_ended_here = "tool_choice" in fields or expected["stop_reason"] in ("stop_sequence", "tool_use")
    if not is_ended_here:  # by the batch
        assert again == expected
    assert {**again, "usage": None} == {**expected, "usage": None} == {**streamed, "usage": None}
    assert streamed["usage"] == again["usage"]
    if "stop_sequences" in fields and "STOP" in "".join(pieces) and finish is FinishReason.STOP:
        assert (again["stop_reason"], again["stop_sequence"]) == ("stop_sequence", "STOP")
        assert "STOP" not in "".join(block.get("text", "") for block in again["content"])


async def test_instructions_in_the_middle_are_the_users_where_a_template_takes_none() -> None:
    strict = tiny_model.TEMPLATE.replace(
        "{%- for message in messages %}",
        "{%- for message in messages %}{%- if message.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{%- endif %}",
    )
    models = ModelCatalog(tiny_model.SECRET)
    models.add(tiny_model.card(), tiny_model.bundle(strict))
    messages = [*ASKED["messages"], {"role": "system", "content": "New rules."}]
    async with http_server(catalog=models) as server, httpx.AsyncClient(base_url=server.url) as http:
        server.dispatcher.script = says([tiny_model.END_OF_TURN])
        await whole(http, max_tokens=5, system="Be brief.", messages=messages)
        (generation,) = server.dispatcher.generations
        prompt = models.get(MODEL).tokenizer.decode(generation.token_ids)
        assert "<|im_start|>user\nNew rules.<|im_end|>" in prompt


async def test_a_large_body_is_answered_as_a_small_one(server: HttpServer, http: httpx.AsyncClient) -> None:
    server.dispatcher.script = says(token_ids(THINKS + "So. " + CALL), num_written_tokens=64)
    fields = {
        "system": [{"type": "text", "text": "Be brief. " * 20, "cache_control": HOUR}],
        "tools": TOOLS,
        "thinking": {"type": "adaptive", "display": "omitted"},
    }
    small = await whole(http, **fields)
    large = await whole(http, **fields, metadata={"much": list(range(5000))})
    assert comparable(small) == comparable(large)
    first, second = server.dispatcher.generations
    assert first.token_ids == second.token_ids and first.submit.leases == second.submit.leases
    assert server.context.worker.num_done == 1


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("full", retry_after_seconds=3), 429, "rate_limit_error"),
        (NoReplicaAvailable("none", retry_after_seconds=3), 529, "overloaded_error"),
        (GenerationFailed("broken"), 500, "api_error"),
        (RuntimeError("our own"), 500, "api_error"),
    ],
)
async def test_what_goes_wrong_before_and_in_the_middle_of_a_stream(
    server: HttpServer, http: httpx.AsyncClient, error: Exception, status: int, kind: str
) -> None:
    server.dispatcher.script = lambda generation: [error]
    refused = await http.post("/v1/messages", json=ASKED)
    assert refused.status_code == status
    body = refused.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == refused.headers["request-id"] == refused.headers["x-request-id"]
    assert ("retry-after" in refused.headers) == (status in (429, 529))

    begun = says(token_ids("The fox"))
    server.dispatcher.script = lambda generation: [*begun(generation)[:1], error]
    answer = await http.post("/v1/messages", json=ASKED | {"stream": True})
    assert answer.status_code == 200
    named, data = answer.text.removesuffix("\n\n").split("\n\n")[-1].split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert named == "event: error" and event["type"] == "error" and event["error"]["type"] == kind
    await server.wait_idle()


@pytest.mark.parametrize(
    ("written", "is_read"),
    [
        ('{"text": "\\ud800"}', True),
        ('{"number": 123456789012345678901234567890}', True),
        ('{"number": NaN}', False),
    ],
)
async def test_arguments_are_answered_as_the_model_wrote_them(
    server: HttpServer, http: httpx.AsyncClient, written: str, is_read: bool
) -> None:
    call = CALL.replace('{"city": "Århus"}', written)
    server.dispatcher.script = says(token_ids(THINKS + call))
    answer = await whole(http, tools=TOOLS)
    assert answer["content"][-1]["input"] == (json.loads(written) if is_read else {})


@pytest.mark.parametrize(
    ("written", "finish", "reason"),
    [
        ('{"days": 12, "city": "År', FinishReason.LENGTH, "max_tokens"),
        ('{"days": 12, "city": Århus}}\n</tool_call>', FinishReason.STOP, "end_turn"),
        ('{"days": 12, "city": "the "old" one"}}\n</tool_call>', FinishReason.STOP, "end_turn"),
    ],
)
async def test_a_call_that_breaks_off_is_for_anthropics_sdk_the_same_whole_and_streamed(
    server: HttpServer, written: str, finish: FinishReason, reason: str
) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": ' + written
    server.dispatcher.script = says(token_ids(call, end=finish is FinishReason.STOP), finish=finish)
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        answer = await client.messages.create(**ASKED, tools=TOOLS)
        async with client.messages.stream(**ASKED, tools=TOOLS) as stream:
            streamed = await stream.get_final_message()
    for message in (answer, streamed):
        used = next(block for block in message.content if block.type == "tool_use")
        assert used.input == {"days": 12} | ({"city": "the "} if "old" in written else {})
        assert message.stop_reason == reason


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_runner_of_tools_goes_on_without_threads(server: HttpServer, stream: bool) -> None:
    """It asks for a thread first, and sends whole conversations once it is told that there are none."""
    says_in_turn = [CALL, "It is sunny.", "Still sunny."]

    def script(generation: Generation) -> Sequence[Step]:
        return says(token_ids(says_in_turn[len(server.dispatcher.generations) - 1]))(generation)

    server.dispatcher.script = script
    asked: list[str] = []

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return "sunny"

    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(**ASKED, tools=[weather], stream=stream)
        said = [await turn.get_final_message() if stream else turn async for turn in runner]
        assert asked == ["Århus"]
        assert [message.stop_reason for message in said] == ["tool_use", "end_turn"]
        assert said[-1].content[0].text == "It is sunny."
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.beta.messages.create(
                **ASKED, thread={"type": "continue", "previous_message_id": said[-1].id}, stream=stream
            )
    assert caught.value.error_code == "thread_unsupported_request"
    assert caught.value.type == "invalid_request_error" and "thread" in caught.value.message


async def test_no_tokens_warm_the_prompt_and_say_nothing(server: HttpServer, http: httpx.AsyncClient) -> None:
    server.dispatcher.script = says(token_ids("The fox"), finish=FinishReason.LENGTH, num_written_tokens=48)
    answer = await whole(http, max_tokens=0, system="Be brief. " * 20, cache_control=MINUTES)
    assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")
    usage = answer["usage"]
    assert (usage["output_tokens"], usage["cache_creation_input_tokens"]) == (0, 48)
    (generation,) = server.dispatcher.generations
    assert generation.sampling.max_tokens == 1
    assert generation.submit.leases[0].seconds == 300


@given(
    num_prompt=st.integers(1, 400),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    marks=st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=4),
)
def test_input_read_and_written_tokens_add_up_to_the_prompt(
    num_prompt: int, shares: tuple[float, float], marks: list[tuple[int, bool]]
) -> None:
    num_cached = int(num_prompt * shares[0]) // 16 * 16
    num_written = int((num_prompt - num_cached) * shares[1]) // 16 * 16
    leases = [PrefixLease(end, 3600 if is_hour else 300) for end, is_hour in marks]
    others = [PrefixLease(25, 3600)]
    usage = usage_of(PromptUsage(num_prompt, num_cached, num_written), leases + others, 16, len(leases))
    by_class = msgspec.structs.asdict(usage.cache_creation)
    created = usage.cache_creation_input_tokens
    assert created == sum(by_class.values()) <= num_written
    assert usage.input_tokens + usage.cache_read_input_tokens + created == num_prompt
    if not leases:
        assert created == 0
    # token by token: a written one belongs to the longest class of the marks at or behind it
    for name, is_hour in (("ephemeral_1h_input_tokens", True), ("ephemeral_5m_input_tokens", False)):
        slow = sum(
            any(end * 16 > token for end, hour in marks)
            and any(end * 16 > token and hour for end, hour in marks) is is_hour
            for token in range(num_cached, num_cached + num_written)
        )
        assert by_class[name] == slow


async def test_marks_become_leases_and_classes_of_writes(server: HttpServer, http: httpx.AsyncClient) -> None:
    server.dispatcher.script = says(token_ids("Yes."), num_written_tokens=400)
    body = {
        "system": [{"type": "text", "text": "Be brief. " * 20, "cache_control": HOUR}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "The quick brown fox. " * 20, "cache_control": MINUTES},
                    {"type": "text", "text": "What does it do? " * 20},
                ],
            }
        ],
    }
    answer = await whole(http, **body)
    (generation,) = server.dispatcher.generations
    hour, minutes = generation.submit.leases
    tokenizer = server.context.catalog.get(MODEL).tokenizer
    for lease, ends in ((hour, "Be brief."), (minutes, "brown fox.")):
        kept = tokenizer.decode(generation.token_ids[: lease.end_block * 16])
        following = tokenizer.decode(generation.token_ids[: lease.end_block * 16 + 17])
        assert "What does" not in kept and following.count(ends) >= kept.count(ends) >= 18
    assert (hour.seconds, minutes.seconds) == (3600, 300)
    by_class = answer["usage"]["cache_creation"]
    assert by_class["ephemeral_1h_input_tokens"] == hour.end_block * 16
    assert by_class["ephemeral_5m_input_tokens"] == (minutes.end_block - hour.end_block) * 16
    assert answer["usage"]["cache_leases"] == [{"status": "refused", "reason": "no_answer"}] * 2


@pytest.mark.parametrize("marked", ["tools", "system"])
async def test_where_there_are_tools_a_mark_reaches_over_them_and_the_system_text(
    server: HttpServer, http: httpx.AsyncClient, marked: str
) -> None:
    server.dispatcher.script = says(token_ids("Yes."))
    tool = {
        "name": "last",
        "description": "The last tool of all. " * 10,
        "input_schema": {"type": "object"},
    }
    rules: dict[str, Any] = {"type": "text", "text": "Be brief. " * 10}
    (tool if marked == "tools" else rules)["cache_control"] = HOUR
    question = {"role": "user", "content": "What does it do? " * 20}
    await whole(http, system=[rules], tools=[*TOOLS, tool], messages=[question])
    (generation,) = server.dispatcher.generations
    (lease,) = generation.submit.leases
    tokenizer = server.context.catalog.get(MODEL).tokenizer
    kept = tokenizer.decode(generation.token_ids[: lease.end_block * 16])
    assert kept.count("last tool of all") == 10 and "Be brief" in kept
    assert kept.count("What does") <= 1
