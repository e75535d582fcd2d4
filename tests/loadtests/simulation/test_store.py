"""Host memory, disks and pulls in virtual time: what they bring, what they cost, and that nothing is lost."""

import dataclasses
import random

import pytest

from loadtests.reports.report import RequestRecord
from loadtests.simulation.fleet import VirtualFleet
from loadtests.simulation.options import FleetOptions, Kill
from loadtests.simulation.request import prepare
from loadtests.simulation.shape import TierShape
from loadtests.workloads import Workload
from replicas.kvstore.directory import ChunkPlace
from replicas.protocol.events import Tier
from tests.loadtests.simulation.builders import new_fleet, random_workload, request, serve, small_shape

TOKEN_BYTES = 1000
FAST = TierShape(
    TOKEN_BYTES,
    host_bytes=2000 * 16 * TOKEN_BYTES,
    chunk_tokens=32,
    host_bytes_per_second=1e9,
    disk_bytes_per_second=1e9,
)
WITH_DISK = dataclasses.replace(FAST, host_bytes=160 * 16 * TOKEN_BYTES, disk_bytes=5000 * 16 * TOKEN_BYTES)
WITH_PULLS = dataclasses.replace(FAST, pull_bytes_per_second=1e9)


def served(
    workload: Workload, tiers: TierShape | None, *, num_replicas: int = 1, **options: object
) -> tuple[VirtualFleet, list[RequestRecord]]:
    shape = small_shape(tiers=tiers)
    fleet = new_fleet(FleetOptions(shape, num_replicas=num_replicas, **options))  # type: ignore[arg-type]
    return fleet, fleet.serve(prepare(workload)).records


def num_hits(records: list[RequestRecord]) -> int:
    return sum(record.num_cached_tokens or 0 for record in records)


@pytest.mark.parametrize(
    "tiers", [FAST, WITH_DISK, dataclasses.replace(WITH_DISK, pull_bytes_per_second=1e9)]
)
@pytest.mark.parametrize("seed", range(3))
def test_after_a_storm_nothing_is_moving_pinned_or_lost(tiers: TierShape, seed: int) -> None:
    workload = random_workload(seed, num_requests=150, qps=20.0)
    fleet, records = served(
        workload, tiers, num_replicas=3, kills=(Kill(1, 2.0, 1.0), Kill(2, 4.0, 1.0, keeps_disk=False))
    )
    assert all(record.error is None for record in records)
    for host in fleet.hosts:
        assert host.replica is not None and host.replica.store is not None
        replica, directory = host.replica, host.replica.store.directory
        assert replica.num_requests == 0 and replica.pool.num_used == 0
        while replica.moves_end_at is not None:
            host.observe(replica.end_moves(replica.moves_end_at))
        for chunk in [*directory._hot, *directory._cold]:
            assert directory.place(chunk.name.key) is ChunkPlace.HOST
            directory.pin([chunk.name.key])
            directory.unpin([chunk.name.key])
        assert directory.num_in_host <= directory.num_host_slots
        assert directory.num_on_disk <= directory.max_disk_chunks
        assert not any(chunk.num_readers for chunk in directory._chunks.values())
        residency = host._residency
        assert residency is not None
        assert residency.num_resident(Tier.HOST) == directory.num_in_host
        assert residency.num_resident(Tier.DISK) == directory.num_on_disk


def repeated(num_prompts: int, num_rounds: int) -> Workload:
    """Prompts of 20 blocks that share nothing, each in every round, one after the other."""
    requests = [
        request(
            10.0 * (round_number * num_prompts + prompt),
            [1000 * prompt + block for block in range(20)],
            block_tokens=16,
            output=1,
        )
        for round_number in range(num_rounds)
        for prompt in range(num_prompts)
    ]
    return Workload("repeated", 16, tuple(requests))


@pytest.mark.parametrize("tiers", [FAST, WITH_DISK])
def test_what_the_device_has_forgotten_is_read_back(tiers: TierShape) -> None:
    workload = repeated(num_prompts=10, num_rounds=3)
    assert num_hits(served(workload, None)[1]) == 0
    # The last token of each prompt is computed, and with it the rest of its block.
    _, records = served(workload, tiers)
    assert {record.num_cached_tokens for record in records[10:]} == {19 * 16}
    assert {record.predicted_tokens for record in records[10:]} == {19 * 16}


def test_a_load_takes_its_time_and_less_than_computing() -> None:
    workload = repeated(num_prompts=10, num_rounds=2)
    slow = dataclasses.replace(FAST, host_bytes_per_second=2e6)
    computed = served(workload, None)[1][-1].ttft_seconds
    fast, slower = (served(workload, tiers)[1][-1].ttft_seconds for tiers in (FAST, slow))
    assert computed is not None and fast is not None and slower is not None
    # 304 tokens of 1,000 bytes at 2 MB/s are 152 ms; to compute, they take 304 ms and more.
    assert slower - fast == pytest.approx(0.152, abs=0.01)
    assert slower < computed


