"""One generation through dispatch: real gRPC, a real routing table, replicas that die on cue."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.frames import FinishReason, RefusalCode, SamplingParams, TokenDelta, UserTag
from replicas.protocol.status import Adapter, ReplicaId
from router.dispatch import Dispatcher, RetryPolicy, Run
from router.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    InvalidRequest,
    NoReplicaAvailable,
    Overloaded,
)
from router.generation import Generation
from router.replica_client import ReplicaClient
from router.routing.cost import CostParameters
from router.routing.table import RoutingTable
from tests.router.scripted_replica import CARD, ScriptedReplica, eventually, token_at

ROOT = BlockHash(bytes(16))
PROMPT = list(range(100))
GENERATION = Generation(
    model="toy",
    token_ids=PROMPT,
    root=ROOT,
    block_hashes=hash_blocks(ROOT, PROMPT, CARD.block_size),
    bucket=b"bucket",
    sampling=SamplingParams(max_tokens=20, seed=7),
)


class Fleet:
    """Scripted replicas, their clients, a table and a dispatcher, wired as membership wires them."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.tasks = tasks
        self.table = RoutingTable("kvasir", CostParameters(), random.Random(0))
        self.replicas: dict[ReplicaId, ScriptedReplica] = {}
        self.clients: dict[ReplicaId, ReplicaClient] = {}
        self.serving: list[asyncio.Task[None]] = []
        self.dispatcher = Dispatcher(
            self.table,
            self.clients.get,
            rng=random.Random(0),
            retry=RetryPolicy(max_waits=3, first_wait_seconds=0.01),
        )

    async def add(self, replica_id: str, *adapters: Adapter) -> ScriptedReplica:
        replica = ScriptedReplica(replica_id, card=replace(CARD, adapters=adapters))
        await replica.start()
        self.replicas[replica.replica_id] = replica
        self.connect(replica)
        return replica

    def connect(self, replica: ScriptedReplica) -> None:
        client = ReplicaClient(
            replica.replica_id,
            replica.address,
            self.table.update_load,
            on_lost=lambda client: self.table.remove_replica(client.replica_id),
            stall_seconds=0.5,
        )
        self.clients[replica.replica_id] = client
        self.table.add_replica(replica.replica_id, replica.card, CARD.block_size)
        self.serving.append(self.tasks.create_task(client.serve()))

    def serving_replica(self) -> ScriptedReplica:
        return next(replica for replica in self.replicas.values() if replica.num_live)

    def assert_nothing_reserved(self) -> None:
        assert self.table.loads.num_reserved == 0
        assert self.table.num_predictions == 0
        assert self.dispatcher.statistics().num_running == 0
        assert all(client.num_inflight == 0 for client in self.clients.values())

    async def close(self) -> None:
        for client in self.clients.values():
            await client.close()
        for replica in self.replicas.values():
            await replica.kill()


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with asyncio.TaskGroup() as tasks:
        fleet = Fleet(tasks)
        yield fleet
        fleet.assert_nothing_reserved()
        await fleet.close()


def tokens_of(deltas: list[TokenDelta], choice: int = 0) -> list[int]:
    return [token for delta in deltas if delta.key.choice == choice for token in delta.token_ids]


def expected_tokens(choice: int = 0, num_tokens: int = 20) -> list[int]:
    return [token_at(7 + choice, n) for n in range(num_tokens)]


async def generate(
    fleet: Fleet,
    generation: Generation = GENERATION,
    *,
    after_first: Callable[[Run], Awaitable[None]] | None = None,
) -> list[TokenDelta]:
    """Run to the end. `after_first` is awaited once, after the first batch."""
    deltas: list[TokenDelta] = []
    async with fleet.dispatcher.run(generation) as run:
        async for batch in run:
            if not deltas and after_first is not None:
                await after_first(run)
            deltas += batch
    return deltas


def assert_complete(deltas: list[TokenDelta], num_choices: int) -> None:
    """Every choice has exactly its own tokens, one usage at its start, one end."""
    for choice in range(num_choices):
        own = [delta for delta in deltas if delta.key.choice == choice]
        assert tokens_of(own, choice) == expected_tokens(choice)
        assert [delta.finish_reason is not None for delta in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].finish_reason is FinishReason.LENGTH
        assert [delta.usage is not None for delta in own] == [True] + [False] * (len(own) - 1)


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_generation_yields_every_token_of_every_choice_once(fleet: Fleet, num_choices: int) -> None:
    await fleet.add("r0")
    deltas = await generate(fleet, replace(GENERATION, num_choices=num_choices))
    assert_complete(deltas, num_choices)
    assert fleet.replicas[ReplicaId("r0")].submits[0].token_ids == PROMPT


