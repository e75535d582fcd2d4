"""Turns of agents are sent when what they wait for has ended, and refusals are tried again.

A turn is known by the number of tokens that it asks for.
"""

import asyncio
import json
import time
from collections import Counter
from typing import Any

import pytest

from loadtests.load import closed_loop
from loadtests.load.closed_loop import ClosedLoop, programs_of, within
from loadtests.load.replay import Endpoint
from loadtests.load.streaming import Answer
from loadtests.reports.report import RequestRecord
from loadtests.reports.sessions import SessionFigures, render_sessions, session_figures
from loadtests.workloads import Workload, ideal_hits
from loadtests.workloads.prompts import Prompts
from loadtests.workloads.sessions import SessionFile, parse_sessions
from tests.loadtests.scripted_server import Reply, scripted_server, whole

HEAD = {"format": "kvasir-sessions", "version": 1, "block_tokens": 16}
SECONDS_OF_AN_ANSWER = 0.15


def session(session_id: str, *outs: int, lane: int = 0, after: float = 0.0, **more: object) -> dict[str, Any]:
    """Its turns ask for these numbers of tokens, with a pause of 0.4 s between them."""
    turns = [
        {"in": 20 + 16 * number, "out": out, "think": 0.4 if number else 0.0, "blocks": [[lane, 1 + number]]}
        for number, out in enumerate(outs)
    ]
    return {"id": session_id, "lane": lane, "after": after, "agent": "main", "turns": turns} | more


def file_of(*sessions: dict[str, Any]) -> SessionFile:
    return parse_sessions("few", [json.dumps(line).encode() for line in (HEAD, *sessions)])


async def served(
    reply: Reply, *sessions: dict[str, Any], heads: dict[int, str] | None = None
) -> dict[int, RequestRecord]:
    """What became of each turn, at twice the pace."""
    block_tokens, programs = programs_of(file_of(*sessions))
    prompts = Prompts("toy", block_tokens, 1, list(range(300, 364)))
    async with scripted_server(reply, heads) as port:
        loop = ClosedLoop(Endpoint("127.0.0.1", port, {}), programs, prompts, speed=2.0, timeout_seconds=10.0)
        await loop.run()
    return {request.num_output_tokens: loop.records[number] for number, request in enumerate(loop.sent)}


