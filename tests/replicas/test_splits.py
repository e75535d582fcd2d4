"""Prompts computed at one replica and decoded at another, by binding pulls: torch engines, over real gRPC.

Both engines are in this process, where tests look inside and hold the prefiller's steps.
"""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from replicas.config import ReplicaConfig
from replicas.engine_process.build import build_engine
from replicas.host import ReplicaHost
from replicas.protocol.frames import PromptUsage, StepFrame, Submit
from replicas.protocol.pulls import PullPart
from replicas.protocol.status import SplitWay
from replicas.torch_engine.engine import TorchEngine
from tests.replicas.between import Between, Way, dies, freezes
from tests.replicas.router_client import RouterClient
from tests.replicas.splitting import (
    CHUNK,
    Answer,
    Side,
    Tally,
    compare,
    first_part,
    greedy,
    is_at_rest,
    new_root,
    new_split,
    prompt_of,
    random_request,
    second_part,
)
from tests.replicas.test_peer_pull import TIERS
from tests.replicas.waiting import until
from tests.replicas.whole_replica import config

NUM_CHUNKS = 9
NUM_TOKENS = NUM_CHUNKS * CHUNK + 40


class TorchSide(Side):
    """Its engine makes steps while it `may_step`, and keeps count of prompt tokens."""

    def __init__(self, host: ReplicaHost, client: RouterClient, engine: TorchEngine) -> None:
        super().__init__(host, client)
        self.engine = engine
        self.may_step = threading.Event()
        self.may_step.set()
        self.stops_after: int | None = None
        """Chunks in host memory."""
        self.num_prefill_tokens = 0
        self._step = engine.step
        engine.step = self.step  # type: ignore[method-assign]

    @property
    def num_chunks(self) -> int:
        assert self.engine.store is not None
        return self.engine.store.directory.num_in_host

    def step(self) -> StepFrame:
        self.may_step.wait(60)
        frame = self._step()
        self.num_prefill_tokens += frame.num_prefill_tokens
        if self.stops_after is not None and self.num_chunks >= self.stops_after:
            self.may_step.clear()
        return frame

    def goes_on(self) -> None:
        self.stops_after = None
        self.may_step.set()

    def rests(self) -> bool:
        scheduler, store = self.engine._scheduler, self.engine.store
        assert store is not None and scheduler._lower_tiers is not None and self.host._parts is not None
        return (
            not (scheduler._requests or scheduler._lower_tiers._progress or scheduler._loading)
            and scheduler._manager.pool.num_used == 0
            and is_at_rest(store)
            and not (self.has_open_splits or self.host._parts.server.num_requests)
            and self.host._parts.server._pull_service.is_idle
        )


Two = tuple[TorchSide, TorchSide]
"""The prefiller, and the decoder."""


@asynccontextmanager
async def torch_side(redis_url: str, number: int, **settings: Any) -> AsyncIterator[TorchSide]:
    built: list[Any] = []

    def build(config: ReplicaConfig) -> Any:
        built.append(build_engine(config))
        return built[0]

    own = {"replica_id": f"r{number}", "pull_bytes_per_second": 1e9, "max_batched_tokens": CHUNK}
    host = ReplicaHost(
        config(redis_url, **{**TIERS, "engine_process": False, **own, **settings}), build=build
    )
    await host.start()
    try:
        async with grpc.aio.insecure_channel(host.address) as channel:
            side = TorchSide(host, RouterClient(channel), built[0][0])
            yield side
            side.goes_on()
    finally:
        await host.stop()


@asynccontextmanager
async def two_sides(redis_url: str, **settings: Any) -> AsyncIterator[Two]:
    """Both are at rest in the end, whatever happened."""
    async with AsyncExitStack() as stack:
        there = await stack.enter_async_context(torch_side(redis_url, 0))
        here = await stack.enter_async_context(torch_side(redis_url, 1, **settings))
        yield there, here
        there.goes_on()
        here.goes_on()
        await until(lambda: there.rests() and here.rests())


async def undivided(here: Side, asked: Submit) -> list[Answer]:
    ((answers, _),) = await here.ask(replace(asked, root=new_root(), pull=None))
    return answers