async def test_a_run_says_who_serves_it(fleet: Fleet) -> None:
    await fleet.add("r0")
    async with fleet.dispatcher.run(GENERATION) as run:
        assert (run.replica_id, run.decision.replica_id, run.num_attempts) == ("r0", "r0", 1)
        assert fleet.dispatcher.statistics().num_running == 1


async def test_the_prefill_reservation_ends_with_the_first_token(fleet: Fleet) -> None:
    replica = await fleet.add("r0")
    replica.script.holding = True
    async with fleet.dispatcher.run(GENERATION) as run:
        await eventually(lambda: replica.num_live == 1)
        assert fleet.table.num_predictions == 1
        replica.script.holding = False
        await anext(run)
        assert fleet.table.num_predictions == 0
        assert fleet.table.loads.num_reserved == 1


async def test_the_reservation_is_given_back_with_the_last_token(fleet: Fleet) -> None:
    await fleet.add("r0")
    async with fleet.dispatcher.run(GENERATION) as run:
        async for _ in run:
            pass
        assert fleet.table.loads.num_reserved == 0


async def test_leaving_a_run_stops_it_on_the_replica(fleet: Fleet) -> None:
    replica = await fleet.add("r0")
    replica.script.step_seconds = 0.005
    async with fleet.dispatcher.run(long_generation()) as run:
        await anext(run)
    fleet.assert_nothing_reserved()
    await eventually(lambda: replica.num_live == 0)
    assert replica.num_aborts == 1


def long_generation(num_choices: int = 1) -> Generation:
    sampling = replace(GENERATION.sampling, max_tokens=100_000)
    return replace(GENERATION, sampling=sampling, num_choices=num_choices)


async def test_an_aborted_choice_ends_and_the_others_go_on(fleet: Fleet) -> None:
    replica = await fleet.add("r0")
    replica.script.step_seconds = 0.002
    deltas: list[TokenDelta] = []
    async with fleet.dispatcher.run(replace(GENERATION, num_choices=3)) as run:
        async for batch in run:
            deltas += batch
            if len(tokens_of(deltas, 1)) >= 3:
                run.abort_choice(1)
                run.abort_choice(1)
    assert tokens_of(deltas, 0) == expected_tokens(0)
    assert tokens_of(deltas, 2) == expected_tokens(2)
    assert len(tokens_of(deltas, 1)) < 20
    assert replica.num_aborts == 1


async def test_what_had_come_for_a_choice_before_it_was_aborted_is_not_handed_out(fleet: Fleet) -> None:
    replica = await fleet.add("r0")
    replica.script.step_seconds = 0.002
    async with fleet.dispatcher.run(long_generation(num_choices=2)) as run:
        await anext(run)
        await eventually(lambda: replica.num_tokens_sent > 20)
        run.abort_choice(1)
        deltas = list(await anext(run))
    assert len(tokens_of(deltas, 0)) > 1
    assert tokens_of(deltas, 1) == []


async def test_a_run_ends_when_its_last_choice_is_aborted(fleet: Fleet) -> None:
    replica = await fleet.add("r0")
    replica.script.step_seconds = 0.002
    async with fleet.dispatcher.run(long_generation(num_choices=2)) as run:
        await anext(run)
        run.abort_choice(0)
        run.abort_choice(1)
        with pytest.raises(StopAsyncIteration):
            await anext(run)
        assert fleet.table.loads.num_reserved == 0
    await eventually(lambda: replica.num_live == 0)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_cancelled_run_gives_everything_back(fleet: Fleet, stage: str) -> None:
    replica = await fleet.add("r0")
    replica.script.step_seconds = 0.005
    replica.script.holding = stage == "prefill"
    task = asyncio.create_task(generate(fleet, long_generation(num_choices=2)))
    await eventually(lambda: replica.num_live == 2 and (stage == "prefill" or replica.num_tokens_sent > 6))
    assert fleet.table.loads.num_reserved == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    fleet.assert_nothing_reserved()
    await eventually(lambda: replica.num_live == 0)


