"""What Anthropic's clients mark to be cached, and how the tokens of a prompt are told apart."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.protocol.frames import FinishReason, PromptUsage
from replicas.protocol.prefix_leases import PrefixLease
from router.api.anthropic.caching import usage_of
from tests.router.api.anthropic_client import HOUR, MINUTES, TOOLS, whole
from tests.router.http_server import HttpServer, http_server
from tests.router.scripted_dispatch import says
from tests.router.thinking_model import MODEL, catalog, token_ids


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async with http_server(catalog=catalog()) as running:
        yield running


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


async def test_the_billing_header_changes_and_the_prompt_does_not(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    server.dispatcher.script = says(token_ids("Yes."))
    for number in range(2):
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=1; cch={number:05x};"}
        rules = {"type": "text", "text": "Be brief.", "cache_control": MINUTES}
        await whole(http, system=[header, rules])
    first, second = server.dispatcher.generations
    assert first.token_ids == second.token_ids and first.block_hashes == second.block_hashes
