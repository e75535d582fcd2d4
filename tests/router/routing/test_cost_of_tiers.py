"""What it costs when a prompt's KV lies below the device, beside the slow way to say it."""

import random
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec import structs

from replicas.protocol.blocks import ImageTokens
from replicas.protocol.status import ReplicaId
from replicas.protocol.ways import DISK_MOVE_SECONDS, HOST_MOVE_SECONDS, PULL_MOVE_SECONDS, MoveSpeeds, Reach
from router.routing.cost import CostParameters, FleetRates, cost_of
from router.routing.decision import Decision, Replicas, decide
from router.routing.levels import Overlaps, Slots, View
from router.routing.load import ReplicaLoad
from tests.router.routing.fleets import BLOCK_SIZE, fleet, ready, request

PARAMETERS = CostParameters()
RATES = FleetRates(1e-4, 1e-2)

SPEEDS = st.none() | st.sampled_from([1e-7, 5e-6, 5e-5, 1e-4, 1e-3])
LOADS = st.builds(
    ReplicaLoad,
    num_requests=st.integers(0, 20),
    num_pending_tokens=st.integers(0, 5000),
    cache_fill=st.floats(0, 1),
    speeds=st.builds(MoveSpeeds, SPEEDS, SPEEDS, SPEEDS, st.sampled_from([0.0, 0.05, 2.0])),
)
IMAGES = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 400)), max_size=4).map(
    lambda images: tuple(ImageTokens(b"", 1000 * n + gap, length) for n, (gap, length) in enumerate(images))
)
REACHES = st.lists(st.integers(0, 4000), min_size=4, max_size=4).map(lambda ends: Reach(*sorted(ends)))


def seconds_of(
    load: ReplicaLoad,
    reach: Reach,
    num_tokens: int,
    num_ready: int,
    images: Sequence[ImageTokens] = (),
    encode: float = 0.0,
) -> float:
    """Time to first token and what others lose, if just so much is made ready; infinite if it cannot be."""
    wait = load.num_pending_tokens * 1e-4 + load.num_requests * 1e-2 + load.num_pending_image_tokens * encode
    move = load.speeds.backlog_seconds if num_ready > reach.device else 0.0
    ways = (
        (reach.device, reach.host, 0.0, HOST_MOVE_SECONDS),
        (reach.host, reach.local, load.speeds.disk, DISK_MOVE_SECONDS),
        (reach.local, reach.peer, load.speeds.pull, PULL_MOVE_SECONDS),
    )
    for start, end, per_token, fixed in ways:
        if start < end <= num_ready:
            if load.speeds.host is None or per_token is None:
                return float("inf")
            move += fixed + (end - start) * (load.speeds.host + per_token)
    prefill = (num_tokens - num_ready) * 1e-4
    for image in images:
        if any(place >= num_ready for place in range(image.start, image.start + image.length)):
            prefill += image.length * encode
    return max(wait, move) + prefill * (1 + PARAMETERS.delay_price * load.num_requests)


@given(LOADS, REACHES)
def test_the_cheapest_way_is_taken(load: ReplicaLoad, reach: Reach) -> None:
    cost = cost_of(load, num_tokens=5000, reach=reach, rates=RATES, parameters=PARAMETERS)
    wanted = {end: seconds_of(load, reach, 5000, end) for end in reach}
    assert cost.seconds - cost.room_seconds == pytest.approx(min(wanted.values()))
    assert cost.num_ready_tokens in reach
    assert wanted[cost.num_ready_tokens] == pytest.approx(min(wanted.values()))


@given(LOADS, REACHES, IMAGES, st.sampled_from([1e-5, 1e-3]), st.integers(0, 5000))
def test_the_cheapest_way_is_taken_of_a_prompt_with_images(
    load: ReplicaLoad, reach: Reach, images: tuple[ImageTokens, ...], encode: float, num_pending: int
) -> None:
    load = structs.replace(load, num_pending_image_tokens=num_pending)
    rates = RATES._replace(encode_seconds_per_token=encode)
    cost = cost_of(load, num_tokens=5000, reach=reach, rates=rates, parameters=PARAMETERS, media=images)
    wanted = {end: seconds_of(load, reach, 5000, end, images, encode) for end in reach}
    assert cost.seconds - cost.room_seconds == pytest.approx(min(wanted.values()))
    assert wanted[cost.num_ready_tokens] == pytest.approx(min(wanted.values()))
    assert cost.prefill_seconds - cost.encode_seconds == pytest.approx((5000 - cost.num_ready_tokens) * 1e-4)