async def test_a_run_cancelled_while_it_waits_for_a_replica_gives_everything_back(fleet: Fleet) -> None:
    replica = await fleet.add("r0")
    fleet.dispatcher.retry = RetryPolicy(first_wait_seconds=60)
    fleet.table.set_draining(replica.replica_id)
    task = asyncio.create_task(generate(fleet))
    await eventually(lambda: fleet.dispatcher.statistics().num_running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    fleet.assert_nothing_reserved()


async def test_a_run_cancelled_while_it_waits_for_a_place_to_resume_gives_everything_back(
    fleet: Fleet,
) -> None:
    replica = await fleet.add("r0")
    replica.script.step_seconds = 0.005
    fleet.dispatcher.retry = RetryPolicy(first_wait_seconds=60)
    task = asyncio.create_task(generate(fleet, long_generation()))
    await eventually(lambda: replica.num_tokens_sent > 2)
    await replica.kill()
    await eventually(lambda: fleet.dispatcher.statistics().num_lost == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    fleet.assert_nothing_reserved()


@pytest.mark.parametrize("death", ["kill", "silence"])
async def test_a_replica_lost_before_the_first_token_is_invisible(fleet: Fleet, death: str) -> None:
    for name in ("r0", "r1"):
        (await fleet.add(name)).script.holding = True
    task = asyncio.create_task(generate(fleet, replace(GENERATION, num_choices=2)))
    await eventually(lambda: any(replica.num_live for replica in fleet.replicas.values()))
    dying = fleet.serving_replica()
    for replica in fleet.replicas.values():
        replica.script.holding = False
    dying.script.silent = True
    if death == "kill":
        await dying.kill()
    assert_complete(await task, num_choices=2)
    other = next(replica for replica in fleet.replicas.values() if replica is not dying)
    assert [(submit.num_choices, submit.num_output_tokens) for submit in other.submits] == [(2, 0)]
    statistics = fleet.dispatcher.statistics()
    assert (statistics.num_retries, statistics.num_resumes, statistics.num_lost) == (1, 0, 1)


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("death", ["stream", "kill"])
async def test_a_replica_lost_in_mid_stream_is_resumed_elsewhere(
    fleet: Fleet, death: str, num_choices: int
) -> None:
    for name in ("r0", "r1"):
        (await fleet.add(name)).script.step_seconds = 0.003

    async def die(run: Run) -> None:
        dying = fleet.replicas[run.replica_id]
        if death == "kill":
            await dying.kill()
        else:
            dying.script.die_after_tokens = dying.num_tokens_sent + 3 * num_choices + 1

    deltas = await generate(fleet, replace(GENERATION, num_choices=num_choices), after_first=die)
    assert_complete(deltas, num_choices)
    statistics = fleet.dispatcher.statistics()
    assert (statistics.num_retries, statistics.num_resumes, statistics.num_lost) == (0, num_choices, 1)


ADAPTER = Adapter("sql", "f1")
ADAPTED = replace(GENERATION, adapter=ADAPTER, user=UserTag(b"somebody"))


async def test_adapter_and_user_are_the_same_wherever_a_generation_is_tried_or_resumed(fleet: Fleet) -> None:
    unable = [await fleet.add("r0"), await fleet.add("r1", Adapter("sql", "f0"))]
    able = [await fleet.add(name, ADAPTER) for name in ("r2", "r3", "r4")]
    for replica in able:
        replica.script.step_seconds = 0.003
    able[0].script.refusal = RefusalCode.OVERLOADED

    async def die(run: Run) -> None:
        await fleet.replicas[run.replica_id].kill()

    assert_complete(await generate(fleet, ADAPTED, after_first=die), num_choices=1)
    submits = [submit for replica in able for submit in replica.submits]
    assert {(submit.adapter, submit.user) for submit in submits} == {("sql", b"somebody")}
    assert any(submit.num_output_tokens for submit in submits)
    assert [replica.submits for replica in unable] == [[], []]


async def test_without_adapter_and_user_none_are_sent(fleet: Fleet) -> None:
    replica = await fleet.add("r0", ADAPTER)
    await generate(fleet)
    assert [(submit.adapter, submit.user) for submit in replica.submits] == [(None, b"")]


async def test_an_adapter_that_no_replica_has_ready_is_named_in_the_refusal(fleet: Fleet) -> None:
    for name, adapter in (("r0", Adapter("sql", "f0")), ("r1", Adapter("other", "f1"))):
        await fleet.add(name, adapter)
    with pytest.raises(NoReplicaAvailable, match="sql"):
        await generate(fleet, ADAPTED)


async def test_every_attempt_announces_what_is_missing_of_the_prompt_under_an_id_of_its_own(
    fleet: Fleet,
) -> None:
    replicas = [await fleet.add(f"r{number}") for number in range(2)]
    for replica in replicas:
        replica.script.step_seconds = 0.002

    async def kill(run: Run) -> None:
        await fleet.serving_replica().kill()

    deltas = await generate(fleet, after_first=kill)
    assert tokens_of(deltas) == expected_tokens()
    first, resumed = (replica.submits[0] for replica in replicas)
    assert max(first.num_output_tokens, resumed.num_output_tokens) > 0
    assert first.announced_hashes == resumed.announced_hashes == tuple(GENERATION.block_hashes)
    assert first.announcement_id != resumed.announcement_id


async def test_finished_choices_are_not_resumed(fleet: Fleet) -> None:
    for name in ("r0", "r1"):
        (await fleet.add(name)).script.step_seconds = 0.003
    deltas: list[TokenDelta] = []
    async with fleet.dispatcher.run(replace(GENERATION, num_choices=2)) as run:
        async for batch in run:
            deltas += batch
            if run.num_attempts == 1 and len(tokens_of(deltas, 0)) == 5:
                run.abort_choice(0)
                await fleet.replicas[run.replica_id].kill()
        resumed_on = fleet.replicas[run.replica_id]
    assert len(resumed_on.submits) == 1
    assert resumed_on.submits[0].sampling.seed == 8
    assert tokens_of(deltas, 1) == expected_tokens(1)


async def test_a_generation_survives_several_losses(fleet: Fleet) -> None:
    for name in ("r0", "r1", "r2"):
        (await fleet.add(name)).script.step_seconds = 0.003
    deltas: list[TokenDelta] = []
    async with fleet.dispatcher.run(GENERATION) as run:
        async for batch in run:
            deltas += batch
            if len(deltas) >= 5 * run.num_attempts and run.num_attempts < 3:
                await fleet.replicas[run.replica_id].kill()
        assert run.num_attempts == 3
    assert_complete(deltas, 1)


async def test_when_every_replica_is_dead_the_client_is_told_within_bounds(fleet: Fleet) -> None:
    for name in ("r0", "r1"):
        await (await fleet.add(name)).kill()
    with pytest.raises(NoReplicaAvailable):
        await generate(fleet)


async def test_when_no_replica_is_left_to_resume_on_the_generation_has_failed(fleet: Fleet) -> None:
    for name in ("r0", "r1"):
        (await fleet.add(name)).script.step_seconds = 0.003

    async def kill_all(run: Run) -> None:
        for replica in fleet.replicas.values():
            await replica.kill()

    with pytest.raises(GenerationFailed):
        await generate(fleet, after_first=kill_all)


async def test_a_request_that_kills_replicas_is_not_tried_on_all_of_them(fleet: Fleet) -> None:
    for n in range(6):
        (await fleet.add(f"r{n}")).script.die_after_tokens = 0
    for replica in fleet.replicas.values():
        await eventually(lambda replica=replica: replica.num_streams == 0)  # type: ignore[misc]
    fleet.serving.clear()
    for replica in fleet.replicas.values():
        replica.script.die_after_tokens = None
        replica.script.refusal = RefusalCode.INTERNAL
        fleet.connect(replica)
    with pytest.raises(GenerationFailed):
        await generate(fleet)
    assert sum(len(replica.submits) for replica in fleet.replicas.values()) == 4


@pytest.mark.parametrize("code", [RefusalCode.DRAINING, RefusalCode.OVERLOADED])
async def test_a_replica_that_refuses_is_passed_over(fleet: Fleet, code: RefusalCode) -> None:
    for name in ("r0", "r1"):
        (await fleet.add(name)).script.holding = True
    async with fleet.dispatcher.run(GENERATION) as run:
        home = fleet.replicas[run.replica_id]
    home.script.refusal = code
    for replica in fleet.replicas.values():
        replica.script.holding = False
    deltas = await generate(fleet, replace(GENERATION, num_choices=2))
    assert_complete(deltas, 2)
    assert fleet.dispatcher.statistics().num_lost == 0


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (RefusalCode.DRAINING, NoReplicaAvailable),
        (RefusalCode.OVERLOADED, Overloaded),
        (RefusalCode.CONTEXT_LENGTH_EXCEEDED, ContextLengthExceeded),
        (RefusalCode.INVALID_REQUEST, InvalidRequest),
    ],
)
async def test_a_refusal_by_all_is_the_matching_error(
    fleet: Fleet, code: RefusalCode, error: type[Exception]
) -> None:
    (await fleet.add("r0")).script.refusal = code
    with pytest.raises(error):
        await generate(fleet, replace(GENERATION, num_choices=2))


