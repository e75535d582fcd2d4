"""A simulated fleet: every request ends once, everything is given back, and delays mean what they say."""

import dataclasses

import pytest

from loadtests.simulation.fleet import RETRY, FleetResult, VirtualFleet
from loadtests.simulation.options import Delays, FleetOptions, Kill, Outage
from loadtests.simulation.request import prepare
from loadtests.workloads import Workload
from tests.loadtests.simulation.builders import (
    NO_DELAYS,
    new_fleet,
    plain_shape,
    random_workload,
    request,
    serve,
    small_shape,
)

POLICIES = ("kvasir", "round_robin", "random", "least_loaded", "consistent_hash")

FLEET = FleetOptions(small_shape(), num_replicas=4, num_routers=3)

ACCIDENTS = dataclasses.replace(
    FLEET,
    delays=Delays(event=0.05, load=0.1, network=0.01),
    drop_share=0.1,
    kills=(Kill(0, at=5.0, back_after=3.0), Kill(1, at=9.0), Kill(0, at=20.0, back_after=0.5)),
    outages=(Outage(6.0, 12.0),),
)


def plain_fleet(num_replicas: int = 2, *, num_routers: int = 1, delays: Delays = NO_DELAYS) -> FleetOptions:
    shape = plain_shape(num_blocks=50)
    return FleetOptions(
        shape, num_replicas=num_replicas, num_routers=num_routers, delays=delays, index_stride=10
    )


def assert_all_is_given_back(fleet: VirtualFleet) -> None:
    for router in fleet.routers:
        assert router.table.loads.num_reserved == 0
        assert router.table.num_predictions <= len(router.table._lingering)
    for host in fleet.hosts:
        if host.replica is not None:
            assert host.replica.num_requests == 0
            assert host.replica.pool.num_used == 0
            host.replica.pool.check()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", [FLEET, ACCIDENTS], ids=["quiet", "accidents"])
def test_every_request_ends_once_and_everything_is_given_back(options: FleetOptions, policy: str) -> None:
    workload = random_workload(1, num_requests=300, qps=15.0)
    fleet = new_fleet(dataclasses.replace(options, policy=policy))
    result = fleet.serve(prepare(workload))
    assert len(result.records) == len(workload.requests)
    for record, trace in zip(result.records, workload.requests, strict=True):
        assert record.arrival_seconds == trace.arrival_seconds
        assert record.error is None
        assert record.num_output_tokens == trace.num_output_tokens
        assert record.ttft_seconds is not None and record.e2e_seconds is not None
        assert 0 < record.ttft_seconds <= record.e2e_seconds
        assert record.num_cached_tokens is not None and record.num_cross_user_tokens is not None
        assert record.num_cross_user_tokens <= record.num_cached_tokens < record.num_input_tokens
    assert_all_is_given_back(fleet)


def test_every_index_ends_as_the_caches_are() -> None:
    """Whatever was delayed, missed or written anew: with the last change, all routers know all."""
    fleet = new_fleet(dataclasses.replace(ACCIDENTS, drop_share=0.0))
    fleet.serve(prepare(random_workload(2, num_requests=300, qps=15.0)))
    for router in fleet.routers:
        index = router.table.index("simulated")
        for host in fleet.hosts:
            assert index.stored(host.replica_id) == host.kept
    assert any(host.kept for host in fleet.hosts)


def test_the_same_seed_gives_the_same_run_and_another_one_does_not() -> None:
    workload = random_workload(3, num_requests=200, qps=15.0)
    first, again, other = (serve(workload, ACCIDENTS, seed) for seed in (1, 1, 2))
    assert dataclasses.asdict(first) == dataclasses.asdict(again)
    assert first.records != other.records


def test_a_second_request_finds_what_the_first_one_left_and_only_another_users_counts_as_such() -> None:
    workload = Workload(
        "shared",
        10,
        (
            request(0.0, [1, 2, 3]),
            request(10.0, [1, 2, 4], user="ann"),
            request(20.0, [1, 2, 5], user="bob"),
        ),
    )
    records = serve(workload, plain_fleet()).records
    assert [record.num_cached_tokens for record in records] == [0, 20, 20]
    assert [record.num_cross_user_tokens for record in records] == [0, 0, 20]
    assert [record.ttft_seconds for record in records] == pytest.approx([0.8, 0.6, 0.6])
    assert [record.predicted_tokens for record in records] == [0, 20, 20]


