"""`kvasir replay` against a router and a simulated replica, all of them real processes."""

import gzip
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.cli import main
from loadtests import progress
from loadtests.reports.report import Slo
from loadtests.reports.run_figures import figures_of
from loadtests.reports.run_file import read_run
from loadtests.stacks.key_file import write_key_file
from loadtests.stacks.local_stack import LocalStack, local_stack
from router.caller import Tenant

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

MAX_IN_FLIGHT = 4
SMALL_B2B = ["b2b", "--scale-tokens", "0.1", "--set", "num_groups=4", "--set", "output_tokens=40"]


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    replica = {
        **{"engine": "simulated", "model_name": "toy", "simulated_speed": 4.0},
        **{"block_size": 32, "num_blocks": 2048},
    }
    router = {"max_in_flight": MAX_IN_FLIGHT, "address_share": 1.0}  # all clients are one address here
    with local_stack(replica_settings=replica, router_settings=router) as running:
        yield running


def write_trace(path: Path, *, count: int, gap_milliseconds: int, num_output_tokens: int) -> Path:
    """Every second request repeats the one before it, as another user."""
    lines = [
        json.dumps(
            {
                "timestamp": 1 + number * gap_milliseconds,
                "input_length": 1300,
                "output_length": num_output_tokens,
                "hash_ids": [number // 2 * 3, number // 2 * 3 + 1, number // 2 * 3 + 2],
                "session": f"session-{number}",
            }
        )
        for number in range(count)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def replayed(folder: Path, words: list[str]) -> tuple[int, dict[str, Any]]:
    """The exit status, and what was written as JSON."""
    file = folder / "report.json"
    status = main(["replay", *words, "--json", str(file)])
    return status, json.loads(file.read_text(encoding="utf-8"))


def test_a_trace_finds_all_that_it_could_find_and_says_how_far_it_is(
    stack: LocalStack, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "ELSEWHERE_SECONDS", 0.5)
    trace = write_trace(tmp_path / "pairs.jsonl", count=12, gap_milliseconds=200, num_output_tokens=8)
    status, content = replayed(tmp_path, [str(trace), "--url", stack.url, "--seed", "11"])
    report = content["report"]
    assert status == 0
    assert report["num_answered"] == 12
    assert report["num_input_tokens"] == 12 * 1300
    assert report["num_output_tokens"] == 12 * 8
    assert content["block_size"] == 32
    assert report["token_hit_rate"] == content["ideal_token_hit_rate"] == 0.5 * (1300 // 32 * 32) / 1300
    assert report["requests_per_replica"] == {"replica-0": 12}
    assert report["imbalance_requests"]["max_over_mean"] == 1.0
    assert report["prediction"]["mean_absolute_error"] < 32
    said = capsys.readouterr()
    assert "100.0% of the ideal 49.2%" in said.out
    assert re.match(r" +\d+ s  \d+ of 12 sent, \d+ in flight, 0 failed\n", said.err)


def test_a_server_that_asks_for_a_key_gets_one_by_an_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVASIR_API_KEY", raising=False)
    keys_file = tmp_path / "keys.json"
    key = write_key_file(keys_file, [Tenant(name="acme")])["acme"]
    trace = write_trace(tmp_path / "pairs.jsonl", count=2, gap_milliseconds=10, num_output_tokens=2)
    replica = {"engine": "simulated", "model_name": "toy", "simulated_speed": 4.0}
    with local_stack(replica_settings=replica, router_settings={"keys_file": keys_file}) as running:
        words = ["replay", str(trace), "--url", running.url]
        assert main(words) == 2
        hint = "set KVASIR_API_KEY to an API key, or give --api-key"
        assert capsys.readouterr().err == f"kvasir: {running.url}/v1/models answers 401; {hint}\n"
        assert main([*words, "--api-key", key]) == 0


def test_a_run_file_keeps_every_request_and_no_key(
    stack: LocalStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = write_trace(tmp_path / "pairs.jsonl", count=10, gap_milliseconds=100, num_output_tokens=8)
    words = [str(trace), "--url", stack.url, "--seed", "13", "--limit", "8", "--warm-up", "0.25"]
    words += ["--api-key", "secret-1", "--run-file", str(tmp_path / "run.json.gz")]
    monkeypatch.setattr(sys, "argv", ["/somewhere/kvasir", "replay", *words])
    _, content = replayed(tmp_path, words)
    run = read_run(tmp_path / "run.json.gz")
    assert (run.info.test, run.info.seed, run.info.num_replicas) == ("replay", 13, 1)
    assert run.info.workload["limit"] == "8"
    assert run.info.command.startswith("kvasir replay ")
    assert "secret-1" not in run.info.command
    assert len(run.records) == 8
    figures = figures_of(run, Slo())
    assert figures.num_warmup_requests == 2
    assert figures.report.as_json() | {"lateness": None} == content["report"] | {"lateness": None}
    record = run.records[-1]
    assert (record.user, record.session) != (None, None)
    assert record.reason and record.request_id and record.itl_seconds
    assert abs(sum(record.itl_seconds) + (record.ttft_seconds or 0) - (record.e2e_seconds or 0)) < 1


def test_a_run_file_that_cannot_be_written_is_said(
    stack: LocalStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "pairs.jsonl", count=2, gap_milliseconds=10, num_output_tokens=2)
    words = ["replay", str(trace), "--url", stack.url, "--run-file", str(tmp_path / "no" / "run.json")]
    assert main(words) == 2
    printed = capsys.readouterr()
    assert "token hit rate" in printed.out, "the figures are not lost with the file"
    assert "cannot be written" in printed.err


def test_words_in_place_of_token_ids_share_prefixes_too(stack: LocalStack, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "pairs.jsonl", count=4, gap_milliseconds=300, num_output_tokens=8)
    words = [str(trace), "--url", stack.url, "--seed", "12", "--text", "--scale-tokens", "0.5"]
    _, content = replayed(tmp_path, words)
    assert content["report"]["num_answered"] == 4
    assert content["report"]["token_hit_rate"] > 0.4


def write_sessions(path: Path, *, num_lanes: int, think: float) -> Path:
    """Each lane has a session of three turns, which begins a subagent, and then another session."""
    lines: list[dict[str, Any]] = [{"format": "kvasir-sessions", "version": 1, "block_tokens": 512}]
    for lane in range(num_lanes):
        sizes = (1100, 1700, 2100)
        turns = [
            {"in": size, "out": 4, "think": think, "blocks": [[lane * 100, size // 512]]} for size in sizes
        ]
        agent = [{"in": 600, "out": 2, "think": 0, "blocks": [[lane * 100 + 50, 1]]}]
        common = {"lane": lane, "after": 0.1}
        lines += [
            {"id": f"{lane}.0", "agent": "main", "turns": turns, **common},
            {"id": f"{lane}.0.0", "agent": "explore", "parent": f"{lane}.0", "turn": 1, "turns": agent}
            | common,
            {"id": f"{lane}.1", "agent": "main", "turns": turns[:1], **common},
        ]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    return path


def test_sessions_of_agents_are_served_turn_by_turn_and_have_figures_of_their_own(
    stack: LocalStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_sessions(tmp_path / "few.jsonl.gz", num_lanes=2, think=1.0)
    words = [str(file), "--url", stack.url, "--seed", "21", "--speed", "4", "--scale-tokens", "0.5"]
    status, content = replayed(tmp_path, [*words, "--run-file", str(tmp_path / "run.json")])
    report, sessions = content["report"], content["sessions"]
    assert (status, report["num_answered"], report["errors"]) == (0, 10, {})
    tokens = (550, 850, 1050, 550)  # a lane's turns; of them 512, 768 and 512 were there before
    assert content["ideal_token_hit_rate"] == pytest.approx((512 + 768 + 512) / (sum(tokens) + 300), rel=0.01)
    assert report["token_hit_rate"] == pytest.approx(content["ideal_token_hit_rate"])
    assert (sessions["num_sessions"], sessions["num_ended"], sessions["failed"]) == (4, 4, [])
    assert 0 < sessions["mean_seconds"] < sessions["p90_seconds"]
    assert sessions["p90_seconds"] > 0.5, "two pauses"
    said = capsys.readouterr().out
    assert "2 lanes with 4 sessions and 2 subagents, 10 turns as token ids" in said
    assert "sessions            4 of 4 ended, mean " in said
    run = read_run(tmp_path / "run.json")
    assert Counter(record.session for record in run.records)["0.0"] == 3
    assert {record.user for record in run.records} == {"0.0", "0.1", "1.0", "1.1"}
    assert figures_of(run, Slo()).report.num_answered == 10
    assert replayed(tmp_path, [*words, "--limit", "1"])[1]["report"]["num_answered"] == 4
    assert main(["replay", *words, "--limit", "5s"]) == 2
    assert "--limit takes a number of sessions here, not 5s" in capsys.readouterr().err
    assert main(["replay", str(file), "--url", stack.url, "--qps", "5"]) == 2
    assert "--qps and --set are for generators" in capsys.readouterr().err


def test_sessions_outlast_a_router_that_refuses_some_of_their_turns(
    stack: LocalStack, tmp_path: Path
) -> None:
    file = write_sessions(tmp_path / "many.jsonl.gz", num_lanes=3 * MAX_IN_FLIGHT, think=0.01)
    _, content = replayed(tmp_path, [str(file), "--url", stack.url, "--seed", "23"])
    report, sessions = content["report"], content["sessions"]
    assert (report["num_answered"], report["errors"]) == (5 * 3 * MAX_IN_FLIGHT, {})
    assert (sessions["num_ended"], sessions["num_failed"]) == (2 * 3 * MAX_IN_FLIGHT, 0)
    assert sessions["num_retries"] > 0
    assert sessions["longest_wait_seconds"] >= report["ttft"]["p99"]


def test_interrupted_sessions_are_reported_as_far_as_they_came(stack: LocalStack, tmp_path: Path) -> None:
    file, report = (
        write_sessions(tmp_path / "few.jsonl.gz", num_lanes=1, think=60.0),
        tmp_path / "report.json",
    )
    num_before = num_answered(stack)
    words = [str(file), "--url", stack.url, "--seed", "22", "--json", str(report)]
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", "replay", *words], stdout=subprocess.PIPE, text=True
    )
    while num_answered(stack) < num_before + 1:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "sessions            0 of 2 ended\n" in said
    assert "Interrupted after 1 requests" in said
    assert json.loads(report.read_text(encoding="utf-8"))["report"]["num_requests"] <= 1


def test_requests_that_the_router_refuses_miss_the_slo(stack: LocalStack, tmp_path: Path) -> None:
    words = [*SMALL_B2B, "--url", stack.url, "--qps", "1000", "--set", "num_requests=40"]
    status, content = replayed(tmp_path, words)
    report = content["report"]
    assert status == 0
    assert report["errors"] == {"refused (429)": 40 - report["num_answered"]}
    assert MAX_IN_FLIGHT <= report["num_answered"] < 40
    assert report["good_share"] == report["num_answered"] / 40


def test_requests_longer_than_the_context_are_left_out_and_that_is_said(
    stack: LocalStack, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["agentic", "--url", stack.url, "--set", "num_sessions=1", "--limit", "1"]
    assert main(["replay", *words]) == 2
    captured = capsys.readouterr()
    assert re.search(r"exceed the context of \d+ tokens\.\n", captured.out)
    assert captured.err == "kvasir: nothing is left to send; --scale-tokens makes prompts smaller\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["warp"], "warp is neither a file nor a generator; there are b2b, "),
        (["b2b", "--set", "warp=9"], "--set: warp=9 is not NAME=VALUE of one of b2b's parameters: qps, "),
        (["b2b", "--set", "seed=9"], "--set: seed=9 is not NAME=VALUE of one of b2b's parameters"),
        (
            ["b2b", "--set", "num_groups=many"],
            "--set: num_groups takes a whole number above 0 and up to 1,000,000, not many",
        ),
        (["b2b", "--limit", "soon"], "--limit takes a number of requests, or of seconds as 60s, not soon"),
        (["b2b", "--model", "gpt"], "no model gpt is served; there are: toy"),
        (["b2b", "--scale-tokens", "2"], "b2b: tokens are scaled by a factor above 0 and up to 1, not 2"),
        (
            ["documents"],
            "documents has images, and a replay sends completions, which are text: `kvasir simulate` ",
        ),
        (["documents", "--scale-tokens", "0.5"], "documents: prompts with images cannot be scaled"),
        ([__file__], "line 1 of the trace is not JSON"),
        ([__file__, "--qps", "3"], "--qps and --set are for generators; a trace has its own pace"),
    ],
)
def test_what_cannot_be_replayed_gets_one_sentence(
    words: list[str], sentence: str, stack: LocalStack, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *words, "--url", stack.url]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_without_a_cluster_there_is_one_sentence(
    tmp_path: Path, free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "b2b", "--run-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"kvasir: no cluster runs in {tmp_path}")
    assert main(["replay", "b2b", "--url", f"http://127.0.0.1:{free_port}"]) == 2
    assert capsys.readouterr().err.startswith(f"kvasir: no answer from http://127.0.0.1:{free_port}")


def test_an_interrupted_replay_reports_what_it_has(stack: LocalStack, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    words = [*SMALL_B2B, "--url", stack.url, "--qps", "10", "--seed", "14", "--json", str(file)]
    num_before = num_answered(stack)
    process = subprocess.Popen([sys.executable, "-m", "cluster.cli", "replay", *words])
    while num_answered(stack) < num_before + 8:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    content = json.loads(file.read_text(encoding="utf-8"))
    assert 1 <= content["report"]["num_answered"] < 6000
    assert content["ideal_token_hit_rate"] < 0.9, "of what was sent, not of the whole workload"


def test_requests_of_a_replica_that_is_killed_miss_the_slo(stack: LocalStack, tmp_path: Path) -> None:
    """The only one there is, so nobody can take them over. Last in this file: it needs the replica."""
    trace = write_trace(tmp_path / "pairs.jsonl", count=8, gap_milliseconds=400, num_output_tokens=40)

    num_before = num_answered(stack)

    def kill_once_some_are_answered() -> None:
        while num_answered(stack) < num_before + 2:
            time.sleep(0.1)
        stack.kill("replica-0")

    killer = threading.Thread(target=kill_once_some_are_answered)
    killer.start()
    words = [str(trace), "--url", stack.url, "--seed", "13", "--timeout", "20"]
    _, content = replayed(tmp_path, words)
    killer.join()
    report = content["report"]
    assert 2 <= report["num_answered"] < 8
    assert sum(report["errors"].values()) == 8 - report["num_answered"]
    assert report["good_share"] == report["num_answered"] / 8


def num_answered(stack: LocalStack) -> float:
    lines = httpx.get(stack.url + "/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("router_requests_total{"))