async def test_a_replica_without_an_open_client_is_passed_over(fleet: Fleet) -> None:
    for name in ("r0", "r1"):
        await fleet.add(name)
    async with fleet.dispatcher.run(GENERATION) as run:
        home = run.replica_id
    client = fleet.clients.pop(home)
    async with fleet.dispatcher.run(GENERATION) as run:
        assert run.replica_id != home
        assert run.num_attempts == 1
    await client.close()


async def test_an_invalid_request_is_not_tried_elsewhere(fleet: Fleet) -> None:
    for name in ("r0", "r1"):
        (await fleet.add(name)).script.refusal = RefusalCode.INVALID_REQUEST
    with pytest.raises(InvalidRequest, match="refused: invalid_request"):
        await generate(fleet)
    assert sum(len(replica.submits) for replica in fleet.replicas.values()) == 1


async def test_a_request_waits_a_little_for_a_model_whose_first_replica_is_just_joining(fleet: Fleet) -> None:
    fleet.dispatcher.retry = RetryPolicy(first_wait_seconds=0.02)
    task = asyncio.create_task(generate(fleet))
    await eventually(lambda: fleet.dispatcher.statistics().num_running == 1)
    await fleet.add("r0")
    assert_complete(await task, 1)


async def test_a_request_waits_a_little_for_a_replica_that_is_just_reconnecting(fleet: Fleet) -> None:
    replica = await fleet.add("r0")
    await fleet.clients[replica.replica_id].close()
    fleet.dispatcher.retry = RetryPolicy(first_wait_seconds=0.02)
    task = asyncio.create_task(generate(fleet))
    await eventually(lambda: fleet.dispatcher.statistics().num_running == 1)
    fleet.connect(replica)
    assert_complete(await task, 1)


