"""Whose request the loop prepares next: in one pass of it, by tenant, whoever leaves meanwhile."""

import asyncio
from collections.abc import Awaitable, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from router.caller import Tenant
from router.limits import tenant_turns
from router.limits.tenant_turns import REQUEST_BYTES, TenantTurns

FLOOD, OTHER, HEAVY = Tenant(name="flood"), Tenant(name="other"), Tenant(name="heavy", weight=3.0)


class Preparations:
    """What has been prepared: by whom, and in which pass of the loop."""

    def __init__(self) -> None:
        self.turns = TenantTurns()
        self.prepared: list[tuple[str, int]] = []
        self.number = 0

    async def prepare(self, tenant: Tenant, num_bytes: int = 0) -> None:
        await self.turns.turn(tenant, num_bytes)
        self.prepared.append((tenant.name, self.number))

    async def passes(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)
            self.number += 1

    async def mixed(self) -> "Preparations":
        """After a request of each, so that several are known to ask."""
        for tenant in (FLOOD, OTHER, HEAVY):
            await self.prepare(tenant)
            await self.passes(3)
        self.prepared.clear()
        self.number = 0
        return self

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.prepared]


def start(*preparations: Awaitable[None]) -> list["asyncio.Task[None]"]:
    return [asyncio.ensure_future(each) for each in preparations]


def does_not_give_way(turns: TenantTurns, tenant: Tenant) -> bool:
    try:
        turns.turn(tenant, 0).send(None)
    except StopIteration:
        return True
    return False


async def test_a_tenant_that_is_alone_does_not_even_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = TenantTurns()
    assert all(does_not_give_way(turns, FLOOD) for _ in range(100))
    await asyncio.sleep(0)
    assert does_not_give_way(turns, OTHER)
    monkeypatch.setattr(tenant_turns, "MIXED_SECONDS", 0.0)
    await asyncio.sleep(0)
    assert all(does_not_give_way(turns, FLOOD) for _ in range(100)), "the other has not come for a while"


async def test_while_several_ask_a_pass_of_the_loop_prepares_one_request() -> None:
    seen = await Preparations().mixed()
    tasks = start(*(seen.prepare(FLOOD) for _ in range(10)))
    await seen.passes(30)
    assert [number for _, number in seen.prepared] == [0, *range(2, 11)], "who waits first gives way once"
    await asyncio.gather(*tasks)


async def test_who_comes_beside_a_flood_waits_for_a_pass_of_it_and_no_longer() -> None:
    seen = await Preparations().mixed()
    tasks = start(*(seen.prepare(FLOOD) for _ in range(100)))
    await seen.passes(3)
    before = len(seen.prepared)
    tasks += start(seen.prepare(OTHER))
    await asyncio.gather(*tasks)
    assert before < 10
    assert seen.names.index("other") <= before + 2


async def test_tenants_that_wait_get_turns_by_weight_and_size() -> None:
    seen = await Preparations().mixed()
    tasks = start(*(seen.prepare(tenant) for tenant in (FLOOD, HEAVY) for _ in range(100)))
    await asyncio.gather(*tasks)
    assert seen.names[:80].count("heavy") == pytest.approx(60, abs=3)
    sized = await Preparations().mixed()
    tasks = start(
        *(sized.prepare(FLOOD, 3 * REQUEST_BYTES) for _ in range(50)),
        *(sized.prepare(OTHER) for _ in range(100)),
    )
    await asyncio.gather(*tasks)
    assert sized.names[1:61].count("other") == pytest.approx(48, abs=4)


@given(
    asked=st.lists(
        st.tuples(st.sampled_from([FLOOD, OTHER, HEAVY]), st.integers(0, 5 * REQUEST_BYTES)), max_size=40
    ),
    leaving=st.sets(st.integers(0, 39)),
    wait=st.integers(0, 6),
)
async def test_everyone_who_stays_gets_a_turn_and_nothing_is_kept(
    asked: Sequence[tuple[Tenant, int]], leaving: set[int], wait: int
) -> None:
    seen = await Preparations().mixed()
    tasks = start(*(seen.prepare(*each) for each in asked))
    await seen.passes(wait)
    for number in leaving:
        if number < len(tasks):
            tasks[number].cancel()
    ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    stayed = [name for number, name in enumerate(ended) if number not in leaving]
    assert stayed == [None] * len(stayed)
    await seen.passes(2)
    turns = seen.turns
    assert turns.places.line.num_waiting == 0
    line = turns.places.line
    assert line.num_working == 0 and not line._owners and not line._idle
    assert does_not_give_way(turns, OTHER)
    await asyncio.sleep(0)