@pytest.mark.parametrize(
    ("announces", "second_at", "knows"),
    [(True, 0.19, False), (True, 0.21, True), (False, 0.99, False), (False, 1.01, True)],
)
def test_a_router_knows_of_blocks_when_its_delay_is_over(
    announces: bool, second_at: float, knows: bool
) -> None:
    """The first prompt comes to its replica at once and is computed at 0.8 s."""
    delays = dataclasses.replace(NO_DELAYS, event=0.2)
    workload = Workload("pair", 10, (request(0.0, [1, 2, 3]), request(second_at, [1, 2, 4])))
    options = dataclasses.replace(plain_fleet(1, delays=delays), announces=announces)
    fleet = new_fleet(options)
    fleet.serve(prepare(workload)[:1])
    stranger = new_fleet(options).routers[0]
    stranger._feed = fleet._feed
    stranger.catch_up(second_at)
    overlaps = stranger.table.index("simulated").overlaps(prepare(workload)[1].block_hashes)
    assert (overlaps == {"replica-0": 2}) is knows


@pytest.mark.parametrize(
    ("interval", "now", "num_requests"), [(0.0, 0.95, 0), (0.0, 1.01, 1), (0.5, 1.15, 0), (0.5, 1.21, 1)]
)
def test_a_router_knows_a_load_when_its_delay_is_over(interval: float, now: float, num_requests: int) -> None:
    """The prompt's step ends at 0.8 s and leaves one request; a snapshot is taken then, or at 1 s."""
    delays = dataclasses.replace(NO_DELAYS, load=0.2, snapshot_interval=interval)
    workload = Workload("one", 10, (request(0.0, [1, 2, 3], output=40),))
    options = plain_fleet(1, delays=delays)
    options = dataclasses.replace(options, shape=dataclasses.replace(options.shape, counts_arrivals=False))
    fleet = new_fleet(options)
    fleet.serve(prepare(workload))
    stranger = new_fleet(options).routers[0]
    stranger._feed = fleet._feed
    stranger.catch_up(now)
    assert stranger.table.load(fleet.hosts[0].replica_id).num_requests == num_requests


PAUSE = RETRY.first_wait_seconds
"""A request that has lost its replica comes back within so long."""


def served_through(kill: Kill | None, *, output: int = 20) -> FleetResult:
    options = plain_fleet(2)
    options = dataclasses.replace(options, policy="round_robin", kills=(kill,) if kill else ())
    return serve(Workload("one", 10, (request(0.0, [1, 2, 3], output=output),)), options)


def test_a_request_that_is_lost_before_its_first_token_is_tried_elsewhere() -> None:
    result = served_through(Kill(0, at=0.5))
    assert (result.num_retries, result.num_resumes) == (1, 0)
    assert result.records[0].replica == "replica-1"
    assert result.records[0].ttft_seconds == pytest.approx(0.5 + 0.8 + PAUSE / 2, abs=PAUSE / 2)


def test_a_request_that_is_lost_after_its_first_token_goes_on_elsewhere_from_where_it_was() -> None:
    """At 1.35 s it has 1 + 5 tokens; 36 tokens are computed again, which yields the seventh."""
    result = served_through(Kill(0, at=1.35))
    assert (result.num_retries, result.num_resumes) == (0, 1)
    record = result.records[0]
    assert record.ttft_seconds == pytest.approx(0.8)
    assert record.num_output_tokens == 20
    assert record.e2e_seconds == pytest.approx(1.35 + 0.36 + 0.5 + 13 * 0.1 + PAUSE / 2, abs=PAUSE / 2)


