"""Recorded bodies: a line each in a file for one user alone, which `kvasir lint` reads; never more than is
allowed."""

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from replicas.process.settings import SettingsError
from router.explain.linting.log_lines import read_line
from router.features.recorded_bodies import feature as body_recorder
from router.features.recorded_bodies.feature import BodyRecorder, RecordedBodies
from tests.router.http_server import http_server

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello\nthere \u2028 ok"}]}


def test_a_body_is_a_line_that_lint_reads_whatever_white_space_it_had(tmp_path: Path) -> None:
    path = tmp_path / "bodies.jsonl"
    recorder = BodyRecorder(str(path), 2**20)
    recorder.take("/v1/messages", "tenant:acme", json.dumps(CHAT, indent=2).encode() + b"\r\n", 17.25)
    recorder.take("/v1/chat/completions", None, json.dumps(CHAT).encode(), 18.0)
    recorder.finish()
    first, second = path.read_bytes().splitlines()
    read = read_line(first)
    assert (read.kind, read.tenant, read.time, read.body) == ("messages", "tenant:acme", 17.25, CHAT)
    assert (read_line(second).kind, read_line(second).tenant) == ("chat", None)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert recorder.counts() == RecordedBodies(2, 0)


def test_the_file_stays_within_its_bound_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "bodies.jsonl"
    path.touch(0o600)
    recorder = BodyRecorder(str(path), 1000)
    for number in range(50):
        recorder.take("/v1/completions", None, b'{"prompt": "%050d"}' % number, 0.0)
    recorder.finish()
    written, left_out = recorder.counts()
    assert written + left_out == 50
    assert written == len(path.read_bytes().splitlines())
    assert 900 - 60 < path.stat().st_size <= 1000


def test_what_waits_for_a_slow_disk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_recorder, "WAITING_BYTES", 1000)
    may_write, write = threading.Event(), os.write

    def slowly(file: int, line: bytes) -> int:
        may_write.wait(20)
        return write(file, line)

    monkeypatch.setattr(os, "write", slowly)
    recorder = BodyRecorder(str(tmp_path / "bodies.jsonl"), 2**20)
    for _ in range(50):
        recorder.take("/v1/completions", None, b'{"prompt": "%050d"}' % 1, 0.0)
    assert recorder.counts().num_left_out >= 40
    may_write.set()
    recorder.finish()
    written, left_out = recorder.counts()
    assert (written + left_out, written) == (50, len((tmp_path / "bodies.jsonl").read_bytes().splitlines()))


def test_several_routers_write_whole_lines_to_one_file(tmp_path: Path) -> None:
    path = str(tmp_path / "bodies.jsonl")
    recorders = [BodyRecorder(path, 2**30) for _ in range(3)]
    body = json.dumps({"prompt": "word " * 20_000}).encode()
    for _ in range(20):
        for recorder in recorders:
            recorder.take("/v1/completions", None, body, 0.0)
    for recorder in recorders:
        recorder.finish()
    lines = Path(path).read_bytes().splitlines()
    assert len(lines) == 60
    assert {json.dumps(read_line(line).body).encode() for line in lines} == {body}


def test_a_file_that_others_can_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.touch()
    path.chmod(0o644)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("open", "link", "pipe", "none/bodies", "."):
        with pytest.raises(SettingsError, match="record_bodies"):
            BodyRecorder(str(tmp_path / name), 2**20)
    assert not (tmp_path / "elsewhere").exists()


async def test_requests_that_are_served_are_recorded_and_others_are_not(tmp_path: Path) -> None:
    path = tmp_path / "bodies.jsonl"
    async with http_server() as server, httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        server.context.add(recorder := BodyRecorder(str(path), 2**20))
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        gemini = {"contents": [{"parts": [{"text": "Hello"}]}]}
        assert (
            await client.post("/v1beta/models/tiny:generateContent?key=s", json=gemini)
        ).status_code == 200
        assert (await client.post("/v1/chat/completions", content=b"{")).status_code == 400
        assert (await client.post("/v1/chat/completions", json={"model": "tiny"})).status_code == 400
        await server.wait_idle()
    recorder.finish()
    lines = path.read_bytes().splitlines()
    assert [read_line(line).kind for line in lines] == ["chat", "gemini"]
    assert read_line(lines[0]).body == CHAT
    assert read_line(lines[1]).body["model"] == "tiny"
    assert b"key=" not in lines[1]
