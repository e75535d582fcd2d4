"""The controller's own life, without replicas. With them: test_fleet.py."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import FleetSpec
from cluster.controller import actors
from cluster.controller import fleet_controller as controller
from cluster.controller.fleet_controller import FleetController
from cluster.controller.views import FleetView
from cluster.engines import finders
from replicas.process.logs import JsonFormatter
from tests.cluster.engines.named_servers import named_server
from tests.cluster.finding import finding

SPEC = FleetSpec(())


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray without machines, without replicas."""
    monkeypatch.setattr(actors, "find", dict)
    monkeypatch.setattr(actors, "machines", list)
    monkeypatch.setattr(actors, "leaving_machines", frozenset)
    for name in ("NODES_SECONDS", "ENDPOINT_SECONDS", "ROOM_SECONDS"):
        monkeypatch.setattr(controller, name, 0.01)


@asynccontextmanager
async def running(spec: FleetSpec) -> AsyncIterator[FleetController]:
    fleet = FleetController(spec)
    life = asyncio.create_task(fleet.run())
    yield fleet
    assert not life.done(), "it has ended by itself"
    await fleet.stop_fleet()
    await life


async def seen(fleet: FleetController, condition: Callable[[FleetView], bool]) -> FleetView:
    view = await fleet.view()
    async with asyncio.timeout(30):
        while not condition(view):
            view = await fleet.view(view.version)
    return view


async def test_every_look_survives_whatever_it_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: FleetController) -> str | None:
        raise LookupError("no")

    looks = {"machines": "_count_nodes", "room": "_look_for_room", "leases": "_look_at_leases"}
    looks |= {"leaving machines": "_clear_leaving"}
    for name in looks.values():
        monkeypatch.setattr(FleetController, name, fail)
    monkeypatch.setattr(actors, "recall", lambda: None)
    monkeypatch.setattr(actors, "forget", lambda: None)
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    fleet = FleetController(SPEC, runs_itself=True)
    view = await seen(fleet, lambda view: len(view.complaints) == len(looks))
    assert sorted(view.complaints) == [f"the look at {what} failed: no" for what in sorted(looks)]
    await fleet.stop_fleet()
    assert ended == []


async def test_a_controller_that_runs_by_itself_and_fails_ends_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise LookupError("no")

    monkeypatch.setattr(actors, "recall", lambda: None)
    monkeypatch.setattr(actors, "find", fail)
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr("os._exit", ended.set_result)
    fleet = FleetController(SPEC, runs_itself=True)
    assert await asyncio.wait_for(ended, 30) == 1
    assert fleet is not None, "it lived until then"


async def test_what_the_plan_meets_ends_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise LookupError("no")

    monkeypatch.setattr(controller, "plan", fail)
    with pytest.raises(ExceptionGroup) as caught:
        await FleetController(SPEC).run()
    assert caught.group_contains(LookupError)


async def test_what_is_applied_holds_for_the_controller_that_runs(free_port: int) -> None:
    async with running(SPEC) as fleet:
        assert (await fleet.view()).metrics_address is None
        assert await fleet.apply(replace(SPEC, metrics_port=free_port, log_format="json")) is None
        assert (await fleet.view()).metrics_address == f"127.0.0.1:{free_port}"
        (handler,) = logging.root.handlers
        assert isinstance(handler.formatter, JsonFormatter)
        assert await fleet.apply(SPEC) is None
        assert (await fleet.view()).metrics_address is None


async def test_a_pool_that_finds_servers_wants_a_replica_for_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def launch(*_: object) -> None:
        raise ValueError("there is no Ray")

    monkeypatch.setattr(actors, "launch", launch)
    monkeypatch.setattr(actors, "remove", lambda *_: None)
    monkeypatch.setattr(actors, "waiting_for_room", frozenset)
    monkeypatch.setattr(finders, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(finders.FileFinder, "linger_seconds", 0.0)
    file = tmp_path / "servers"
    async with named_server() as a, named_server() as b, running(SPEC) as fleet:
        assert await fleet.apply(FleetSpec((finding("p", file=str(file)),)), is_checked=True) is None
        view = await seen(fleet, lambda view: view.complaints != ())
        assert "cannot be read" in view.complaints[0]
        assert [(pool.num_replicas, pool.is_settled) for pool in view.pools] == [(0, False)]
        file.write_text(f"{a.url}\n{b.url}\n")
        view = await seen(fleet, lambda view: len(view.replicas) == 2)
        ids = sorted(f"p_at_{each.url.removeprefix('http://').replace(':', '-')}-0" for each in (a, b))
        assert [replica.replica_id for replica in view.replicas] == ids
        assert [pool.num_replicas for pool in view.pools] == [2]
        file.write_text(a.url)
        view = await seen(fleet, lambda view: len(view.replicas) == 1)
        assert [pool.num_replicas for pool in view.pools] == [1]
        assert view.complaints == ()