@pytest.mark.parametrize(("away", "error"), [(0.1, None), (14.0, None), (16.0, "no replica")])
def test_a_replica_that_is_coming_back_is_waited_for_as_long_as_the_router_does(
    away: float, error: str | None
) -> None:
    options = dataclasses.replace(plain_fleet(1), kills=(Kill(0, at=0.5, back_after=away),))
    (record,) = serve(Workload("one", 10, (request(0.0, [1, 2, 3]),)), options).records
    assert record.error == error
    assert record.e2e_seconds is not None
    if error is None:
        assert record.ttft_seconds == pytest.approx(0.5 + away + 0.8, abs=0.01)
    else:
        assert record.e2e_seconds == pytest.approx(0.5 + RETRY.wait_seconds, abs=2 * PAUSE)


def test_a_request_may_lose_many_replicas_that_it_got_somewhere_with_and_few_without() -> None:
    deaths = tuple(Kill(0, at=1.5 + 1.5 * number, back_after=0.1) for number in range(8))
    options = dataclasses.replace(plain_fleet(1), kills=deaths)
    (record,) = serve(Workload("long", 10, (request(0.0, [1, 2, 3], output=60),)), options).records
    assert record.error is None
    at_once = tuple(Kill(0, at=0.3 * (number + 1), back_after=0.1) for number in range(8))
    options = dataclasses.replace(plain_fleet(1), kills=at_once)
    (record,) = serve(Workload("long", 10, (request(0.0, [1, 2, 3], output=60),)), options).records
    assert record.error == "attempts"


def test_while_redis_is_away_nobody_hears_of_changes_and_afterwards_everybody_does() -> None:
    requests = tuple(request(at, [1, 2, 3 + number]) for number, at in enumerate((0.0, 5.0, 10.5)))
    options = dataclasses.replace(plain_fleet(1), outages=(Outage(0.0, 10.0),))
    records = serve(Workload("outage", 10, requests), options).records
    assert [record.num_cached_tokens for record in records] == [0, 20, 20]
    assert [record.predicted_tokens for record in records] == [0, 0, 20]


def test_announcements_keep_twins_together_that_come_to_different_routers() -> None:
    """Two prompts with the same beginning, 100 ms apart, long before the first is computed."""
    workload = Workload("twins", 10, (request(0.0, [1, 2, 3]), request(0.1, [1, 2, 4])))
    options = plain_fleet(8, num_routers=8)
    for announces, num_meetings in ((True, 20), (False, None)):
        records = [
            serve(workload, dataclasses.replace(options, announces=announces), seed).records
            for seed in range(20)
        ]
        met = [first.replica == second.replica for first, second in records]
        assert sum(met) == num_meetings or (num_meetings is None and sum(met) < 20)


@pytest.mark.parametrize("counts_arrivals", [False, True])
def test_a_load_counts_each_request_once_whoever_sent_it(counts_arrivals: bool) -> None:
    """Between its sending and its counting a router adds its own; afterwards the replica's load has it."""
    workload = random_workload(5, num_requests=200, qps=15.0)
    shape = small_shape(counts_arrivals=counts_arrivals)
    fleet = new_fleet(dataclasses.replace(FLEET, shape=shape, num_routers=1, delays=NO_DELAYS))
    router = fleet.routers[0]
    seen: list[tuple[int, int]] = []
    catch_up = router.catch_up

    def look(now: float) -> None:
        catch_up(now)
        counted = sum(router.table.load(host.replica_id).num_requests for host in fleet.hosts)
        seen.append((counted, len(fleet._runs)))

    router.catch_up = look  # type: ignore[method-assign]
    fleet.serve(prepare(workload))
    arrivals = seen[: len(workload.requests)]
    assert [counted for counted, _ in arrivals] == [num_open - 1 for _, num_open in arrivals]


def test_copies_are_counted_over_the_fleet() -> None:
    """Round robin computes the same two blocks on both replicas."""
    requests = tuple(request(5.0 * number, [1, 2]) for number in range(40))
    options = dataclasses.replace(plain_fleet(2), policy="round_robin")
    assert serve(Workload("copies", 10, requests), options, num_warm_up=4).duplication == 2.0
    assert serve(Workload("copies", 10, requests), plain_fleet(2), num_warm_up=4).duplication == 1.0
