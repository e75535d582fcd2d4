"""What the page is told of its fleet: what is wrong with replicas that are not connected, from a real
registry and real sockets, and what they hold."""

import json
import logging
import random
from dataclasses import replace
from typing import Any, cast

import pytest

from replicas.protocol.keys import IndexChange
from replicas.protocol.status import Epoch, ModelCard, ReplicaId, Role, TokenizerBundle
from router.features.live_page.fleet_source import NOT_CONNECTED, FleetSource
from router.features.live_page.live_view import MAX_COMPLAINT, LiveReplica, replicas_data
from router.fleet.registry_source import RegistrySource
from router.routing.cost import CostParameters
from router.routing.table import RoutingTable
from tests.own_log import own_records
from tests.router.quiet_fleet import replica_view
from tests.router.routing.chains import chain
from tests.router.scripted_replica import CARD, ScriptedReplica, eventually
from tests.router.watched_fleet import POLL_SECONDS, Registry, Start, World, registry, start, watching, world

__all__ = ["registry", "start", "world"]


def view_of(world: World) -> LiveReplica | None:
    """Of the only replica."""
    views = FleetSource("me", world.membership, world.table, {}).replicas()
    return views[0] if views else None


def is_connected(world: World) -> bool:
    view = view_of(world)
    return view is not None and (view.state, view.complaint) == ("ready", None)


def complains_of(world: World, words: str) -> bool:
    view = view_of(world)
    return view is not None and view.state == NOT_CONNECTED and words in (view.complaint or "")


async def test_a_replica_that_cannot_be_reached_says_why_until_it_is_connected(
    registry: Registry, world: World, free_port: int, start: Start
) -> None:
    absent = ScriptedReplica("r0")
    absent.port = free_port
    await registry.put(absent)
    await eventually(lambda: complains_of(world, "Connection refused"))
    replica = await start("r0", port=free_port)
    await eventually(lambda: is_connected(world))
    await replica.kill()
    await eventually(lambda: complains_of(world, "Connection refused"))


@pytest.mark.parametrize(("role", "shown"), [(Role.BOTH, None), (Role.PREFILL, "prefill")])
async def test_a_role_of_its_own_comes_with_the_card(
    role: Role, shown: str | None, registry: Registry, world: World, start: Start
) -> None:
    await registry.put(await start("r0", card=replace(CARD, role=role)))
    await eventually(lambda: is_connected(world))
    view = view_of(world)
    assert view is not None
    assert json.loads(json.dumps(replicas_data([view], [])[0]))["role"] == shown


async def test_a_replica_that_became_somebody_else_says_so(
    registry: Registry, world: World, start: Start
) -> None:
    replica = await start("r0")
    await registry.put(replica)
    await eventually(lambda: is_connected(world))
    replica.script.describes_as = ("somebody-else", "e9")
    replica.script.die_after_tokens = 0
    await eventually(lambda: complains_of(world, "is replica somebody-else with epoch e9"))


async def test_a_lease_that_ran_out_is_complained_of_until_it_is_back(
    registry: Registry, world: World, start: Start
) -> None:
    replica = await start("r0")
    await registry.put(replica)
    await eventually(lambda: is_connected(world))
    await registry.end_lease(replica)
    await eventually(lambda: (view_of(world) or replica_view("x")).complaint is not None)
    assert is_connected(world) is False
    view = view_of(world)
    assert view is not None and view.state == "ready" and "its lease is gone" in (view.complaint or "")
    await registry.put(replica)
    await eventually(lambda: is_connected(world))


async def test_a_failure_of_the_router_itself_is_told_too_and_logged_once(
    redis_url: str, registry: Registry, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    num_tries = 0

    def refuse(card: ModelCard, bundle: TokenizerBundle) -> None:
        nonlocal num_tries
        num_tries += 1
        raise RuntimeError("no such tokenizer")

    await registry.put(await start("r0"))
    async with watching(RegistrySource(redis_url, POLL_SECONDS), on_model=refuse) as world:
        await eventually(lambda: num_tries >= 3)
        assert complains_of(world, "no such tokenizer")
    (record,) = own_records(caplog, logging.ERROR)
    assert record.exc_info is not None and record.getMessage() == "replica r0 cannot be connected"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (None, None),
        ("all  in\none\r\n line ", "all in one line"),
        ("x" * MAX_COMPLAINT, "x" * MAX_COMPLAINT),
        ("x" * (MAX_COMPLAINT + 1), "x" * (MAX_COMPLAINT - 1) + "…"),
    ],
)
def test_a_complaint_is_one_short_line(said: str | None, shown: str | None) -> None:
    (data,) = replicas_data([replica_view("r0", complaint=said)], [])
    assert data["complaint"] == shown


@pytest.mark.parametrize(("is_sparse", "held"), [(True, {"r0": 4, "r1": 1}), (False, {"r0": 4})])
def test_of_a_sparse_model_the_page_shows_what_is_held_and_not_what_can_be_resumed(
    is_sparse: bool, held: dict[str, int]
) -> None:
    card = ModelCard("m", "fingerprint", "simulated", 16, 1000, 10_000, 1000, is_sparse=is_sparse)
    table = RoutingTable("kvasir", CostParameters(), random.Random(1))
    hashes, epoch, nobody = chain("abcd"), Epoch("e"), cast(Any, None)
    for name, blocks, points in (("r0", hashes[1::2], hashes[:2]), ("r1", [], hashes[:1])):
        table.add_replica(ReplicaId(name), card, 32)
        index = table.index("m")
        index.replace(ReplicaId(name), epoch, ())
        points = points if is_sparse else []
        index.apply(IndexChange(ReplicaId(name), epoch, 1, added=tuple(blocks), points=tuple(points)))
    source = FleetSource("me", nobody, table, {})
    assert source.overlaps("m", hashes) == held
    assert source.overlaps("other", hashes) == {}
