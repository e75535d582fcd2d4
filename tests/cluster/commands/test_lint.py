"""kvasir lint as a user runs it: its table, its JSON and its exit status; and logs that are none."""

import asyncio
import gzip
import io
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from cluster.cli import main
from cluster.commands import lint
from router.features.recorded_bodies.feature import BodyRecorder
from tests.router import tiny_model
from tests.router.explain.broken_prompts import broken
from tests.router.explain.conversations import AS, Conversation, Turn, text
from tests.router.http_server import http_server


def _log(path: Path, *lines: Any) -> str:
    path.write_bytes(
        b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)
    )
    return str(path)


BROKEN = broken("tool_word", "chat", Random(1))


def test_a_broken_prefix_is_a_row_with_its_path_and_ends_in_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lint", _log(tmp_path / "log", BROKEN.before, BROKEN.after), "--prefill-rate", "1000"]) == 1
    printed = capsys.readouterr().out
    assert BROKEN.path in printed
    assert "a tool that was edited" in printed
    assert "1→2" in printed
    assert "s of computation" in printed


def test_json_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", _log(tmp_path / "log", BROKEN.before, BROKEN.after), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    (found,) = said["findings"]
    assert (found["path"], found["habit"], found["num_breaks"]) == (BROKEN.path, "tool_edited", 1)
    (example,) = found["examples"]
    assert (example["earlier_line"], example["line"], example["path"]) == (1, 2, BROKEN.path)
    assert found["num_lost_tokens"] == said["num_lost_tokens"] <= said["num_tokens"]
    assert (said["num_requests"], said["num_bad_lines"]) == (2, 0)


def test_a_log_that_breaks_nothing_ends_in_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Conversation("Be brief.", [], [Turn("Hello? " + text(Random(1)))])
    bodies = [AS["responses"](made)]
    made.turns[0].answer = "Hello."
    made.turns.append(Turn("And now?"))
    bodies.append(AS["responses"](made))
    assert main(["lint", _log(tmp_path / "log", *bodies)]) == 0
    assert "Nothing breaks a prefix." in capsys.readouterr().out


def test_a_line_that_is_no_request_is_named_and_ends_in_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _log(tmp_path / "log", BROKEN.before, b"", b"{no", BROKEN.after)
    assert main(["lint", path]) == 2
    captured = capsys.readouterr()
    assert captured.err == "line 3: it is not JSON\n"
    assert BROKEN.path in captured.out  # the rest is looked at nevertheless


def test_what_a_router_would_refuse_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    stored = {"input": "Hello", "previous_response_id": "resp_1"}
    assert main(["lint", _log(tmp_path / "log", BROKEN.before, refused, stored), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["num_refused"] == 2
    assert "line 2: a router would refuse it" in captured.err
    assert "line 3" in captured.err


def test_gzip_and_the_standard_input_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = gzip.compress(b"\n".join(json.dumps(body).encode() for body in (BROKEN.before, BROKEN.after)))
    (tmp_path / "log.gz").write_bytes(packed)
    assert main(["lint", str(tmp_path / "log.gz")]) == 1
    first = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(packed))))  # type: ignore[arg-type]
    assert main(["lint", "-"]) == 1
    assert capsys.readouterr().out == first
    (tmp_path / "cut.gz").write_bytes(packed[:-20])
    assert main(["lint", str(tmp_path / "cut.gz")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_a_line_of_ten_megabytes_is_a_request_and_one_beyond_the_bound_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {"prompt": "word " * 2_000_000}
    assert main(["lint", _log(tmp_path / "log", large)]) == 0
    capsys.readouterr()
    monkeypatch.setattr(lint, "MAX_LINE_BYTES", 2**20)
    assert main(["lint", _log(tmp_path / "log", BROKEN.before, large, BROKEN.after)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("line 2: it is longer than 1 MiB")
    assert "2→" not in captured.out
    assert "1→3" in captured.out


async def test_what_a_router_has_recorded_names_the_word_that_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in tiny_model.bundle().files.items():
        (tmp_path / name).write_bytes(content)
    log = tmp_path / "bodies.jsonl"
    function = {"name": "get_weather", "description": "Tells the weather.", "parameters": {"type": "object"}}
    messages = [
        {
            "role": "system",
            "content": "The quick brown fox jumps over the lazy dog, and the dog does not.",
        },
        {"role": "user", "content": "Hello world! Hello again. What is the capital of France?"},
    ]
    body = {"model": "tiny", "messages": messages, "tools": [{"type": "function", "function": function}]}
    other = {**function, "description": "Tells the climate."}
    answered = [
        *messages,
        {"role": "assistant", "content": "It is Paris."},
        {"role": "user", "content": "Thanks!"},
    ]
    broken = {**body, "messages": answered, "tools": [{"type": "function", "function": other}]}
    async with http_server() as server, httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        server.context.add(recorder := BodyRecorder(str(log), 2**20))
        for sent in (body, broken):
            assert (await client.post("/v1/chat/completions", json=sent)).status_code == 200
        await server.wait_idle()
    recorder.finish()
    assert await asyncio.to_thread(main, ["lint", str(log), "--model", str(tmp_path), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["path"], found["habit"]) == ("tools[0].function.description", "tool_edited")
    assert found["examples"][0]["is_certain"]
