"""How servers that run already are found and asked, and how long an answer is believed."""

import asyncio
import itertools
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import EngineSource, FoundServer
from cluster.engines import asking, finders
from cluster.engines.addresses import SourceFailed
from cluster.engines.asking import Asker
from cluster.engines.belief import EMPTY_SECONDS, STALE_SECONDS, Belief, Failed, believed
from cluster.engines.finders import finder_of
from tests.cluster.engines.named_servers import named_server


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


async def test_each_rank_of_a_server_is_one_found_server(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    async with (
        named_server('{"0": {}, "1": {}, "01": {}}') as two,
        named_server('{"0": {}}') as one,
        named_server() as none,
    ):
        asker = Asker(str(key))
        found = await asker.ask([two.url, one.url, none.url])
        assert found == [
            *(FoundServer(two.url, 0), FoundServer(two.url, 1)),
            *(FoundServer(one.url), FoundServer(none.url)),
        ]
        assert asker.complaint is None
        assert "authorization: Bearer sesame\r\n" in one.last_head
        await asker.close()


@pytest.mark.parametrize("status", [401, 403])
async def test_a_server_that_wants_a_key_is_told_with_the_option_that_gives_one(status: int) -> None:
    async with named_server() as locked:
        locked.status = status
        asker = Asker(None, takes_bodies=True)
        assert await asker.ask([locked.url]) == []
        assert f"answers {status}: it wants an API key, or another one: give --join-key-file" in str(
            asker.complaint
        )
        await asker.close()


async def test_no_compressed_answer_is_asked_for_or_inflated() -> None:
    async with named_server('{"0": {}, "1": {}}') as bomb:
        bomb.is_compressed = True
        asker = Asker(None)
        assert await asker.ask([bomb.url]) == []
        assert "it is compressed: gzip" in str(asker.complaint)
        assert "accept-encoding: identity\r\n" in bomb.last_head.lower()
        await asker.close()


async def test_sglang_names_its_ranks_in_its_own_description() -> None:
    async with named_server('{"dp_size": 2}') as two, named_server('{"dp_size": 2000}') as many:
        two.lacks = many.lacks = "/kv_event_sources"
        asker = Asker(None)
        found = await asker.ask([two.url, many.url])
        assert found == [FoundServer(two.url, 0), FoundServer(two.url, 1)]
        assert asker.complaint is not None and "ranks that cannot be" in asker.complaint
        await asker.close()


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "hangs",
        "drips",
        "<html>",
        "7",
        '["x"]',
        f"{[*range(2000)]}",
        '{"-1": 0}',
        "[" * 10**5,
        " " * 10**6,
    ],
)
async def test_one_that_gives_no_answer_is_told_and_keeps_none_from_being_found(
    answer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(asking, "MOST_BYTES", 500_000)
    async with named_server(answer) as bad, named_server() as good:
        asker = Asker(None)
        assert await asker.ask([bad.url, good.url]) == [FoundServer(good.url)]
        assert asker.complaint is not None
        assert asker.complaint.startswith(f"{bad.url} cannot be joined yet: ")
        bad.answer = "{}"
        assert await asker.ask([bad.url, good.url]) == [FoundServer(bad.url), FoundServer(good.url)]
        monkeypatch.setattr(asking, "AGAIN_SECONDS", 0.0)
        bad.answer = answer
        assert await asker.ask([bad.url]) == [FoundServer(bad.url)], "what it said before holds"
        assert asker.complaint is None
        await asker.close()


async def test_a_server_that_has_answered_is_asked_again_later_and_may_have_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    async with named_server() as server:
        asker = Asker(None)
        for second in (0.0, 2.0, 28.0, 31.0):
            now = second
            await asker.ask([server.url])
        assert server.num_asked == 2
        server.answer, now = '{"0": {}, "1": {}}', 62.0
        assert await asker.ask([server.url]) == [FoundServer(server.url, 0), FoundServer(server.url, 1)]
        await asker.close()


async def test_a_server_that_stays_silent_is_asked_more_and_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    asked_at = []
    async with named_server(None) as silent:
        asker = Asker(None)
        for second in range(0, 120, 2):
            now, before = float(second), silent.num_asked
            await asker.ask([silent.url])
            if silent.num_asked > before:
                asked_at.append(second)
        await asker.close()
    gaps = [then - last for last, then in itertools.pairwise(asked_at)]
    assert gaps == sorted(gaps)
    assert gaps[0] == 2
    assert gaps[-1] == 30


async def test_without_a_key_that_can_be_read_nothing_is_asked(tmp_path: Path) -> None:
    async with named_server() as server:
        asker = Asker(str(tmp_path / "none"))
        assert await asker.ask([server.url]) == []
        assert "engine_key_file" in str(asker.complaint)
        assert server.num_asked == 0
        await asker.close()


async def test_servers_that_take_bodies_have_no_ranks() -> None:
    async with named_server('{"0": {}, "1": {}}') as server:
        asker = Asker(None, takes_bodies=True)
        assert await asker.ask([server.url]) == [FoundServer(server.url)]
        assert "GET /v1/models " in server.last_head
        await asker.close()


async def test_what_an_earlier_one_was_told_is_known() -> None:
    asker = Asker(None)
    known = [FoundServer("http://127.0.0.1:1", 0), FoundServer("http://127.0.0.1:1", 1)]
    asker.know(known)
    assert await asker.ask(["http://127.0.0.1:1"]) == known
    await asker.close()


URLS = st.sets(st.sampled_from([f"http://10.0.0.{number}:8000" for number in range(6)]))
ANSWERS = st.one_of(URLS, st.just(Failed("away")))
STEPS = st.lists(st.tuples(st.sampled_from([0.0, 1.0, 30.0, 61.0, 4000.0]), ANSWERS), max_size=12)


def told(*steps: tuple[float, set[str] | Failed], linger: float = 0.0, at_most: int = 9) -> Belief:
    belief, now = Belief(), 0.0
    for seconds, answer in steps:
        now += seconds
        belief = believed(belief, answer, now, linger_seconds=linger, at_most=at_most)
    return belief


@given(STEPS, st.sampled_from([0.0, 5.0, 30.0]), st.integers(1, 6))
def test_what_is_believed_was_named_and_not_too_long_ago(
    steps: list[tuple[float, set[str] | Failed]], linger: float, at_most: int
) -> None:
    belief, now = Belief(), 0.0
    named: dict[str, float] = {}
    for seconds, answer in steps:
        now += seconds
        before, belief = belief, believed(belief, answer, now, linger_seconds=linger, at_most=at_most)
        assert len(belief.named_at) <= at_most
        kept = list(belief.named_at)
        assert [url for url in before.named_at if url in kept] == kept[: len(before.named_at.keys() & kept)]
        if isinstance(answer, Failed):
            assert kept == [url for url in before.named_at if now - before.named_at[url] <= STALE_SECONDS]
        elif not answer:
            assert kept == [url for url in before.named_at if now - before.named_at[url] <= EMPTY_SECONDS]
        else:
            named |= dict.fromkeys(answer, now)
            assert all(now - named[url] <= linger for url in kept)
            assert answer <= belief.named_at.keys() or len(kept) == at_most
            assert before.named_at.keys() & answer <= belief.named_at.keys()
        assert all(url in named for url in kept)


def test_no_single_bad_answer_takes_a_server_away() -> None:
    a, b = "http://a:1", "http://b:1"
    for bad in (set(), Failed("away")):
        belief = told((0, {a, b}), (30, bad))
        assert set(belief.named_at) == {a, b}
        assert belief.complaint is not None
        assert "the 2 known before stay" in belief.complaint
        assert told((0, {a, b}), (30, bad), (1, {a, b})).complaint is None
    assert told((0, {a}), (EMPTY_SECONDS + 1, set())).named_at == {}
    assert told((0, {a}), (STALE_SECONDS + 1, Failed("away"))) == Belief({}, "away; none is known")


def test_a_server_that_an_answer_leaves_out_goes_at_once_or_lingers() -> None:
    a, b = "http://a:1", "http://b:1"
    assert list(told((0, {a, b}), (1, {b})).named_at) == [b]
    assert list(told((0, {a, b}), (1, {b}), linger=5).named_at) == [a, b]
    assert list(told((0, {a, b}), (6, {b}), linger=5).named_at) == [b]


def test_beyond_the_bound_known_ones_stay_and_it_is_said() -> None:
    belief = told((0, {"http://b:1"}), (1, {"http://a:1", "http://b:1", "http://c:1"}), at_most=2)
    assert list(belief.named_at) == ["http://b:1", "http://a:1"]
    assert belief.complaint == "3 servers are named, and at most 2 are taken"
