"""Who is blamed for a replica's death or doubted, how long that is remembered, and what clears it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace as replace_of_doubts

import pytest
from msgspec.structs import replace

from replicas.protocol.blocks import hash_blocks
from replicas.protocol.frames import BodyForm, RefusalCode, ServerError, TokenDelta
from replicas.protocol.status import Epoch, ReplicaId
from router.dispatch.generation_run import GenerationRun
from router.dispatch.suspects import (
    MAX_FEW,
    STORM_DEATHS,
    STORM_SECONDS,
    Presence,
    PromptDigest,
    Standing,
    Suspects,
    blamed,
)
from router.errors import GenerationFailed, ServerRefused
from router.generation import Generation
from router.routing.table import REFUSALS_IN_A_ROW, UNREAD_IN_A_ROW
from tests.router.dispatched_fleet import (
    GENERATION,
    PROMPT,
    ROOT,
    DispatchedFleet,
    assert_complete,
    changed,
    generate,
    tokens_of,
)
from tests.router.scripted_replica import CARD, ScriptedReplica, eventually

KEY = b"k" * 32
A, B = PromptDigest(b"a"), PromptDigest(b"b")


def here(num_tokens_out: int = 0, num_uncached_tokens: int = 100, *, on_trial: bool = False) -> Presence:
    return Presence(num_uncached_tokens, num_tokens_out, on_trial)


def blame(suspects: Suspects, digests: Sequence[PromptDigest], now: float, *, heard: bool = True) -> None:
    suspects.blame([(digest, heard) for digest in digests], now)


def test_who_was_new_is_blamed_and_who_ran_is_not() -> None:
    assert blamed([here(50), here(0), here(3), here(4)], 0) == [1, 2]


def test_who_was_on_trial_is_blamed_alone() -> None:
    assert blamed([here(0), here(0, on_trial=True), here(1)], 0) == [1]


def test_who_had_survived_its_trial_is_not_blamed_for_having_been_on_one() -> None:
    assert blamed([here(0), here(9, on_trial=True)], 0) == [0]


def test_who_cannot_have_been_in_the_last_steps_is_not_blamed() -> None:
    waiting = [here(num_uncached_tokens=100) for _ in range(1000)]
    assert blamed(waiting, 256) == list(range(6))
    assert blamed([here(2), *waiting], 256) == list(range(7))
    assert blamed([here(num_uncached_tokens=100_000), *waiting], 256) == [0]


def test_where_nobody_was_new_a_few_are_blamed_and_many_are_not() -> None:
    assert blamed([here(50)] * MAX_FEW, 0) == list(range(MAX_FEW))
    assert blamed([here(50)] * (MAX_FEW + 1), 0) == []
    assert blamed([], 0) == []


def test_two_deaths_condemn_and_one_does_not() -> None:
    suspects = Suspects(KEY)
    blame(suspects, [A, A], 0.0)
    assert suspects.standing(A, 1.0) is Standing.SUSPECT
    blame(suspects, [A], 1.0)
    assert suspects.standing(A, 2.0) is Standing.CONDEMNED
    assert suspects.standing(B, 2.0) is Standing.CLEAR


def test_deaths_before_the_replica_had_the_prompt_count_half() -> None:
    suspects = Suspects(KEY)
    for now in (0.0, 1.0, 2.0):
        blame(suspects, [A], now, heard=False)
        assert suspects.standing(A, now) is Standing.SUSPECT
    blame(suspects, [A], 3.0, heard=False)
    assert suspects.standing(A, 3.0) is Standing.CONDEMNED


def test_of_copies_in_flight_the_one_that_the_replica_had_counts() -> None:
    suspects = Suspects(KEY)
    for now in (0.0, 1.0):
        suspects.blame([(A, True), (A, False)], now)
    assert suspects.standing(A, 1.0) is Standing.CONDEMNED


def test_surviving_clears() -> None:
    suspects = Suspects(KEY)
    blame(suspects, [A], 0.0)
    suspects.survived(A)
    blame(suspects, [A], 1.0)
    assert suspects.standing(A, 1.0) is Standing.SUSPECT


def test_all_is_forgotten_after_a_while() -> None:
    suspects = Suspects(KEY, seconds=10.0)
    blame(suspects, [A], 0.0)
    blame(suspects, [A], 5.0)
    assert suspects.remaining_seconds(A, 6.0) == 9.0
    assert suspects.standing(A, 15.0) is Standing.CLEAR
    assert not suspects.has_any


def test_in_a_storm_of_other_deaths_it_takes_three() -> None:
    suspects = Suspects(KEY)
    for _ in range(STORM_DEATHS):
        suspects.blame([], 0.0)
    blame(suspects, [A], 1.0)
    blame(suspects, [A], 2.0)
    assert suspects.standing(A, 2.0) is Standing.SUSPECT
    blame(suspects, [A], 3.0)
    assert suspects.standing(A, 3.0) is Standing.CONDEMNED


def test_deaths_that_a_prompt_explains_are_no_storm_and_old_ones_are_none_either() -> None:
    suspects = Suspects(KEY)
    for _ in range(STORM_DEATHS):
        suspects.blame([], 0.0)
    now = STORM_SECONDS + 1.0
    for number in range(20):
        digest = PromptDigest(bytes([number]))
        blame(suspects, [digest], now)
        blame(suspects, [digest], now)
        assert suspects.standing(digest, now) is Standing.CONDEMNED


def test_memory_is_bounded() -> None:
    suspects = Suspects(KEY, max_remembered=10)
    blame(suspects, [PromptDigest(bytes([number])) for number in range(50)], 0.0)
    assert suspects.num_remembered == 10


def test_digests_depend_on_tokens_model_owner_and_key_alone() -> None:
    digest = Suspects(KEY).digest("m", [1, 2, 3])
    assert Suspects(KEY).digest("m", (1, 2, 3)) == digest
    others = {
        Suspects(b"x" * 32).digest("m", [1, 2, 3]),
        Suspects(KEY).digest("n", [1, 2, 3]),
        Suspects(KEY).digest("m", [1, 2, 4]),
        Suspects(KEY).digest("m", [1, 2, 3], "tenant:acme"),
        Suspects(KEY).digest("m", [1, 2, 3], "tenant:beta"),
    }
    assert len(others | {digest}) == 6


DEADLY = 49_999
"""A replica that computes this token dies."""

DEADLY_GENERATION = changed(GENERATION, token_ids=[*PROMPT, DEADLY], bucket=b"deadly")


@pytest.fixture
async def mortals(fleet: DispatchedFleet) -> AsyncIterator[DispatchedFleet]:
    for number in range(6):
        replica = await fleet.add(f"r{number}")
        replica.script.deadly_token = DEADLY
        replica.script.step_seconds = 0.005
    yield fleet


def num_killed(fleet: DispatchedFleet) -> int:
    return sum(replica.was_killed for replica in fleet.replicas.values())


async def test_a_prompt_that_kills_is_tried_once_more_and_then_refused(mortals: DispatchedFleet) -> None:
    with pytest.raises(GenerationFailed, match="Replicas have died"):
        await generate(mortals, DEADLY_GENERATION)
    assert num_killed(mortals) == 2
    assert mortals.dispatcher.suspects.num_condemned == 1


@pytest.mark.parametrize("num_choices", [1, 4])
async def test_it_is_remembered_however_it_is_asked_again(mortals: DispatchedFleet, num_choices: int) -> None:
    for seed in range(4):
        sampling = replace(GENERATION.sampling, seed=seed, temperature=seed / 10)
        again = changed(DEADLY_GENERATION, sampling=sampling, num_choices=num_choices, bucket=bytes([seed]))
        with pytest.raises(GenerationFailed):
            await generate(mortals, again)
    assert num_killed(mortals) == 2


async def test_a_client_that_leaves_after_a_death_and_comes_back_kills_no_third_replica(
    mortals: DispatchedFleet,
) -> None:
    leaving = asyncio.create_task(generate(mortals, DEADLY_GENERATION))
    await eventually(lambda: mortals.dispatcher.suspects.has_any)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    for _ in range(3):
        with pytest.raises(GenerationFailed):
            await generate(mortals, DEADLY_GENERATION)
    assert num_killed(mortals) <= 2


async def test_copies_of_a_deadly_prompt_at_one_replica_kill_one_more_between_them(
    fleet: DispatchedFleet,
) -> None:
    first = await fleet.add("r0")
    first.script.holding = True
    tasks = [asyncio.create_task(generate(fleet, DEADLY_GENERATION)) for _ in range(50)]
    await eventually(lambda: first.num_live == 50)
    for number in range(1, 5):
        await fleet.add(f"r{number}")
    for replica in fleet.replicas.values():
        replica.script.deadly_token = DEADLY
    first.script.holding = False
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {GenerationFailed}
    assert num_killed(fleet) == 2


async def test_others_in_flight_with_a_deadly_prompt_are_all_answered(mortals: DispatchedFleet) -> None:
    answers = [asyncio.create_task(generate(mortals, innocent(n))) for n in range(100)]
    await eventually(lambda: sum(replica.num_live for replica in mortals.replicas.values()) > 50)
    with pytest.raises(GenerationFailed):
        await generate(mortals, DEADLY_GENERATION)
    late = [asyncio.create_task(generate(mortals, innocent(n))) for n in range(100, 120)]
    for deltas in await asyncio.gather(*answers, *late):
        assert_complete(deltas, 1)
    assert num_killed(mortals) == 2
    with pytest.raises(GenerationFailed):
        await generate(mortals, DEADLY_GENERATION)


def innocent(number: int) -> Generation:
    return changed(GENERATION, token_ids=[*PROMPT, number], bucket=str(number).encode())


@pytest.mark.parametrize("is_computed", [True, False], ids=["running", "not begun"])
async def test_a_replica_lost_with_a_thousand_requests_costs_none_of_them(
    fleet: DispatchedFleet, is_computed: bool
) -> None:
    dying = await fleet.add("r0")
    dying.script.holding = True
    answers = [asyncio.create_task(generate(fleet, innocent(n))) for n in range(1000)]
    await eventually(lambda: dying.num_live == 1000)
    for number in (1, 2):
        await fleet.add(f"r{number}")
    if is_computed:
        dying.script.holding = False
        dying.script.step_seconds = 0.05
        await eventually(lambda: dying.num_tokens_sent >= 5000)
    await dying.kill()
    for deltas in await asyncio.gather(*answers):
        assert_complete(deltas, 1)
    suspects = fleet.dispatcher.suspects
    assert (suspects.num_remembered, suspects.num_on_trial, suspects.num_condemned) == (0, 0, 0)


async def test_of_a_thousand_requests_the_one_that_kills_is_found(mortals: DispatchedFleet) -> None:
    for replica in mortals.replicas.values():
        replica.script.holding = True
    tasks = [asyncio.create_task(generate(mortals, innocent(n))) for n in range(1000)]
    await eventually(lambda: sum(replica.num_live for replica in mortals.replicas.values()) == 1000)
    deadly = asyncio.create_task(generate(mortals, DEADLY_GENERATION))
    await eventually(lambda: num_live(mortals) == 1001)
    for replica in mortals.replicas.values():
        replica.script.holding = False
        replica.script.step_seconds = 0.001
    for deltas in await asyncio.gather(*tasks):
        assert_complete(deltas, 1)
    with pytest.raises(GenerationFailed):
        await deadly
    assert num_killed(mortals) == 2


def num_live(fleet: DispatchedFleet) -> int:
    return sum(replica.num_live for replica in fleet.replicas.values())


async def test_an_engine_that_says_that_it_failed_counts_as_a_death(fleet: DispatchedFleet) -> None:
    for number in range(4):
        replica = await fleet.add(f"r{number}")
        replica.script.refusal = RefusalCode.ENGINE_FAILED
    with pytest.raises(GenerationFailed, match="Replicas have died"):
        await generate(fleet)
    assert sum(len(replica.submits) for replica in fleet.replicas.values()) == 2


async def test_a_stream_that_is_resumed_and_kills_again_at_the_same_token_is_refused(
    mortals: DispatchedFleet,
) -> None:
    for replica in mortals.replicas.values():
        replica.script.dies_at_position = 10
    with pytest.raises(GenerationFailed):
        await generate(mortals)
    assert num_killed(mortals) == 2


async def test_a_suspect_that_survives_is_suspected_no_more(fleet: DispatchedFleet) -> None:
    for number in range(3):
        (await fleet.add(f"r{number}")).script.step_seconds = 0.01

    async def kill(run: GenerationRun) -> None:
        await fleet.replicas[run.replica_id].kill()

    deltas: list[TokenDelta] = await generate(fleet, after_first=kill)
    assert_complete(deltas, 1)
    assert tokens_of(deltas)
    suspects = fleet.dispatcher.suspects
    assert (suspects.num_remembered, suspects.num_on_trial, suspects.num_condemned) == (0, 0, 0)


async def test_a_replica_that_was_told_to_leave_and_did_not_wait_blames_nobody(
    fleet: DispatchedFleet,
) -> None:
    leaving, staying = await fleet.add("r0"), await fleet.add("r1")
    for replica in (leaving, staying):
        replica.script.holding = True
    task = asyncio.create_task(generate(fleet))
    await eventually(lambda: num_live(fleet) == 1)
    serving = fleet.serving_replica()
    fleet.clients[serving.replica_id].is_draining = True
    await serving.kill()
    other: ScriptedReplica = staying if serving is leaving else leaving
    other.script.holding = False
    assert_complete(await task, 1)
    assert not fleet.dispatcher.suspects.has_any


def refuse(replica: ScriptedReplica, status: int = 400) -> None:
    replica.script.refusal = RefusalCode.INVALID_REQUEST
    replica.script.server_error = ServerError(status)


async def home_and_others(fleet: DispatchedFleet, number: int = 2) -> list[ScriptedReplica]:
    for each in range(number):
        await fleet.add(f"r{each}")
    home = fleet.dispatcher.preview(GENERATION).decision.replica_id
    return sorted(fleet.replicas.values(), key=lambda replica: replica.replica_id != home)


def num_submits(*replicas: ScriptedReplica) -> list[int]:
    return [len(replica.submits) for replica in replicas]


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_what_one_server_refuses_and_we_have_checked_is_tried_once_elsewhere(
    fleet: DispatchedFleet, num_choices: int
) -> None:
    home, other = await home_and_others(fleet)
    refuse(home)
    assert_complete(await generate(fleet, changed(GENERATION, num_choices=num_choices)), num_choices)
    assert num_submits(home, other) == [1, 1]


@pytest.mark.parametrize(
    ("why", "number", "most"), [("a body of a client", 3, 1), ("no other", 1, 1), ("refused by all", 3, 2)]
)
async def test_a_refusal_is_the_answer_where_another_try_says_nothing(
    fleet: DispatchedFleet, why: str, number: int, most: int
) -> None:
    replicas = await home_and_others(fleet, number)
    for replica in replicas:
        refuse(replica, 422)
    generation = GENERATION
    if why == "a body of a client":
        generation = changed(GENERATION, body=b"{}", body_form=BodyForm.CHAT)
    for _ in range(2 * REFUSALS_IN_A_ROW):
        with pytest.raises(ServerRefused, match="refused: invalid_request"):
            await generate(fleet, generation)
    assert sum(num_submits(*replicas)) == 2 * REFUSALS_IN_A_ROW * most
    assert not fleet.table.refusing.counts, "a request that none takes says nothing of any"


async def test_a_replica_that_refuses_what_others_take_is_passed_over_until_it_takes_some(
    fleet: DispatchedFleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    home, other = await home_and_others(fleet)
    refuse(home)
    for _ in range(2 * REFUSALS_IN_A_ROW):
        await generate(fleet)
    assert num_submits(home, other) == [REFUSALS_IN_A_ROW, 2 * REFUSALS_IN_A_ROW]
    assert f"replica {home.replica_id}, for 30 s: it is passed over" in caplog.text
    text = "".join(each.text() for each in fleet.table.instruments())
    assert f'router_replica_faults_total{{kind="refused"}} {REFUSALS_IN_A_ROW}' in text
    assert 'router_doubted_replicas{kind="refused"} 1' in text
    home.script.refusal = None
    fleet.table.set_draining(other.replica_id)
    assert_complete(await generate(fleet), 1)
    assert f"replica {home.replica_id} takes requests again" in caplog.text
    assert fleet.table.doubt(home.replica_id) is None


async def test_a_share_of_the_index_of_which_nothing_is_read_counts_again_once_something_is(
    fleet: DispatchedFleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    liar, other = await home_and_others(fleet)
    prompt = [each % CARD.vocab_size for each in range(2048)]
    hashes = hash_blocks(ROOT, prompt, CARD.block_size)
    long = replace_of_doubts(changed(GENERATION, token_ids=prompt), block_hashes=hashes)
    await expect(fleet, long, 0)
    fleet.table.index("toy").replace(other.replica_id, Epoch("e0"), hashes)
    fleet.table.index("toy").replace(liar.replica_id, Epoch("e0"), ())
    for _ in range(UNREAD_IN_A_ROW):
        assert await expect(fleet, long, 1024) == other.replica_id
    assert await expect(fleet, long, 0) == liar.replica_id, "the home of a prompt that nobody holds"
    assert f"replica {other.replica_id}, for 60 s: its share of the index does not count" in caplog.text
    text = "".join(each.text() for each in fleet.table.instruments())
    assert f'router_replica_faults_total{{kind="unread"}} {UNREAD_IN_A_ROW}' in text
    assert 'router_doubted_replicas{kind="unread"} 1' in text
    fleet.table.set_draining(liar.replica_id)
    other.script.num_cached = 16
    await generate(fleet, long)
    assert f"what the index has of replica {other.replica_id} counts again" in caplog.text
    await expect(fleet, long, 1024)


async def test_a_hit_between_misses_and_a_promise_that_is_only_predicted_are_no_reason_for_doubt(
    fleet: DispatchedFleet,
) -> None:
    (replica,) = await home_and_others(fleet, 1)
    prompt = [each % CARD.vocab_size for each in range(2048)]
    hashes = hash_blocks(ROOT, prompt, CARD.block_size)
    long = replace_of_doubts(changed(GENERATION, token_ids=prompt), block_hashes=hashes)
    fleet.table.index("toy").predict(7, replica.replica_id, hashes)
    for _ in range(2 * UNREAD_IN_A_ROW):
        await expect(fleet, long, 1024)
    fleet.table.index("toy").replace(ReplicaId("r0"), Epoch("e0"), hashes[:8])
    for _ in range(2 * UNREAD_IN_A_ROW):
        await expect(fleet, long, 1024)
    assert not fleet.table.unread.counts, "little of it was stored"
    fleet.table.index("toy").end_prediction(7)
    fleet.table.index("toy").replace(ReplicaId("r0"), Epoch("e0"), hashes)
    await generate(fleet, changed(long, num_choices=4))
    assert fleet.table.unread.counts == {"r0": 1}, "its choices are one prompt"
    for number in range(3 * UNREAD_IN_A_ROW):
        replica.script.num_cached = 0 if number % UNREAD_IN_A_ROW else 16
        await generate(fleet, long)
    assert fleet.table.doubt(ReplicaId("r0")) is None


async def expect(fleet: DispatchedFleet, generation: Generation, least_tokens: int) -> ReplicaId:
    async with fleet.dispatcher.run(generation) as run:
        async for _ in run:
            pass
        assert (run.decision.overlap_tokens >= least_tokens) is True
        assert least_tokens or not run.decision.overlap_tokens
        return run.replica_id