@pytest.mark.timeout(60)
async def test_after_a_storm_of_losses_and_cancellations_every_counter_is_zero(fleet: Fleet) -> None:
    rng = random.Random(4)
    fleet.dispatcher.retry = RetryPolicy(max_attempts=10, first_wait_seconds=0.05)
    for n in range(3):
        (await fleet.add(f"r{n}")).script.step_seconds = 0.002
    answers: list[tuple[int, list[TokenDelta]]] = []

    async def one_request(seed: int) -> None:
        num_choices = seed % 3 + 1
        generation = replace(GENERATION, num_choices=num_choices, bucket=str(seed).encode())
        await asyncio.sleep(seed * 0.01)
        answers.append((num_choices, await generate(fleet, generation)))

    requests = [asyncio.create_task(one_request(seed)) for seed in range(150)]
    while not all(request.done() for request in requests):
        await asyncio.sleep(rng.uniform(0.0, 0.04))
        if rng.random() < 0.2:
            replica = rng.choice(list(fleet.replicas.values()))
            await replica.kill()
            await eventually(lambda: fleet.clients[replica.replica_id].lost is not None)  # noqa: B023
            await replica.start()
            fleet.connect(replica)
        else:
            rng.choice(requests).cancel()
    outcomes = await asyncio.gather(*requests, return_exceptions=True)
    failures = [
        outcome
        for outcome in outcomes
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError)
    ]
    assert failures == []
    assert len(answers) >= 20
    for num_choices, deltas in answers:
        assert_complete(deltas, num_choices)
    assert fleet.dispatcher.statistics().num_resumes > 0
    fleet.assert_nothing_reserved()
    await eventually(lambda: all(replica.num_live == 0 for replica in fleet.replicas.values()))