def test_what_is_slower_than_computing_is_not_used() -> None:
    workload = repeated(num_prompts=10, num_rounds=2)
    useless = dataclasses.replace(FAST, host_bytes_per_second=1e5)
    without, with_tiers = (served(workload, tiers)[1] for tiers in (None, useless))
    assert num_hits(with_tiers) == 0
    assert [each.ttft_seconds for each in with_tiers] == [each.ttft_seconds for each in without]


def test_a_replica_that_comes_back_on_its_disk_hits_at_once_and_a_new_one_does_not() -> None:
    workload = repeated(num_prompts=10, num_rounds=2)
    for keeps_disk, num_expected in ((True, 19 * 16), (False, 0)):
        _, records = served(workload, WITH_DISK, kills=(Kill(0, 95.0, 1.0, keeps_disk=keeps_disk),))
        hits = [record.num_cached_tokens for record in records[10:14]]
        assert hits == [num_expected] * 4


def test_a_new_replica_pulls_what_its_peer_has() -> None:
    """The first request sees one replica with everything and a long queue, the other with nothing."""
    rounds = repeated(num_prompts=1, num_rounds=1).requests
    burst = [dataclasses.replace(rounds[0], arrival_seconds=50.0, num_output_tokens=40) for _ in range(40)]
    workload = Workload("burst", 16, (*rounds, *burst))
    _, records = served(workload, WITH_PULLS, num_replicas=2)
    assert len({record.replica for record in records[1:]}) == 2
    assert {record.num_cached_tokens for record in records[1:]} == {19 * 16}


def test_a_fleet_without_tiers_is_what_it_was() -> None:
    """Golden figures of one seed, from before there were tiers."""
    result = serve(random_workload(7), FleetOptions(small_shape(), num_replicas=3))
    assert num_hits(result.records) == GOLDEN_HITS
    ends = [record.arrival_seconds + (record.e2e_seconds or 0.0) for record in result.records]
    assert max(ends) == pytest.approx(GOLDEN_SECONDS)


GOLDEN_HITS, GOLDEN_SECONDS = 49_072, 50.19417662532167


def shared_by_users(seed: int, num_requests: int = 120) -> Workload:
    """One at a time. Prompts begin with chunks of two blocks that others may have begun with, too, and end
    with two blocks of their own.
    """
    rng = random.Random(seed)
    known: list[tuple[int, ...]] = [()]
    requests = []
    for number in range(num_requests):
        head = rng.choice(known)
        if len(head) < 16:
            head += tuple(1000 * number + block for block in range(2 * rng.randint(0, 3)))
            known.append(head)
        blocks = (*head, 1000 * number + 900, 1000 * number + 901)
        user = f"user-{rng.randrange(4)}"
        requests.append(request(10.0 * number, blocks, block_tokens=16, user=user))
    return Workload("shared", 16, tuple(requests))


def cross_user_tokens(workload: Workload, records: list[RequestRecord]) -> list[int]:
    """By hand: of what each has hit, the blocks that another user's request has computed last."""
    writers: dict[int, str | None] = {}
    tokens = []
    for trace, record in zip(workload.requests, records, strict=True):
        num_hit = (record.num_cached_tokens or 0) // 16
        tokens.append(16 * sum(writers[block] != trace.user for block in trace.prefix_ids[:num_hit]))
        writers.update(dict.fromkeys(trace.prefix_ids[num_hit:], trace.user))
    return tokens


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("tiers", "kills"), [(FAST, ()), (WITH_DISK, ()), (WITH_DISK, (Kill(0, 605.0, 1.0),))]
)
def test_whose_hits_they_were_is_still_known_of_what_the_device_has_forgotten(
    tiers: TierShape, kills: tuple[Kill, ...], seed: int
) -> None:
    workload = shared_by_users(seed)
    fleet, records = served(workload, tiers, kills=kills)
    assert num_hits(records) > num_hits(served(workload, None)[1])
    assert [record.num_cross_user_tokens for record in records] == cross_user_tokens(workload, records)
    assert sum(record.num_cross_user_tokens or 0 for record in records) > 0
    (host,) = fleet.hosts
    assert host.replica is not None and host.replica.store is not None
    store = host.replica.store
    assert store._writers.keys() == store.directory._chunks.keys()


def test_what_is_pulled_is_still_whose_it_was() -> None:
    alone = repeated(num_prompts=1, num_rounds=1).requests[0]
    others = [dataclasses.replace(alone, arrival_seconds=50.0, num_output_tokens=40, user="bob")] * 40
    workload = Workload("burst", 16, (alone, *others))
    _, records = served(workload, WITH_PULLS, num_replicas=2)
    assert len({record.replica for record in records[1:]}) == 2
    assert [record.num_cross_user_tokens for record in records] == [0] + 40 * [19 * 16]