@given(LOADS, REACHES)
def test_what_is_known_below_the_device_never_makes_a_replica_dearer(load: ReplicaLoad, reach: Reach) -> None:
    only_device = Reach(*[reach.device] * 4)
    with_tiers = cost_of(load, num_tokens=5000, reach=reach, rates=RATES, parameters=PARAMETERS)
    without = cost_of(load, num_tokens=5000, reach=only_device, rates=RATES, parameters=PARAMETERS)
    assert with_tiers.seconds <= without.seconds + 1e-9


def test_an_unknown_speed_is_never_taken() -> None:
    reach = Reach(0, 1000, 2000, 3000)
    for load, num_ready in (
        (ReplicaLoad(), 0),
        (ReplicaLoad(speeds=MoveSpeeds(None, 1e-9, 1e-9)), 0),
        (ReplicaLoad(speeds=MoveSpeeds(1e-9, None, None)), 1000),
        (ReplicaLoad(speeds=MoveSpeeds(1e-9, 1e-9, None)), 2000),
        (ReplicaLoad(speeds=MoveSpeeds(1e-9, None, 1e-9)), 1000),
    ):
        cost = cost_of(load, num_tokens=5000, reach=reach, rates=RATES, parameters=PARAMETERS)
        assert cost.num_ready_tokens == num_ready


def test_a_move_that_delays_more_than_it_saves_is_not_taken() -> None:
    """200 tokens save 20 ms, and take 21 to load; behind 3,000 that lie on the device already."""
    idle = ReplicaLoad(speeds=MoveSpeeds(1e-4, None, None))
    reach = Reach(3000, 3200, 3200, 3200)
    cost = cost_of(idle, num_tokens=5000, reach=reach, rates=RATES, parameters=PARAMETERS)
    assert (cost.num_ready_tokens, cost.move_seconds) == (3000, 0.0)


def test_a_move_that_is_shorter_than_the_queue_costs_no_time() -> None:
    busy = ReplicaLoad(num_requests=4, num_pending_tokens=5000, speeds=MoveSpeeds(1e-5, None, None))
    cost = cost_of(
        busy, num_tokens=5000, reach=Reach(0, 4000, 4000, 4000), rates=RATES, parameters=PARAMETERS
    )
    assert (cost.move_seconds, cost.num_ready_tokens) == (0.0, 4000)


FAST = ReplicaLoad(speeds=MoveSpeeds(5e-6, 3e-5, 1e-5))


def decided(depths: dict[str, tuple[int, int, int]], loads: dict[str, ReplicaLoad]) -> Decision:
    """Depths in blocks on the device, in host memory or faster, and anywhere."""
    slots = Slots({ReplicaId(name): 1 << number for number, name in enumerate(depths)})

    def levels(tier: int) -> list[tuple[int, int]]:
        return sorted(
            ((ends[tier], slots.bit(ReplicaId(name))) for name, ends in depths.items() if ends[tier]),
            reverse=True,
        )

    tiers = {View.ON_DEVICE: 0, View.IN_HOST: 1, View.STORED: 2}
    overlaps = Overlaps(slots, levels(2), lambda view: levels(tiers[view]))
    return decide(request(), ready(fleet(len(loads), **loads)), overlaps, PARAMETERS, random.Random(1))


def test_what_lies_in_host_memory_is_as_good_as_on_the_device() -> None:
    for holder, other in (("r0", "r1"), ("r1", "r0")):
        decision = decided({holder: (0, 400, 400), other: (100, 100, 100)}, {"r0": FAST, "r1": FAST})
        assert (decision.replica_id, decision.overlap_tokens) == (holder, 400 * BLOCK_SIZE)
        assert decision.pull_from is None