async def slow(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(SECONDS_OF_AN_ANSWER)
    await whole(body, writer)


def ended(record: RequestRecord) -> float:
    return record.arrival_seconds + record.lateness_seconds + (record.e2e_seconds or 0)


async def test_turns_wait_for_answers_and_subagents_and_lanes_run_beside_each_other() -> None:
    heads: dict[int, str] = {}
    turns = await served(
        slow,
        session("a", 1, 2, 3, after=0.2),
        session("a.0", 11, 12, parent="a", turn=0, after=0.1),
        session("a.1", 13, parent="a", turn=0),
        session("a.0.0", 21, parent="a.0", turn=0, after=0.1),
        session("b", 4, after=0.3),
        session("b.0", 14, parent="b", turn=0),
        session("c", 5, lane=1, after=0.1),
        heads=heads,
    )
    pauses_after = [
        (1, None, 0.1),
        (11, 1, 0.05),
        (13, 1, 0.0),
        (21, 11, 0.05),
        (12, 21, 0.2),  # a parent's pause counts from the later end: here its subagent's
        (2, 12, 0.2),
        (3, 2, 0.2),
        (4, 3, 0.15),
        (14, 4, 0.0),
        (5, None, 0.05),
    ]
    assert len(turns) == len(pauses_after)
    for turn, before, pause in pauses_after:
        since = 0.0 if before is None else ended(turns[before])
        assert turns[turn].arrival_seconds == pytest.approx(since + pause, abs=0.03), turn
        assert turns[turn].lateness_seconds >= 0
        assert turns[turn].error is None
    names = ("program", "agent", "parent-agent")
    named = {
        turn: [line for line in head.split("\r\n") if line.startswith("x-kvasir-")]
        for turn, head in heads.items()
    }
    for turns_of, values in [
        ((1, 2, 3), ("a",)),
        ((11, 12), ("a", "a.0")),
        ((13,), ("a", "a.1")),
        ((21,), ("a", "a.0.0", "a.0")),
        ((4,), ("b",)),
        ((14,), ("b", "b.0")),
        ((5,), ("c",)),
    ]:
        for turn in turns_of:
            assert named[turn] == [
                f"x-kvasir-{name}: {value}" for name, value in zip(names, values, strict=False)
            ]


@pytest.mark.parametrize(
    ("num_refusals", "status", "told", "error"),
    [
        (2, 429, "0.2", None),
        (2, 503, None, None),
        (2, 503, "soon", None),
        (11, 429, "0", "refused (429)"),
        (1, 500, None, "status 500"),
    ],
)
async def test_a_refused_turn_is_tried_again_and_a_lane_outlives_a_session_that_fails(
    num_refusals: int, status: int, told: str | None, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed_loop, "FIRST_BACKOFF_SECONDS", 0.1)
    asked: Counter[int] = Counter()

    async def reply(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        asked[body["max_tokens"]] += 1
        if body["max_tokens"] == 2 and asked[2] <= num_refusals:
            line = "" if told is None else f"retry-after: {told}\r\n"
            writer.write(f"HTTP/1.1 {status} No\r\n{line}content-length: 2\r\n\r\n{{}}".encode())
        else:
            await whole(body, writer)

    turns = await served(
        reply, session("a", 1, 2, 3), session("a.0", 11, parent="a", turn=1), session("b", 4, 5)
    )
    record = turns[2]
    assert record.error == error
    if error is None:
        assert asked == {1: 1, 2: 3, 3: 1, 11: 1, 4: 1, 5: 1}
        least = 0.4 if told == "0.2" else 0.3
        assert least <= (record.ttft_seconds or 0) <= (record.e2e_seconds or 0) < least + 0.2
    else:
        assert asked == {1: 1, 2: num_refusals, 4: 1, 5: 1}
    assert record.num_retries == (num_refusals if error is None else num_refusals - 1)
    figures = session_figures(list(turns.values()), {"a": 3, "b": 2})
    assert figures.num_ended == (2 if error is None else 1)
    assert figures.failed == (() if error is None else (f"a: {error}",))
    assert figures.num_retries == record.num_retries


@pytest.mark.parametrize(
    ("told", "num_before", "seconds"),
    [
        (None, 0, 0.5),
        (None, 3, 4.0),
        (None, 9, 8.0),
        ("7", 9, 7.0),
        ("1e9", 0, 60.0),
        ("inf", 0, 60.0),
        ("-1", 1, 1.0),
        ("nan", 1, 1.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 1, 1.0),
    ],
)
def test_a_client_stays_away_as_long_as_it_is_told_but_not_for_ever(
    told: str | None, num_before: int, seconds: float
) -> None:
    headers = {} if told is None else {"retry-after": told}
    assert closed_loop._wait_of(Answer(429, headers), num_before) == seconds


async def test_a_run_that_is_ended_by_hand_ends_at_once_and_keeps_what_it_measured() -> None:
    is_asked = asyncio.Event()

    async def reply(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body["max_tokens"] == 2:
            is_asked.set()
            await asyncio.Event().wait()
        await whole(body, writer)

    block_tokens, programs = programs_of(file_of(session("a", 1, 2, 3), session("b", 4, lane=1, after=900.0)))
    prompts = Prompts("toy", block_tokens, 1, list(range(300, 364)))
    async with scripted_server(reply) as port:
        loop = ClosedLoop(Endpoint("127.0.0.1", port, {}), programs, prompts, speed=2.0, timeout_seconds=60.0)
        run = asyncio.create_task(loop.run())
        await is_asked.wait()
        began = time.perf_counter()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert time.perf_counter() - began < 1
    assert [record.error for record in loop.records.values()] == [None]
    assert [request.num_output_tokens for request in loop.sent] == [1, 2]
    figures = session_figures(list(loop.records.values()), {"a": 3, "b": 1})
    assert (figures.num_ended, figures.num_failed, figures.mean_seconds) == (0, 0, None)


def test_smaller_prompts_share_what_they_shared_and_tails_are_shared_with_nobody() -> None:
    file = file_of(session("a", 1, 2, 3), session("a.0", 11, parent="a", turn=1), session("b", 4))
    block_tokens, programs = programs_of(file, scale_tokens=0.5)
    assert block_tokens == 8
    requests = tuple(request for program in programs for request in program.requests)
    assert [request.num_input_tokens for request in requests] == [10, 18, 26, 10, 10]
    hits = [8, 16, 8, 8]  # the second and third turn of a, its subagent, b
    assert ideal_hits(Workload("few", 8, requests)).token_hit_rate == sum(hits) / 74
    assert {request.user for request in requests} == {"a", "b"}


def test_sessions_end_before_what_exceeds_the_context_and_later_subagents_never_begin() -> None:
    file = file_of(
        session("a", 1, 2, 3),
        session("a.0", 11, 12, parent="a", turn=0),
        session("a.1", 13, parent="a", turn=1),
        session("a.1.0", 21, parent="a.1", turn=0),
        session("b", 99),
    )
    _, programs = programs_of(file)
    kept = {each.session.id: len(each.requests) for each in within(programs, 36 + 1)}
    assert kept == {"a": 1, "a.0": 1}
    _, programs = programs_of(file, limit=1)
    assert [each.session.id for each in programs] == ["a", "a.0", "a.1", "a.1.0"]


@pytest.mark.parametrize("name", ["a\r\nx-evil: 1", "ä", "a b", "", "x" * 257])
def test_an_id_that_no_header_can_carry_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no header can carry"):
        programs_of(file_of(session(name, 1)))


def test_figures_of_sessions_are_those_of_main_sessions_that_were_answered_whole() -> None:
    def record(name: str, at: float, e2e: float, **more: Any) -> RequestRecord:
        return RequestRecord(arrival_seconds=at, num_input_tokens=9, e2e_seconds=e2e, session=name, **more)

    records = [
        record("a", 0.0, 10.0, ttft_seconds=2.0, num_retries=3),
        record("b", 5.0, 5.0, ttft_seconds=1.0),
        record("c", 6.0, 1.0, ttft_seconds=0.5),
        record("a.0", 10.0, 5.0, ttft_seconds=9.0, lateness_seconds=0.5),
        record("c", 10.0, 0.0, error="truncated"),
        record("a", 28.0, 2.0, ttft_seconds=1.0),
    ]
    figures = session_figures(records, {"a": 2, "b": 1, "c": 2, "d": 4})
    expected = SessionFigures(4, 2, 1, ("c: truncated",), 17.5, 27.5, 10.0, 9.5, 3)
    assert figures == expected
    assert render_sessions(figures).splitlines() == [
        "sessions            2 of 4 ended, mean 17.5 s   p90 27.5 s",
        "turns               10.0 a minute, longest wait 9.50 s, 3 retries",
        "failed              c: truncated",
    ]
    assert session_figures([], {"a": 1}) == SessionFigures(1, 0, 0, (), None, None, 0.0, None, 0)
