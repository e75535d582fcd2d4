"""Replicas whose servers refuse what others take, and replicas that hold less than the index says."""

import logging
from dataclasses import replace

import pytest

from replicas.protocol.blocks import hash_blocks
from replicas.protocol.frames import BodyForm, RefusalCode, ServerError
from replicas.protocol.status import Epoch, ReplicaId
from router.errors import ServerRefused
from router.generation import Generation
from router.routing.table import REFUSALS_IN_A_ROW, UNREAD_IN_A_ROW
from tests.router.dispatched_fleet import (
    GENERATION,
    ROOT,
    DispatchedFleet,
    assert_complete,
    changed,
    fleet,
    generate,
)
from tests.router.scripted_replica import CARD, ScriptedReplica

__all__ = ["fleet"]


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
    long = replace(changed(GENERATION, token_ids=prompt), block_hashes=hashes)
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
    long = replace(changed(GENERATION, token_ids=prompt), block_hashes=hashes)
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
