"""Pools with roles in virtual time: what a split costs, and that nothing is lost whoever dies."""

import dataclasses
from pathlib import Path

import pytest

from cluster.cli import main
from loadtests.simulation.fleet import FleetResult, VirtualFleet
from loadtests.simulation.options import FleetOptions, Kill, PoolShape, parse_pools
from loadtests.simulation.request import prepare
from loadtests.simulation.shape import TierShape
from loadtests.workloads import Workload
from replicas.protocol.status import Role
from replicas.protocol.ways import HOST_MOVE_SECONDS, PULL_MOVE_SECONDS
from router.routing.cost import CostParameters
from router.routing.decision import DecisionReason
from tests.loadtests.simulation.builders import NO_DELAYS, new_fleet, random_workload, request, small_shape
from tests.loadtests.simulation.test_fleet import assert_all_is_given_back

TOKEN_BYTES = 1000
TIERS = TierShape(
    TOKEN_BYTES,
    host_bytes=2000 * 16 * TOKEN_BYTES,
    chunk_tokens=32,
    host_bytes_per_second=1e9,
    disk_bytes_per_second=1e9,
    pull_bytes_per_second=1e6,
)
POOLS = (PoolShape(Role.PREFILL, 1), PoolShape(Role.DECODE, 2, 40))
PAIR = (PoolShape(Role.PREFILL, 1), PoolShape(Role.DECODE, 1))
ALWAYS = CostParameters(split_delay_price=1000.0)
"""A decoder that has anything to do computes no prompt."""
SPLITTING = FleetOptions(
    small_shape(tiers=TIERS), num_replicas=3, pools=POOLS, parameters=ALWAYS, index_stride=16
)


def served(workload: Workload, options: FleetOptions, seed: int = 1) -> tuple[VirtualFleet, FleetResult]:
    fleet = new_fleet(options, seed)
    return fleet, fleet.serve(prepare(workload))


def test_chunks_come_while_the_prompt_is_computed() -> None:
    """A long answer keeps the one decoder busy, and then a prompt of eight chunks and a tail comes."""
    tail, answering = 16, request(0.0, [1], block_tokens=16, output=1000)
    asked = request(1.0, range(100, 117), block_tokens=16)
    workload = Workload("two", 16, (answering, asked))
    shape = dataclasses.replace(small_shape(num_blocks=200, tiers=TIERS), max_running=8)
    options = dataclasses.replace(
        SPLITTING, shape=shape, num_replicas=2, pools=PAIR, delays=NO_DELAYS, queue=None
    )
    fleet, result = served(workload, options)
    assert result.reasons[DecisionReason.SPLIT] == 1
    record = result.records[1]
    assert (record.replica, record.num_cached_tokens, record.predicted_tokens) == ("replica-1", 0, 0)
    prefiller, decoder = (host.replica for host in fleet.hosts)
    assert prefiller is not None and decoder is not None
    assert (prefiller.num_computed_tokens, decoder.num_computed_tokens) == (17 * 16, 16 + tail)

    alone = dataclasses.replace(options, pools=(), num_replicas=1)
    _, undivided = served(Workload("one", 16, (asked,)), alone)
    first, second = record.ttft_seconds, undivided.records[0].ttft_seconds
    assert first is not None and second is not None
    link = 32 * TOKEN_BYTES / 1e6
    least = second + PULL_MOVE_SECONDS + HOST_MOVE_SECONDS + link
    steps = 4 * shape.cost.d0 + 2 * (shape.cost.a + tail * shape.cost.b)
    assert least < first < least + steps + 2 * link, "of eight chunks, only the last step's are left"


def test_a_slow_link_is_what_a_split_waits_for() -> None:
    asked = request(1.0, range(100, 117), block_tokens=16)
    workload = Workload("two", 16, (request(0.0, [1], block_tokens=16, output=1000), asked))
    options = dataclasses.replace(SPLITTING, num_replicas=2, pools=PAIR, delays=NO_DELAYS, queue=None)
    seconds = []
    for rate in (5e5, 2.5e5):
        tiers = dataclasses.replace(TIERS, pull_bytes_per_second=rate)
        _, result = served(
            workload, dataclasses.replace(options, shape=small_shape(num_blocks=200, tiers=tiers))
        )
        assert result.reasons[DecisionReason.SPLIT] == 1
        seconds.append(result.records[1].ttft_seconds or 0.0)
    assert seconds[1] - seconds[0] == pytest.approx(256 * TOKEN_BYTES * (1 / 2.5e5 - 1 / 5e5), rel=0.05)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "kills",
    [(), (Kill(0, 2.0, 1.0), Kill(0, 4.0, 1.0, keeps_disk=False)), (Kill(1, 2.0, 1.0), Kill(2, 3.0, 1.0))],
    ids=["quiet", "prefiller", "decoders"],
)
def test_a_storm_ends_every_request_and_gives_everything_back(kills: tuple[Kill, ...], seed: int) -> None:
    workload = random_workload(seed, num_requests=150, qps=20.0)
    options = dataclasses.replace(SPLITTING, kills=kills, num_routers=2)
    fleet, result = served(workload, options, seed)
    assert result.reasons[DecisionReason.SPLIT] > 30
    assert [record.error for record in result.records] == [None] * 150
    for record, trace in zip(result.records, workload.requests, strict=True):
        assert record.num_output_tokens == trace.num_output_tokens
    assert fleet._followings == []
    assert_all_is_given_back(fleet)


@pytest.mark.parametrize("killed", [0, 1])
def test_roles_are_preferences(killed: int) -> None:
    """One of two replicas stays away: the other does all."""
    options = dataclasses.replace(SPLITTING, num_replicas=2, pools=PAIR, kills=(Kill(killed, 1.0),))
    fleet, result = served(random_workload(1, num_requests=60, qps=10.0), options)
    assert [record.error for record in result.records] == [None] * 60
    assert {record.replica for record in result.records[-20:]} == {f"replica-{1 - killed}"}
    assert_all_is_given_back(fleet)


def test_pools_without_roles_have_steps_of_their_own() -> None:
    options = dataclasses.replace(SPLITTING, pools=parse_pools("both:1:64,both:2:40"))
    assert [options.shape_of(number).max_batched_tokens for number in range(3)] == [64, 40, 40]
    _, result = served(random_workload(1), options)
    assert not result.reasons[DecisionReason.SPLIT]


@pytest.mark.parametrize(
    "text", ["", "prefill", "prefill:0", "prefill:1:2:3", "cook:1", "prefill:1,", "both:1:0"]
)
def test_a_bad_word_about_pools_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ROLE:REPLICAS"):
        parse_pools(text)


def test_pools_are_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "simulate",
        "multi-turn",
        "--set",
        "num_sessions=6",
        "--jobs",
        "1",
        "--pools",
        "prefill:1,decode:2",
    ]
    assert main(words) != 0
    assert "--pull" in capsys.readouterr().err
    file = tmp_path / "figures.json"
    assert main([*words, "--ram", "64GiB", "--pull", "10GB/s", "--json", str(file)]) == 0
    assert '"role": "prefill"' in file.read_text()
