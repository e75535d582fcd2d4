import itertools
from pathlib import Path

import pytest

from cluster.config import FoundServer
from cluster.engines import asking
from cluster.engines.asking import Asker
from tests.cluster.engines.named_servers import named_server


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
