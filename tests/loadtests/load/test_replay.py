import asyncio
from typing import Any

import pytest

from loadtests.load.replay import Endpoint, Replay
from loadtests.reports.report import RequestRecord, make_report
from loadtests.workloads import TraceRequest, Workload
from loadtests.workloads.prompts import Prompts
from tests.loadtests.scripted_server import DONE, EVENT, HEAD, USAGE, Reply, chunk, scripted_server, whole


def workload(count: int, *, seconds_apart: float) -> Workload:
    requests = [
        TraceRequest(number * seconds_apart, 48, 2, (0, 1, 10 + number), f"user-{number}", "s")
        for number in range(count)
    ]
    return Workload("tiny", 16, tuple(requests))


async def replay(
    port: int, count: int, *, seconds_apart: float = 0.001, timeout_seconds: float = 10.0
) -> list[RequestRecord]:
    prompts = Prompts("toy", 16, 1, list(range(300, 364)))
    asked = workload(count, seconds_apart=seconds_apart)
    run = Replay(Endpoint("127.0.0.1", port, {}), asked, prompts, timeout_seconds=timeout_seconds)
    await run.run()
    return [run.records[number] for number in range(count)]


async def test_a_request_is_sent_at_its_time_although_no_earlier_one_is_answered() -> None:
    """The server answers nobody until all have asked: a client that waits for answers never gets there."""
    arrived: list[str] = []
    everyone = asyncio.Event()

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        arrived.append(body["user"])
        if len(arrived) == 50:
            everyone.set()
        await everyone.wait()
        await whole(body, writer)

    async with scripted_server(answer) as port:
        records = await replay(port, 50)
    assert [record.error for record in records] == [None] * 50
    assert sorted(arrived) == sorted(f"user-{number}" for number in range(50))


async def test_no_request_is_sent_before_its_time() -> None:
    async with scripted_server(whole) as port:
        records = await replay(port, 20)
    assert all(record.lateness_seconds >= 0 for record in records)


async def test_a_record_has_what_the_answer_says() -> None:
    async with scripted_server(whole) as port:
        [record] = await replay(port, 1)
    assert (record.num_input_tokens, record.num_output_tokens) == (48, 2)
    assert (record.num_cached_tokens, record.num_cross_user_tokens) == (32, 16)
    assert (record.predicted_tokens, record.replica, record.error) == (24, "replica-7", None)
    assert record.ttft_seconds is not None
    assert record.e2e_seconds is not None
    assert 0 < record.ttft_seconds <= record.e2e_seconds


async def refused(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}")


async def broken(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\n{}")


async def cut(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunk(EVENT))
    writer.close()


async def ended_with_an_error(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunk(EVENT) + chunk(b'data: {"error":{"message":"no"}}\n\n') + b"0\r\n\r\n")


async def closed(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.close()


async def silent(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def silent_in_mid_stream(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunk(EVENT))
    await writer.drain()
    await asyncio.Event().wait()


async def counting_in_words(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    usage = USAGE.replace(b'"prompt_tokens":48', b'"prompt_tokens":"some"')
    writer.write(HEAD + chunk(EVENT) + chunk(usage + DONE) + b"0\r\n\r\n")


async def gibberish(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"What do you mean?\r\n\r\n")


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (refused, "refused (429)"),
        (broken, "status 500"),
        (cut, "truncated"),
        (ended_with_an_error, "failed"),
        (closed, "connection lost"),
        (silent, "timed out"),
        (silent_in_mid_stream, "timed out"),
        (gibberish, "unreadable answer"),
        (counting_in_words, "unreadable answer"),
    ],
)
async def test_what_goes_wrong_is_named_and_is_no_good_request(bad: Reply, error: str) -> None:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await (bad if body["user"] in ("user-1", "user-4") else whole)(body, writer)

    async with scripted_server(answer) as port:
        records = await replay(port, 6, timeout_seconds=2.0)
    assert [record.error for record in records] == [None, error, None, None, error, None]
    assert make_report(records).good_share == 4 / 6


async def test_a_server_that_is_not_there_is_an_error_of_every_request(free_port: int) -> None:
    records = await replay(free_port, 3)
    assert [record.error for record in records] == ["connection lost"] * 3


async def test_a_connection_is_used_again_unless_its_request_failed() -> None:
    connections: set[int] = set()

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        connections.add(id(writer))
        if body["user"] == "user-3":
            writer.write(HEAD + chunk(EVENT))
            writer.close()
        else:
            writer.write(HEAD + chunk(EVENT + USAGE + DONE) + b"0\r\n\r\n")

    async with scripted_server(answer) as port:
        records = await replay(port, 8, seconds_apart=0.2)
    assert [record.error for record in records] == [None] * 3 + ["truncated"] + [None] * 4
    assert len(connections) < 8


async def test_a_connection_that_is_still_busy_with_a_timed_out_request_is_not_used_again() -> None:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await (silent_in_mid_stream if body["user"] == "user-0" else whole)(body, writer)

    async with scripted_server(answer) as port:
        records = await replay(port, 2, seconds_apart=2.5, timeout_seconds=2.0)
    assert [record.error for record in records] == ["timed out", None]