def test_a_busy_holder_is_pulled_from() -> None:
    busy = ReplicaLoad(num_requests=30, num_pending_tokens=60_000, speeds=MoveSpeeds(5e-6, None, None))
    decision = decided({"r0": (400, 400, 400)}, {"r0": busy, "r1": FAST})
    assert (decision.replica_id, decision.pull_from) == ("r1", "r0")
    assert decision.overlap_tokens == 400 * BLOCK_SIZE


def test_what_cannot_be_pulled_is_computed() -> None:
    busy = ReplicaLoad(num_requests=30, num_pending_tokens=60_000)
    decision = decided({"r0": (400, 400, 400)}, {"r0": busy, "r1": ReplicaLoad()})
    assert (decision.replica_id, decision.pull_from, decision.overlap_tokens) == ("r1", None, 0)


def test_a_replica_that_does_not_say_what_moving_takes_has_all_its_tiers_counted() -> None:
    """As one whose engine moves KV by itself."""
    decision = decided({"r0": (0, 0, 0), "r1": (0, 400, 400)}, {"r0": ReplicaLoad(), "r1": ReplicaLoad()})
    assert (decision.replica_id, decision.overlap_tokens) == ("r1", 400 * BLOCK_SIZE)


def test_what_cannot_be_reached_attracts_nothing() -> None:
    """A copy on a disk of unknown speed, next to a little less on a device."""
    host_only = ReplicaLoad(speeds=MoveSpeeds(5e-6, None, None))
    decision = decided({"r0": (0, 0, 24), "r1": (22, 22, 22)}, {"r0": host_only, "r1": host_only})
    assert (decision.replica_id, decision.overlap_tokens) == ("r1", 22 * BLOCK_SIZE)


def test_only_a_replica_that_may_serve_is_pulled_from() -> None:
    slots = Slots({ReplicaId("gone"): 1, ReplicaId("r0"): 2})
    overlaps = Overlaps(slots, [(400, 1)], lambda view: [(400, 1)])
    decision = decide(request(), ready(fleet(1, r0=FAST)), overlaps, PARAMETERS, random.Random(1))
    assert (decision.pull_from, decision.overlap_tokens) == (None, 0)


def test_what_is_only_predicted_is_not_pulled() -> None:
    slots = Slots({ReplicaId("r0"): 1, ReplicaId("r1"): 2})
    predicted = {View.ON_DEVICE: [(400, 1)], View.IN_HOST: [(400, 1)], View.STORED: []}
    overlaps = Overlaps(slots, [(400, 1)], predicted.__getitem__)
    busy = ReplicaLoad(num_requests=30, num_pending_tokens=60_000, speeds=MoveSpeeds(5e-6, None, None))
    replicas = ready(fleet(2, r0=busy, r1=FAST))
    decision = decide(request(), replicas, overlaps, PARAMETERS, random.Random(1))
    assert decision.pull_from is None


@pytest.mark.parametrize(("layouts", "source"), [("aa", "r0"), ("ab", None), ("a", None), ("", None)])
def test_only_who_lays_out_its_kv_alike_is_pulled_from(layouts: str, source: str | None) -> None:
    busy = ReplicaLoad(num_requests=30, num_pending_tokens=60_000, speeds=MoveSpeeds(5e-6, None, None))
    loads = fleet(2, r0=busy, r1=FAST)
    overlaps = Overlaps(Slots({ReplicaId("r0"): 1}), [(400, 1)], lambda view: [(400, 1)])
    replicas = Replicas(loads, loads.__getitem__, dict(zip(sorted(loads), layouts, strict=False)))
    for each in (replicas, replicas.without([ReplicaId("r2")])):
        decision = decide(request(), each, overlaps, PARAMETERS, random.Random(1))
        assert (decision.replica_id, decision.pull_from) == ("r1", source)
        assert decision.overlap_tokens == (400 * BLOCK_SIZE if source else 0)
