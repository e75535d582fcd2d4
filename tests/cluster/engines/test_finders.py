import asyncio
import os
import socket
from pathlib import Path

import pytest

from cluster.config import EngineSource
from cluster.engines import finders
from cluster.engines.addresses import SourceFailed
from cluster.engines.finders import finder_of


async def test_a_list_names_each_server_once_however_it_is_spelt() -> None:
    urls = ("http://a:1/", "HTTP://A:1", "http://b:80", "http://b", "https://b:443", "http://c/p/")
    urls += ("http://[::1]:2", "http://[0:0::1]:2")
    assert await finder_of(EngineSource(urls)).look() == {
        *("http://a:1", "http://b", "https://b", "http://c/p", "http://[::1]:2")
    }


async def test_a_file_is_read_at_each_look(tmp_path: Path) -> None:
    file = tmp_path / "servers"
    finder = finder_of(EngineSource(file=str(file)))
    with pytest.raises(SourceFailed, match="No such file"):
        await finder.look()
    file.write_text("# ours\nhttp://a:1\n\n  http://b:1/  \nhttp://B:1\n")
    assert await finder.look() == {"http://a:1", "http://b:1"}
    file.write_text("http://c:1")
    assert await finder.look() == {"http://c:1"}
    file.write_text("")
    assert await finder.look() == set()


async def test_a_file_that_others_may_write_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "servers"
    file.write_text("http://a:1")
    finder = finder_of(EngineSource(file=str(file)))
    for mode, num_warnings in ((0o644, 0), (0o666, 1), (0o666, 1), (0o644, 1), (0o660, 2)):
        file.chmod(mode)
        assert await finder.look() == {"http://a:1"}
        assert caplog.text.count("others may change it; chmod go-w") == num_warnings


class Resolver:
    """Answers for every name with these addresses, or raises."""

    def __init__(self, *answer: str | Exception) -> None:
        self.answer = answer

    async def getaddrinfo(self, host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        assert (host, port) == ("vllm.example", 8000)
        for address in self.answer:
            if isinstance(address, Exception):
                raise address
        return [(0, 0, 0, "", (address, port)) for address in self.answer]


def resolve(monkeypatch: pytest.MonkeyPatch, *answer: str | Exception) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", Resolver(*answer).getaddrinfo)


async def test_every_address_of_a_name_is_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = finder_of(EngineSource(dns="http://vllm.example:8000"))
    resolve(monkeypatch, "10.0.0.2", "10.0.0.1", "10.0.0.2")
    assert await finder.look() == {"http://10.0.0.1:8000", "http://10.0.0.2:8000"}
    resolve(monkeypatch, "fd00::1")
    assert await finder.look() == {"http://[fd00::1]:8000"}
    resolve(monkeypatch, "fd00::1", "10.0.0.1")
    assert await finder.look() == {"http://10.0.0.1:8000"}, "a server with both addresses is one"


async def test_no_address_is_an_answer_and_no_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = finder_of(EngineSource(dns="http://vllm.example:8000"))
    for errno in (socket.EAI_NONAME, socket.EAI_NODATA):
        resolve(monkeypatch, socket.gaierror(errno, "no"))
        assert await finder.look() == set()
    for error in (socket.gaierror(socket.EAI_AGAIN, "later"), TimeoutError(), UnicodeError("label too long")):
        resolve(monkeypatch, error)
        with pytest.raises(SourceFailed, match=r"vllm\.example"):
            await finder.look()


async def test_an_address_of_a_metadata_service_is_none_of_a_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    resolve(monkeypatch, "10.0.0.1", "169.254.7.7")
    with pytest.raises(SourceFailed, match=r"169\.254\.7\.7 is link-local"):
        await finder_of(EngineSource(dns="http://vllm.example:8000")).look()
    file = tmp_path / "servers"
    hosts = ("169.254.169.254", "0xa9fea9fe", "2852039166", "[::ffff:a9fe:a9fe]", "[fd00:ec2:0::254]")
    for host in (*hosts, "169.254.43518", "0xa9.0376.169.254", "Metadata.google.internal"):
        file.write_text(f"http://{host}")
        with pytest.raises(SourceFailed, match="metadata service"):
            await finder_of(EngineSource(file=str(file))).look()
    for host in ("10.0.0.1", "a.b", "0.0.0.0", "[fd00::1]", "1.2.3.4.5", "metadata"):
        file.write_text(f"http://{host}")
        assert await finder_of(EngineSource(file=str(file))).look() == {f"http://{host}"}


async def test_a_resolver_that_hangs_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finders, "DNS_SECONDS", 0.05)
    finder = finder_of(EngineSource(dns="http://vllm.example:8000"))
    answers, num_asked = asyncio.Event(), 0

    async def getaddrinfo(*_: object, **__: object) -> list[tuple[object, ...]]:
        nonlocal num_asked
        num_asked += 1
        await answers.wait()
        return [(0, 0, 0, "", ("10.0.0.1", 8000))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    for _ in range(3):
        with pytest.raises(SourceFailed, match=r"does not answer for vllm\.example"):
            await finder.look()
    answers.set()
    for _ in range(2):
        assert await finder.look() == {"http://10.0.0.1:8000"}
    assert num_asked == 2


async def test_the_machines_own_resolver_is_asked() -> None:
    assert "http://127.0.0.1:7" in await finder_of(EngineSource(dns="http://localhost:7")).look()


@pytest.mark.parametrize("content", [b"http://a:1\nnonsense\n", b"\xff", b"http://a:99999", b"http://a b:1"])
async def test_a_file_with_anything_else_in_it_fails_as_a_whole(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "servers"
    file.write_bytes(content)
    with pytest.raises(SourceFailed, match="servers"):
        await finder_of(EngineSource(file=str(file))).look()


async def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "servers")
    with pytest.raises(SourceFailed, match="it is a pipe"):
        await finder_of(EngineSource(file=str(tmp_path / "servers"))).look()


async def test_an_endless_file_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finders, "MOST_FILE_BYTES", 100)
    file = tmp_path / "servers"
    file.write_text("#" * 101)
    with pytest.raises(SourceFailed, match="longer than"):
        await finder_of(EngineSource(file=str(file))).look()
