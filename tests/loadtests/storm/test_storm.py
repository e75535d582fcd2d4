"""What a storm notices: wrong texts, hangs, failures that nothing excuses; and a small one of its own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from loadtests.storm.clients import StormClients, read_events
from loadtests.storm.faults import Freezer
from loadtests.storm.verdict import ROUTER_KILL, Failure, Fault, StormRequest, judge
from tests.loadtests.scripted_server import DONE, HEAD, chunk, scripted_server

REFERENCES = ["one two three", "four five six"]


def request(
    text: str = REFERENCES[0],
    *,
    sent: float = 10.0,
    ended: float = 12.0,
    failure: Failure | None = None,
    is_retry: bool = False,
) -> StormRequest:
    return StormRequest(1, 0, sent, ended, text, sent + 0.1, failure, "", is_retry)


def fault(name: str, began: float, healthy: float | None = 20.0) -> Fault:
    return Fault(name, "router-0", began, began, healthy)


def test_answers_that_are_their_references_break_nothing() -> None:
    assert not judge([request(), request()], REFERENCES, [fault("replica-kill", 11.0)]).is_broken


@pytest.mark.parametrize("text", ["one two threx", "one two", "one two three four", "", REFERENCES[1]])
def test_a_whole_answer_that_differs_is_wrong(text: str) -> None:
    verdict = judge([request(text)], REFERENCES, [])
    assert verdict.wrong == (request(text),)
    assert verdict.is_broken


def test_what_a_failed_request_has_said_must_be_the_beginning_of_its_reference() -> None:
    cut = request("one tw", failure=Failure.RESET)
    twisted = request("one xx", failure=Failure.RESET)
    assert judge([cut, twisted], REFERENCES, [fault(ROUTER_KILL, 11.9)]).wrong == (twisted,)


@pytest.mark.parametrize("failure", list(Failure))
def test_every_failure_counts_where_no_router_was_killed(failure: Failure) -> None:
    failed = request("one", failure=failure)
    verdict = judge([failed], REFERENCES, [fault("replica-kill", 11.9), fault("router-freeze", 11.9)])
    assert verdict.failed == (failed,)
    assert verdict.is_broken


def test_a_killed_router_excuses_the_resets_of_its_moment_and_nothing_else() -> None:
    kill = fault(ROUTER_KILL, 11.9)
    reset = request("one", failure=Failure.RESET)
    assert judge([reset], REFERENCES, [kill]).of_killed_routers == (reset,)
    assert not judge([reset], REFERENCES, [kill]).is_broken
    to_the_dying = request("", failure=Failure.RESET, sent=11.95)
    assert not judge([to_the_dying], REFERENCES, [kill]).is_broken
    for inexcusable in (
        request("one", failure=Failure.REFUSED),
        request("one", failure=Failure.HANG),
        request("one", failure=Failure.RESET, is_retry=True),
        request("one", failure=Failure.RESET, sent=12.45, ended=12.5),
        request("one", failure=Failure.RESET, ended=11.8),
        request("one", failure=Failure.RESET, ended=30.0),
    ):
        assert judge([inexcusable], REFERENCES, [kill]).failed == (inexcusable,)


def test_a_cluster_that_does_not_recover_and_what_is_left_behind_break_the_storm() -> None:
    assert judge([], REFERENCES, [fault("redis-kill", 1.0, None)]).is_broken
    assert judge([], REFERENCES, [], ["router: router_in_flight is 1"]).is_broken
    assert judge([], REFERENCES, [], hung_bodies=["/tokenize spaces"]).is_broken


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


def test_an_error_inside_a_stream_is_read_with_the_text_before_it() -> None:
    events = (event("one ")[6:-2], event("two")[6:-2], b'{"error":{"message":"lost"}}', b"[DONE]")
    assert read_events(events) == ("one two", "lost")


class StormServer:
    """Answers like the cluster that a storm needs; `misbehave` is what it does instead."""

    def __init__(self) -> None:
        self.misbehave: str | None = None

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if self.misbehave == "hang":
            await asyncio.sleep(60)
        writer.write(HEAD + chunk(event("one ")))
        if self.misbehave == "cut":
            writer.close()
            return
        last = b'data: {"error":{"message":"lost"}}\n\n' if self.misbehave == "error" else DONE
        writer.write(chunk(event("too" if self.misbehave == "wrong" else "two")) + chunk(last) + b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("misbehave", "failure"),
    [
        (None, None),
        ("wrong", None),
        ("hang", Failure.HANG),
        ("cut", Failure.RESET),
        ("error", Failure.REFUSED),
    ],
)
async def test_clients_notice_what_a_server_does(misbehave: str | None, failure: Failure | None) -> None:
    server = StormServer()
    async with scripted_server(server.answer) as port:
        clients = StormClients(
            f"http://127.0.0.1:{port}", "toy", num_prompts=2, num_tokens=4, patience_seconds=10.0, seed=0
        )
        await clients.take_references()
        assert clients.references == ["one two", "one two"]
        server.misbehave = misbehave
        if misbehave == "hang":
            clients.patience_seconds = 0.3
        asked = await clients.ask(0, 1, is_retry=False)
    assert asked.failure is failure
    assert judge([asked], clients.references, []).is_broken is (misbehave is not None)


async def test_a_cut_request_is_sent_again_at_once_as_a_retry() -> None:
    server = StormServer()
    async with scripted_server(server.answer) as port:
        clients = StormClients(
            f"http://127.0.0.1:{port}", "toy", num_prompts=2, num_tokens=4, patience_seconds=10.0, seed=0
        )
        await clients.take_references()
        server.misbehave = "cut"
        await clients.run(1, lambda: bool(clients.requests), seed=0)
    assert [(each.was_cut, each.is_retry) for each in clients.requests] == [(True, False), (True, True)]


async def test_no_two_requests_of_uncached_prompts_share_a_salt_and_split_ones_are_told() -> None:
    bodies: list[dict[str, Any]] = []
    computed_at = {0: b"x-kvasir-computed-at: prefill-0\r\n", 1: b""}

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        bodies.append(body)
        head = HEAD.removesuffix(b"\r\n") + computed_at[len(bodies) % 2] + b"\r\n"
        writer.write(head + chunk(event("one ")) + chunk(DONE) + b"0\r\n\r\n")

    sizes = {"num_prompts": 1, "num_tokens": 4, "num_uncached_words": 500}
    async with scripted_server(answer) as port:
        clients = StormClients(f"http://127.0.0.1:{port}", "toy", **sizes, patience_seconds=10.0, seed=0)
        await clients.take_references()
        asked = [await clients.ask(0, 0, is_retry=False) for _ in range(2)]
    assert [each.is_split for each in asked] == [False, True]
    assert len({body.pop("cache_salt") for body in bodies}) == 4
    assert all(body == bodies[0] for body in bodies)
    assert len(bodies[0]["messages"][1]["content"].split()) > 500


def test_whatever_is_frozen_goes_on_at_the_end() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:

        async def freeze_and_be_interrupted() -> None:
            async with freezer.frozen(process.pid):
                await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED)
                raise KeyboardInterrupt

        freezer = Freezer()
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(freeze_and_be_interrupted())
        assert process.communicate(b"\n", timeout=60) == (None, None)
        assert process.returncode == 0


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_storm_over_two_routers_and_two_replicas_breaks_nothing() -> None:
    command = [sys.executable, "-m", "loadtests.storm", "--own", "--routers 2 --replicas 2"]
    command += [
        "--seconds",
        "20",
        "--calm-seconds",
        "2",
        "--clients",
        "4",
        "--prompts",
        "4",
        "--tokens",
        "48",
    ]
    command += ["--faults", "replica-kill,router-kill,redis-kill"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            said, _ = process.communicate(timeout=500)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            raise
    assert process.returncode == 0, said
    assert "wrong texts: 0" in said