async def outcome(here: Side, sent: Submit) -> tuple[list[Answer], PromptUsage]:
    (found,) = await here.answers(sent)
    return found


def failures(side: Side) -> dict[str, float]:
    reasons = ("missing", "late", "busy", "refused", "unreachable", "damaged", "io_error")
    found = {
        each: side.metric("replica_tier_failed_moves_total", way="pull", reason=each) for each in reasons
    }
    return {reason: number for reason, number in found.items() if number}


@pytest.mark.parametrize(
    "number", [40, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
async def test_a_split_answers_as_the_undivided_request(redis_url: str, number: int) -> None:
    rng = random.Random(number)
    tally = Tally()
    async with two_sides(redis_url) as (there, here):
        while tally.num < number:
            once = rng.choice((1, 1, 1, 5))
            await compare(there, here, rng, once, lambda: random_request(rng, 1200), tally)
        assert tally.num_to_the_bit and tally.num_pulled_tokens


async def test_the_decoder_computes_the_rest_alone_and_others_pass(redis_url: str) -> None:
    async with two_sides(redis_url) as (there, here):
        for each in (there, here):
            assert each.host._parts is not None
            assert each.host._parts.card.splits_by is SplitWay.PULL
        asked, split = greedy(prompt_of(random.Random(1), NUM_TOKENS)), new_split()
        there.stops_after = 4
        sent = await here.send(second_part(asked, there, split))
        await there.send(first_part(asked, split))
        await until(lambda: here.num_chunks == NUM_CHUNKS and there.num_chunks >= 4)
        await until(lambda: there.metric("replica_waiting_pulls") == 1)
        assert there.metric("replica_open_splits") == 1
        assert here.engine._scheduler._manager.pool.num_used == 0, "it waits without blocks"
        await here.ask(greedy(prompt_of(random.Random(2), 300)))
        here.num_prefill_tokens = 0
        there.goes_on()
        answers, usage = await outcome(here, sent)
        assert here.num_prefill_tokens == NUM_TOKENS - NUM_CHUNKS * CHUNK
        assert usage.num_pulled_tokens == usage.num_cached_tokens == NUM_CHUNKS * CHUNK
        assert answers == await undivided(here, asked)
        assert failures(here) == {}


async def test_waiting_is_not_the_links_speed(redis_url: str) -> None:
    async with two_sides(redis_url) as (there, here):
        store = here.engine.store
        assert store is not None and store._pulls is not None
        for number in range(4):
            asked, split = greedy(prompt_of(random.Random(number), NUM_TOKENS)), new_split()
            there.stops_after = there.num_chunks + 4
            sent = await here.send(second_part(asked, there, split))
            await there.send(first_part(asked, split))
            await until(lambda: there.metric("replica_waiting_pulls") == 1)
            await asyncio.sleep(0.5)
            there.goes_on()
            await outcome(here, sent)
        assert 4 * NUM_CHUNKS * CHUNK * store._pulls.seconds_per_token < 1.0, "it has waited for two seconds"


async def test_what_a_hint_without_time_or_split_says_is_weighed(redis_url: str) -> None:
    async with two_sides(redis_url) as (there, here):
        asked = greedy(prompt_of(random.Random(3), 150))
        for fields in ({"wait_seconds": 0.0}, {"split_id": 0}):
            with Between(there, sends_slowly) as between:
                hint = between.hint(CHUNK, **{"wait_seconds": 50.0, "split_id": new_split(), **fields})
                _, usage = await outcome(here, await here.send(replace(asked, pull=hint)))
                assert usage.num_pulled_tokens == 0
                assert not any(each.split_id for each in between.requests)
            asked = replace(asked, root=new_root())


async def refused(there: TorchSide, here: TorchSide, asked: Submit, split: int) -> None:
    """It takes no request with so many choices."""
    sent = await there.send(replace(first_part(asked, split), num_choices=1000))
    await there.client.finish((sent.submit_id, 0))


async def refused_by_the_engine(there: TorchSide, here: TorchSide, asked: Submit, split: int) -> None:
    sent = await there.send(replace(first_part(asked, split), adapter="none"))
    await there.client.finish((sent.submit_id, 0))


async def never_submitted(there: TorchSide, here: TorchSide, asked: Submit, split: int) -> None:
    pass


async def aborted(there: TorchSide, here: TorchSide, asked: Submit, split: int) -> None:
    there.stops_after = 4
    sent = await there.send(first_part(asked, split))
    await until(lambda: not there.may_step.is_set() and there.metric("replica_waiting_pulls") == 1)
    await there.abort(sent)
    await until(lambda: not there.metric("replica_open_splits"))
    there.goes_on()


async def without_its_router(there: TorchSide, here: TorchSide, asked: Submit, split: int) -> None:
    there.stops_after = 4
    await there.send(first_part(asked, split))
    await until(lambda: not there.may_step.is_set() and there.metric("replica_waiting_pulls") == 1)
    there.client.call.cancel()
    await until(lambda: not there.metric("replica_open_splits"))
    there.goes_on()


@pytest.mark.parametrize(
    ("ends", "num_came"),
    [(refused, 0), (refused_by_the_engine, 0), (never_submitted, 0), (aborted, 4), (without_its_router, 4)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
async def test_the_decoder_need_not_wait_for_a_split_that_has_ended(
    redis_url: str, ends: Any, num_came: int
) -> None:
    async with two_sides(redis_url) as (there, here):
        asked, split = greedy(prompt_of(random.Random(4), NUM_TOKENS)), new_split()
        sent = await here.send(second_part(asked, there, split))
        await ends(there, here, asked, split)
        answers, usage = await outcome(here, sent)
        assert num_came * CHUNK <= usage.num_pulled_tokens < NUM_CHUNKS * CHUNK
        assert usage.num_lost_tokens == NUM_CHUNKS * CHUNK - usage.num_pulled_tokens
        assert answers[0].tokens == (await undivided(here, asked))[0].tokens
        assert failures(here) == {"missing": 1}, "its time was not over"


def never_sends(between: Between, parts: Iterator[PullPart]) -> Iterator[PullPart]:
    between.may_go_on.wait(60)
    yield from ()


def lies(between: Between, parts: Iterator[PullPart]) -> Iterator[PullPart]:
    """It sends another chunk under the name of the fourth."""
    whole = {}
    for part in parts:
        whole[part.index] = part
        if part.index == 3:
            yield PullPart(3, whole[0].content)
        else:
            yield part


def sends_slowly(between: Between, parts: Iterator[PullPart]) -> Iterator[PullPart]:
    for part in parts:
        time.sleep(0.03)
        yield part


def claims_to_have_waited(between: Between, parts: Iterator[PullPart]) -> Iterator[PullPart]:
    for part in parts:
        yield replace(part, has_waited=True)


@pytest.mark.parametrize(
    ("way", "wait_seconds", "num_came", "reasons"),
    [
        (never_sends, 1.0, 0, {"late": 1}),
        (freezes, 2.0, 3, {"late": 1}),
        (dies, 50.0, 3, {"refused": 1}),
        (lies, 50.0, 3, {"damaged": 1}),
        (sends_slowly, 50.0, NUM_CHUNKS, {}),
        (claims_to_have_waited, 50.0, NUM_CHUNKS, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_prefiller_that_fails_costs_time_only(
    redis_url: str, way: Way, wait_seconds: float, num_came: int, reasons: dict[str, int]
) -> None:
    async with two_sides(redis_url) as (there, here):
        asked, split = greedy(prompt_of(random.Random(5), NUM_TOKENS)), new_split()
        with Between(there, way) as between:
            hinted = second_part(asked, there, split)
            hint = between.hint(NUM_CHUNKS * CHUNK, split_id=split, wait_seconds=wait_seconds)
            sent = await here.send(replace(hinted, pull=hint))
            await there.ask(first_part(asked, split))
            answers, usage = await outcome(here, sent)
            assert usage.num_pulled_tokens == num_came * CHUNK
            assert usage.num_lost_tokens == (NUM_CHUNKS - num_came) * CHUNK
            assert answers[0].tokens == (await undivided(here, asked))[0].tokens
            await until(lambda: failures(here) == reasons)


async def waiting(there: TorchSide, here: TorchSide, started: Callable[[], bool]) -> None:
    there.stops_after = 4
    await until(lambda: there.metric("replica_waiting_pulls") == 1 and not there.may_step.is_set())
    assert not started()


async def loading(there: TorchSide, here: TorchSide, started: Callable[[], bool]) -> None:
    await until(lambda: bool(here.engine._scheduler._loading))


async def running(there: TorchSide, here: TorchSide, started: Callable[[], bool]) -> None:
    await until(started)


@dataclass
class SlowCopy:
    may_end: bool = False

    def is_done(self) -> bool:
        return self.may_end


@pytest.mark.parametrize("state", [waiting, loading, running], ids=lambda state: str(state.__name__))
@pytest.mark.parametrize("is_told", [True, False])
async def test_a_client_that_leaves_leaves_nothing(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, state: Any, is_told: bool
) -> None:
    """By aborts, or with its router, whose streams end. The prefiller's part is still being computed."""
    async with two_sides(redis_url) as (there, here):
        scheduler = here.engine._scheduler
        copy = SlowCopy()
        if state is loading:
            tiers = scheduler._lower_tiers
            assert tiers is not None
            copy_in = tiers._copier.copy_in

            def copies(*arguments: Any) -> SlowCopy:
                copy_in(*arguments)
                return copy

            monkeypatch.setattr(tiers._copier, "copy_in", copies)
        if state is waiting:
            there.stops_after = 4
        asked, split = greedy(prompt_of(random.Random(6), NUM_TOKENS), max_tokens=90), new_split()
        sent = await here.send(second_part(asked, there, split))
        first = await there.send(first_part(asked, split))
        await state(there, here, lambda: bool(scheduler._running))
        if is_told:
            await here.abort(sent)
            await until(lambda: not scheduler._requests)
            if state is waiting:
                await until(
                    lambda: is_at_rest(here.engine.store) and not there.metric("replica_waiting_pulls")
                )  # type: ignore[arg-type]
            await there.abort(first)
        else:
            here.client.call.cancel()
            there.client.call.cancel()
        copy.may_end = True
        there.goes_on()
        await until(lambda: there.rests() and here.rests())


async def test_binding_pulls_wait_for_room_in_host_memory(redis_url: str) -> None:
    """The decoder's host memory has room for six chunks of splits at once, the prompts have nine."""
    async with two_sides(redis_url, host_kv_bytes=16 * TIERS["host_kv_bytes"] // 40) as (there, here):
        requests = [greedy(prompt_of(random.Random(n), NUM_TOKENS)) for n in range(3)]
        splits = [new_split() for _ in requests]
        there.may_step.clear()
        sent = [
            await here.send(second_part(asked, there, split))
            for asked, split in zip(requests, splits, strict=True)
        ]
        for asked, split in zip(requests, splits, strict=True):
            await there.send(first_part(asked, split))
        store = here.engine.store
        assert store is not None and store._pulls is not None
        pulls = store._pulls
        await until(lambda: [len(each.wanted) for each in pulls._bindings.values()] == [3, 9, 9])
        assert pulls._num_slots == 6
        there.goes_on()
        found = await here.answers(*sent)
        for asked, (answers, usage) in zip(requests, found, strict=True):
            assert answers[0].tokens == (await undivided(here, asked))[0].tokens
            assert usage.num_pulled_tokens == 9 * CHUNK
        assert failures(here) == {}


async def test_a_drain_waits_for_the_pulls_of_its_splits(redis_url: str) -> None:
    async with two_sides(redis_url) as (there, here):
        asked, split = greedy(prompt_of(random.Random(8), NUM_TOKENS)), new_split()
        there.stops_after = 4
        first = await there.send(first_part(asked, split))
        sent = await here.send(second_part(asked, there, split))
        await until(lambda: there.metric("replica_waiting_pulls") == 1)
        draining = asyncio.create_task(there.host.drain())
        await there.client.say_that_it_knows()
        there.goes_on()
        _, usage = await outcome(here, sent)
        assert usage.num_pulled_tokens == NUM_CHUNKS * CHUNK
        await there.answers(first)
        await draining
