import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config import FoundServer, PoolSpec
from cluster.engines import asking, finders
from cluster.engines.watch import ServerWatch
from replicas.config import ReplicaConfig
from tests.cluster.engines.named_servers import named_server
from tests.cluster.finding import finding


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finders, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(asking, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(finders.FileFinder, "linger_seconds", 0.0)


class Told:
    def __init__(self) -> None:
        self.found: list[tuple[str, list[str]]] = []
        self.complaints: dict[str, str | None] = {}
        self.fails = False

    async def on_found(self, pool: str, servers: Sequence[FoundServer]) -> None:
        if self.fails:
            self.fails = False
            raise LookupError("no")
        self.found.append((pool, [server.url for server in servers]))

    async def complain(self, what: str, complaint: str | None) -> None:
        self.complaints[what] = complaint

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.fixture
async def told() -> Told:
    return Told()


@pytest.fixture
async def watching(told: Told) -> AsyncIterator[ServerWatch]:
    watching = ServerWatch(told.on_found, told.complain)
    yield watching
    await watching.close()


def pool(name: str, file: Path) -> PoolSpec:
    return finding(name, file=str(file))


async def test_servers_come_and_go_with_the_file(watching: ServerWatch, told: Told, tmp_path: Path) -> None:
    file = tmp_path / "servers"
    async with named_server() as a, named_server() as b:
        watching.follow([pool("p", file), PoolSpec(1, "plain")], {})
        await told.until(lambda: "cannot be read" in str(told.complaints.get("servers of pool p")))
        assert told.found == []
        file.write_text(a.url)
        await told.until(lambda: told.found == [("p", [a.url])])
        file.write_text(f"{a.url}\n{b.url}\n")
        await told.until(lambda: told.found[1:] == [("p", [a.url, b.url])])
        file.write_text("")
        await told.until(lambda: "the 2 known before stay" in str(told.complaints["servers of pool p"]))
        file.write_text(b.url)
        await told.until(lambda: told.found[2:] == [("p", [b.url])])
        await told.until(lambda: told.complaints["servers of pool p"] is None)
        asked = b.num_asked
        await told.until(lambda: b.num_asked > asked + 3)
        assert len(told.found) == 3, "what does not change is not told again"


async def test_one_that_is_silent_holds_up_no_others(
    watching: ServerWatch, told: Told, tmp_path: Path
) -> None:
    file = tmp_path / "servers"
    async with named_server() as a, named_server(None) as silent:
        file.write_text(f"{a.url}\n{silent.url}\n")
        watching.follow([pool("p", file)], {})
        await told.until(lambda: told.found == [("p", [a.url])])
        await told.until(
            lambda: f"{silent.url} cannot be joined" in str(told.complaints["servers of pool p"])
        )


async def test_a_failure_of_whatever_kind_is_followed_by_the_next_look(
    watching: ServerWatch, told: Told, tmp_path: Path
) -> None:
    file = tmp_path / "servers"
    told.fails = True
    async with named_server() as a:
        file.write_text(a.url)
        watching.follow([pool("p", file)], {})
        await told.until(lambda: told.found == [("p", [a.url])])


async def test_pools_that_go_or_look_elsewhere_are_no_longer_looked_for(
    watching: ServerWatch, told: Told, tmp_path: Path
) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    async with named_server() as a, named_server() as b:
        first.write_text(a.url)
        second.write_text(b.url)
        watching.follow([pool("p", first)], {})
        await told.until(lambda: told.found == [("p", [a.url])])
        watching.follow([pool("p", second)], {"p": (FoundServer(a.url),)})
        await told.until(lambda: told.found[1:] == [("p", [b.url])])
        bodies = replace(pool("p", second), replica=ReplicaConfig(engine="openai", engine_url=b.url))
        watching.follow([bodies], {"p": (FoundServer(b.url),)})
        await told.until(lambda: "GET /v1/models " in b.last_head)
        watching.follow([], {})
        asked = b.num_asked
        await asyncio.sleep(0.1)
        assert b.num_asked <= asked + 1


async def test_what_is_known_stays_while_a_source_fails_from_the_start(
    watching: ServerWatch, told: Told, tmp_path: Path
) -> None:
    known = (FoundServer("http://127.0.0.1:1"),)
    watching.follow([pool("p", tmp_path / "none")], {"p": known})
    await told.until(lambda: "the 1 known before stay" in str(told.complaints.get("servers of pool p")))
    assert told.found == []
